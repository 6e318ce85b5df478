"""How well one reference run predicts the skipped steps of every configuration, measured.

Trains, in this process and without files, every built-in workload under the configurations of
``config.yaml`` and of STRICTER, each from several seeds, in real fp16; and one probe a workload and
seed. Then every configuration is replayed over the probe, and its skipped steps are compared with
those of the training. Prints the share of runs within one step, by workload and altogether, and the
worst case of each. Takes about ten minutes on one core.

    python benchmarks/calibration.py [--seeds 5] [--stricter]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from halfscale.config import read_config
from halfscale.plan import Plan, RunSpec
from halfscale.planner import build_plan
from halfscale.probe import record_probe
from halfscale.records import PROBE_SCHEMA
from halfscale.replay import Probe, replay_traces
from halfscale.train import run_training

ROOT = Path(__file__).resolve().parents[1]

STRICTER = {
    "every-5": {"init_scale": 2**16, "growth_interval": 5},
    "low-every-5": {"init_scale": 2**10, "growth_interval": 5},
    "high-every-10": {"init_scale": 2**24, "growth_interval": 10},
}
"""Configurations that come near the limit more often than any that one would train with."""


@dataclass(frozen=True)
class Case:
    """One run: what was predicted of it and what it did."""

    workload: str
    configuration: str
    seed: int
    predicted: int
    had: int

    @property
    def apart(self) -> int:
        """By how many steps the prediction was off."""
        return abs(self.predicted - self.had)

    def __str__(self) -> str:
        name = f"{self.configuration}, seed {self.seed}"
        return f"{name}: predicted {self.predicted}, had {self.had}"


def quiet(line: str) -> None:
    """Nobody looks at the progress."""


def make_plan(seeds: int, stricter: bool) -> Plan:
    """Every built-in workload at the length that ``examples/workloads.yaml`` gives it."""
    shipped = read_config(ROOT / "config.yaml")["configurations"]
    workloads = read_config(ROOT / "examples" / "workloads.yaml")["workloads"]
    configurations = {**shipped, **(STRICTER if stricter else {})}
    return build_plan(
        {
            "configurations": configurations,
            "workloads": workloads,
            "seeds": list(range(seeds)),
            "device": "cpu",
            "threads": 1,
        }
    )


def skipped_steps(spec: RunSpec) -> int:
    """The skipped steps of a real training."""
    applied: list[bool] = []
    run_training(spec, lambda row: applied.append(row["applied"]), quiet)
    return applied.count(False)


def cases_of(plan: Plan, workload: str) -> Iterator[Case]:
    """Train and predict every configuration of one workload."""
    for seed in plan.seeds:
        columns, _ = record_probe(plan.probe(workload, seed), quiet)
        probe = Probe.of(pa.table(columns, schema=PROBE_SCHEMA))
        for name, choice in plan.configurations.items():
            predicted = int(replay_traces(choice, probe).overflow.sum())
            yield Case(
                workload, name, seed, predicted, skipped_steps(plan.run(workload, name, seed))
            )


def line(name: str, cases: list[Case]) -> str:
    """A row of the table."""
    within = sum(case.apart <= 1 for case in cases)
    exact = sum(case.apart == 0 for case in cases)
    worst = max(cases, key=lambda case: case.apart)
    return (
        f"| {name} | {len(cases)} | {within} ({within / len(cases):.1%}) | {exact} "
        f"| {worst if worst.apart else 'all exact'} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--stricter", action="store_true", help="those of STRICTER too")
    parser.add_argument("--workloads", nargs="+", help="some of them only")
    given = parser.parse_args(arguments)
    plan = make_plan(given.seeds, given.stricter)
    print("| workload | runs | within one step | exact | worst |")
    print("| --- | --- | --- | --- | --- |")
    everything: list[Case] = []
    for workload in given.workloads or plan.workloads:
        cases = list(cases_of(plan, workload))
        print(line(workload, cases), flush=True)
        everything += cases
    print(line("all", everything))
    if given.stricter:
        shipped = [case for case in everything if case.configuration not in STRICTER]
        print(line("those of config.yaml", shipped))


if __name__ == "__main__":
    main()
