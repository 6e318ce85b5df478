"""A probe: what one reference run tells about every scale it did not have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from halfscale.magnitudes import (
    BINS,
    LOWEST_EXPONENT,
    OVERFLOW,
    VANISHING_EXPONENT,
    largest_safe_exponent,
    smallest_useful_exponent,
)
from halfscale.records import probe_counts

Reals = NDArray[np.float64]

# At the first of these powers of two even the last bin is lost, at the last one not even the first.
_ALL_LOST = VANISHING_EXPONENT - (LOWEST_EXPONENT + BINS)
_NONE_LOST = VANISHING_EXPONENT - LOWEST_EXPONENT

# The powers of two that a float32 scale can be.
_SMALLEST_POWER, _LARGEST_POWER = -149, 127


def overflows(scale: Reals | float, largest: Reals | float) -> NDArray[np.bool_]:
    """Whether a step overflows: its largest magnitude, scaled, rounds to infinity in fp16.

    Args:
        scale: The scale, float64, 0 and infinity included.
        largest: The largest unscaled magnitude of the step, float64; broadcast against `scale`.

    Returns:
        Flags of the broadcast shape. A product that is no number (0 × infinity) is an overflow:
        gradients that are infinite by themselves are so at scale 0 too, and an infinite loss
        has no finite gradient.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        below = np.multiply(scale, largest) < OVERFLOW
    return np.logical_not(below)


