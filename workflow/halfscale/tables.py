"""Tables: from the plan's run files to what was measured.

The list of runs comes from the plan, never from what happens to lie in a folder, and every file is
checked before it is read (`halfscale.records.read_run`).
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from halfscale.plan import CONTROLS, Plan, RunSpec
from halfscale.records import RunRecord, read_run
from halfscale.verdict import least_steps, paired_interval

TARGET_SHARE = 0.05
STALLED_SHARE = 0.05

# What acts only when the scale rises, and only when it falls, over all policies.
GROWTH_KNOBS = ("growth_factor", "growth_interval", "factor", "max_scale")
BACKOFF_KNOBS = ("backoff_factor", "hysteresis", "tolerance", "threshold", "min_scale")

RUN_COLUMNS = {
    "workload": "name of the workload",
    "configuration": "name of the configuration or control",
    "control": "whether it is a control (never recommended)",
    "policy": "the rule that moves its scale; empty for controls",
    "seed": "the seed",
    "outcome": "ok, diverged, stuck, stalled, out-of-memory or failed",
    "error": "the error's text, empty if there was none",
    "steps": "steps that were planned",
    "steps_done": "steps that were recorded",
    "steps_to_target": "steps until the smoothed loss reached the target, skipped steps counted; "
    "inf: not reached",
    "initial_loss": "loss of the first step",
    "final_loss": "mean loss of the last 5 % of the steps",
    "final_loss_difference": "final_loss less that of the fp32 control of the same seed",
    "skipped_steps": "optimizer steps not taken because of an overflow",
    "longest_skip_streak": "most skipped steps in a row",
    "growths": "times the scale rose",
    "backoffs": "times the scale fell",
    "final_scale": "the scale after the last step; empty for controls",
    "evaluation": "what the workload's evaluate returned after training; empty if it has none, "
    "if that was not finite or the training ended early",
    "inert_knobs": "parameters that never acted in the run",
    "smallest_headroom": "bits left below fp16's limit at the worst step; -inf on an overflow",
    "seconds_per_step": "median wall time of a step, in seconds",
    "arithmetic": "what computed the run",
    "digest": "digest of the run's specification",
    "curve": "digest of losses and applied steps; equal means bit-identical training",
}

CONFIGURATION_COLUMNS = {
    "workload": "name of the workload",
    "configuration": "name of the configuration or control",
    "control": "whether it is a control",
    "policy": "the rule that moves its scale; empty for controls",
    "runs": "number of seeds",
    "ok": "runs that ended ok",
    "diverged": "runs whose loss, parameters or buffers became non-finite",
    "stuck": "runs that never left overflow",
    "stalled": "runs whose loss did not move though steps were taken",
    "out-of-memory": "runs that ran out of memory",
    "failed": "runs that ended in an error",
    "reached": "runs that reached the target",
    "steps_to_target": "median over seeds of the steps to the target; inf: not reached",
    "ratio_to_fp32": "steps to target against the fp32 control of the same seed, geometric mean; "
    "a run that did not reach the target counts with one step more than it had",
    "ratio_low": "lower end of the 95 % interval of ratio_to_fp32, paired over seeds",
    "ratio_high": "upper end of that interval",
    "final_loss": "median over seeds",
    "final_loss_difference": "median over seeds of the difference to fp32 of the same seed",
    "skipped_steps": "mean over seeds",
    "longest_skip_streak": "largest over seeds",
    "growths": "mean over seeds",
    "backoffs": "mean over seeds",
    "final_scale": "median over seeds",
    "evaluation": "median over seeds",
    "inert_knobs": "parameters that never acted in any of the runs",
    "seconds_per_step": "median over seeds, in seconds",
}


def smooth(loss: np.ndarray, steps: int) -> np.ndarray:
    """Trailing mean over 5 % of the planned steps (at least one); shape (steps_done,)."""
    window = max(1, steps // 20)
    mean: np.ndarray = pd.Series(loss).rolling(window, min_periods=1).mean().to_numpy()
    return mean


def measure_run(spec: RunSpec, record: RunRecord, trace: pa.Table) -> dict[str, Any]:
    """What one run shows by itself: every column of `RUN_COLUMNS` that needs no other run."""
    loss = trace["loss"].to_numpy().astype(float)
    applied = trace["applied"].to_numpy()
    scale = trace["scale"].to_numpy()
    after = np.append(scale[1:], record.final_scale) if record.final_scale is not None else scale
    growths, backoffs = int((after > scale).sum()), int((after < scale).sum())
    smoothed = smooth(loss, spec.steps)
    done = len(loss)
    seconds = trace["seconds"].to_numpy()
    return {
        "workload": spec.workload,
        "configuration": spec.arm,
        "control": spec.is_control,
        "policy": spec.policy.policy if spec.policy else "",
        "seed": spec.seed,
        "outcome": record.outcome,
        "error": record.error,
        "steps": spec.steps,
        "steps_done": done,
        "initial_loss": loss[0] if done else math.nan,
        "final_loss": smoothed[-1] if done and math.isfinite(loss[-1]) else math.nan,
        "skipped_steps": int((~applied).sum()),
        "longest_skip_streak": longest_streak(~applied),
        "growths": growths,
        "backoffs": backoffs,
        "final_scale": record.final_scale,
        "evaluation": math.nan if record.evaluation is None else record.evaluation,
        "inert_knobs": _inert_knobs(spec, growths, backoffs),
        "smallest_headroom": trace["headroom"].to_numpy().min() if done else math.nan,
        "seconds_per_step": float(np.median(seconds)) if done else math.nan,
        "arithmetic": str(record.environment["arithmetic"]),
        "digest": record.digest,
        "curve": hashlib.sha256(trace["loss"].to_numpy().tobytes() + applied.tobytes()).hexdigest()[
            :16
        ],
        "_smoothed": smoothed,
    }


def longest_streak(skipped: np.ndarray) -> int:
    """Most skipped steps in a row."""
    edges = np.flatnonzero(np.diff(np.asarray(skipped, dtype=np.int8), prepend=0, append=0))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def _inert_knobs(spec: RunSpec, growths: int, backoffs: int) -> str:
    if spec.policy is None:
        return ""
    idle = (() if growths else GROWTH_KNOBS) + (() if backoffs else BACKOFF_KNOBS)
    return ", ".join(knob for knob in idle if knob in spec.policy.parameters)


def collect_runs(plan: Plan, results: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read every run of the plan.

    Returns:
        The table of runs (`RUN_COLUMNS`) and the steps in long form: workload, configuration, seed
        and the columns of the trace.

    Raises:
        RecordError: If a run file is missing, damaged or belongs to another specification.
    """
    rows, tables = [], []
    for spec in plan.runs():
        record, trace = read_run(results, spec)
        rows.append(measure_run(spec, record, trace))
        identity = {"workload": spec.workload, "configuration": spec.arm, "seed": spec.seed}
        for position, (name, value) in enumerate(identity.items()):
            kind = pa.int64() if name == "seed" else pa.string()
            trace = trace.add_column(position, name, pa.repeat(pa.scalar(value, kind), len(trace)))
        tables.append(trace)
    runs = _compare_with_fp32(pd.DataFrame(rows))
    return runs[list(RUN_COLUMNS)], pa.concat_tables(tables).to_pandas()


