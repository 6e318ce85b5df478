"""Wording: the same thing is said in the same words wherever it is said."""

from __future__ import annotations

import math

import pytest

from halfscale.wording import name_window


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (5.0, 17.0, "2^5 to 2^17"),
        (4.5, 4.5, "2^4.5 to 2^4.5"),
        (9.0, 8.0, "none"),
        (-math.inf, -math.inf, "none"),
        (3.0, -math.inf, "none"),
        (math.nan, math.nan, "none"),
        (-math.inf, math.inf, "every scale"),
        (-math.inf, 12.0, "up to 2^12"),
        (3.0, math.inf, "from 2^3 on"),
    ],
)
def test_a_usable_window_in_words(low: float, high: float, said: str) -> None:
    assert name_window(low, high) == said
