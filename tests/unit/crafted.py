"""Plans, runs and tables made by hand, without training, through the package's own writers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from halfscale.calibration import calibrate
from halfscale.evidence import Evidence
from halfscale.export import build_recommendation
from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.plan import Plan, PolicyChoice, ProbeSpec, RunSpec
from halfscale.planner import build_plan
from halfscale.predict import write_predictions
from halfscale.probe_tables import collect_probes
from halfscale.records import (
    TRACE_SCHEMA,
    Outcome,
    ProbeRecord,
    RunRecord,
    write_probe,
    write_run,
    write_text,
)
from halfscale.tables import collect_runs, summarise
from halfscale.verdict import Verdict, decide

ENVIRONMENT: dict[str, str | int] = {"torch": "2.0", "arithmetic": "fp16 (crafted)", "threads": 1}


def make_plan(
    configurations: Mapping[str, Mapping[str, object]] | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    workloads: Mapping[str, Mapping[str, object]] | None = None,
    search: object = False,
) -> Plan:
    """A small plan on the CPU."""
    return build_plan(
        {
            "configurations": configurations or {"default": {"growth_interval": 5}},
            "seeds": list(seeds),
            "workloads": workloads or {"binary": {"steps": 100}},
            "device": "cpu",
            "search": search,
        }
    )


def tiny_spec(arm: str = "default", steps: int = 12, seed: int = 0, **scaler: object) -> RunSpec:
    """A specification that trains in a few milliseconds."""
    plan = make_plan(
        {"default": {"growth_interval": 5, **scaler}},
        seeds=[seed],
        workloads={"binary": {"steps": steps, "samples": 64, "hidden": 8}},
    )
    return plan.run("binary", arm, seed)


@dataclass(frozen=True)
class Fate:
    """How a crafted run goes.

    Attributes:
        pace: Steps in which the loss falls to 1/e of its way; smaller is faster.
        skipped: The steps that overflow.
        outcome: How the run ends.
        error: The error's text.
        done: Steps that were recorded; None for all.
        floor: Where the loss ends.
    """

    pace: float = 15.0
    skipped: Iterable[int] = ()
    outcome: Outcome = "ok"
    error: str | None = None
    done: int | None = None
    floor: float = 0.2


def craft_trace(spec: RunSpec, fate: Fate) -> tuple[dict[str, list[Any]], float | None]:
    """The columns of a trace and the final scale, by GradScaler's rule over the given overflows."""
    done = spec.steps if fate.done is None else fate.done
    skipped = set(fate.skipped)
    noise = np.random.default_rng(spec.seed).normal(0, 0.004, spec.steps)
    scaler = (spec.policy or PolicyChoice.of(init_scale=1)).make()
    scale, clean, taken = scaler.init_scale, 0, 0
    trace: dict[str, list[Any]] = {name: [] for name in TRACE_SCHEMA.names}
    for step in range(done):
        overflow = step in skipped
        row = {
            "step": step,
            "loss": fate.floor + 0.7 * math.exp(-taken / fate.pace) + noise[step],
            "scale": scale,
            "overflow": overflow,
            "applied": not overflow,
            "grad_norm": math.inf if overflow else 0.5,
            "headroom": -math.inf if overflow else 4.0,
            "seconds": 0.001,
        }
        for name, value in row.items():
            trace[name].append(value)
        clean = 0 if overflow else clean + 1
        taken += not overflow
        if spec.policy and overflow:
            scale *= scaler.backoff_factor
        elif spec.policy and clean == scaler.growth_interval:
            scale, clean = scale * scaler.growth_factor, 0
    return trace, scale if spec.policy else None


def write_crafted(results: Path, spec: RunSpec, fate: Fate | None = None) -> RunRecord:
    """Write the two files of one run."""
    fate = fate or Fate()
    trace, final_scale = craft_trace(spec, fate)
    return write_run(
        results / spec.folder,
        trace,
        spec=spec,
        outcome=fate.outcome,
        error=fate.error,
        final_scale=final_scale,
        environment=ENVIRONMENT,
    )


def write_crafted_probe(results: Path, spec: ProbeSpec, done: int | None = None) -> ProbeRecord:
    """Write the two files of a probe: gradients of 2^-30 to 2^-3, every step like the other."""
    weights, activations = np.zeros(BINS, int), np.zeros(BINS, int)
    weights[-12 - LOWEST_EXPONENT : -2 - LOWEST_EXPONENT] = 8
    activations[-30 - LOWEST_EXPONENT : -10 - LOWEST_EXPONENT] = 16
    row = {
        "largest": 2.0**-2 - 2.0**-10,
        "largest_gradient": 2.0**-3,
        "batch_repeats": True,
        "activation_counts": activations.tolist(),
        "weight_counts": weights.tolist(),
        "activation_zeros": 80,
        "weight_zeros": 0,
    }
    steps = spec.steps if done is None else done
    probe = {name: [value] * steps for name, value in row.items()}
    return write_probe(
        results / spec.folder,
        {"step": list(range(steps)), "loss": [0.5] * steps, **probe},
        spec=spec,
        outcome="ok" if done is None else "failed",
        error=None if done is None else "building the workload",
        environment=ENVIRONMENT,
    )


def write_all(results: Path, plan: Plan, fates: Mapping[str, Fate] | None = None) -> None:
    """Write every run of a plan, each arm by its fate, and every probe."""
    for spec in plan.runs():
        write_crafted(results, spec, (fates or {}).get(spec.arm))
    for probe in plan.probes():
        write_crafted_probe(results, probe)