def _compare_with_fp32(runs: pd.DataFrame) -> pd.DataFrame:
    """Add what needs the fp32 control: the target, the difference, the outcome ``stalled``."""
    fp32 = runs[runs["configuration"] == "fp32"]
    targets = find_targets(runs)
    own = runs.merge(
        fp32[["workload", "seed", "initial_loss", "final_loss"]],
        on=["workload", "seed"],
        suffixes=("", "_fp32"),
        validate="many_to_one",
    )
    own["final_loss_difference"] = own["final_loss"] - own["final_loss_fp32"]
    own["steps_to_target"] = [
        _first_at_most(smoothed, targets[workload])
        for smoothed, workload in zip(own["_smoothed"], own["workload"], strict=True)
    ]
    drop = own["initial_loss"] - own["final_loss"]
    control_drop = own["initial_loss_fp32"] - own["final_loss_fp32"]
    stalled = (
        (own["outcome"] == "ok")
        & (control_drop > 0)
        & (drop <= STALLED_SHARE * control_drop)
        & (2 * own["skipped_steps"] < own["steps"])
    )
    own.loc[stalled, "outcome"] = "stalled"
    return own


def find_targets(runs: pd.DataFrame) -> dict[str, float]:
    """Target loss by workload: fp32's median final loss plus 5 % of its median drop."""
    medians = (
        runs[runs["configuration"] == "fp32"]
        .groupby("workload")[["initial_loss", "final_loss"]]
        .median()
    )
    drop = medians["initial_loss"] - medians["final_loss"]
    targets: dict[str, float] = (medians["final_loss"] + TARGET_SHARE * drop).to_dict()
    return targets


