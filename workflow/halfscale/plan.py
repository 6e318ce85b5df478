"""What is to be run: the plan, and from it the specification of each run.

A specification (`RunSpec`) holds everything a run's numbers depend on and is written as canonical
JSON: sorted keys, normalised numbers. Two configurations that mean the same give the same text, and
its digest tells whether a result on the disk belongs to it. `halfscale.planner` makes plans.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from halfscale.policies import POLICIES, Policy, make_policy

SCHEMA = 1
LARGEST_FP16 = 65504.0
CONTROLS: dict[str, Literal["fp32", "bf16", "fp16"]] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16-unscaled": "fp16",
}

FOUND = "found-"
"""How the names of configurations begin that the search found."""

Precision = Literal["fp32", "bf16", "fp16"]
Parameter = bool | int | float | str


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PolicyChoice(_Block):
    """A scaling policy and every parameter it has, resolved."""

    policy: str = "torch"
    parameters: dict[str, Any]

    @classmethod
    def of(cls, policy: str = "torch", **parameters: Any) -> PolicyChoice:
        """Choose a policy; parameters left out have its project's defaults.

        Raises:
            ValueError: If the policy is unknown, has no such parameter or refuses a value.
        """
        machine = make_policy(policy, **parameters)
        resolved = {name: getattr(machine, name) for name in machine.parameters()}
        # As JSON reads it back, so that a choice equals its own copy from a file.
        return cls(policy=policy, parameters=json.loads(json.dumps(resolved)))

    def make(self) -> Policy:
        """The state machine, at its initial scale."""
        return make_policy(self.policy, **self.parameters)

    @property
    def distance(self) -> tuple[bool, int, float]:
        """How far it is from PyTorch's defaults.

        Another rule is farther than any parameter; of other rules, one that lacks more of
        PyTorch's parameters; then the sum of |log2| of the parameters' ratios decides.
        """
        default = POLICIES["torch"].parameters()
        shared = [key for key in default if key in self.parameters]
        apart = sum(abs(math.log2(self.parameters[key] / default[key])) for key in shared)
        return self.policy != "torch", len(default) - len(shared), apart

    def constructor(self, device: str) -> str:
        """The Python that builds this scaler in a user's own training."""
        order = POLICIES[self.policy].parameters()
        keywords = [f"{key}={_short(self.parameters[key])}," for key in order]
        if self.policy == "torch":
            lines = [f'"{device}",', *keywords]
            return "\n".join(
                ["scaler = torch.amp.GradScaler(", *(f"    {line}" for line in lines), ")"]
            )
        lines = [f'"{self.policy}",', *keywords]
        return "\n".join(
            [
                "from halfscale.policies import make_policy",
                "from halfscale.scaling import LossScaler",
                "",
                "scaler = LossScaler(",
                "    make_policy(",
                *(f"        {line}" for line in lines),
                "    )",
                ")",
            ]
        )


def _short(value: object) -> str:
    if isinstance(value, float) and math.isfinite(value) and value > 0:
        mantissa, exponent = math.frexp(value)
        if mantissa == 0.5 and abs(exponent - 1) >= 5:
            return f"2.0**{exponent - 1}"
    return repr(value)


class WorkloadPlan(_Block):
    """One workload of the plan: its length, its resolved parameters, the digests of its code.

    ``entry`` is where a user's own workload is, such as ``mine.py:build``; None for a built-in one.
    """

    steps: int
    parameters: dict[str, Parameter]
    source: str
    probe_source: str
    entry: str | None = None


class SearchPlan(_Block):
    """What the search for settings nobody listed is to try.

    Attributes:
        proposals: How many configurations to train of those found.
        policy: The policy whose parameters are varied.
        ranges: The values of each parameter, as `halfscale.grid.grid` takes them; None for its
            defaults.
        source: The digest of the search's code.
    """

    proposals: int
    policy: str
    ranges: dict[str, Any] | None
    source: str


class SearchSpec(_Block):
    """Everything that the proposals of a search depend on."""

    schema_version: int = SCHEMA
    search: SearchPlan
    configurations: dict[str, PolicyChoice]
    probes: list[str]

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
        return digest_of(canonical_json(self))


class JobSpec(_Block):
    """Everything that the numbers of one job depend on: a workload from a seed, and how to run it.

    Attributes:
        record_name: The name of the job's record in its folder.
        table_name: The name of the table beside it, a row a step.
    """

    record_name: ClassVar[str]
    table_name: ClassVar[str]

    schema_version: int = SCHEMA
    workload: str
    parameters: dict[str, Parameter]
    steps: int
    seed: int
    device: Literal["cpu", "cuda"]
    threads: int
    source: str
    entry: str | None = None

    def canonical_json(self) -> str:
        """The specification as one line of JSON; equal meaning gives equal text."""
        return canonical_json(self)

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
        return digest_of(self.canonical_json())

    @property
    def folder(self) -> Path:
        """The job's folder, relative to the results folder."""
        raise NotImplementedError

    @property
    def log(self) -> Path:
        """The job's log, relative to the folder of logs."""
        raise NotImplementedError


