"""From a configuration to a checked plan, or one line that says what to write instead."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from halfscale.config import ConfigError, Number, flow, parse_number
from halfscale.devices import count_gpus
from halfscale.naming import find_fault, suggest_name
from halfscale.plan import Parameter, Plan, PolicyChoice, WorkloadPlan
from halfscale.policies import POLICIES
from halfscale.policies.checks import LARGEST_COUNT
from halfscale.sources import PACKAGE, PROBING, TRAINING, source_digest

LARGEST_SEED = 2**63 - 1


def _whole(value: object, low: int, high: int) -> int:
    number = parse_number(value)
    if number != int(number):
        raise ValueError("must be a whole number")
    if not low <= number <= high:
        raise ValueError(f"must be at least {low} and at most {high}")
    return int(number)


def _within(low: int, high: int) -> BeforeValidator:
    return BeforeValidator(lambda value: _whole(value, low, high))


class _Config(BaseModel):
    """The top level; the blocks of `configurations` and `workloads` are checked one by one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    configurations: dict[str, Any]
    workloads: dict[str, Any] = {"binary": None, "digits": None}
    seeds: list[Annotated[int, _within(0, LARGEST_SEED)]] = [0, 1, 2, 3, 4]
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, _within(1, 1024)] = 1


def build_plan(config: Mapping[str, Any], source: str = "config.yaml") -> Plan:
    """Check a configuration and resolve it: defaults, device, code digests.

    Args:
        config: The content of the configuration file, overrides applied.
        source: What errors call it.

    Raises:
        ConfigError: With the file, the key, the value and what to write instead, on one line.
    """
    try:
        checked = _Config.model_validate(dict(config))
    except ValidationError as error:
        _refuse_first(error, source)
    _check_names(checked.configurations, source)
    if repeated := [seed for seed in checked.seeds if checked.seeds.count(seed) > 1]:
        fewer = sorted(set(checked.seeds))
        _refuse(source, ("seeds",), checked.seeds, f"{repeated[0]} is repeated", fewer)
    if not checked.seeds:
        _refuse(source, ("seeds",), [], "is empty", [0, 1, 2, 3, 4])
    if not checked.workloads:
        _refuse(source, ("workloads",), {}, "is empty", {"binary": {"steps": 100}})
    return Plan(
        device=_resolve_device(checked.device, source),
        threads=checked.threads,
        seeds=tuple(sorted(checked.seeds)),
        workloads={
            name: _plan_workload(name, _block(source, ("workloads", name), block), source)
            for name, block in sorted(checked.workloads.items())
        },
        configurations={
            name: _plan_configuration(name, _block(source, ("configurations", name), block), source)
            for name, block in sorted(checked.configurations.items())
        },
    )


def _check_names(configurations: Mapping[str, object], source: str) -> None:
    if not configurations:
        _refuse(source, ("configurations",), {}, "is empty", {"default": {}})
    names = list(configurations)
    for index, name in enumerate(names):
        if fault := find_fault(name, names[:index]):
            better = suggest_name(name, names)
            _refuse(source, ("configurations", name), name, f"the name {fault}", {}, better)


def _block(source: str, keys: tuple[str, str], block: object) -> Mapping[str, Any]:
    """A block of keys and values; nothing at all means its defaults."""
    if block is None:
        return {}
    if not isinstance(block, Mapping) or not all(isinstance(key, str) for key in block):
        example = {"init_scale": 65536.0} if keys[0] == "configurations" else {"steps": 100}
        _refuse(source, keys, block, "must be a block of keys and values", example)
    return block


def _plan_configuration(name: str, block: Mapping[str, Any], source: str) -> PolicyChoice:
    policy = block.get("policy", "torch")
    if not isinstance(policy, str) or policy not in POLICIES:
        better = difflib.get_close_matches(str(policy), POLICIES, n=1) or ["torch"]
        reason = f"unknown policy; known: {', '.join(POLICIES)}"
        _refuse(source, ("configurations", name, "policy"), policy, reason, better[0])
    defaults = POLICIES[policy].parameters()
    beside = {} if policy == "torch" else {"policy": policy}
    given = {}
    for key, value in block.items():
        keys = ("configurations", name, key)
        if key != "policy" and key not in defaults:
            better = difflib.get_close_matches(key, defaults, n=1, cutoff=0.5) or list(defaults)
            example = _if_accepted(policy, better[0], value, defaults[better[0]])
            reason = f"unknown key; policy {policy} has {', '.join(defaults)}"
            _refuse(source, keys, value, reason, example, better[0], beside)
        if key != "policy":
            try:
                given[key] = _like_number(value)
            except ValueError as error:
                _refuse(source, keys, value, str(error), defaults[key], None, beside)
    try:
        return PolicyChoice.of(policy, **given)
    except ValueError as error:
        # A policy's complaint begins with the parameter's name.
        key = str(error).split(maxsplit=1)[0].rstrip(":")
        reason = str(error).removeprefix(key).partition(", got ")[0].strip()
        keys = ("configurations", name, key)
        _refuse(source, keys, given.get(key, block), reason, defaults.get(key), None, beside)


