"""Read ``config.yaml``: YAML with line numbers, numbers as people write them, short errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

Number = int | float

_POWER = re.compile(r"\s*(?P<base>[0-9.]+)\s*(?:\*\*|\^)\s*(?P<exponent>[+-]?[0-9]+)\s*")


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one line a user can act on."""


def parse_number(value: object) -> Number:
    """Read a number as people write it: ``65536``, ``1e4``, ``0x10000``, ``2**16``, ``"2^16"``.

    YAML 1.1 reads ``1e4`` and ``2**16`` as strings, so strings are parsed here.

    Returns:
        An ``int`` where the text is one, else a ``float``.

    Raises:
        ValueError: If ``value`` is not a finite number (booleans are not numbers).
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("is not a number")
    number: Number = _parse_text(value) if isinstance(value, str) else value
    try:
        finite = math.isfinite(number)
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError("is not finite")
    return number


def parse_whole(value: object, low: int, high: int) -> int:
    """Read a whole number within limits, as people write numbers.

    Raises:
        ValueError: If it is none, or beyond the limits.
    """
    number = parse_number(value)
    if number != int(number):
        raise ValueError("must be a whole number")
    if not low <= number <= high:
        raise ValueError(f"must be at least {low} and at most {high}")
    return int(number)


def _parse_text(text: str) -> Number:
    if power := _POWER.fullmatch(text):
        try:
            return float(power["base"]) ** int(power["exponent"])
        except (OverflowError, ZeroDivisionError):
            return math.inf
        except ValueError:
            raise ValueError("is not a number") from None
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError("is not a number") from None


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses what YAML would silently change: repeated and non-text keys."""

    path = Path()


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    first_line: dict[str, int] = {}
    for key_node, value_node in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raw = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            better = re.sub(r"[^A-Za-z0-9_]+", "-", raw, flags=re.ASCII).strip("-") or "1"
            raise ConfigError(
                f"{loader.path}, line {line}: YAML reads the name {raw} as {key!r}, not as text; "
                f"write another name, such as run-{better}: ..."
            )
        if key in first_line:
            # A name of one's own can be changed, a setting cannot.
            named = isinstance(value_node, yaml.MappingNode) and key_node.start_mark.column > 0
            mend = f"rename or remove one, such as {key}-2: ..." if named else "remove one"
            raise ConfigError(
                f"{loader.path}: the key {key!r} stands twice, in line {first_line[key]} and in "
                f"line {line}; YAML would keep the last one silently: {mend}"
            )
        first_line[key] = line
    loader.flatten_mapping(node)
    return dict(yaml.SafeLoader.construct_mapping(loader, node, deep=True))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_config(path: Path | str) -> dict[str, Any]:
    """Read a YAML configuration file.

    Raises:
        ConfigError: If the file is missing, empty, not UTF-8, not YAML (the line is named), not a
            mapping, or names a key twice (both lines are named).
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        _refuse(path, "there is no such file; copy the one that ships with halfscale")
    except IsADirectoryError:
        _refuse(path, "this is a folder, not a YAML file")
    except UnicodeDecodeError as error:
        _refuse(path, f"the file is not UTF-8 text (byte {error.start}); save it as UTF-8")
    loader = type("_PathLoader", (_Loader,), {"path": path})
    try:
        content = yaml.load(text, Loader=loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        _refuse(path, _describe(error, text))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        _refuse(path, f"a value cannot be read: {error}")
    if content is None:
        _refuse(path, "the file is empty; write at least: configurations: {default: {}}")
    if not isinstance(content, dict):
        _refuse(
            path,
            f"the file holds {type(content).__name__} {content!r:.60}, not keys; "
            "write at least: configurations: {default: {}}",
        )
    return content


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ConfigError(f"{path}: {reason}") from None


def _describe(error: yaml.YAMLError, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if mark is None:
        return f"this is not YAML: {problem}"
    lines = text.splitlines()
    number = min(mark.line, max(len(lines) - 1, 0))
    shown = lines[number].strip() if lines else ""
    return f"line {number + 1} is not YAML: {problem}: {shown!r}"


def flow(value: object) -> str:
    """Write a value as YAML on one line, as it could stand in ``config.yaml``."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...").strip().removeprefix("{").removesuffix("}")


def refuse_key(
    source: str,
    keys: tuple[str, ...],
    value: object,
    reason: str,
    example: object,
    better: str | None = None,
    beside: Mapping[str, object] | None = None,
) -> NoReturn:
    """Raise the error for one key, with the block to write instead.

    ``better`` replaces the last key in the block to write, ``beside`` holds keys that belong to it.

    Raises:
        ConfigError: Always.
    """
    block: object = {**(beside or {}), better or keys[-1]: example}
    for key in reversed(keys[:-1]):
        block = {key: block}
    printable = (c if c.isprintable() else repr(c)[1:-1] for c in ".".join(keys))
    where = "".join(printable)
    raise ConfigError(f"{source}: {where}: {value!r:.60}: {reason}; write: {flow(block)}")