@dataclass(frozen=True, eq=False)
class Probe:
    """One reference run that never overflows, step by step. Arrays are copied and read-only.

    Attributes:
        largest: The largest magnitude over all fp16 tensors of the backward pass, unscaled, shape
            (steps,), float64; infinity if it was not finite.
        largest_gradient: The largest magnitude of the unscaled parameter gradients, shape
            (steps,), float64; finite wherever `largest` is.
        counts: The number of non-zero elements of those tensors by exponent, shape (steps, 268),
            int64. Bin b holds those with floor(log2 |g|) = b − 140: from 2^-140 up to below 2^128.
        same_batch: Whether every step had the same batch. A skipped step is then met again as it
            was: after k skipped steps a training stands where the probe stood k steps before.
            With other batches at every step it is the batch that stays with its step.

    Raises:
        ValueError: If the shapes do not fit, a magnitude is negative or NaN, a count is negative
            or no whole number, or a parameter gradient is infinite in a finite step.
    """

    largest: Reals
    largest_gradient: Reals
    counts: NDArray[np.int64]
    same_batch: bool = False

    def __post_init__(self) -> None:
        """Check the arrays and take copies that nobody else can write to."""
        self._take("largest", np.float64)
        self._take("largest_gradient", np.float64)
        self._take("counts", np.int64)
        if self.largest.ndim != 1:
            raise ValueError(f"largest must have shape (steps,), got {self.largest.shape}")
        if self.largest_gradient.shape != self.largest.shape:
            raise ValueError(
                f"largest_gradient must have the shape of largest, {self.largest.shape}, "
                f"got {self.largest_gradient.shape}"
            )
        if self.counts.shape != (self.steps, BINS):
            raise ValueError(
                f"counts must have shape {(self.steps, BINS)}, got {self.counts.shape}"
            )
        for name in ("largest", "largest_gradient", "counts"):
            if not (getattr(self, name) >= 0).all():
                raise ValueError(f"{name} must hold no negative number and no NaN")
        if np.isinf(self.largest_gradient[np.isfinite(self.largest)]).any():
            raise ValueError("largest_gradient must be finite wherever largest is")

    @classmethod
    def of(cls, table: pa.Table) -> Probe:
        """The probe in a table of `halfscale.records.PROBE_SCHEMA`.

        Where a parameter's gradient is not finite, as in the last step of a probe that diverged,
        no scale saves the step, whatever the tensors in half precision held.
        """
        counts = probe_counts(table, "activation") + probe_counts(table, "weight")
        gradient = np.nan_to_num(table["largest_gradient"].to_numpy(), nan=np.inf, posinf=np.inf)
        largest = np.where(np.isinf(gradient), np.inf, table["largest"].to_numpy())
        repeats = table["batch_repeats"].to_numpy()
        return cls(largest, gradient, counts, same_batch=bool(repeats[1:].all()))

    def _take(self, name: str, dtype: type[np.generic]) -> None:
        given = np.asarray(getattr(self, name))
        taken: NDArray[Any] = np.array(given, dtype=dtype)
        if dtype is np.int64 and not np.array_equal(taken, given):
            raise ValueError(f"{name} must hold whole numbers")
        taken.setflags(write=False)
        object.__setattr__(self, name, taken)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.largest)

    def row(self, step: int, skipped: NDArray[np.int64] | int) -> NDArray[np.int64] | int:
        """The row of the probe at which a configuration is, after so many skipped steps.

        Args:
            step: The configuration's step, skipped ones counted.
            skipped: Of its steps before, those that it skipped.
        """
        return step - skipped if self.same_batch else step

    @cached_property
    def lost_table(self) -> Reals:
        """The lost share at each power of two from 2^-153 to 2^116, shape (steps, 270).

        At the first every element is lost, at the last two none is. For `interpolate`.
        """
        before = np.zeros((self.steps, BINS + 1))  # the elements in the bins before each
        np.cumsum(self.counts, axis=1, out=before[:, 1:])
        table = np.zeros((self.steps, BINS + 2))
        np.divide(before[:, ::-1], np.maximum(before[:, -1:], 1), out=table[:, :-1])
        return table

    def lost_share(self, scales: ArrayLike) -> Reals:
        """The share of each step's non-zero elements that fp16 rounds to zero.

        An element is lost if its scaled magnitude is below 2^-25 (one at exactly 2^-25, the tie
        that fp16 rounds to zero as well, counts as kept). At a power of two the histogram tells
        that exactly; in between, one bin is lost in part, and its elements are taken to be spread
        evenly over its magnitudes. A step without non-zero elements loses none.

        Args:
            scales: The scale at each step, 0 and infinity included; shape (..., steps) or one
                that broadcasts to it, such as a single number or (k, 1).

        Returns:
            The lost share, from 0 to 1, shape (..., steps), float64.
        """
        index, weight = interpolate(np.asarray(scales, dtype=np.float64))
        steps = np.arange(self.steps)
        table = self.lost_table
        share: Reals = weight * table[steps, index] + (1 - weight) * table[steps, index + 1]
        return share

    def largest_safe_scale(self) -> Reals:
        """The largest power of two at which each step does not overflow: the oracle's choice.

        Returns:
            The scales, shape (steps,), float64: at most 2^127, the largest power of two in
            float32; infinity where every gradient is zero, so that any scale is safe; 0 where no
            power of two in float32 is safe.
        """
        exponent = largest_safe_exponent(self.largest)
        safe: Reals = np.exp2(np.minimum(exponent, _LARGEST_POWER))
        safe[exponent < _SMALLEST_POWER] = 0.0
        safe[exponent == np.inf] = np.inf
        return safe

    def smallest_useful_scale(self, epsilon: float) -> Reals:
        """The smallest power of two at which each step loses no more than a share `epsilon`.

        Args:
            epsilon: The lost share still allowed, from 0 to below 1.

        Returns:
            The scales, shape (steps,), float64; 0 where there is no element to lose.

        Raises:
            ValueError: If `epsilon` is no such share.
        """
        check_epsilon(epsilon)
        smallest: Reals = np.exp2(smallest_useful_exponent(self.counts, epsilon))
        return smallest


def interpolate(scale: Reals) -> tuple[NDArray[np.intp], Reals]:
    """Where scales lie in a row of `Probe.lost_table`.

    Args:
        scale: Scales, float64, any shape.

    Returns:
        The index of the power of two at or below each scale, and the weight from 0 to 1 of the
        lost share there; the rest is the weight of the next. Both of the shape of `scale`.
    """
    bounded = np.clip(scale, 2.0**_ALL_LOST, 2.0**_NONE_LOST)
    mantissa, exponent = np.frexp(bounded)
    # With S = 2^p·m the elements below 2^(-25-p)/m are lost. Of the bin from 2^(-26-p) up to twice
    # that, these are the first 2/m - 1, and frexp's mantissa is m/2.
    return (exponent - (1 + _ALL_LOST)).astype(np.intp), 1 / mantissa - 1


def check_epsilon(epsilon: float) -> None:
    """Refuse a lost share that is none, or that allows to lose everything.

    Raises:
        ValueError: If `epsilon` is not from 0 to below 1.
    """
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon must be a share from 0 to below 1, got {epsilon!r}")
