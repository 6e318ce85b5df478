"""The jobs of a plan while Snakemake parses the workflow: each specification is made once.

Snakemake asks for the same job again and again: its targets, its parameters, whether its result
still fits. In a plan of thousands of runs the specifications would take longer than all else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from halfscale.packing import pack
from halfscale.plan import CONTROLS, Plan, ProbeSpec, RunSpec, digest_of, is_found
from halfscale.proposals import PROPOSALS, ProposalError, extend_plan


@dataclass(frozen=True, slots=True)
class Job:
    """One specification and what is derived from it.

    Attributes:
        spec: The specification.
        text: Its canonical JSON.
        digest: Its digest.
        record: Its record's file, relative to the results folder.
    """

    spec: RunSpec | ProbeSpec
    text: str
    digest: str
    record: str

    @classmethod
    def of(cls, spec: RunSpec | ProbeSpec) -> Job:
        """Derive the rest from a specification."""
        text = spec.canonical_json()
        return cls(spec, text, digest_of(text), f"{spec.folder.as_posix()}/{spec.record_name}")


class Jobs:
    """The jobs of a plan and of what its search has found so far.

    Args:
        plan: The plan as its configuration states it.
        results: The results folder.
    """

    def __init__(self, plan: Plan, results: Path) -> None:
        self.plan = plan
        self.results = results
        self._runs: dict[tuple[str, str, int], Job] = {}
        self._probes: dict[tuple[str, int], Job] = {}
        self._extended: tuple[object, Plan] = (None, plan)

    @cached_property
    def plan_text(self) -> str:
        """The plan as its configuration states it, as an argument of a job's command."""
        return pack(self.plan.canonical_json())

    def whole(self) -> Plan:
        """The plan with what its search has found; the plan itself if that is nothing of use."""
        if self.plan.search is None:
            return self.plan
        state = _state_of(self.results / PROPOSALS)
        if state is None:
            return self.plan
        if state != self._extended[0]:
            self._forget_found()
            try:
                self._extended = (state, extend_plan(self.plan, self.results))
            except ProposalError:
                self._extended = (state, self.plan)
        return self._extended[1]

    def _forget_found(self) -> None:
        self._runs = {key: job for key, job in self._runs.items() if not is_found(key[1])}

    def run(self, workload: str, arm: str, seed: int) -> Job:
        """A run, or the end of the process with one line if there is none of these names."""
        # The proposals are looked at only for what they hold: a large plan asks this of every run.
        whole = self.whole() if is_found(arm) else self.plan
        key = workload, arm, seed
        if key not in self._runs:
            # Not in its arms, which are sorted anew each time: many runs would take for ever.
            known = arm in whole.configurations or arm in CONTROLS
            if workload not in whole.workloads or not known:
                hint = "; what the search finds can be asked for once it has run"
                sys.exit(
                    f"halfscale: the configuration has no workload {workload} or no configuration "
                    f"{arm}{hint if is_found(arm) else ''}"
                )
            self._runs[key] = Job.of(whole.run(workload, arm, seed))
        return self._runs[key]

    def probe(self, workload: str, seed: int) -> Job:
        """A probe.

        Raises:
            KeyError: If the plan has no such workload.
        """
        key = workload, seed
        if key not in self._probes:
            self._probes[key] = Job.of(self.plan.probe(workload, seed))
        return self._probes[key]

    def runs(self) -> list[Job]:
        """Every run, those of what the search has found among them."""
        return [self.run(*key) for key in self.whole().run_keys()]

    def count_runs(self) -> int:
        """How many runs there are, those of what the search has found among them."""
        return sum(1 for _ in self.whole().run_keys())

    def listed(self) -> Iterator[Job]:
        """The runs and probes of the plan itself, which wait for no search."""
        yield from (self.run(*key) for key in self.plan.run_keys())
        yield from (self.probe(*key) for key in self.plan.probe_keys())

    @cached_property
    def outdated(self) -> list[Job]:
        """The runs and probes whose result on the disk is of another specification."""
        return [
            job
            for job in (*self.runs(), *(self.probe(*key) for key in self.plan.probe_keys()))
            if recorded_digest(self.results / job.record) not in (None, job.digest)
        ]


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written anew; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def recorded_digest(record: Path) -> str | None:
    """The digest that a record claims, or None if there is no readable one."""
    try:
        digest = json.loads(record.read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(digest)
