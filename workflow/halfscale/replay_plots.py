"""The figures of the replay: predicted costs over the parameters, and predictions against runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from halfscale.calibration import (
    TOLERANCE,
    describe_prediction,
    describe_worst,
    within_tolerance,
)
from halfscale.evidence import Evidence, add_shared_legend
from halfscale.plan import PolicyChoice
from halfscale.policies import POLICIES
from halfscale.style import INK, arm_styles

# Costs as shares of the steps; cheaper ones are drawn as this.
_CHEAPEST, _DEAREST = 0.003, 1.0
_BAND = "#d7eedd"
_POINT = 36.0
_MOST_IN_TEXT = 40
_MOST_TICKS = 11
_MOST_BESIDE = 4


@dataclass(frozen=True)
class _Plane:
    """Two parameters of torch's rule, over which costs are drawn."""

    across: str
    up: str

    def title(self, rows: pd.DataFrame) -> str:
        """What all configurations of the plane share."""
        shared = [name for name in POLICIES["torch"].parameters() if name not in self.axes]
        return ", ".join(f"{name} {_short(rows[name].iloc[0])}" for name in shared)

    @property
    def axes(self) -> tuple[str, str]:
        return self.across, self.up


_PLANES = {
    "scale": _Plane("init_scale", "growth_interval"),
    "factors": _Plane("growth_factor", "backoff_factor"),
}


def draw_landscape(evidence: Evidence) -> tuple[Figure, str]:
    """Predicted costs over init_scale × growth_interval and growth_factor × backoff_factor."""
    workloads = evidence.workloads
    figure, grid = plt.subplots(
        len(workloads), 2, figsize=(9.5, 3.1 * len(workloads)), squeeze=False
    )
    norm = LogNorm(_CHEAPEST, _DEAREST, clip=True)
    drawn, parts = None, []
    for workload, pair in zip(workloads, grid, strict=True):
        table = evidence.landscape[evidence.landscape["workload"] == workload]
        for (name, plane), axis in zip(_PLANES.items(), pair, strict=True):
            rows = table[table["plane"] == name]
            axis.set_title(workload if name == "scale" else "", loc="left", fontweight="bold")
            if rows.empty:
                axis.set_axis_off()
                axis.text(0.5, 0.5, "the probe recorded no step", ha="center")
                continue
            drawn = _draw_costs(axis, rows, plane, norm)
            _mark_configurations(axis, rows, plane, evidence)
            parts.append(_describe_costs(workload, rows, plane, evidence.choices))
    if drawn is not None:
        # Beside many rows a bar would be out of sight of most of them.
        where = "top" if len(workloads) > _MOST_BESIDE else "right"
        pad = 0.02 / len(workloads) if where == "top" else 0.02
        bar = figure.colorbar(drawn, ax=grid, location=where, shrink=0.5, aspect=40, pad=pad)
        bar.set_label("predicted cost, share of the steps")
        bar.set_ticks([0.003, 0.01, 0.03, 0.1, 0.3, 1], labels=["≤ 0.3 %", *_percents()])
    add_shared_legend(figure, {str(place): axis for place, axis in enumerate(grid.flat)})
    return figure, (
        "Predicted cost in steps (skipped steps, and shares of gradient elements lost), mean over "
        f"seeds. {'; '.join(parts) or 'The probes recorded no step'}."
    )


def _percents() -> list[str]:
    return [f"{share} %" for share in (1, 3, 10, 30, 100)]


def _draw_costs(axis: Axes, rows: pd.DataFrame, plane: _Plane, norm: LogNorm) -> QuadMesh:
    costs = rows.pivot(index=plane.up, columns=plane.across, values="cost")
    across, up = (np.log2(values.to_numpy(float)) for values in (costs.columns, costs.index))
    drawn = axis.pcolormesh(
        _edges(across),
        _edges(up),
        costs.to_numpy() / rows["steps"].iloc[0],
        norm=norm,
        cmap="viridis_r",
        linewidth=0,
        rasterized=True,
    )
    axis.set_ylabel(plane.up, fontsize="small")
    axis.set_xlabel(f"{plane.across}, at {plane.title(rows)}", fontsize="x-small")
    for axle, values in ((axis.xaxis, across), (axis.yaxis, up)):
        ticks = values
        if len(values) > _MOST_TICKS:
            whole = values[values % 1 == 0]
            ticks = whole[:: 4 if len(whole) > _MOST_TICKS else 1]
        axle.set_ticks(ticks, labels=[_short(2.0**tick) for tick in ticks], fontsize="x-small")
    axis.grid(False)
    return drawn


def _edges(centres: np.ndarray) -> np.ndarray:
    """The edges of cells around their centres."""
    middles = (centres[1:] + centres[:-1]) / 2
    first, last = 2 * centres[0] - middles[0], 2 * centres[-1] - middles[-1]
    edges: np.ndarray = np.concatenate([[first], middles, [last]])
    return edges


