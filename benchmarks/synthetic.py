"""Plans of any size and the files that their runs and probes would leave, without training."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halfscale.config import read_config
from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.plan import Plan, RunSpec
from halfscale.planner import build_plan
from halfscale.policies.base import FloorReached
from halfscale.records import write_probe, write_run

REPOSITORY = Path(__file__).parents[1]
SNAKEMAKE = [str(Path(sys.executable).parent / "snakemake")]
HALFSCALE = [sys.executable, "-P", "-m", "halfscale"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "workflow")}


def timed(command: list[str], folder: Path) -> float:
    """Wall seconds of a command that must succeed."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=ENVIRONMENT)
    return time.perf_counter() - started


def synthetic_plan(runs: int) -> Plan:
    """A plan of about so many runs: two workloads, eight arms, as many seeds as it takes."""
    config = read_config(REPOSITORY / "config.yaml")
    changes = {
        "workloads": {name: config["workloads"][name] for name in ("binary", "digits")},
        "seeds": list(range(max(1, round(runs / 16)))),
        "device": "cpu",
        "search": False,
    }
    return build_plan(config | changes)


def wide_config(
    workloads: Mapping[str, Any], configurations: int, seeds: int, search: bool
) -> dict[str, Any]:
    """The content of a ``config.yaml``: as many configurations of torch's rule, all different."""
    listed = {
        f"scale{8 + number % 17}-every{5 * (1 + number // 17)}": {
            "init_scale": 2 ** (8 + number % 17),
            "growth_interval": 5 * (1 + number // 17),
        }
        for number in range(configurations)
    }
    return {
        "configurations": listed,
        "seeds": list(range(seeds)),
        "workloads": dict(workloads),
        "device": "cpu",
        "search": {"proposals": 2} if search else False,
    }


def write_synthetic(plan: Plan, results: Path) -> int:
    """Write the files of every run of the plan; losses fall, scales move, steps are skipped.

    Of the configurations that begin at 2^20 or above some seeds diverge half-way.

    Returns:
        The number of runs.
    """
    count = 0
    for count, spec in enumerate(plan.runs(), start=1):  # noqa: B007 - the count is returned
        random = np.random.default_rng([*spec.arm.encode(), spec.seed])
        scale, overflow, final = _move_scale(spec, random)
        ended = spec.policy is not None and scale[0] >= 2.0**20 and random.random() < 0.2
        steps = spec.steps // 2 if ended else spec.steps
        lag = float(random.uniform(36.0, 44.0))
        loss = 2.0 * np.exp(-np.arange(steps) / lag) + 0.1 + 0.01 * random.random(steps)
        trace = {
            "step": list(range(steps)),
            "loss": [*loss[:-1].tolist(), float("nan") if ended else float(loss[-1])],
            "scale": scale[:steps],
            "overflow": overflow[:steps],
            "applied": [not hit for hit in overflow[:steps]],
            "grad_norm": loss.tolist(),
            "headroom": [3.0] * steps,
            "seconds": [0.001] * steps,
        }
        write_run(
            results / spec.folder,
            trace,
            spec=spec,
            outcome="diverged" if ended else "ok",
            error=f"the loss became nan in step {steps - 1}" if ended else None,
            final_scale=final,
            environment={"arithmetic": "synthetic"},
        )
    return count


def _move_scale(
    spec: RunSpec, random: np.random.Generator
) -> tuple[list[float], list[bool], float | None]:
    """The scale of each step, which steps overflow and the scale at the end."""
    if spec.policy is None:
        return [1.0] * spec.steps, [False] * spec.steps, None
    machine = spec.policy.make()
    limits = np.exp2(random.uniform(15.0, 18.0, spec.steps))
    scale, overflow = [], []
    for limit in limits:
        scale.append(machine.scale)
        overflow.append(bool(machine.scale > limit))
        with contextlib.suppress(FloorReached):
            machine.update(overflow[-1], largest_gradient=float(32768.0 / limit))
    return scale, overflow, machine.scale


def write_synthetic_probes(plan: Plan, results: Path) -> None:
    """Write the files of every probe of the plan; a scale of 2^16 overflows in some steps."""
    counts = np.zeros(BINS, dtype=np.int64)
    counts[-30 - LOWEST_EXPONENT : -LOWEST_EXPONENT] = 16
    for spec in plan.probes():
        random = np.random.default_rng(spec.seed)
        largest = np.exp2(random.uniform(-4.0, 0.2, spec.steps))
        probe = {
            "step": list(range(spec.steps)),
            "loss": [0.5] * spec.steps,
            "largest": largest.tolist(),
            "largest_gradient": (largest / 2).tolist(),
            "batch_repeats": [False] * spec.steps,
            "activation_counts": [counts.tolist()] * spec.steps,
            "weight_counts": [counts.tolist()] * spec.steps,
            "activation_zeros": [0] * spec.steps,
            "weight_zeros": [0] * spec.steps,
        }
        write_probe(
            results / spec.folder,
            probe,
            spec=spec,
            outcome="ok",
            error=None,
            environment={"arithmetic": "synthetic"},
        )
