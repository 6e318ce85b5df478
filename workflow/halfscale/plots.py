"""The figures, each drawn from the tables, each with a text alternative that states its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from halfscale.drawn import choose_ranked, draws_one_seed, draws_seed_lines, rank, steps_a_point
from halfscale.evidence import Evidence, add_shared_legend, panels_of
from halfscale.plan import CONTROLS, LARGEST_FP16
from halfscale.probe_plots import (
    describe_usable_range,
    draw_exponents,
    draw_window,
    shade_usable_range,
)
from halfscale.records import write_text
from halfscale.replay_plots import draw_calibration, draw_landscape
from halfscale.style import INK, LIMIT, ArmStyle, apply_theme
from halfscale.svg import to_svg


def draw_loss(evidence: Evidence) -> tuple[Figure, str]:
    """Loss curves: median over seeds, band from the lowest to the highest, thin seed lines."""
    figure, panels = panels_of(evidence)
    arms, width = [*evidence.drawn, *CONTROLS], steps_a_point(evidence.recommendation)
    seed_lines = draws_seed_lines(evidence.recommendation)
    for workload, axis in panels.items():
        steps = evidence.steps[evidence.steps["workload"] == workload]
        # Each point of a curve at the first of the steps that it stands for.
        steps = steps.assign(step=steps["step"] // width * width)
        present = set(steps["configuration"].unique())
        order = [name for name in arms if name in present]
        _draw_bands(axis, steps, order, evidence.styles, seed_lines)
        axis.set(xlabel="step", ylabel="loss", yscale="log")
    add_shared_legend(figure, panels)
    finals = evidence.configurations
    parts = [
        f"{row.workload}, {row.configuration}: "
        + ("no final loss" if math.isnan(row.final_loss) else f"final loss {row.final_loss:.4g}")
        for row in finals.itertuples()
    ]
    return figure, "Loss over steps, median over seeds. " + "; ".join(parts) + "."


def _draw_bands(
    axis: Axes, steps: pd.DataFrame, order: list[str], styles: dict[str, ArmStyle], thin: bool
) -> None:
    look: dict[str, Any] = {
        "x": "step",
        "hue": "configuration",
        "hue_order": order,
        "palette": {name: styles[name].colour for name in order},
        "estimator": None,
        "ax": axis,
    }
    finite = steps[np.isfinite(steps["loss"]) & steps["configuration"].isin(order)]
    if finite.empty:
        return
    if thin:
        seeds = {"units": "seed", "linewidth": 0.5, "alpha": 0.35, "legend": False}
        runs = finite.groupby(["configuration", "seed", "step"])["loss"].median().reset_index()
        sns.lineplot(runs, y="loss", **look, **seeds)
    # In one pass: seaborn's own estimator works through a group a step.
    groups = finite.groupby(["configuration", "step"])["loss"]
    band = groups.agg(["median", "min", "max"]).reset_index()
    sns.lineplot(
        band,
        y="median",
        **look,
        style="configuration",
        style_order=order,
        dashes={name: styles[name].dashes for name in order},
        linewidth=1.6,
    )
    for name, mine in band.groupby("configuration"):
        axis.fill_between(
            mine["step"],
            mine["min"],
            mine["max"],
            color=styles[str(name)].colour,
            alpha=0.08,
            linewidth=0,
        )


def draw_scale(evidence: Evidence) -> tuple[Figure, str]:
    """The scale over steps on a log2 axis; a cross marks each overflow, shaded: usable scales."""
    figure, panels = panels_of(evidence)
    styles = evidence.styles
    for workload, axis in panels.items():
        steps = evidence.steps[
            (evidence.steps["workload"] == workload)
            & evidence.steps["configuration"].isin(evidence.drawn)
        ]
        if draws_one_seed(evidence.recommendation):
            steps = steps[steps["seed"] == steps["seed"].min()]
        for name, group in steps.groupby("configuration"):
            style = styles[str(name)]
            for index, (_, run) in enumerate(group.groupby("seed")):
                # The corners alone draw the same line.
                corners = run["scale"].ne(run["scale"].shift()) | run["step"].eq(run["step"].max())
                axis.step(
                    *(run.loc[corners, column] for column in ("step", "scale")),
                    where="post",
                    color=style.colour,
                    linewidth=1.1,
                    alpha=0.9 if index == 0 else 0.4,
                    label=name if index == 0 else None,
                    linestyle=(0, style.dashes) if style.dashes else "-",
                )
            hits = group[group["overflow"]]
            axis.plot(hits["step"], hits["scale"], "x", color=style.colour, markersize=5)
        axis.set_yscale("log", base=2)
        axis.set(xlabel="step", ylabel="scale S")
        shade_usable_range(axis, evidence.windows[evidence.windows["workload"] == workload])
    add_shared_legend(figure, panels)
    return figure, _describe_scales(evidence)


def _describe_scales(evidence: Evidence) -> str:
    finals = evidence.configurations
    finals = finals[finals["configuration"].isin(evidence.scaled)]
    parts = [
        f"{row.workload}, {row.configuration}: final scale 2^{_log2(row.final_scale)}, "
        f"{row.growths:g} growths, {row.backoffs:g} backoffs"
        for row in finals.itertuples()
    ]
    usable = [
        f"{workload}: {describe_usable_range(windows)}"
        for workload, windows in evidence.windows.groupby("workload")
    ]
    return (
        "Scale over steps; crosses mark overflows. "
        + "; ".join(parts)
        + ". Usable range by the probes, first and last step. "
        + "; ".join(usable or ["nothing was recorded"])
        + "."
    )


def _log2(value: float) -> str:
    return f"{math.log2(value):.3g}" if value and math.isfinite(value) else "?"


def draw_skipped(evidence: Evidence) -> tuple[Figure, str]:
    """Skipped steps of every run, and their mean."""
    figure, panels = panels_of(evidence, height=0.6 + 0.45 * max(3, len(evidence.drawn)))
    styles = evidence.styles
    palette = {name: styles[name].colour for name in evidence.drawn}
    scaled = evidence.runs[evidence.runs["configuration"].isin(evidence.scaled)]
    drawn = scaled[scaled["configuration"].isin(evidence.drawn)]
    for workload, axis in panels.items():
        look: dict[str, Any] = {
            "data": drawn[drawn["workload"] == workload],
            "x": "skipped_steps",
            "y": "configuration",
            "hue": "configuration",
            "order": evidence.drawn,
            "hue_order": evidence.drawn,
            "palette": palette,
            "legend": False,
            "ax": axis,
        }
        sns.barplot(**look, errorbar=None, alpha=0.35)
        sns.stripplot(**look, size=5, jitter=0.15)
        axis.set(xlabel="skipped steps", ylabel="")
        axis.set_xlim(left=0)
    means = scaled.groupby(["workload", "configuration"])["skipped_steps"].mean()
    parts = [f"{workload}, {name}: {mean:g}" for (workload, name), mean in means.items()]
    return figure, "Mean skipped steps a run. " + "; ".join(parts) + "."


def draw_ranking(evidence: Evidence) -> tuple[Figure, str]:
    """Steps to the target against fp32, best first, with 95 % intervals; hollow: not in the set."""
    verdict = evidence.recommendation
    scores, order = verdict["scores"], choose_ranked(verdict)
    figure, axis = plt.subplots(figsize=(9.5, 1.3 + 0.45 * max(2, len(order))))
    styles = evidence.styles
    for position, name in enumerate(order):
        ratio = scores[name]["ratio"]
        inside = name in verdict["winning_set"]
        axis.plot(_limits(ratio), [position] * 2, color=styles[name].colour, linewidth=2.2)
        axis.plot(
            ratio["estimate"],
            position,
            styles[name].marker,
            color=styles[name].colour,
            markersize=9,
            markerfacecolor=styles[name].colour if inside else "white",
        )
    axis.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    policies = verdict["policies"]
    several = len(set(policies.values())) > 1
    names = [
        name
        + (f" ({policies[name]})" if several and name != policies[name] else "")
        + ("  ★" if name == verdict["recommended"] else "")
        for name in order
    ]
    axis.set_yticks(range(len(order)), names)
    axis.invert_yaxis()
    axis.set_xlabel("steps to the target ÷ fp32's of the same seed (1 = as fast as fp32)")
    if not order:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "every configuration was rejected", ha="center")
    return figure, _describe_ranking(verdict)


def _limits(ratio: Mapping[str, Any]) -> list[float]:
    """The ends of an interval; the estimate where it has none."""
    ends = (ratio["low"], ratio["high"])
    return [ratio["estimate"] if end is None else end for end in ends]


def _describe_ranking(verdict: Mapping[str, Any]) -> str:
    parts = []
    for name in rank(verdict):
        ratio = verdict["scores"][name]["ratio"]
        low, high = _limits(ratio)
        inside = name in verdict["winning_set"]
        parts.append(
            f"{name}: {ratio['estimate']:.3f} ({low:.3f} to {high:.3f})"
            + ("" if inside else ", told apart from the best")
        )
    said = "; ".join(parts or ["none"])
    return f"Steps to the target against fp32, with 95 % intervals. {said}."


def draw_sweep(evidence: Evidence) -> tuple[Figure, str]:
    """Verification, inputs × 1e4: the largest scaled gradient against fp16's limit."""
    sweep = evidence.sweep
    figure, axis = plt.subplots(figsize=(9.5, 3.8))
    axis.plot(
        sweep["scale"],
        sweep["fp32_largest"],
        color="#7c848d",
        linestyle="--",
        label="without fp16's limit (fp32)",
    )
    fine = sweep[~sweep["overflow"]]
    lost = sweep[sweep["overflow"]]
    axis.plot(fine["scale"], fine["fp16_largest"], "o", color="#0173b2", label="fp16: finite")
    axis.plot(lost["scale"], [LARGEST_FP16] * len(lost), "x", color=LIMIT, label="fp16: Inf")
    axis.axhline(LARGEST_FP16, color=LIMIT, linewidth=1)
    axis.annotate(
        "65504, the largest fp16 number",
        (sweep["scale"].min(), LARGEST_FP16),
        xytext=(0, 5),
        textcoords="offset points",
        color=LIMIT,
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set(xlabel="scale S", ylabel="largest scaled gradient")
    axis.legend(frameon=False, loc="lower right")
    limit = fine["scale"].max()
    return figure, (
        f"Largest scaled gradient over the scale, inputs times 1e4: finite up to S = 2^"
        f"{_log2(limit)}, Inf at the {len(lost)} larger scales tried up to 2^"
        f"{_log2(sweep['scale'].max())}. A larger scale never cures an overflow."
    )


FIGURES: dict[str, Callable[[Evidence], tuple[Figure, str]]] = {
    "ranking": draw_ranking,
    "window": draw_window,
    "landscape": draw_landscape,
    "calibration": draw_calibration,
    "loss": draw_loss,
    "scale": draw_scale,
    "skipped": draw_skipped,
    "exponents": draw_exponents,
    "sweep": draw_sweep,
}


def draw_all(evidence: Evidence, folder: Path) -> None:
    """Write every figure as ``<name>.svg`` with its text alternative in ``<name>.txt``.

    Raises:
        OSError: If a file cannot be written.
    """
    apply_theme()
    np.random.seed(0)  # seaborn's jitter takes from it, and the files would vary
    for name, draw in FIGURES.items():
        figure, alternative = draw(evidence)
        write_text(folder / f"{name}.svg", to_svg(figure))
        plt.close(figure)
        write_text(folder / f"{name}.txt", alternative + "\n")
