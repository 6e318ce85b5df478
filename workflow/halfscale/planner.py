"""From a configuration to a checked plan, or one line that says what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictBool, ValidationError

from halfscale.config import parse_number, parse_whole, refuse_key
from halfscale.devices import GpuError, count_gpus
from halfscale.naming import find_fault, suggest_name
from halfscale.plan import Execution, Plan, PolicyChoice
from halfscale.policies import POLICIES
from halfscale.search_plan import plan_search
from halfscale.workload_plan import plan_workload

LARGEST_SEED = 2**63 - 1


def _within(low: int, high: int) -> BeforeValidator:
    return BeforeValidator(lambda value: parse_whole(value, low, high))


class _Config(BaseModel):
    """The top level; the blocks of `configurations` and `workloads` are checked one by one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    configurations: dict[str, Any]
    workloads: dict[str, Any] = {"binary": None, "digits": None}
    seeds: list[Annotated[int, _within(0, LARGEST_SEED)]] = [0, 1, 2, 3, 4]
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, _within(1, 1024)] = 1
    search: Any = True
    warm_workers: StrictBool = True
    runs_per_gpu: Annotated[int, _within(1, 1024)] = 1


def build_plan(
    config: Mapping[str, Any], source: str = "config.yaml", *, elsewhere: bool = False
) -> Plan:
    """Check a configuration and resolve it: defaults, device, code digests.

    Args:
        config: The content of the configuration file, overrides applied.
        source: What errors call it.
        elsewhere: Whether the runs may be on other machines: ``cuda`` is then taken without a GPU.

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
        refuse_key(source, ("seeds",), checked.seeds, f"{repeated[0]} is repeated", fewer)
    if not checked.seeds:
        refuse_key(source, ("seeds",), [], "is empty", [0, 1, 2, 3, 4])
    if not checked.workloads:
        refuse_key(source, ("workloads",), {}, "is empty", {"binary": {"steps": 100}})
    return Plan(
        device=_resolve_device(checked.device, source, elsewhere),
        threads=checked.threads,
        seeds=tuple(sorted(checked.seeds)),
        workloads={
            name: plan_workload(
                name, _block(source, ("workloads", name), block), checked.workloads, source
            )
            for name, block in sorted(checked.workloads.items())
        },
        configurations={
            name: _plan_configuration(name, _block(source, ("configurations", name), block), source)
            for name, block in sorted(checked.configurations.items())
        },
        search=plan_search(checked.search, source),
        execution=Execution(
            warm_workers=checked.warm_workers,
            runs_per_gpu=checked.runs_per_gpu,
            device_found=checked.device == "auto",
        ),
    )


def _check_names(configurations: Mapping[str, object], source: str) -> None:
    if not configurations:
        refuse_key(source, ("configurations",), {}, "is empty", {"default": {}})
    names = list(configurations)
    for index, name in enumerate(names):
        if fault := find_fault(name, names[:index]):
            better = suggest_name(name, names)
            refuse_key(source, ("configurations", name), name, f"the name {fault}", {}, better)


def _block(source: str, keys: tuple[str, str], block: object) -> Mapping[str, Any]:
    """A block of keys and values; nothing at all means its defaults."""
    if block is None:
        return {}
    if not isinstance(block, Mapping) or not all(isinstance(key, str) for key in block):
        example = {"init_scale": 65536.0} if keys[0] == "configurations" else {"steps": 100}
        refuse_key(source, keys, block, "must be a block of keys and values", example)
    return block


def _plan_configuration(name: str, block: Mapping[str, Any], source: str) -> PolicyChoice:
    policy = block.get("policy", "torch")
    if not isinstance(policy, str) or policy not in POLICIES:
        better = difflib.get_close_matches(str(policy), POLICIES, n=1) or ["torch"]
        reason = f"unknown policy; known: {', '.join(POLICIES)}"
        refuse_key(source, ("configurations", name, "policy"), policy, reason, better[0])
    defaults = POLICIES[policy].parameters()
    beside = {} if policy == "torch" else {"policy": policy}
    given = {}
    for key, value in block.items():
        keys = ("configurations", name, key)
        if key != "policy" and key not in defaults:
            better = difflib.get_close_matches(key, defaults, n=1, cutoff=0.5) or list(defaults)
            example = _if_accepted(policy, better[0], value, defaults[better[0]])
            reason = f"unknown key; policy {policy} has {', '.join(defaults)}"
            refuse_key(source, keys, value, reason, example, better[0], beside)
        if key != "policy":
            try:
                given[key] = _like_number(value)
            except ValueError as error:
                refuse_key(source, keys, value, str(error), defaults[key], None, beside)
    try:
        return PolicyChoice.of(policy, **given)
    except ValueError as error:
        # A policy's complaint begins with the parameter's name.
        key = str(error).split(maxsplit=1)[0].rstrip(":")
        reason = str(error).removeprefix(key).partition(", got ")[0].strip()
        keys = ("configurations", name, key)
        refuse_key(source, keys, given.get(key, block), reason, defaults.get(key), None, beside)


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


def _resolve_device(
    wanted: Literal["auto", "cpu", "cuda"], source: str, elsewhere: bool
) -> Literal["cpu", "cuda"]:
    if wanted == "auto":
        return "cuda" if _count_gpus(wanted, source) else "cpu"
    if wanted == "cuda" and not elsewhere:
        refuse_missing_gpu(source)
    return wanted


def _count_gpus(wanted: str, source: str) -> int:
    try:
        return count_gpus()
    except GpuError as error:
        reason = f"{error}, or leave the GPUs alone"
        refuse_key(source, ("device",), wanted, reason, "cpu")


def refuse_missing_gpu(source: str) -> None:
    """Refuse ``device: cuda`` if this machine has no GPU for it.

    Raises:
        ConfigError: If there is none, or if ``CUDA_VISIBLE_DEVICES`` cannot be read.
    """
    if not _count_gpus("cuda", source):
        reason = "no NVIDIA GPU that torch can use was found on this machine"
        refuse_key(source, ("device",), "cuda", reason, "auto")


_EXAMPLES: dict[str, Any] = {
    "configurations": {"default": {"init_scale": 65536.0}},
    "workloads": {"binary": {"steps": 100}},
    "seeds": [0, 1, 2, 3, 4],
    "device": "auto",
    "threads": 1,
    "search": {"proposals": 2},
    "warm_workers": True,
    "runs_per_gpu": 1,
}


def _refuse_first(error: ValidationError, source: str) -> NoReturn:
    """Turn pydantic's first complaint into one line with the block to write instead."""
    first = error.errors(include_url=False)[0]
    key, value = str(first["loc"][0]), first["input"]
    if first["type"] == "extra_forbidden":
        better = (difflib.get_close_matches(key, _EXAMPLES, n=1, cutoff=0.5) or list(_EXAMPLES))[0]
        reason = f"unknown key; known: {', '.join(_EXAMPLES)}"
        refuse_key(source, (key,), value, reason, _EXAMPLES[better], better)
    reasons = {
        "missing": "is missing",
        "dict_type": "must be a block of keys and values",
        "list_type": "must be a list",
        "bool_type": "must be true or false",
        "literal_error": f"must be one of {first.get('ctx', {}).get('expected')}",
    }
    reason = reasons.get(first["type"], first["msg"].removeprefix("Value error, "))
    shown = None if first["type"] == "missing" else value
    refuse_key(source, (key,), shown, reason, _EXAMPLES[key])
