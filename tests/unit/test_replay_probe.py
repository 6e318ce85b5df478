"""What a probe says about scales it did not have, against fp16 itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.records import PROBE_SCHEMA
from halfscale.replay import Probe, overflows


def probe_of(tensors: list[list[float]]) -> Probe:
    """A probe recorded from the elements of each step."""
    counts = np.zeros((len(tensors), BINS))
    for step, elements in enumerate(tensors):
        for element in elements:
            if element and math.isfinite(element):
                counts[step, math.frexp(element)[1] - 1 - LOWEST_EXPONENT] += 1
    largest = [max(map(abs, elements), default=0.0) for elements in tensors]
    return Probe(np.array(largest), np.array(largest), counts)


def counts_at(*bins: tuple[int, int]) -> list[int]:
    """One step's histogram from pairs of exponent and count."""
    row = [0] * BINS
    for exponent, count in bins:
        row[exponent - LOWEST_EXPONENT] = count
    return row


ONE_STEP = Probe(np.array([1.0]), np.array([1.0]), np.array([counts_at((0, 1), (-26, 3))]))


def test_an_element_is_lost_below_half_of_the_smallest_fp16_number() -> None:
    # Three of four elements lie from 2^-26 up to 2^-25, so at S = 1 they are lost, at 2 kept.
    assert ONE_STEP.lost_share(1.0) == [0.75]
    assert ONE_STEP.lost_share(2.0) == [0.0]
    assert ONE_STEP.lost_share(2.0**-25) == [0.75]
    assert ONE_STEP.lost_share(2.0**-26) == [1.0]


def test_between_powers_of_two_the_elements_of_a_bin_are_spread_evenly() -> None:
    # At S = 1.6 what is below 2^-25/1.6 = 1.25·2^-26 is lost: the first quarter of the bin.
    assert ONE_STEP.lost_share(1.6) == pytest.approx([0.75 / 4])


def test_a_vanished_scale_loses_everything_and_an_infinite_one_nothing() -> None:
    edges = Probe(
        np.ones(3), np.ones(3), np.array([counts_at((-140, 1)), counts_at((127, 1)), counts_at()])
    )
    assert edges.lost_share(0.0).tolist() == [1, 1, 0]
    assert edges.lost_share(2.0**-153).tolist() == [1, 1, 0]
    assert edges.lost_share(2.0**-152).tolist() == [1, 0, 0]
    assert edges.lost_share(2.0**114).tolist() == [1, 0, 0]
    assert edges.lost_share(2.0**115).tolist() == [0, 0, 0]
    assert edges.lost_share(math.inf).tolist() == [0, 0, 0]


def test_shares_are_given_for_a_scale_a_step_and_for_many_scales_at_once() -> None:
    probe = Probe(np.ones(2), np.ones(2), np.array([counts_at((-26, 1)), counts_at((-27, 1))]))
    assert probe.lost_share([2.0, 2.0]).tolist() == [0, 1]
    assert probe.lost_share([[1.0], [2.0], [4.0]]).tolist() == [[1, 1], [0, 1], [0, 0]]


@given(
    elements=st.lists(st.floats(2.0**-40, 2.0**10), min_size=1, max_size=30),
    power=st.integers(-30, 30),
)
def test_overflow_and_loss_are_those_of_fp16_at_every_power_of_two(
    elements: list[float], power: int
) -> None:
    scale = 2.0**power
    probe = probe_of([elements])
    with np.errstate(over="ignore"):
        halves = (np.array(elements) * scale).astype(np.float16)
    ties = sum(element * scale == 2.0**-25 for element in elements)
    assert overflows(scale, probe.largest)[0] == np.isinf(halves).any()
    assert probe.lost_share(scale)[0] == (np.sum(halves == 0) - ties) / len(elements)


