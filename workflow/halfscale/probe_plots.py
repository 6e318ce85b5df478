"""The figures of the probes: where gradients lie in fp16's range, and which scales are usable."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from halfscale.evidence import Evidence, add_shared_legend, panels_of
from halfscale.magnitudes import VANISHING_EXPONENT
from halfscale.probe_tables import TENSORS, lost_share_of, usable_window
from halfscale.style import INK, LIMIT
from halfscale.wording import name_window

_SMALLEST_NORMAL = -14
_LARGEST = 16
_DEFAULT = 16  # PyTorch's initial scale, as a power of two
_BANDS = {
    "zero": (-math.inf, VANISHING_EXPONENT, "#c9ced4"),
    "subnormal": (VANISHING_EXPONENT, _SMALLEST_NORMAL, "#fbe3b5"),
    "normal": (_SMALLEST_NORMAL, _LARGEST, "#d7eedd"),
    "overflow": (_LARGEST, math.inf, "#f5cccc"),
}
_COLOURS = {"activation": "#0173b2", "weight": "#d55e00"}
_USABLE = "#bfe3c9"
# Powers of two that an axis of scales shows of the usable range beyond the scales themselves.
_MARGIN = 4.0


def draw_exponents(evidence: Evidence) -> tuple[Figure, str]:
    """Unscaled gradients by exponent, over fp16's bands: zero, subnormal, normal, overflow."""
    figure, panels = panels_of(evidence)
    parts = []
    for workload, axis in panels.items():
        table = evidence.exponents
        table = table[(table["workload"] == workload) & (table["part"] == "all")]
        filled = table.dropna(subset="exponent")
        if filled.empty:
            _say_nothing_recorded(axis)
            parts.append(f"{workload}: nothing was recorded")
            continue
        # One bin of room on either side, and all bands in sight.
        low = min(filled["exponent"].min() - 2, VANISHING_EXPONENT - 6)
        high = max(filled["exponent"].max() + 3, _LARGEST + 6)
        _draw_bands(axis, low, high)
        for tensors in TENSORS:
            mine = filled[filled["tensors"] == tensors]
            if len(mine):
                _draw_histogram(axis, mine, tensors, low, high)
                parts.append(f"{workload}, {_describe(mine, tensors, table)}")
        axis.set(xlim=(low, high), ylim=(0, None))
        axis.set(xlabel="log2 of the unscaled gradient", ylabel="share of elements, %")
        axis.grid(False)
    add_shared_legend(figure, panels)
    return figure, (
        "Gradients in half precision by exponent, unscaled, over all steps and seeds. "
        + "; ".join(parts)
        + "."
    )


def _draw_bands(axis: Axes, low: float, high: float) -> None:
    for name, (start, end, colour) in _BANDS.items():
        start, end = max(start, low), min(end, high)
        axis.axvspan(start, end, color=colour, linewidth=0, zorder=0)
        axis.text(
            (start + end) / 2,
            0.985,
            name,
            transform=axis.get_xaxis_transform(),
            ha="center",
            va="top",
            rotation=90 if end - start < 9 else 0,
            color=INK,
            fontsize="x-small",
        )


def _draw_histogram(axis: Axes, rows: pd.DataFrame, tensors: str, low: float, high: float) -> None:
    edges = np.arange(int(low), int(high) + 1)
    share = pd.Series(
        rows["elements"].to_numpy() / rows["elements"].sum() * 100.0,
        index=rows["exponent"].astype(int),
    )
    axis.stairs(
        share.reindex(edges[:-1], fill_value=0.0),
        edges,
        fill=True,
        alpha=0.55,
        color=_COLOURS[tensors],
        label=f"{tensors} gradients",
    )


def _describe(rows: pd.DataFrame, tensors: str, table: pd.DataFrame) -> str:
    elements = rows["elements"].sum()
    below = rows["elements"][rows["exponent"] < VANISHING_EXPONENT].sum() / elements
    mine = table[table["tensors"] == tensors]
    zeros = mine["elements"][mine["exponent"].isna()].sum() / mine["elements"].sum()
    return (
        f"{tensors} gradients: 2^{rows['exponent'].min():.0f} to 2^{rows['exponent'].max() + 1:.0f}"
        f", {below:.1%} of them below fp16's smallest number, and {zeros:.0%} of all are zero"
    )


