"""How well the probes predicted: predicted against actual skipped steps, run by run.

A run and its prediction are compared over the steps that both have. Nothing is left out: a run
that cannot be compared says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from halfscale.plan import Plan
from halfscale.records import RecordError
from halfscale.replay_seal import check_replay
from halfscale.tables import longest_streak

TOLERANCE = 1
"""A prediction is good if it is off by this many skipped steps at most."""

_RUN = ["workload", "configuration", "seed"]
_Row = Mapping[str, Any]
_Columns = Mapping[str, np.ndarray]

# A loss that is farther from the reference's, relative to it, is on a course of its own.
_SAME_COURSE = 0.01

CALIBRATION_COLUMNS = {
    "workload": "name of the workload",
    "configuration": "name of the configuration",
    "seed": "the seed",
    "outcome": "how the run ended",
    "compared_steps": "steps over which it is compared with its prediction; 0: it cannot be",
    "predicted_skipped_steps": "skipped steps that the probe predicted",
    "skipped_steps": "skipped steps of the run",
    "difference": "predicted less actual skipped steps",
    "predicted_longest_skip_streak": "most skipped steps in a row, predicted",
    "longest_skip_streak": "the same of the run",
    "predicted_final_scale": "the scale after the compared steps, predicted",
    "final_scale": "the same of the run",
    "first_difference": "the first step that overflowed in one of the two only; empty if none",
    "note": "what was not compared, and where a prediction went wrong",
}


def calibrate(
    runs: pd.DataFrame, steps: pd.DataFrame, predictions: pd.DataFrame, traces: pd.DataFrame
) -> pd.DataFrame:
    """Hold every run of a configuration to its prediction.

    Args:
        runs: The table of runs.
        steps: The steps of the runs, in long form.
        predictions: `halfscale.predict.PREDICTION_COLUMNS`.
        traces: The predicted steps, in long form.

    Returns:
        `CALIBRATION_COLUMNS`, a row a run of a configuration.

    Raises:
        RecordError: If a run has no prediction, or one that was made for another specification.
    """
    predicted = {tuple(row[name] for name in _RUN): row for row in predictions.to_dict("records")}
    actual_steps = _Steps(steps, ["loss", "applied", "scale"])
    predicted_steps = _Steps(traces, ["overflow", "scale"])
    rows = []
    for run in runs[~runs["control"]].to_dict("records"):
        identity = tuple(run[name] for name in _RUN)
        prediction = _of_the_same_run(predicted, identity, run["digest"])
        actual = actual_steps.of(*identity)
        reference = actual_steps.of(run["workload"], "bf16", run["seed"])
        rows.append(_compare(run, actual, prediction, predicted_steps.of(*identity), reference))
    frame = pd.DataFrame(rows, columns=list(CALIBRATION_COLUMNS))
    counts = [name for name in CALIBRATION_COLUMNS if "skip" in name or "difference" in name]
    return frame.astype(dict.fromkeys(counts, "Int64"))


class _Steps:
    """Columns of a table in long form, run by run."""

    def __init__(self, table: pd.DataFrame, columns: list[str]) -> None:
        self._rows = table.groupby(_RUN, sort=False).indices
        self._columns = {name: table[name].to_numpy() for name in columns}

    def of(self, workload: str, configuration: str, seed: int) -> _Columns:
        """The steps of one run; empty columns if it has none."""
        rows = self._rows.get((workload, configuration, seed), [])
        return {name: values[rows] for name, values in self._columns.items()}


def _of_the_same_run(
    predicted: Mapping[tuple[Any, ...], _Row], identity: tuple[Any, ...], digest: str
) -> _Row:
    found = predicted.get(identity)
    if found is None or found["digest"] != digest:
        workload, configuration, seed = identity
        raise RecordError(
            f"the predictions have none of this run: workload={workload} "
            f"configuration={configuration} seed={seed}. Mend it: remove the folder replay of the "
            "results and run the same command again"
        )
    return found


def read_replay(plan: Plan, results: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The predictions and the predicted steps below a results folder.

    Raises:
        RecordError: If a file is missing, is not as it was written, or is of other probes.
    """
    predictions, traces = check_replay(plan, results, "predictions.csv", "traces.parquet")
    return pd.read_csv(predictions, dtype={"digest": str}), pd.read_parquet(traces)


