"""Lost shares and safe scales: what counting promises is what fp16 really does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from halfscale.magnitudes import (
    BINS,
    LOWEST_EXPONENT,
    largest_safe_exponent,
    lost_share,
    smallest_useful_exponent,
)

TIE = 2.0**-25
"""Half of fp16's smallest number; IEEE 754 rounds it to the even neighbour, which is zero."""

# Magnitudes as fp32 and bf16 have them, from their smallest to their largest power of two.
magnitudes = st.builds(math.ldexp, st.floats(1.0, 2.0, exclude_max=True), st.integers(-133, 127))
# Near fp16's ends, where rounding decides.
edges = st.builds(
    lambda mantissa, power: math.ldexp(mantissa, power),
    st.sampled_from([1.0, math.nextafter(1, 2), 1.5, 65520 / 2**15, math.nextafter(2, 1)]),
    st.integers(-60, 60),
)
elements = st.lists(magnitudes | edges, min_size=1, max_size=40)
exponents = st.integers(-120, 140)
histograms = st.dictionaries(st.integers(0, BINS - 1), st.integers(1, 10**9), max_size=6)


def half(values: float | NDArray[np.float64]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float64).astype(np.float16)


def count(values: list[float]) -> NDArray[np.int64]:
    """A histogram by `math.frexp`, one element at a time."""
    counts = np.zeros(BINS, dtype=np.int64)
    for value in values:
        counts[math.frexp(value)[1] - 1 - LOWEST_EXPONENT] += 1
    return counts


def filled(bins: dict[int, int]) -> NDArray[np.int64]:
    counts = np.zeros(BINS, dtype=np.int64)
    counts[list(bins)] = list(bins.values())
    return counts


# Lost share.


@given(values=elements, exponent=exponents)
def test_the_lost_share_is_what_fp16_rounds_to_zero(values: list[float], exponent: int) -> None:
    scaled = np.ldexp(values, exponent)
    # Elements of exactly 2^-25 over the scale share a bin with kept ones, and count as kept.
    lost = (half(scaled) == 0) & (scaled != TIE)
    assert lost_share(count(values), [exponent])[0] == pytest.approx(lost.mean(), abs=1e-12)


def test_an_element_at_the_tie_counts_as_kept_though_fp16_loses_it() -> None:
    assert half(TIE) == 0
    assert half(math.nextafter(TIE, 1)) != 0
    for exponent in (-3, 0, 20):
        at_the_tie, below = TIE * 2.0**-exponent, math.nextafter(TIE, 0) * 2.0**-exponent
        assert lost_share(count([at_the_tie]), [exponent]) == [0]
        assert lost_share(count([below]), [exponent]) == [1]


def test_between_powers_of_two_the_share_grows_evenly() -> None:
    # One element in [2^-30, 2^-29), three in [2^-29, 2^-28): the first is lost up to S = 2^4.
    counts = count([2.0**-30, 2.0**-29, 2.0**-29, 1.5 * 2.0**-29])
    # Three times a power of two: a third of the bin's width is still below.
    between = math.log2(1.5)
    shares = lost_share(counts, [3.0, 3.0 + between, 4.0, 4.0 + between, 5.0, 5.5])
    assert shares.tolist() == pytest.approx([1.0, 0.25 + 0.75 / 3, 0.25, 0.25 / 3, 0.0, 0.0])


@given(bins=histograms, scales=st.lists(st.floats(-300, 300), min_size=2, max_size=8))
def test_a_larger_scale_never_loses_more(bins: dict[int, int], scales: list[float]) -> None:
    shares = lost_share(filled(bins), sorted(scales))
    assert (np.diff(shares) <= 0).all()
    assert (shares >= 0).all() and (shares <= 1).all()


@given(bins=histograms.filter(bool))
def test_everything_is_lost_at_the_smallest_scale_and_nothing_at_the_largest(
    bins: dict[int, int],
) -> None:
    assert lost_share(filled(bins), [-1e6, -154, 116, 1e6]).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (0,), (0, 3)])
@pytest.mark.parametrize("scales", [0, 1, 5])
def test_every_histogram_gets_a_share_at_every_scale(shape: tuple[int, ...], scales: int) -> None:
    counts = np.random.default_rng(0).integers(0, 5, (*shape, BINS))
    log2_scales = np.linspace(-20, 20, scales)
    shares = lost_share(counts, log2_scales)
    assert shares.shape == (*shape, scales)
    for index in np.ndindex(shape):
        assert shares[index].tolist() == lost_share(counts[index], log2_scales).tolist()


def test_nothing_is_lost_of_no_elements() -> None:
    assert lost_share(np.zeros((2, BINS)), [-200, 0, 200]).tolist() == [[0, 0, 0]] * 2


# The largest scale that does not overflow.


def overflows(largest: float, exponent: int) -> bool:
    return not np.isfinite(half(np.ldexp(largest, exponent)))


@given(largest=magnitudes | edges | st.floats(1e-300, 1e300))
def test_the_largest_safe_scale_is_the_last_that_fp16_can_hold(largest: float) -> None:
    safe = float(largest_safe_exponent(largest))
    assert not overflows(largest, int(safe))
    assert overflows(largest, int(safe) + 1)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (65520.0, -1),  # rounds to Inf
        (math.nextafter(65520, 0), 0),
        (65519.99, 0),
        (65504.0, 0),
        (32760.0, 0),
        (math.nextafter(32760, 0), 1),
        (1.0, 15),
        (0.5, 16),
        (2.0**-24, 39),
        (72.5, 9),
        (1e-300, 1012),
        (5e-324, 1089),
        (2.0**127, -112),
        (0.0, math.inf),
        (math.inf, -math.inf),
        (math.nan, -math.inf),
    ],
)
def test_largest_safe_scales_worked_by_hand(largest: float, expected: float) -> None:
    assert largest_safe_exponent(largest) == expected


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2)])
def test_safe_scales_have_the_shape_of_the_magnitudes(shape: tuple[int, ...]) -> None:
    safe = largest_safe_exponent(np.full(shape, 3.0))
    assert safe.shape == shape
    assert (safe == 14).all()


# The smallest scale that loses little.


@given(values=elements, share=st.sampled_from([0.0, 0.05, 0.25, 0.5, 0.9]))
def test_the_smallest_useful_scale_is_the_first_to_lose_no_more(
    values: list[float], share: float
) -> None:
    def lost(exponent: int) -> float:
        scaled = np.ldexp(values, exponent)
        return float(((half(scaled) == 0) & (scaled != TIE)).mean())

    smallest = int(smallest_useful_exponent(count(values), share))
    assert lost(smallest) <= share < lost(smallest - 1)


def test_smallest_useful_scales_worked_by_hand() -> None:
    # 19 elements of 1 and one of 2^-40: 5 % may go, 4 % may not.
    counts = count([1.0] * 19 + [2.0**-40])
    assert smallest_useful_exponent(counts, 0.05) == -25
    assert smallest_useful_exponent(counts, 0.04) == 15
    assert smallest_useful_exponent(counts, 0.0) == 15


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2)])
def test_useful_scales_have_the_shape_of_the_histograms(shape: tuple[int, ...]) -> None:
    counts = np.broadcast_to(count([1.0]), (*shape, BINS))
    smallest = smallest_useful_exponent(counts, 0.05)
    assert smallest.shape == shape
    assert (smallest == -25).all()


def test_every_scale_is_useful_for_no_elements() -> None:
    counts = np.stack([np.zeros(BINS), count([1.0])])
    assert smallest_useful_exponent(counts, 0.05).tolist() == [-math.inf, -25]
