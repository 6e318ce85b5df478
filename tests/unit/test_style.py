"""One look an arm, everywhere, also for readers who see no colours."""

from __future__ import annotations

from itertools import combinations

import pytest
from matplotlib.colors import to_rgb

from halfscale.plan import CONTROLS
from halfscale.style import arm_styles

FIVE = ["default", "fast", "high", "low", "slow"]


def test_every_arm_has_a_style_and_controls_are_grey() -> None:
    styles = arm_styles(FIVE)
    assert list(styles) == [*FIVE, *CONTROLS]
    for name, style in styles.items():
        red, green, blue = to_rgb(style.colour)
        spread = max(red, green, blue) - min(red, green, blue)
        assert (spread < 0.1) == (name in CONTROLS)


def test_styles_do_not_depend_on_the_order_of_names() -> None:
    assert arm_styles(FIVE[::-1]) == arm_styles(FIVE)


@pytest.mark.parametrize("count", [5, 10])
def test_up_to_ten_configurations_differ_in_colour(count: int) -> None:
    styles = arm_styles([f"c{number}" for number in range(count)])
    assert len({style.colour for style in styles.values()}) == count + len(CONTROLS)


def test_five_configurations_differ_in_line_and_marker_too() -> None:
    styles = [style for name, style in arm_styles(FIVE).items() if name in FIVE]
    assert len({style.dashes for style in styles}) == 5
    assert len({style.marker for style in styles}) == 5


def test_forty_configurations_still_differ_somehow() -> None:
    styles = arm_styles([f"c{number:02}" for number in range(40)])
    for (one, look), (other, same) in combinations(styles.items(), 2):
        assert look != same, (one, other)
