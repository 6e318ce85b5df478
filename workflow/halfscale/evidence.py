"""What figures are drawn from, and their common frame: a panel a workload, one legend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from halfscale.drawn import choose_drawn
from halfscale.plan import CONTROLS, PolicyChoice
from halfscale.style import ArmStyle, arm_styles


@dataclass(frozen=True)
class Evidence:
    """The tables that figures are drawn from, and the verdict (``recommendation.json``).

    ``choices`` are the configurations' policies and parameters, by name.
    """

    runs: pd.DataFrame
    configurations: pd.DataFrame
    steps: pd.DataFrame
    sweep: pd.DataFrame
    exponents: pd.DataFrame
    windows: pd.DataFrame
    calibration: pd.DataFrame
    landscape: pd.DataFrame
    choices: Mapping[str, PolicyChoice]
    recommendation: dict[str, Any]

    @property
    def workloads(self) -> list[str]:
        return sorted(self.runs["workload"].unique())

    @property
    def scaled(self) -> list[str]:
        """The configurations, without the controls."""
        return sorted(set(self.runs["configuration"]) - set(CONTROLS))

    @property
    def drawn(self) -> list[str]:
        """The configurations that figures with a line or a bar for each draw."""
        return choose_drawn(self.recommendation)

    @property
    def styles(self) -> dict[str, ArmStyle]:
        """The style of every arm; those drawn together are told apart whatever the others are."""
        return arm_styles(self.scaled) | arm_styles(self.drawn)


def panels_of(evidence: Evidence, height: float = 3.6) -> tuple[Figure, dict[str, Axes]]:
    """One panel a workload, two in a row."""
    names = evidence.workloads
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(9.5, height * rows), squeeze=False, sharey=False
    )
    for spare in axes.flat[len(names) :]:
        spare.remove()
    panels = dict(zip(names, axes.flat, strict=False))
    for name, axis in panels.items():
        axis.set_title(name, loc="left", fontweight="bold")
    return figure, panels


def add_shared_legend(figure: Figure, panels: dict[str, Axes]) -> None:
    """One legend below all panels, each entry once."""
    handles: dict[str, Any] = {}
    for axis in panels.values():
        lines, labels = axis.get_legend_handles_labels()
        handles.update(zip(labels, lines, strict=True))
        if legend := axis.get_legend():
            legend.remove()
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False
    )
