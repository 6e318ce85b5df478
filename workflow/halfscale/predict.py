"""Predictions: the plan's configurations, and a landscape of others, replayed over the probes.

Nothing is trained here. `halfscale.calibration` holds the predictions to the real runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from halfscale.plan import Plan, PolicyChoice
from halfscale.records import read_probe, write_atomically, write_text
from halfscale.replay import Probe, cost, grid, replay, replay_traces
from halfscale.replay_seal import REPLAY, seal_replay

PREDICTION_COLUMNS = {
    "workload": "name of the workload",
    "configuration": "name of the configuration",
    "seed": "the seed",
    "digest": "digest of the specification of the run that is predicted",
    "steps": "steps that the probe recorded; fewer than planned if it ended early",
    "skipped_steps": "predicted number of steps not taken because of an overflow",
    "longest_skip_streak": "most of them in a row",
    "calibration": "steps skipped before the first one that was taken",
    "growths": "times the scale rose",
    "backoffs": "times the scale fell",
    "final_scale": "the scale after the last step",
    "lost_steps": "shares of gradient elements lost, summed over the steps taken",
    "below_window": "steps taken that lost more than 5 % of their elements",
    "regret": "mean distance of the scale from the largest safe power of two, in bits",
    "aborted": "whether the policy gave up",
    "stuck": "whether the last half of the steps or more was skipped",
}

TRACE_COLUMNS = ("workload", "configuration", "seed", "step", "scale", "overflow")

LANDSCAPE_COLUMNS = {
    "workload": "name of the workload",
    "plane": "scale: init_scale × growth_interval; factors: growth_factor × backoff_factor",
    "init_scale": "of the configuration",
    "growth_factor": "of the configuration",
    "backoff_factor": "of the configuration",
    "growth_interval": "of the configuration",
    "cost": "predicted cost in steps: skipped ones, and shares of elements lost; mean over seeds",
    "steps": "steps of the probes",
    "seeds": "number of probes; those that ended before the longest are left out",
}

_MEASURES = {"skipped": "skipped_steps", "longest_streak": "longest_skip_streak"}
_COUNTS = (
    *("skipped_steps", "longest_skip_streak", "calibration", "growths", "backoffs"),
    "below_window",
)

_SCALES = [2.0**power for power in range(29)]
_INTERVALS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
_QUARTERS = [quarter / 4 for quarter in range(1, 17)]


def predict(plan: Plan, results: Path) -> dict[str, pd.DataFrame]:
    """Replay every configuration of the plan, and the landscape, over every probe of the plan.

    Returns:
        ``predictions`` (`PREDICTION_COLUMNS`), a row a run of a configuration, its measures empty
        where the probe recorded no step; ``traces`` (`TRACE_COLUMNS`), a row a predicted step; and
        ``landscape`` (`LANDSCAPE_COLUMNS`).

    Raises:
        RecordError: If a probe's file is missing, damaged or belongs to another specification.
    """
    rows: list[dict[str, Any]] = []
    traces: list[pd.DataFrame] = []
    landscapes: list[pd.DataFrame] = []
    for workload in sorted(plan.workloads):
        probes = {}
        for seed in plan.seeds:
            _, table = read_probe(results, plan.probe(workload, seed))
            if len(table):
                probes[seed] = Probe.of(table)
            rows += _predict_runs(plan, workload, seed, probes.get(seed))
        for seed, probe in probes.items():
            for name, choice in sorted(plan.configurations.items()):
                identity = {"workload": workload, "configuration": name, "seed": seed}
                traces.append(_trace(choice, probe).assign(**identity))
        landscapes.append(_landscape(plan, list(probes.values())).assign(workload=workload))
    predictions = pd.DataFrame(rows, columns=list(PREDICTION_COLUMNS))
    kinds = dict.fromkeys(_COUNTS, "Int64") | dict.fromkeys(("aborted", "stuck"), "boolean")
    return {
        "predictions": predictions.astype(kinds),
        "traces": _joined(traces, TRACE_COLUMNS),
        "landscape": _joined(landscapes, LANDSCAPE_COLUMNS),
    }


def write_predictions(plan: Plan, results: Path) -> dict[str, pd.DataFrame]:
    """Predict, and write the three tables below ``replay`` in the results folder, and their seal.

    Raises:
        RecordError: As `predict` does.
        OSError: If a file cannot be written.
    """
    tables = predict(plan, results)
    folder = results / REPLAY
    for name in ("landscape", "predictions"):
        write_text(folder / f"{name}.csv", tables[name].to_csv(index=False))
    traces = pa.Table.from_pandas(tables["traces"], preserve_index=False)
    write_atomically(folder / "traces.parquet", partial(pq.write_table, traces))
    seal_replay(plan, results)
    return tables


def _joined(frames: Sequence[pd.DataFrame], columns: Sequence[str] | Mapping[str, str]) -> Any:
    filled = [frame for frame in frames if len(frame)]
    if not filled:
        return pd.DataFrame(columns=list(columns))
    return pd.concat(filled, ignore_index=True)[list(columns)]


def _predict_runs(
    plan: Plan, workload: str, seed: int, probe: Probe | None
) -> Iterator[dict[str, Any]]:
    """The rows of one workload and seed."""
    names = sorted(plan.configurations)
    choices = [plan.configurations[name] for name in names]
    columns = replay(choices, [probe]).columns() if probe else {}
    for position, name in enumerate(names):
        measures = {_MEASURES.get(key, key): values[position] for key, values in columns.items()}
        yield {
            **{key: value for key, value in measures.items() if key in PREDICTION_COLUMNS},
            "workload": workload,
            "configuration": name,
            "seed": seed,
            "digest": plan.run(workload, name, seed).digest,
            "steps": probe.steps if probe else 0,
        }


def _trace(choice: PolicyChoice, probe: Probe) -> pd.DataFrame:
    trace = replay_traces(choice, probe)
    return pd.DataFrame(
        {"step": range(len(trace.scale)), "scale": trace.scale, "overflow": trace.overflow}
    )


def _landscape(plan: Plan, probes: Sequence[Probe]) -> pd.DataFrame:
    """What torch's rule would cost over two planes of its parameters."""
    steps = max((probe.steps for probe in probes), default=0)
    longest = [probe for probe in probes if probe.steps == steps]
    frames = []
    for plane, ranges in landscape_planes(plan).items():
        choices = grid("torch", ranges)
        frame = pd.DataFrame([choice.parameters for choice in choices]).assign(plane=plane)
        if longest:
            result = replay(choices, longest)
            frames.append(frame.assign(cost=cost(result).mean(axis=1)))
    if not frames:
        return pd.DataFrame()
    return pd.concat(frames).assign(steps=steps, seeds=len(longest))


def landscape_planes(plan: Plan) -> dict[str, dict[str, list[Any]]]:
    """The values of torch's parameters in each plane.

    The first is at PyTorch's other defaults. The second is at the initial scale and interval that
    most configurations of the plan have, so that these lie in it; ties go to the nearest to
    PyTorch's defaults, which also stand in where the plan has no configuration of torch's rule.
    """
    default = PolicyChoice.of("torch")
    choices = [choice for choice in plan.configurations.values() if choice.policy == "torch"]

    def place(choice: PolicyChoice) -> tuple[float, int]:
        return choice.parameters["init_scale"], choice.parameters["growth_interval"]

    counted = Counter(map(place, choices or [default]))

    def key(found: tuple[float, int]) -> tuple[object, ...]:
        there = PolicyChoice.of("torch", init_scale=found[0], growth_interval=found[1])
        return -counted[found], there.distance, found

    scale, interval = min(counted, key=key)
    return {
        "scale": {"init_scale": _SCALES, "growth_interval": _INTERVALS},
        "factors": {
            "growth_factor": [2.0**bits for bits in _QUARTERS],
            "backoff_factor": [2.0**-bits for bits in _QUARTERS],
            "init_scale": [scale],
            "growth_interval": [interval],
        },
    }