def _first_at_most(smoothed: np.ndarray, target: float) -> float:
    reached = np.flatnonzero(smoothed <= target)
    return float(reached[0] + 1) if len(reached) else math.inf


def summarise(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per workload × configuration or control: the columns of `CONFIGURATION_COLUMNS`."""
    key = ["workload", "configuration"]
    own = ["workload", "seed"]
    control = runs[runs["configuration"] == "fp32"].assign(base=least_steps)[[*own, "base"]]
    base = runs[own].merge(control, on=own, how="left", validate="many_to_one")["base"]
    groups = runs.assign(
        log_ratio=np.log(least_steps(runs).to_numpy() / base.to_numpy()),
        reached=np.isfinite(runs["steps_to_target"]),
    ).groupby(key, sort=True)
    ratios = [paired_interval(group.to_numpy()).exp() for _, group in groups["log_ratio"]]
    medians = [
        *("steps_to_target", "final_loss", "final_loss_difference", "final_scale", "evaluation"),
        "seconds_per_step",
    ]
    table = pd.concat(
        [
            groups["policy"].first(),
            groups.size().rename("runs"),
            _count_outcomes(runs, key),
            groups["reached"].sum(),
            groups[medians].median(),
            groups[["skipped_steps", "growths", "backoffs"]].mean(),
            groups["longest_skip_streak"].max(),
            groups["inert_knobs"].agg(_always_inert),
        ],
        axis=1,
    )
    table["ratio_to_fp32"] = [ratio.estimate for ratio in ratios]
    table["ratio_low"] = [ratio.low for ratio in ratios]
    table["ratio_high"] = [ratio.high for ratio in ratios]
    table = table.reset_index()
    table["control"] = table["configuration"].isin(list(CONTROLS))
    return table[list(CONFIGURATION_COLUMNS)]


def _count_outcomes(runs: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    """Runs by outcome, a column an outcome."""
    outcomes = ["ok", "diverged", "stuck", "stalled", "out-of-memory", "failed"]
    counted = runs.groupby([*key, "outcome"]).size().unstack(fill_value=0)
    return counted.reindex(columns=outcomes, fill_value=0)


def _always_inert(knobs: pd.Series) -> str:
    sets = [set(filter(None, text.split(", "))) for text in knobs]
    always = set.intersection(*sets)
    return ", ".join(sorted(always))


def find_orphans(plan: Plan, results: Path) -> list[str]:
    """Folders of runs and probes that the plan does not ask for, relative to the results folder."""
    expected = {spec.folder.as_posix() for spec in plan.jobs()}
    records = (*results.glob("runs/*/*/*/run.json"), *results.glob("probes/*/*/probe.json"))
    found = {path.parent.relative_to(results).as_posix() for path in records}
    return sorted(found - expected)
