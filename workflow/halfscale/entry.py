"""Where a user's own workload is: ``path/to/file.py:build`` or ``package.module:build``.

Everything is read from the source text, so that planning imports neither torch nor the user's code.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from halfscale.plan import Parameter

EXAMPLE = "path/to/file.py:build"
KINDS: Mapping[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


class EntryError(ValueError):
    """An entry cannot be used; the message is a reason on one line.

    Attributes:
        better: The entry to write instead.
    """

    def __init__(self, reason: str, better: str) -> None:
        super().__init__(reason)
        self.better = better


@dataclass(frozen=True)
class Entry:
    """One function in one source file.

    Attributes:
        text: The entry in one spelling, whatever way it was written.
        file: The source file.
        function: The function's name.
        root: The folder in which the modules that the file imports are looked up.
        package: The top-level name of an installed package; None for a file by its path.
    """

    text: str
    file: Path
    function: str
    root: Path
    package: str | None = None

    def owns(self, file: Path) -> bool:
        """Whether a source file is the user's: below the root and not an installed package's."""
        try:
            parts = file.absolute().relative_to(self.root.absolute()).parts
        except ValueError:
            return False
        if self.package:
            return Path(parts[0]).stem == self.package
        return not {"site-packages", "dist-packages"} & set(parts)


@dataclass(frozen=True)
class Signature:
    """What ``build`` takes beside the seed and the device.

    Attributes:
        defaults: The parameters with a literal default, by which their type is known.
        kinds: All parameters with the type of their annotation or default, None if unknown.
        required: The parameters that have no default.
        open: Whether it takes any other keyword.
    """

    defaults: Mapping[str, Parameter]
    kinds: Mapping[str, type | None]
    required: tuple[str, ...]
    open: bool = False


def find_entry(text: object) -> Entry:
    """Find the file of an entry, relative to the working directory, or of an installed module.

    An installed package is not imported for it.

    Raises:
        EntryError: If there is no such file, package or module, or the text is no entry.
    """
    if not isinstance(text, str) or not text.strip():
        raise EntryError("must name a file and a function", EXAMPLE)
    place, colon, function = text.strip().rpartition(":")
    if not colon:
        raise EntryError("has no colon before the function's name", f"{text.strip()}:build")
    if not function.isidentifier():
        raise EntryError(f"{function!r} is not the name of a function", f"{place}:build")
    if place.endswith(".py") or re.search(r"[/\\~]", place):
        return _find_file(place, function)
    return _find_module(place, function)


def _find_file(place: str, function: str) -> Entry:
    path = Path(os.path.normpath(Path(place).expanduser()))
    if path.is_file():
        return Entry(f"{path.as_posix()}:{function}", path, function, path.parent)
    reason = "is a folder" if path.is_dir() else "no such file"
    if not path.is_absolute():
        reason += f"; paths are relative to the working directory, {Path.cwd()}"
    beside = sorted(file.as_posix() for file in path.parent.glob("*.py"))
    if path.is_dir():
        beside = sorted(file.as_posix() for file in path.glob("*.py"))
    better = _closest(path.as_posix(), beside) or "path/to/file.py"
    raise EntryError(reason, f"{better}:{function}")


def _find_module(place: str, function: str) -> Entry:
    names = place.split(".")
    try:
        found = importlib.util.find_spec(names[0]) if names[0].isidentifier() else None
    except (ImportError, ValueError):
        found = None
    if found is None:
        reason = f"no package {names[0]!r} is installed; a file is named with its .py"
        raise EntryError(reason, f"{place.replace('.', '/')}.py:{function}")
    if found.submodule_search_locations is None:
        file = Path(found.origin or "")
        if len(names) == 1 and file.suffix == ".py":
            return Entry(f"{place}:{function}", file, function, file.parent, names[0])
        raise EntryError(f"{names[0]!r} is no package of Python source files", EXAMPLE)
    folders = [Path(location) for location in found.submodule_search_locations]
    for folder in folders:
        for file in _module_files(folder.parent, (folder.name, *names[1:])):
            return Entry(f"{place}:{function}", file, function, folder.parent, names[0])
    modules = [f"{names[0]}.{name}" for folder in folders for name in _list_modules(folder)]
    reason = f"package {names[0]!r} has no module {place!r} of Python source"
    raise EntryError(reason, f"{_closest(place, modules) or names[0]}:{function}")


def _module_files(root: Path, names: tuple[str, ...]) -> list[Path]:
    """The source file of a module, if there is one."""
    base = root.joinpath(*names)
    return [f for f in (base / "__init__.py", base.with_name(f"{base.name}.py")) if f.is_file()][:1]


def _list_modules(folder: Path) -> list[str]:
    files = (file.relative_to(folder).with_suffix("").parts for file in folder.rglob("*.py"))
    return sorted(".".join(parts) for parts in files if not parts[-1].startswith("__"))


def _closest(word: str, known: Iterable[str]) -> str | None:
    choices = list(known)
    return next(iter(difflib.get_close_matches(word, choices, 1, 0.5) or choices), None)


def read_signature(entry: Entry) -> Signature:
    """What the entry's function takes, read from the source text.

    Raises:
        EntryError: If the file is not Python, has no such function, or the function cannot be
            called with a seed, a device and named parameters.
    """
    body = _parse(entry).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    place = entry.text.rpartition(":")[0]
    if entry.function not in functions:
        has = f"it has {', '.join(functions)}" if functions else "it has none"
        reason = f"{entry.file} defines no function {entry.function!r} at its top level; {has}"
        raise EntryError(reason, f"{place}:{_closest(entry.function, functions) or 'build'}")
    arguments = functions[entry.function].args
    named = [*arguments.posonlyargs, *arguments.args]
    if len(named) < 2 and not arguments.vararg:
        reason = (
            f"{entry.function} takes {len(named)} positional parameters, but is called with two; "
            f"begin it with: def {entry.function}(seed, device, ...)"
        )
        raise EntryError(reason, entry.text)
    without = [None] * (len(named) - len(arguments.defaults))
    pairs = list(zip(named, [*without, *arguments.defaults], strict=True))[2:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    signature = _describe(pairs, arguments.kwarg is not None)
    unnamed = {argument.arg for argument in arguments.posonlyargs[2:]} | {"entry"}
    for name in unnamed & set(signature.required):
        reason = f"its parameter {name!r} cannot be set by its name; rename it or give it a default"
        raise EntryError(reason, entry.text)
    return signature


def _parse(entry: Entry) -> ast.Module:
    try:
        return ast.parse(entry.file.read_bytes(), filename=str(entry.file))
    except SyntaxError as error:
        reason = f"{entry.file}, line {error.lineno or 1} is not Python: {error.msg}"
    except (ValueError, RecursionError) as error:
        reason = f"{entry.file} is not Python: {error}"
    except OSError as error:
        reason = f"{entry.file} cannot be read: {error.strerror}"
    raise EntryError(reason, entry.text)


def _describe(pairs: Iterable[tuple[ast.arg, ast.expr | None]], more: bool) -> Signature:
    defaults: dict[str, Parameter] = {}
    kinds: dict[str, type | None] = {}
    required = []
    for argument, node in pairs:
        default = _literal(node)
        kind = _annotated(argument.annotation)
        if kind is float and type(default) is int:
            default = float(default)
        if default is not None:
            defaults[argument.arg] = default
        elif node is None:
            required.append(argument.arg)
        kinds[argument.arg] = kind or (None if default is None else type(default))
    return Signature(defaults, kinds, tuple(required), more)


def _literal(node: ast.expr | None) -> Parameter | None:
    """A default that a specification can hold, or None."""
    try:
        value = ast.literal_eval(node) if node else None
    except ValueError:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str) else None


def _annotated(node: ast.expr | None) -> type | None:
    """The one plain type that an annotation such as ``float | None`` names, or None."""
    words = set(re.findall(r"\w+", ast.unparse(node))) if node else set()
    named = words & set(KINDS)
    return KINDS[named.pop()] if words <= {*named, "Optional", "None"} and len(named) == 1 else None