@given(st.floats(2.0**-100, 2.0**100))
def test_the_oracle_is_the_last_power_of_two_before_an_overflow(largest: float) -> None:
    [safe] = Probe(
        np.array([largest]), np.array([largest]), np.zeros((1, BINS))
    ).largest_safe_scale()
    assert math.frexp(safe)[0] == 0.5
    assert not overflows(safe, largest)
    assert overflows(2 * safe, largest) or safe == 2.0**127


def test_the_oracle_of_an_awkward_step() -> None:
    largest = np.array([0.0, math.inf, 1e-300, 1e300, 65519.0, 65520.0])
    probe = Probe(largest, largest, np.zeros((6, BINS)))
    assert probe.largest_safe_scale().tolist() == [math.inf, 0, 2.0**127, 0, 1, 0.5]


@given(elements=st.lists(st.floats(2.0**-120, 2.0**20), max_size=12), epsilon=st.floats(0, 0.99))
def test_the_smallest_useful_scale_is_the_first_that_loses_little_enough(
    elements: list[float], epsilon: float
) -> None:
    probe = probe_of([elements])
    [useful] = probe.smallest_useful_scale(epsilon)
    assert probe.lost_share(useful)[0] <= epsilon
    assert useful == 0 or probe.lost_share(useful / 2)[0] > epsilon
    assert (useful == 0) == (not elements)


def test_what_cannot_be_scaled_overflows_at_any_scale() -> None:
    scales = np.array([0.0, 1e-45, 1.0, math.inf])
    assert overflows(scales, math.inf).tolist() == [True] * 4
    assert overflows(scales, 0.0).tolist() == [False, False, False, True]
    assert overflows(scales, 1.0).tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"largest": [[1.0, 1.0]]}, r"largest must have shape \(steps,\), got \(1, 2\)"),
        ({"largest_gradient": [1.0]}, "largest_gradient must have the shape of largest"),
        ({"counts": np.zeros((2, 3))}, r"counts must have shape \(2, 268\), got \(2, 3\)"),
        ({"largest": [1.0, -1.0]}, "largest must hold no negative number and no NaN"),
        ({"largest": [1.0, math.nan]}, "largest must hold no negative number and no NaN"),
        ({"counts": np.full((2, BINS), -1)}, "counts must hold no negative number"),
        ({"counts": np.full((2, BINS), 0.5)}, "counts must hold whole numbers"),
        ({"largest_gradient": [1.0, math.inf]}, "largest_gradient must be finite wherever"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arrays = {"largest": [1.0, 1.0], "largest_gradient": [1.0, 1.0], "counts": np.zeros((2, BINS))}
    with pytest.raises(ValueError, match=message):
        Probe(**{name: np.asarray(array) for name, array in (arrays | change).items()})


@pytest.mark.parametrize("epsilon", [-0.1, 1.0, math.nan])
def test_an_epsilon_that_is_no_share_is_refused(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon must be a share from 0 to below 1"):
        ONE_STEP.smallest_useful_scale(epsilon)


def test_a_probe_keeps_its_own_read_only_copies() -> None:
    largest = np.ones(1)
    probe = Probe(largest, np.ones(1), np.zeros((1, BINS)))
    largest[0] = 5
    assert probe.largest[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        probe.largest[0] = 5


def test_a_probe_whose_gradients_are_not_finite_has_no_scale_for_that_step() -> None:
    empty = [[0] * BINS] * 4
    columns = {
        "step": range(4),
        "loss": [1.0] * 4,
        "largest": [1.0, math.inf, 2.0, 0.0],
        "largest_gradient": [0.5, math.nan, math.inf, 0.0],
        "batch_repeats": [False, True, True, False],
        "activation_counts": empty,
        "weight_counts": empty,
        "activation_zeros": [0] * 4,
        "weight_zeros": [0] * 4,
    }
    probe = Probe.of(pa.table({key: list(value) for key, value in columns.items()}, PROBE_SCHEMA))
    assert probe.largest.tolist() == [1, math.inf, math.inf, 0]
    assert probe.largest_safe_scale().tolist() == [2.0**15, 0, 0, math.inf]
    assert not probe.same_batch
