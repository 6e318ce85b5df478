"""Probes made by hand, without training, through the package's own writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.plan import Plan
from halfscale.records import PROBE_SCHEMA, Outcome, ProbeRecord, write_probe

from .crafted import ENVIRONMENT

Counts = Mapping[int | None, int]
"""Elements by exponent; None: those of zero."""

NOTHING: Counts = {}


def craft_step(
    activations: Counts = NOTHING,
    weights: Counts = NOTHING,
    largest: float | None = None,
    largest_gradient: float = 0.25,
) -> dict[str, Any]:
    """The row of a step; its largest magnitude is in the middle of the topmost bin."""
    row: dict[str, Any] = {"loss": 0.5, "largest_gradient": largest_gradient}
    row["batch_repeats"] = False
    for tensors, counts in {"activation": activations, "weight": weights}.items():
        filled = [0] * BINS
        for exponent, elements in counts.items():
            if exponent is not None:
                filled[exponent - LOWEST_EXPONENT] = elements
        row[f"{tensors}_counts"] = filled
        row[f"{tensors}_zeros"] = counts.get(None, 0)
    exponents = [key for key in {**activations, **weights} if key is not None]
    row["largest"] = largest
    if largest is None:
        row["largest"] = 1.5 * 2.0 ** max(exponents) if exponents else 0.0
    return row


def write_steps(
    results: Path,
    plan: Plan,
    steps: Sequence[Mapping[str, Any]],
    workload: str = "binary",
    seed: int = 0,
    outcome: Outcome = "ok",
) -> ProbeRecord:
    """Write the two files of one probe."""
    columns: dict[str, list[Any]] = {name: [] for name in PROBE_SCHEMA.names}
    for step, row in enumerate(steps):
        for name, column in columns.items():
            column.append({**row, "step": step}[name])
    spec = plan.probe(workload, seed)
    error = None if outcome == "ok" else "building the workload: ValueError: no"
    return write_probe(
        results / spec.folder,
        columns,
        spec=spec,
        outcome=outcome,
        error=error,
        environment=ENVIRONMENT,
    )