def _if_accepted(policy: str, key: str, value: object, default: object) -> object:
    """The value as it was written if the policy takes it for this key, else the default."""
    try:
        PolicyChoice.of(policy, **{key: _like_number(value)})
    except ValueError:
        return default
    return value


def _like_number(value: object) -> object:
    """Read numbers as people write them; leave flags, lists and null to the policy."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return parse_number(value)
    return value


def workload_names() -> list[str]:
    """The built-in workloads: one file each in ``workloads/``."""
    return sorted(
        file.stem for file in (PACKAGE / "workloads").glob("*.py") if file.stem != "__init__"
    )


@cache
def workload_defaults(file: Path) -> dict[str, Parameter]:
    """The keyword-only parameters of a workload's ``build`` and their defaults.

    Read from the source text, so that checking a configuration imports no torch.

    Raises:
        ConfigError: If the file has no function ``build``, or a default is not a literal.
    """
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == "build":
            pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            return {name.arg: ast.literal_eval(value) for name, value in pairs if value}
    raise ConfigError(f"{file}: has no function build(seed, device, *, ...)")


def _plan_workload(name: str, block: Mapping[str, Any], source: str) -> WorkloadPlan:
    known = workload_names()
    try:
        steps = _whole(block.get("steps", 100), 2, LARGEST_COUNT)
    except ValueError as error:
        _refuse(source, ("workloads", name, "steps"), block["steps"], str(error), 100)
    if name not in known:
        better = (difflib.get_close_matches(name, known, n=1) or known)[0]
        reason = f"unknown workload; halfscale has {', '.join(known)}"
        _refuse(source, ("workloads", name), name, reason, {"steps": steps}, better)
    file = PACKAGE / "workloads" / f"{name}.py"
    parameters = dict(workload_defaults(file))
    for key, value in block.items():
        if key == "steps":
            continue
        keys = ("workloads", name, key)
        if key not in parameters:
            has = ", ".join(["steps", *parameters])
            better = (difflib.get_close_matches(key, ["steps", *parameters], n=1) or ["steps"])[0]
            example = parameters.get(better, steps)
            _refuse(source, keys, value, f"unknown key; {name} has {has}", example, better)
        try:
            parameters[key] = _like(parameters[key], value)
        except ValueError as error:
            _refuse(source, keys, value, str(error), parameters[key])
    own = f"workloads/{name}.py"
    return WorkloadPlan(
        steps=steps,
        parameters=parameters,
        source=source_digest(*TRAINING, own),
        probe_source=source_digest(*PROBING, own),
    )


def _like(default: Parameter, value: object) -> Parameter:
    """Bring a parameter to the type of its default, so that ``1`` and ``1.0`` are one value."""
    if isinstance(default, bool | str):
        if type(value) is not type(default):
            raise ValueError(f"must be a {type(default).__name__}, like the default {default!r}")
        return value
    number: Number = parse_number(value)
    if isinstance(default, int):
        if number != int(number):
            raise ValueError("must be a whole number")
        return int(number)
    return float(number)


def _resolve_device(wanted: str, source: str) -> Literal["cpu", "cuda"]:
    if wanted == "cpu":
        return "cpu"
    if count_gpus():
        return "cuda"
    if wanted == "cuda":
        reason = "no NVIDIA GPU that torch can use was found on this machine"
        _refuse(source, ("device",), wanted, reason, "auto")
    return "cpu"


_EXAMPLES: dict[str, Any] = {
    "configurations": {"default": {"init_scale": 65536.0}},
    "workloads": {"binary": {"steps": 100}},
    "seeds": [0, 1, 2, 3, 4],
    "device": "auto",
    "threads": 1,
}


def _refuse_first(error: ValidationError, source: str) -> NoReturn:
    """Turn pydantic's first complaint into one line with the block to write instead."""
    first = error.errors(include_url=False)[0]
    key, value = str(first["loc"][0]), first["input"]
    if first["type"] == "extra_forbidden":
        better = (difflib.get_close_matches(key, _EXAMPLES, n=1, cutoff=0.5) or list(_EXAMPLES))[0]
        reason = f"unknown key; known: {', '.join(_EXAMPLES)}"
        _refuse(source, (key,), value, reason, _EXAMPLES[better], better)
    reasons = {
        "missing": "is missing",
        "dict_type": "must be a block of keys and values",
        "list_type": "must be a list",
        "literal_error": f"must be one of {first.get('ctx', {}).get('expected')}",
    }
    reason = reasons.get(first["type"], first["msg"].removeprefix("Value error, "))
    shown = None if first["type"] == "missing" else value
    _refuse(source, (key,), shown, reason, _EXAMPLES[key])


def _refuse(
    source: str,
    keys: tuple[str, ...],
    value: object,
    reason: str,
    example: object,
    better: str | None = None,
    beside: Mapping[str, object] | None = None,
) -> NoReturn:
    """Raise the error for one key.

    ``better`` replaces the last key in the block to write, ``beside`` holds keys that belong to it.
    """
    block: object = {**(beside or {}), better or keys[-1]: example}
    for key in reversed(keys[:-1]):
        block = {key: block}
    printable = (c if c.isprintable() else repr(c)[1:-1] for c in ".".join(keys))
    where = "".join(printable)
    raise ConfigError(f"{source}: {where}: {value!r:.60}: {reason}; write: {flow(block)}")