def runs_table(
    steps: Mapping[str, Mapping[str, Sequence[float]]],
    limit: int = 100,
    skipped: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """The columns that the verdict reads: ``steps[configuration][workload][seed]``."""
    rows = [
        {
            "workload": workload,
            "configuration": name,
            "seed": seed,
            "outcome": "ok",
            "error": None,
            "steps": limit,
            "steps_to_target": float(value),
            "skipped_steps": (skipped or {}).get(name, 0),
            "curve": f"{name}-{workload}-{seed}",
        }
        for name, workloads in steps.items()
        for workload, values in workloads.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def sweep_table() -> pd.DataFrame:
    """A verification sweep whose fp16 gradients overflow above S = 2^-10."""
    scales = 2.0 ** np.arange(-24, 25)
    largest = 6.0e7 * scales
    overflow = largest > 65504
    return pd.DataFrame(
        {
            "scale": scales,
            "fp16_largest": np.where(overflow, np.inf, largest),
            "fp32_largest": largest,
            "overflow": overflow,
        }
    )


def checks_table() -> pd.DataFrame:
    """Verification checks that passed."""
    return pd.DataFrame(
        {
            "name": ["ratio of scaled to unscaled gradients", "overflow in fp16"],
            "measured": ["25 of 25 scales exact", "step skipped"],
            "expected": ["the scale itself", "skipped, bit-identical"],
            "passed": [True, True],
        }
    )


@dataclass(frozen=True)
class Made:
    """Everything that the readers make of a plan's crafted runs."""

    plan: Plan
    results: Path
    runs: pd.DataFrame
    steps: pd.DataFrame
    configurations: pd.DataFrame
    exponents: pd.DataFrame
    windows: pd.DataFrame
    probes: pd.DataFrame
    calibration: pd.DataFrame
    landscape: pd.DataFrame
    verdict: Verdict
    recommendation: dict[str, Any]

    def evidence(self, **changed: Any) -> Evidence:
        """What figures are drawn from, some of it changed."""
        content = {
            "runs": self.runs,
            "configurations": self.configurations,
            "steps": self.steps,
            "sweep": sweep_table(),
            "exponents": self.exponents,
            "windows": self.windows,
            "calibration": self.calibration,
            "landscape": self.landscape,
            "choices": self.plan.configurations,
            "recommendation": self.recommendation,
        }
        return Evidence(**{**content, **changed})

    def write_tables(self, results: Path, orphans: Sequence[str] = ()) -> None:
        """Write the tables and the checks below a results folder, where the report finds them."""
        folder = results / "tables"
        for name in ("runs", "configurations", "exponents", "probes", "calibration"):
            write_text(folder / f"{name}.csv", getattr(self, name).to_csv(index=False))
        self.windows.to_parquet(folder / "windows.parquet")
        write_text(folder / "orphans.json", json.dumps(list(orphans)))
        write_text(folder / "plan.json", self.plan.canonical_json())
        checks = checks_table().to_csv(index=False)
        write_text(results / "verification" / "checks.csv", checks)


def make(results: Path, plan: Plan, fates: Mapping[str, Fate] | None = None) -> Made:
    """Write crafted runs and read them as the workflow does, up to the recommendation."""
    write_all(results, plan, fates)
    runs, steps = collect_runs(plan, results)
    verdict = decide(runs, plan.configurations)
    recommendation = build_recommendation(plan, runs, verdict)
    replayed = write_predictions(plan, results)
    calibration = calibrate(runs, steps, replayed["predictions"], replayed["traces"])
    tables = runs, steps, summarise(runs), *collect_probes(plan, results)
    predicted = calibration, replayed["landscape"]
    return Made(plan, results, *tables, *predicted, verdict, recommendation)


HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"

# One arm each that wins, is told apart, is like another one, fails with a hostile text.
CONTESTED = {
    "default": {"growth_interval": 20},
    "broken": {"init_scale": 2.0**4},
    "fast": {"init_scale": 2.0**10, "growth_interval": 20},
    "slow": {"init_scale": 2.0**20, "growth_interval": 20},
    "twin": {"init_scale": 2.0**6, "growth_interval": 200},
}
CONTESTED_FATES = {
    "default": Fate(pace=15, skipped=[3, 30]),
    "broken": Fate(outcome="failed", error=f"step 4: ValueError: {HOSTILE}", done=4),
    "slow": Fate(pace=24, skipped=[0, 1, 2, 3, 50]),
}
WORKLOADS = {"binary": {"steps": 100}, "digits": {"steps": 150}}


def make_contested(results: Path) -> Made:
    """Runs with a winner, a rejected configuration and a pair of identical ones."""
    return make(results, make_plan(CONTESTED, workloads=WORKLOADS), CONTESTED_FATES)


def make_tied(results: Path) -> Made:
    """Runs of configurations that train alike."""
    names = {name: CONTESTED[name] for name in ("default", "fast", "twin")}
    return make(results, make_plan(names, workloads=WORKLOADS))


def make_hopeless(results: Path) -> Made:
    """Runs of configurations that are all rejected, some before their first step."""
    names = {name: CONTESTED[name] for name in ("broken", "slow")}
    fates = {
        "broken": Fate(outcome="failed", error=f"building the workload: {HOSTILE}", done=0),
        "slow": Fate(outcome="stuck", skipped=range(150)),
    }
    return make(results, make_plan(names, workloads=WORKLOADS), fates)
