"""One look for every figure and page: each arm has one colour, line style and marker everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import seaborn as sns

from halfscale.plan import CONTROLS

INK = "#22262b"
GRID = "#d9dde2"
LIMIT = "#8a1c1c"

_DASHES: list[str | tuple[float, ...]] = [
    "",
    (5, 1.5),
    (1.5, 1),
    (6, 1.5, 1.5, 1.5),
    (8, 2),
    (3, 1),
    (1, 1, 3, 1),
]
_MARKERS = "osD^vPX*hp"
_CONTROL_COLOURS = ["#3b4149", "#7c848d", "#a9b0b7"]


@dataclass(frozen=True)
class ArmStyle:
    """How one arm is drawn; ``dashes`` in seaborn's form."""

    colour: str
    dashes: str | tuple[float, ...]
    marker: str


def arm_styles(configurations: list[str]) -> dict[str, ArmStyle]:
    """A style by arm, controls in greys, configurations in seaborn's colour-blind palette.

    With more than ten configurations colours repeat with other dashes and markers.
    """
    palette = sns.color_palette("colorblind").as_hex()
    styles = {}
    for index, name in enumerate(sorted(configurations)):
        shift = index // len(palette)
        styles[name] = ArmStyle(
            palette[index % len(palette)],
            _DASHES[(index + shift) % len(_DASHES)],
            _MARKERS[(index + shift) % len(_MARKERS)],
        )
    for index, name in enumerate(CONTROLS):
        styles[name] = ArmStyle(_CONTROL_COLOURS[index], _DASHES[index], "|")
    return styles


def apply_theme() -> None:
    """Set the theme of all figures: larger type, light grid, no frame on top and right."""
    sns.set_theme(
        context="notebook",
        style="whitegrid",
        rc={
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "figure.constrained_layout.use": True,
            "font.family": "DejaVu Sans",
            "grid.color": GRID,
            "svg.fonttype": "path",
            # Element names in the SVG would otherwise be random, and the file new at every run.
            "svg.hashsalt": "halfscale",
            "text.color": INK,
        },
    )