class RunSpec(JobSpec):
    """One run: one workload, one arm, one seed."""

    record_name = "run.json"
    table_name = "trace.parquet"

    arm: str
    precision: Precision
    policy: PolicyChoice | None

    @property
    def is_control(self) -> bool:
        return self.arm in CONTROLS

    @property
    def folder(self) -> Path:
        return Path("runs", self.workload, self.arm, f"seed{self.seed}")

    @property
    def log(self) -> Path:
        return Path("train", self.workload, self.arm, f"seed{self.seed}.log")

    def __str__(self) -> str:
        return f"workload={self.workload} configuration={self.arm} seed={self.seed}"


class ProbeSpec(JobSpec):
    """One probe: a reference run of a workload that records every gradient's magnitude.

    It trains in bf16: under autocast the same tensors are in half precision as in fp16, but with
    the range of fp32, so that nothing overflows or vanishes.
    """

    record_name = "probe.json"
    table_name = "probe.parquet"

    precision: Literal["bf16"] = "bf16"
    policy: None = None

    @property
    def folder(self) -> Path:
        return Path("probes", self.workload, f"seed{self.seed}")

    @property
    def log(self) -> Path:
        return Path("probe", self.workload, f"seed{self.seed}.log")

    def __str__(self) -> str:
        return f"workload={self.workload} probe seed={self.seed}"


class Execution(_Block):
    """How the jobs are carried out. It decides no number, so no digest and no JSON holds it.

    Attributes:
        warm_workers: Whether local jobs are forked from one process that has imported torch.
        runs_per_gpu: How many runs may be on one GPU at a time.
        device_found: Whether the device is what was found on this machine, not what was asked for.
    """

    warm_workers: bool = True
    runs_per_gpu: int = 1
    device_found: bool = False


class Plan(_Block):
    """A checked configuration: what is to be run, independent of the order it was written in."""

    schema_version: int = SCHEMA
    device: Literal["cpu", "cuda"]
    threads: int
    seeds: tuple[int, ...]
    workloads: dict[str, WorkloadPlan]
    configurations: dict[str, PolicyChoice]
    search: SearchPlan | None = None
    execution: Execution = Field(default=Execution(), exclude=True)

    @property
    def arms(self) -> list[str]:
        """All arms: the configurations by name, then the controls."""
        return [*sorted(self.configurations), *CONTROLS]

    def run(self, workload: str, arm: str, seed: int) -> RunSpec:
        """The specification of one run.

        Raises:
            KeyError: If the plan has no such workload or arm.
        """
        control = arm in CONTROLS
        return RunSpec(
            **self._shared(workload, seed),
            arm=arm,
            precision=CONTROLS[arm] if control else "fp16",
            policy=None if control else self.configurations[arm],
            source=self.workloads[workload].source,
        )

    def probe(self, workload: str, seed: int) -> ProbeSpec:
        """The specification of one probe.

        Raises:
            KeyError: If the plan has no such workload.
        """
        source = self.workloads[workload].probe_source
        return ProbeSpec(**self._shared(workload, seed), source=source)

    def _shared(self, workload: str, seed: int) -> dict[str, Any]:
        block = self.workloads[workload]
        return {
            "workload": workload,
            "parameters": block.parameters,
            "steps": block.steps,
            "seed": seed,
            "device": self.device,
            "threads": self.threads,
            "entry": block.entry,
        }

    def run_keys(self) -> Iterator[tuple[str, str, int]]:
        """Workload, arm and seed of every run: what `run` makes its specification of."""
        return product(sorted(self.workloads), self.arms, self.seeds)

    def probe_keys(self) -> Iterator[tuple[str, int]]:
        """Workload and seed of every probe."""
        return product(sorted(self.workloads), self.seeds)

    def runs(self) -> Iterator[RunSpec]:
        """Every run of the plan: workloads × arms × seeds."""
        return (self.run(*key) for key in self.run_keys())

    def probes(self) -> Iterator[ProbeSpec]:
        """Every probe of the plan: workloads × seeds."""
        return (self.probe(*key) for key in self.probe_keys())

    def jobs(self) -> Iterator[RunSpec | ProbeSpec]:
        """Every job that trains: runs and probes."""
        yield from self.runs()
        yield from self.probes()

    @property
    def search_spec(self) -> SearchSpec | None:
        """The specification of the search; None if there is to be none."""
        if self.search is None:
            return None
        listed = {
            name: choice for name, choice in self.configurations.items() if not is_found(name)
        }
        probes = [probe.digest for probe in self.probes()]
        return SearchSpec(search=self.search, configurations=listed, probes=probes)

    def with_found(self, choices: Sequence[PolicyChoice]) -> Plan:
        """This plan and the configurations that the search found, named ``found-1`` and so on."""
        found = {f"{FOUND}{number}": choice for number, choice in enumerate(choices, start=1)}
        return self.model_copy(update={"configurations": {**self.configurations, **found}})

    def canonical_json(self) -> str:
        """The plan as one line of JSON; equal meaning gives equal text."""
        return canonical_json(self)


def is_found(name: str) -> bool:
    """Whether a configuration was found by the search, and listed by nobody."""
    return name.startswith(FOUND)


def digest_of(text: str) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a canonical JSON."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical_json(value: BaseModel | Mapping[str, Any]) -> str:
    """JSON with sorted keys and no spaces.

    Raises:
        ValueError: If a number is NaN or infinite.
    """
    plain = value.model_dump() if isinstance(value, BaseModel) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