def draw_window(evidence: Evidence) -> tuple[Figure, str]:
    """Lost share and overflowing steps against the scale; shaded: usable at every step."""
    figure, panels = panels_of(evidence)
    parts = []
    for workload, axis in panels.items():
        windows = evidence.windows[evidence.windows["workload"] == workload]
        exponents = evidence.exponents[evidence.exponents["workload"] == workload]
        if windows.empty or exponents["exponent"].isna().all():
            _say_nothing_recorded(axis)
            parts.append(f"{workload}: nothing was recorded")
            continue
        low, high = usable_window(windows)
        scales = _range_of_scales(windows)
        for part, dashes in {"start": (4, 1.5), "end": ()}.items():
            chosen = exponents[exponents["part"] == part]
            axis.plot(
                scales,
                lost_share_of(chosen, scales) * 100.0,
                color="#0173b2",
                dashes=dashes,
                label=f"elements lost, {'first' if part == 'start' else 'last'} tenth of the steps",
            )
        # A step overflows at every scale above its largest safe one.
        overflow = [(windows["largest_safe"] < scale).mean() * 100.0 for scale in scales]
        axis.step(scales, overflow, where="post", color=LIMIT, label="steps that overflow")
        if low <= high:
            axis.axvspan(low, high, color=_USABLE, linewidth=0, zorder=0, label="usable throughout")
        axis.axvline(
            _DEFAULT, color=INK, linewidth=0.9, linestyle=":", label="PyTorch's initial scale"
        )
        axis.set(xlabel="log2 of the scale S", ylabel="share, %", ylim=(-3, 103))
        said = f"usable throughout: {name_window(low, high)}"
        axis.set_title(said, loc="right", fontsize="small")
        parts.append(f"{workload}: {said}")
    add_shared_legend(figure, panels)
    return figure, (
        "Share of gradient elements lost, and of steps that overflow, against the scale. "
        + "; ".join(parts)
        + "."
    )


def _range_of_scales(windows: pd.DataFrame) -> np.ndarray:
    """From where nearly all is lost to where every step overflows, in whole powers of two."""
    ends = windows[["smallest_useful", "largest_safe"]].to_numpy().ravel()
    finite = [*ends[np.isfinite(ends)], 0.0, _DEFAULT]
    return np.arange(math.floor(min(finite)) - 8, math.ceil(max(finite)) + 5, dtype=float)


def shade_usable_range(axis: Axes, windows: pd.DataFrame) -> None:
    """Shade the usable scales of every step, medians over seeds, behind lines already drawn.

    The axis keeps the lines in sight, and of the range what lies near them.
    """
    medians = _median_range(windows)
    if medians.empty:
        return
    low, high = (np.log2(end) for end in axis.get_ylim())
    finite = medians.clip(low - _MARGIN, high + _MARGIN)
    axis.fill_between(
        medians.index + 0.0,
        np.exp2(finite["smallest_useful"]),
        np.exp2(finite["largest_safe"]),
        where=medians["smallest_useful"] <= medians["largest_safe"],
        step="post",
        color=_USABLE,
        alpha=0.6,
        linewidth=0,
        zorder=0,
        label="usable range (probe)",
    )
    ends = finite.to_numpy()
    axis.set_ylim(2.0 ** min(low, ends.min()), 2.0 ** max(high, ends.max()))


def describe_usable_range(windows: pd.DataFrame) -> str:
    """The usable scales of the first and the last step, medians over seeds, in words."""
    medians = _median_range(windows)
    ends = [name_window(*medians.iloc[row]) for row in (0, -1)]
    return " and ".join(ends)


def _median_range(windows: pd.DataFrame) -> pd.DataFrame:
    return windows.groupby("step")[["smallest_useful", "largest_safe"]].median()


def _say_nothing_recorded(axis: Axes) -> None:
    axis.set_axis_off()
    axis.text(0.5, 0.5, "the probe recorded no gradients", ha="center", transform=axis.transAxes)
