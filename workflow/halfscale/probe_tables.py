"""Tables of the probes: magnitudes by exponent, and the usable scales of every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from halfscale.magnitudes import (
    BINS,
    LOWEST_EXPONENT,
    TOLERABLE_LOSS,
    largest_safe_exponent,
    lost_share,
    smallest_useful_exponent,
)
from halfscale.plan import Plan
from halfscale.records import probe_counts, read_probe, tenths

TENSORS = ("activation", "weight")
PARTS = ("start", "end", "all")

EXPONENT_COLUMNS = {
    "workload": "name of the workload",
    "tensors": "activation: gradients of activations; weight: gradients of weights",
    "part": "start: the first tenth of the steps that each seed recorded; end: the last tenth; "
    "all: every step",
    "exponent": "floor(log2) of the elements' magnitude, unscaled; empty: elements of zero",
    "elements": "their number, over all seeds",
}

WINDOW_COLUMNS = {
    "workload": "name of the workload",
    "seed": "the seed",
    "step": "0 for the first step",
    "largest": "largest magnitude of all half-precision backward tensors, unscaled",
    "largest_gradient": "largest magnitude of the parameters' gradients, unscaled",
    "largest_safe": "log2 of the largest power of two as a scale that does not overflow here",
    "smallest_useful": "log2 of the smallest power of two that loses at most "
    f"{TOLERABLE_LOSS:.0%} of the non-zero elements here",
}


PROBE_COLUMNS = {
    "workload": "name of the workload",
    "seed": "the seed",
    "outcome": "how the reference run ended",
    "error": "the error's text, empty if there was none",
    "steps": "steps that were planned",
    "steps_done": "steps that were recorded",
}


def collect_probes(plan: Plan, results: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Read every probe of the plan.

    Returns:
        Elements by exponent (`EXPONENT_COLUMNS`), the window of each step (`WINDOW_COLUMNS`) and
        how each probe ended (`PROBE_COLUMNS`).

    Raises:
        RecordError: If a probe's file is missing, damaged or belongs to another specification.
    """
    exponents: list[pd.DataFrame] = []
    windows: list[pd.DataFrame] = []
    ends: list[dict[str, Any]] = []
    for workload in sorted(plan.workloads):
        tables = []
        for seed in plan.seeds:
            spec = plan.probe(workload, seed)
            record, table = read_probe(results, spec)
            ends.append({**spec.model_dump(), **record.model_dump(exclude={"spec"})})
            windows.append(_window(workload, seed, table))
            tables.append(table)
        exponents.extend(_by_exponent(workload, tables))
    return (
        pd.concat(exponents, ignore_index=True)[list(EXPONENT_COLUMNS)],
        pd.concat(windows, ignore_index=True)[list(WINDOW_COLUMNS)],
        pd.DataFrame(ends)[list(PROBE_COLUMNS)],
    )


def _window(workload: str, seed: int, table: pa.Table) -> pd.DataFrame:
    counts = sum(probe_counts(table, tensors) for tensors in TENSORS)
    frame = table.select(["step", "largest", "largest_gradient"]).to_pandas()
    return frame.assign(
        workload=workload,
        seed=seed,
        largest_safe=largest_safe_exponent(frame["largest"]),
        smallest_useful=smallest_useful_exponent(counts, TOLERABLE_LOSS),
    )


def _by_exponent(workload: str, tables: list[pa.Table]) -> list[pd.DataFrame]:
    frames = []
    for part in PARTS:
        chosen = [(table, tenths(len(table))[part]) for table in tables]
        for tensors in TENSORS:
            counts = sum(probe_counts(table, tensors)[rows].sum(0) for table, rows in chosen)
            zeros = sum(table[f"{tensors}_zeros"].to_numpy()[rows].sum() for table, rows in chosen)
            (filled,) = np.nonzero(counts)
            frame = pd.DataFrame(
                {
                    "exponent": [np.nan, *(filled + LOWEST_EXPONENT)],
                    "elements": [zeros, *counts[filled]],
                }
            )
            frames.append(frame.assign(workload=workload, tensors=tensors, part=part))
    return frames


def part_of(windows: pd.DataFrame, part: str) -> pd.DataFrame:
    """The steps of one of `PARTS` of each seed, the same ones that `EXPONENT_COLUMNS` counts.

    Args:
        windows: Rows of `WINDOW_COLUMNS` of one workload.
        part: One of `PARTS`.
    """
    seeds = [seed.sort_values("step") for _, seed in windows.groupby("seed")]
    return pd.concat([seed.iloc[tenths(len(seed))[part]] for seed in seeds])


def usable_window(windows: pd.DataFrame) -> tuple[float, float]:
    """The powers of two usable at every step given, as log2: from, to; empty if from > to.

    Args:
        windows: Rows of `WINDOW_COLUMNS`.
    """
    return float(windows["smallest_useful"].max()), float(windows["largest_safe"].min())


def lost_share_of(exponents: pd.DataFrame, log2_scales: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of non-zero elements lost at each scale, shape (scales,).

    Args:
        exponents: Rows of `EXPONENT_COLUMNS` of one part; tensors of several kinds are added up.
        log2_scales: The scales as powers of two, shape (scales,).
    """
    filled = exponents.dropna(subset="exponent")
    bins = filled["exponent"].to_numpy(int) - LOWEST_EXPONENT
    counts = np.bincount(bins, weights=filled["elements"].to_numpy(float), minlength=BINS)
    return lost_share(counts, log2_scales)
