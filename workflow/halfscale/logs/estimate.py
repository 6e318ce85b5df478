"""What probably overflows where a log leaves room: an estimate, between its bounds.

With the largest gradients in the log, they say what scale overflows, up to one factor: the
gradients of activations, which no log holds, can be larger than those of the parameters. The
factor that explains the log's own overflows best is used. Without, the thresholds are taken to
move evenly from one overflow to the next. In neither case does an estimate contradict a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfscale.logs.log import ScalingLog
from halfscale.magnitudes import OVERFLOW

Reals = NDArray[np.float64]

# So near to a threshold that nothing else lies between.
_NEAR = 2.0**-40
# Beyond any scale, log2.
_FARTHEST = 300.0


@dataclass(frozen=True, eq=False)
class Estimate:
    """The probable thresholds of a log.

    Attributes:
        largest: What the largest magnitude of each step is taken to be, shape (steps,), float64:
            scaled, it overflows where the log says so.
        how: Where it comes from, in words.
        certain_only: Whether it is no estimate, but the least that the log leaves room for.
    """

    largest: Reals
    how: str
    certain_only: bool


def estimate(log: ScalingLog) -> Estimate:
    """Estimate the largest magnitude of every step.

    Args:
        log: The log, with at least one known step.
    """
    with np.errstate(divide="ignore"):
        scale = np.log2(log.scale)
    certain = False
    if np.isfinite(log.largest_gradient).any():
        level, how = _from_gradients(log, scale)
    elif log.overflowed.any():
        level, how = _from_overflows(log, scale)
    else:
        certain, level = True, _between(np.where(log.clean, scale, np.nan))
        how = (
            "none: without an overflow and without largest_gradient in the log, every scale "
            "above the logged one is taken to overflow"
        )
    return Estimate(_magnitudes(log, level), how, certain)


def _from_gradients(log: ScalingLog, scale: Reals) -> tuple[Reals, str]:
    with np.errstate(divide="ignore"):
        level = np.log2(OVERFLOW) - np.log2(log.largest_gradient)
    level = _between(np.clip(level, -_FARTHEST, _FARTHEST))  # gradients of zero are safe anywhere
    room = level - scale
    over, clean = room[log.overflowed], room[log.clean]
    if not len(over):
        return level, (
            "from largest_gradient: 65504 over it. Gradients of activations, which may overflow "
            "earlier, are not in the log, and it has no overflow to tell by how much"
        )
    bits, explained = _calibrate(over, clean)
    factor = f"{2.0**bits:.3g} times the largest gradient of the parameters"
    return level - bits, (
        f"from largest_gradient: a step overflows where {factor} does, which explains "
        f"{explained} of the log's {len(over)} overflows best"
    )


def _calibrate(over: Reals, clean: Reals) -> tuple[float, int]:
    """The bits by which thresholds are lower than the gradients say, and the overflows explained.

    A step overflows if its room is at most so many bits. Wrong steps are counted for every choice;
    of equally good ones that nearest to 0 is taken.
    """
    over, clean = np.sort(over), np.sort(clean)
    levels = np.unique(np.concatenate([over, clean, [0.0]]))
    # Between any two levels, and beyond both ends, nothing changes.
    candidates = np.concatenate(
        [[0.0, levels[0] - 0.5, levels[-1] + 0.5], (levels[1:] + levels[:-1]) / 2]
    )
    caught = np.searchsorted(over, candidates, side="right")
    wrong = len(over) - caught + np.searchsorted(clean, candidates, side="right")
    best = np.flatnonzero(wrong == wrong.min())
    chosen = best[np.argmin(np.abs(candidates[best]))]
    return float(candidates[chosen]), int(caught[chosen])


def _from_overflows(log: ScalingLog, scale: Reals) -> tuple[Reals, str]:
    """Between the scale of an overflow and the one it fell to, and evenly in between."""
    after = np.append(scale[1:], np.nan)
    ends = log.overflowed & ~np.append(log.overflowed[1:], False)
    drop = np.where(np.isfinite(after) & (after < scale), scale - after, 1.0)
    level = _between(np.where(ends, scale - drop / 2, np.nan))
    return level, (
        "from the log's overflows: the largest safe scale is taken to lie between the scale of an "
        "overflow and the one it fell to, and to move evenly from one overflow to the next"
    )


def _between(level: Reals) -> Reals:
    """Fill what is NaN evenly between its neighbours, and with the nearest at the ends."""
    known = np.flatnonzero(np.isfinite(level))
    if not len(known):
        return level
    return np.asarray(np.interp(np.arange(len(level)), known, level[known]))


def _magnitudes(log: ScalingLog, level: Reals) -> Reals:
    """The magnitudes that overflow from a level on, log2, but never against what the log says."""
    with np.errstate(over="ignore", divide="ignore"):
        largest = OVERFLOW * np.exp2(-level)
        limit = OVERFLOW / log.scale
    largest = np.where(log.overflowed, np.maximum(largest, limit * (1 + _NEAR)), largest)
    return np.where(log.clean, np.minimum(largest, limit * (1 - _NEAR)), largest)


def count_excess(log: ScalingLog) -> int:
    """Steps without an overflow though their largest gradient, scaled, is beyond fp16's range."""
    return int((log.clean & (log.largest_gradient * log.scale >= OVERFLOW)).sum())
