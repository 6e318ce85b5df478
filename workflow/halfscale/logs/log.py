"""What a log of a training's scale says, step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NONE, OVERFLOW, UNKNOWN = 0, 1, -1

Reals = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ScalingLog:
    """A log with a place for every step from its first to its last; arrays of shape (steps,).

    From an overflow at a scale follows that every larger scale overflows in that step; from none,
    that every smaller scale is safe. More is not known, and nothing where a row is missing.

    Attributes:
        path: The file.
        first: The number of the first step.
        scale: The scale in use, float64; NaN where unknown.
        overflow: OVERFLOW, NONE or UNKNOWN, int8.
        largest_gradient: The largest magnitude of the unscaled gradients, float64; NaN where
            unknown or not finite.
        rows: How many steps have a row.
        notes: What was out of order.
    """

    path: Path
    first: int
    scale: Reals
    overflow: NDArray[np.int8]
    largest_gradient: Reals
    rows: int
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """The number of steps, missing ones included."""
        return len(self.scale)

    @property
    def known(self) -> Flags:
        """Where both the scale and the overflow are known."""
        known: Flags = ~np.isnan(self.scale) & (self.overflow != UNKNOWN)
        return known

    @property
    def overflowed(self) -> Flags:
        """The known overflows."""
        flags: Flags = self.known & (self.overflow == OVERFLOW)
        return flags

    @property
    def clean(self) -> Flags:
        """The steps known to be without one."""
        flags: Flags = self.known & (self.overflow == NONE)
        return flags

    @property
    def safe_up_to(self) -> Reals:
        """The scale up to which a step is known to be safe; -inf where nothing is known."""
        return np.where(self.clean, self.scale, -np.inf)

    @property
    def unsafe_from(self) -> Reals:
        """The scale from which on a step is known to overflow; inf where nothing is known."""
        return np.where(self.overflowed, self.scale, np.inf)

    def noted(self, *notes: str) -> ScalingLog:
        """The same with more notes."""
        return replace(self, notes=(*self.notes, *notes))


def scales_of_steps(log: ScalingLog) -> ScalingLog:
    """The log with the scale that each step had, if it was written after the scale was moved.

    Then the scale falls in the row of the overflow itself and never after it.
    """
    before, here = log.scale[:-1], log.scale[1:]
    falls = np.append(False, here < before)
    after = np.append(here, np.nan)
    stays = log.overflowed & (after >= log.scale)
    compared = np.append(False, ~np.isnan(before)) & log.overflowed
    late = falls.any() and stays.any() and (falls == compared).all()
    if not late:
        return log
    note = (
        "the scale falls in the row of the overflow itself, so it was logged after "
        "scaler.update(): each row is given the scale of the row before; log it before update()"
    )
    shifted = replace(
        log,
        first=log.first + 1,
        scale=before,
        overflow=log.overflow[1:],
        largest_gradient=log.largest_gradient[1:],
        rows=log.rows - 1,
    )
    return shifted.noted(note)