def _compare(
    run: _Row, actual: _Columns, prediction: _Row, trace: _Columns, reference: _Columns
) -> dict[str, Any]:
    """One row: over the steps of the run that ended in a decision of its scaler."""
    # A loss that is not finite ends a run whatever the gradients were.
    decided = int(np.isfinite(actual["loss"]).sum())
    compared = min(decided, int(prediction["steps"]))
    row = {name: run[name] for name in ("workload", "configuration", "seed", "outcome")}
    row["compared_steps"] = compared
    if compared == 0:
        why = "the probe recorded no step" if decided else "the run ended before its first step"
        return {**row, "note": f"not compared: {why}"}
    had = ~actual["applied"][:compared].astype(bool)
    # A policy that gives up leaves no further step to overflow.
    thought = np.zeros(compared, dtype=bool)
    overflow = trace["overflow"][:compared].astype(bool)
    thought[: len(overflow)] = overflow
    (apart,) = np.nonzero(had != thought)
    row |= {
        "predicted_skipped_steps": int(thought.sum()),
        "skipped_steps": int(had.sum()),
        "difference": int(thought.sum()) - int(had.sum()),
        "predicted_longest_skip_streak": longest_streak(thought),
        "longest_skip_streak": longest_streak(had),
        "predicted_final_scale": _scale_after(trace, compared, prediction["final_scale"]),
        "final_scale": _scale_after(actual, compared, run["final_scale"]),
        "first_difference": int(apart[0]) if len(apart) else None,
    }
    notes = [_name_end(run, compared, decided)] if compared < run["steps"] else []
    if abs(row["difference"]) > TOLERANCE:
        notes.append(_break_down(int(apart[0]), actual, reference))
    return {**row, "note": "; ".join(notes)}


def _name_end(run: _Row, compared: int, decided: int) -> str:
    """Why a run is compared over some of its steps only."""
    ended = "the probe" if compared < decided else f"the run, {run['outcome']},"
    return f"compared over {compared} of {run['steps']} steps, then {ended} ended"


def _scale_after(steps: _Columns, compared: int, final: float) -> float:
    scale = steps["scale"]
    return float(scale[compared]) if len(scale) > compared else float(final)


def _break_down(step: int, actual: _Columns, reference: _Columns) -> str:
    """Where a prediction went wrong, and whether the run had left the reference's course there."""
    taken = int(actual["applied"][:step].astype(bool).sum())
    loss = float(actual["loss"][step])
    said = f"they part at step {step}"
    if taken >= len(reference["loss"]) or not math.isfinite(float(reference["loss"][taken])):
        return said
    expected = float(reference["loss"][taken])
    if abs(loss - expected) <= _SAME_COURSE * abs(expected):
        return f"{said}, where the loss is still the reference's: a gradient close to the limit"
    return (
        f"{said}, where the loss is {loss:.4g} and the reference's after as many steps taken "
        f"{expected:.4g}: the run had left the reference's course"
    )


def within_tolerance(calibration: pd.DataFrame) -> pd.Series:
    """Which runs were predicted within `TOLERANCE`; those not compared were not."""
    within: pd.Series = calibration["difference"].abs().le(TOLERANCE).fillna(False).astype(bool)
    return within & (calibration["compared_steps"] > 0)


def summarise_calibration(calibration: pd.DataFrame) -> pd.DataFrame:
    """How good the predictions are, a row a workload and the last one for all of them."""
    rows = []
    groups = [(str(name), group) for name, group in calibration.groupby("workload")]
    for name, group in [*groups, ("all", calibration)]:
        compared = group[group["compared_steps"] > 0]
        within = int(within_tolerance(compared).sum())
        rows.append(
            {
                "workload": name,
                "runs": len(group),
                "compared": len(compared),
                "within": within,
                "share": within / len(compared) if len(compared) else math.nan,
                "exact": int((compared["difference"] == 0).sum()),
                "same scale": int(_same_scale(compared).sum()),
                "worst": describe_worst(compared),
            }
        )
    return pd.DataFrame(rows)


def _same_scale(compared: pd.DataFrame) -> pd.Series:
    same: pd.Series = compared["predicted_final_scale"] == compared["final_scale"]
    return same


def describe_worst(compared: pd.DataFrame) -> str:
    """The run that was predicted worst, in words; empty if every number was right."""
    if compared.empty or not (apart := compared["difference"].abs()).any():
        return ""
    return describe_prediction(compared.loc[apart.idxmax()])


def describe_prediction(row: pd.Series) -> str:
    """A run that was compared, in words."""
    # Counts read from a file are floats as soon as one run in it could not be compared.
    return (
        f"{row['workload']}, {row['configuration']}, seed {row['seed']}: predicted "
        f"{row['predicted_skipped_steps']:g}, had {row['skipped_steps']:g}"
    )
