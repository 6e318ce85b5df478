"""From a configuration to a checked plan, and from the plan to the specification of each run.

A specification (`RunSpec`) holds everything a run's numbers depend on and is written as canonical
JSON: sorted keys, normalised numbers. Two configurations that mean the same give the same text, and
its digest tells whether a result on the disk belongs to it.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from halfscale.config import ConfigError, Number, flow, parse_number
from halfscale.devices import count_gpus
from halfscale.sources import PACKAGE, TRAINING, source_digest

SCHEMA = 1
LARGEST_FP32 = 3.4028234663852886e38
CONTROLS: dict[str, Literal["fp32", "bf16", "fp16"]] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16-unscaled": "fp16",
}

Precision = Literal["fp32", "bf16", "fp16"]
Parameter = bool | int | float | str

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}[A-Za-z0-9_]|[A-Za-z]")
_MISREAD = {"yes", "no", "on", "off", "true", "false", "null", "none", "nan", "na", "y", "n"}
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul"} | {
    f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10)
}


def _between(low: float, high: float, low_open: bool = True) -> BeforeValidator:
    def check(value: object) -> float:
        number = float(parse_number(value))
        if not ((low < number if low_open else low <= number) and number < high):
            comparison = "greater than" if low_open else "at least"
            limit = "" if high > LARGEST_FP32 else f" and less than {high:g}"
            raise ValueError(f"must be {comparison} {low:g}{limit}")
        return number

    return BeforeValidator(check)


def _whole(low: int) -> BeforeValidator:
    def check(value: object) -> int:
        number = parse_number(value)
        if number != int(number):
            raise ValueError("must be a whole number")
        if number < low:
            raise ValueError(f"must be at least {low}")
        return int(number)

    return BeforeValidator(check)


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScalerParameters(_Block):
    """The parameters of ``torch.amp.GradScaler``; the defaults are PyTorch's."""

    init_scale: Annotated[float, _between(0, 2 * LARGEST_FP32)] = 65536.0
    growth_factor: Annotated[float, _between(1, 2 * LARGEST_FP32)] = 2.0
    backoff_factor: Annotated[float, _between(0, 1)] = 0.5
    growth_interval: Annotated[int, _whole(1)] = 2000

    def constructor(self, device: str) -> str:
        """The Python that builds this scaler in a user's own training."""
        return (
            f'scaler = torch.amp.GradScaler(\n    "{device}",\n'
            f"    init_scale={_short(self.init_scale)},\n"
            f"    growth_factor={_short(self.growth_factor)},\n"
            f"    backoff_factor={_short(self.backoff_factor)},\n"
            f"    growth_interval={self.growth_interval},\n)"
        )


def _short(number: float) -> str:
    exponent = number.hex().split("p")
    if exponent[0] == "0x1.0000000000000" and abs(int(exponent[1])) >= 5:
        return f"2.0**{int(exponent[1])}"
    return repr(number)


class _WorkloadBlock(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    steps: Annotated[int, _whole(2)] = 100


class _Config(_Block):
    configurations: dict[str, ScalerParameters | None]
    workloads: dict[str, _WorkloadBlock | None] = {"binary": None, "digits": None}
    seeds: list[Annotated[int, _whole(0)]] = [0, 1, 2, 3, 4]
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, _whole(1)] = 1


class WorkloadPlan(_Block):
    """One workload of the plan: its length, its resolved parameters, the digest of its code."""

    steps: int
    parameters: dict[str, Parameter]
    source: str


class RunSpec(_Block):
    """Everything that one run's numbers depend on: one workload, one arm, one seed."""

    schema_version: int = SCHEMA
    workload: str
    parameters: dict[str, Parameter]
    steps: int
    arm: str
    precision: Precision
    scaler: ScalerParameters | None
    seed: int
    device: Literal["cpu", "cuda"]
    threads: int
    source: str

    def canonical_json(self) -> str:
        """The specification as one line of JSON; equal meaning gives equal text."""
        return canonical_json(self)

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()[:16]

    @property
    def is_control(self) -> bool:
        return self.arm in CONTROLS

    @property
    def folder(self) -> Path:
        """The run's folder, relative to the results folder."""
        return Path("runs", self.workload, self.arm, f"seed{self.seed}")

    def __str__(self) -> str:
        return f"workload={self.workload} configuration={self.arm} seed={self.seed}"


class Plan(_Block):
    """A checked configuration: what is to be run, independent of the order it was written in."""

    schema_version: int = SCHEMA
    device: Literal["cpu", "cuda"]
    threads: int
    seeds: tuple[int, ...]
    workloads: dict[str, WorkloadPlan]
    configurations: dict[str, ScalerParameters]

    @property
    def arms(self) -> list[str]:
        """All arms: the configurations by name, then the controls."""
        return [*sorted(self.configurations), *CONTROLS]

    def run(self, workload: str, arm: str, seed: int) -> RunSpec:
        """The specification of one run.

        Raises:
            KeyError: If the plan has no such workload or arm.
        """
        block = self.workloads[workload]
        control = arm in CONTROLS
        return RunSpec(
            workload=workload,
            parameters=block.parameters,
            steps=block.steps,
            arm=arm,
            precision=CONTROLS[arm] if control else "fp16",
            scaler=None if control else self.configurations[arm],
            seed=seed,
            device=self.device,
            threads=self.threads,
            source=block.source,
        )

    def runs(self) -> Iterator[RunSpec]:
        """Every run of the plan: workloads × arms × seeds."""
        for workload in sorted(self.workloads):
            for arm in self.arms:
                for seed in self.seeds:
                    yield self.run(workload, arm, seed)

    def canonical_json(self) -> str:
        """The plan as one line of JSON; equal meaning gives equal text."""
        return canonical_json(self)