def _mark_configurations(axis: Axes, rows: pd.DataFrame, plane: _Plane, evidence: Evidence) -> None:
    """Mark the configurations that lie in the plane, and PyTorch's defaults in the first."""
    styles = evidence.styles
    for name in evidence.drawn:
        choice, style = evidence.choices[name], styles[name]
        if _lies_in(choice, rows, plane):
            _mark(axis, choice.parameters, plane, style.marker, style.colour, name)
    default = PolicyChoice.of("torch")
    if _lies_in(default, rows, plane):
        _mark(axis, default.parameters, plane, "*", "white", "PyTorch's defaults")


def _mark(
    axis: Axes,
    parameters: Mapping[str, float],
    plane: _Plane,
    marker: str,
    colour: str,
    label: str,
) -> None:
    axis.plot(
        *([np.log2(parameters[name])] for name in plane.axes),
        marker,
        markersize=15 if marker == "*" else 9,
        markerfacecolor=colour,
        markeredgecolor="white" if marker != "*" else INK,
        markeredgewidth=1.4,
        linestyle="none",
        label=label,
        clip_on=False,
    )


def _lies_in(choice: PolicyChoice, rows: pd.DataFrame, plane: _Plane) -> bool:
    if choice.policy != "torch":
        return False
    fixed = [name for name in choice.parameters if name not in plane.axes]
    if any(choice.parameters[name] != rows[name].iloc[0] for name in fixed):
        return False
    return all(
        rows[name].min() <= choice.parameters[name] <= rows[name].max() for name in plane.axes
    )


def _describe_costs(
    workload: str, rows: pd.DataFrame, plane: _Plane, choices: Mapping[str, PolicyChoice]
) -> str:
    steps = rows["steps"].iloc[0]
    ordered = rows.sort_values("cost")
    best, worst = ordered.iloc[0], ordered.iloc[-1]
    found = [
        f"{word} at {', '.join(f'{name} {_short(row[name])}' for name in plane.axes)} with "
        f"{row['cost']:.3g} of {steps} steps"
        for word, row in (("cheapest", best), ("dearest", worst))
    ]
    for label, choice in sorted(choices.items()):
        if _lies_in(choice, rows, plane):
            apart = sum(np.log2(rows[name] / choice.parameters[name]) ** 2 for name in plane.axes)
            found.append(f"{label} about {rows['cost'].loc[apart.idxmin()]:.3g}")
    return f"{workload}, {plane.across} × {plane.up} at {plane.title(rows)}: {', '.join(found)}"


def _short(value: float) -> str:
    power = np.log2(value)
    if value >= 2**5 and power == round(power):
        return f"2^{power:.0f}"
    return f"{value:.3g}" if value < 1000 else f"{value:g}"


def draw_calibration(evidence: Evidence) -> tuple[Figure, str]:
    """Predicted against actual skipped steps of every run; shaded: within one step."""
    figure, axis = plt.subplots(figsize=(9.5, 6.2))
    compared = evidence.calibration[evidence.calibration["compared_steps"] > 0]
    if compared.empty:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "no run could be compared", ha="center")
        return figure, "Predicted against actual skipped steps: no run could be compared."
    figures = compared[["skipped_steps", "predicted_skipped_steps"]].astype(float)
    most = float(figures.to_numpy().max()) + 1.5
    _draw_band(axis, most)
    styles = arm_styles(evidence.workloads)
    width = 0.8 / max(1, len(evidence.workloads) - 1)
    for index, workload in enumerate(evidence.workloads):
        mine = figures[compared["workload"] == workload]
        # Side by side, along the diagonal, since most points lie on the same few places.
        aside = (index - (len(evidence.workloads) - 1) / 2) * width
        counted = mine.value_counts().reset_index()
        axis.scatter(
            counted["skipped_steps"] + aside,
            counted["predicted_skipped_steps"] + aside,
            s=_POINT * np.sqrt(counted["count"]),
            marker=styles[workload].marker,
            color=styles[workload].colour,
            alpha=0.8,
            edgecolor=INK,
            linewidth=0.4,
            label=workload,
        )
    axis.set(xlim=(-1, most), ylim=(-1, most), aspect="equal")
    for axle in (axis.xaxis, axis.yaxis):
        axle.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="skipped steps of the run", ylabel="predicted skipped steps")
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5), markerscale=1.2)
    return figure, _describe_calibration(compared)


def _draw_band(axis: Axes, most: float) -> None:
    ends = np.array([-1.0, most])
    axis.fill_between(
        ends,
        ends - TOLERANCE - 0.5,
        ends + TOLERANCE + 0.5,
        color=_BAND,
        linewidth=0,
        zorder=0,
        label=f"within ±{TOLERANCE} step",
    )
    axis.plot(ends, ends, color=INK, linewidth=0.8, linestyle=":")


def _describe_calibration(compared: pd.DataFrame) -> str:
    within = within_tolerance(compared)
    missed = compared[~within].sort_values("difference", key=lambda apart: -apart.abs())
    shown = [describe_prediction(row) for _, row in missed.head(_MOST_IN_TEXT).iterrows()]
    more = len(missed) - len(shown)
    rest = "; ".join([*shown, *([f"and {more} more"] if more > 0 else [])])
    worst = describe_worst(compared) or "every number was right"
    return (
        f"Predicted against actual skipped steps: {int(within.sum())} of {len(compared)} runs "
        f"within {TOLERANCE} step. " + (f"Farther off: {rest}." if rest else f"Worst: {worst}.")
    )
