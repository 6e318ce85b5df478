"""Magnitudes of gradients against fp16's range: what overflows at a scale, and what vanishes.

A gradient element g, multiplied by the scale S, is kept in fp16 as long as 2^-25 < |g| S < 65520:
smaller ones round to zero, larger ones to Inf (IEEE 754-2019, round to nearest, ties to even).
Counts by exponent therefore tell the lost share at any scale, and the largest magnitude tells
whether a backward pass overflows. Nothing here imports torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

LOWEST_EXPONENT = -140
BINS = 268
"""Bin b counts the elements with floor(log2 |g|) = b + LOWEST_EXPONENT: 2^-140 up to 2^128."""

OVERFLOW = 65520.0
"""From here on fp16 rounds to Inf."""

VANISHING_EXPONENT = -25
"""Up to 2^-25 fp16 rounds to zero; its smallest number is 2^-24."""

TOLERABLE_LOSS = 0.05
"""The lost share up to which a scale counts as usable."""


def lost_share(counts: ArrayLike, log2_scales: ArrayLike) -> NDArray[np.float64]:
    """The share of non-zero elements that fp16 rounds to zero at each scale.

    Exact for powers of two, but for elements of exactly 2^-25 over the scale, which count as kept;
    between them the elements of a bin are taken to be spread evenly over its magnitudes.

    Args:
        counts: Elements by exponent, shape (..., BINS).
        log2_scales: The scales as powers of two, shape (scales,).

    Returns:
        Shares in 0...1, shape (..., scales); 0 where there is no element.
    """
    counts = np.asarray(counts, dtype=np.float64)
    below = np.concatenate([np.zeros((*counts.shape[:-1], 1)), counts.cumsum(-1)], axis=-1)
    bins = VANISHING_EXPONENT - np.asarray(log2_scales, dtype=np.float64) - LOWEST_EXPONENT
    bins = bins.clip(0, BINS)
    whole = np.minimum(bins.astype(np.int64), BINS - 1)
    lost = below[..., whole] + (np.exp2(bins - whole) - 1) * counts[..., whole]
    total = below[..., -1:]
    share: NDArray[np.float64] = np.divide(lost, total, out=np.zeros_like(lost), where=total > 0)
    return share


def largest_safe_exponent(largest: ArrayLike) -> NDArray[np.float64]:
    """log2 of the largest power of two as a scale that does not overflow.

    Args:
        largest: Largest magnitudes of backward passes, any shape.

    Returns:
        The same shape; inf where all is zero, -inf where the magnitude is not finite.
    """
    largest = np.asarray(largest, dtype=np.float64)
    mantissa, exponent = np.frexp(largest)
    power = 15.0 - exponent + (mantissa < OVERFLOW / 2**16)
    safe: NDArray[np.float64] = np.where(np.isfinite(largest), power, -np.inf)
    return np.where(largest == 0, np.inf, safe)


def smallest_useful_exponent(counts: ArrayLike, share: float) -> NDArray[np.float64]:
    """log2 of the smallest power of two as a scale that loses at most ``share`` of the elements.

    Args:
        counts: Elements by exponent, shape (..., BINS).
        share: The largest share that may be lost.

    Returns:
        Shape (...); -inf where there is no element.
    """
    counts = np.asarray(counts, dtype=np.float64)
    exponents = np.arange(VANISHING_EXPONENT - LOWEST_EXPONENT - BINS, BINS)
    tolerable = lost_share(counts, exponents) <= share
    smallest: NDArray[np.float64] = np.where(
        counts.any(-1), exponents[tolerable.argmax(-1)], -np.inf
    )
    return smallest