def canonical_json(value: BaseModel | Mapping[str, Any]) -> str:
    """JSON with sorted keys and no spaces.

    Raises:
        ValueError: If a number is NaN or infinite.
    """
    plain = value.model_dump() if isinstance(value, BaseModel) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


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
            name: _plan_workload(name, block or _WorkloadBlock(), source)
            for name, block in sorted(checked.workloads.items())
        },
        configurations={
            name: block or ScalerParameters()
            for name, block in sorted(checked.configurations.items())
        },
    )


def _check_names(configurations: Mapping[str, object], source: str) -> None:
    if not configurations:
        _refuse(source, ("configurations",), {}, "is empty", {"default": {}})
    seen: dict[str, str] = {}
    for name in configurations:
        folded = name.casefold()
        better = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-_") or "default"
        better = better if better[0].isalpha() else f"run-{better}"
        reason = None
        if folded in CONTROLS:
            reason, better = "is the name of a control, which is always run", f"my-{better}"
        elif folded in _MISREAD or folded.split(".")[0] in _WINDOWS_DEVICES:
            reason, better = "is a reserved word of YAML, pandas or Windows", f"my-{better}"
        elif not _NAME.fullmatch(name):
            reason = (
                "is not usable as a folder name: use letters, digits, '-', '_' and '.', "
                "a letter first, 64 characters at most"
            )
        elif folded in seen:
            reason, better = f"differs from {seen[folded]!r} only in case", f"{better}-2"
        if reason:
            _refuse(source, ("configurations", name), name, f"the name {reason}", {}, better)
        seen[folded] = name


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


def _plan_workload(name: str, block: _WorkloadBlock, source: str) -> WorkloadPlan:
    known = workload_names()
    if name not in known:
        better = (difflib.get_close_matches(name, known, n=1) or known)[0]
        reason = f"unknown workload; halfscale has {', '.join(known)}"
        _refuse(source, ("workloads", name), name, reason, {"steps": block.steps}, better)
    file = PACKAGE / "workloads" / f"{name}.py"
    parameters = dict(workload_defaults(file))
    for key, value in (block.model_extra or {}).items():
        keys = ("workloads", name, key)
        if key not in parameters:
            has = ", ".join(["steps", *parameters])
            better = (difflib.get_close_matches(key, ["steps", *parameters], n=1) or ["steps"])[0]
            example = parameters.get(better, block.steps)
            _refuse(source, keys, value, f"unknown key; {name} has {has}", example, better)
        try:
            parameters[key] = _like(parameters[key], value)
        except ValueError as error:
            _refuse(source, keys, value, str(error), parameters[key])
    digest = source_digest(*TRAINING, f"workloads/{name}.py")
    return WorkloadPlan(steps=block.steps, parameters=parameters, source=digest)


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
    **ScalerParameters().model_dump(),
    "steps": 100,
    "seeds": [0, 1, 2, 3, 4],
    "device": "auto",
    "threads": 1,
    "configurations": {"default": {"init_scale": 65536.0}},
    "workloads": {"binary": {"steps": 100}},
}


def _refuse_first(error: ValidationError, source: str) -> NoReturn:
    """Turn pydantic's first complaint into one line with the block to write instead."""
    first = error.errors(include_url=False)[0]
    keys = tuple(str(part) for part in first["loc"] if not str(part).endswith("]"))
    key = next((part for part in reversed(keys) if not part.isdigit()), "")
    value: Any = first["input"]
    if first["type"] == "extra_forbidden":
        inside = len(keys) > 1
        known = list(ScalerParameters.model_fields if inside else _Config.model_fields)
        better = (difflib.get_close_matches(key, known, n=1, cutoff=0.5) or known)[0]
        example = value if inside and isinstance(value, int | float) else _EXAMPLES[better]
        _refuse(source, keys, value, f"unknown key; known: {', '.join(known)}", example, better)
    if first["type"] == "missing":
        _refuse(source, keys, None, "is missing", _EXAMPLES[key])
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("dict_type", "model_type", "model_attributes_type"):
        reason = "must be a block of keys and values"
    elif first["type"] == "list_type":
        reason = "must be a list"
    elif first["type"] == "literal_error":
        reason = f"must be one of {first['ctx']['expected']}"
    while keys and keys[-1].isdigit():
        keys = keys[:-1]
    example = _EXAMPLES.get(key, {"init_scale": 65536.0} if "configurations" in keys else {})
    _refuse(source, keys, value, reason, example)


def _refuse(
    source: str,
    keys: tuple[str, ...],
    value: object,
    reason: str,
    example: object,
    better: str | None = None,
) -> NoReturn:
    """Raise the error for one key; ``better`` replaces the last key in the block to write."""
    block: object = example
    for key in reversed((*keys[:-1], better or keys[-1])):
        block = {key: block}
    shown = f"{value!r:.60}"
    where = ".".join(keys)
    raise ConfigError(f"{source}: {where}: {shown}: {reason}; write: {flow(block)}")
