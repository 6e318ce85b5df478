"""What is counted while configurations are replayed over a probe, one lane each."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halfscale.replay.probe import interpolate
from halfscale.replay.rules import Counts, Flags, Reals

# The powers of two just beyond float64, for scales that have reached 0 or infinity.
_LOWEST, _HIGHEST = -1075.0, 1024.0

_MIXER = np.uint64(0x9E3779B97F4A7C15)


class Tally:
    """The counts of every lane; `halfscale.replay.Replay` says what each means."""

    DTYPES: ClassVar[dict[str, type[np.generic]]] = {
        "steps_run": np.int64,
        "skipped": np.int64,
        "longest_streak": np.int64,
        "calibration": np.int64,
        "growths": np.int64,
        "backoffs": np.int64,
        "below_window": np.int64,
        "final_scale": np.float64,
        "lost_steps": np.float64,
        "mean_lost": np.float64,
        "regret": np.float64,
        "aborted": np.bool_,
        "stuck": np.bool_,
        "fingerprint": np.uint64,
    }

    def __init__(self, lanes: int, epsilon: float) -> None:
        """Start at zero."""

        def zeros() -> Counts:
            return np.zeros(lanes, dtype=np.int64)

        self.epsilon = epsilon
        self.steps_run, self.skipped = zeros(), zeros()
        self.streak, self.longest_streak = zeros(), zeros()
        self.calibration, self.growths, self.backoffs = zeros(), zeros(), zeros()
        self.below_window, self.judged = zeros(), zeros()
        self.waiting: Flags = np.ones(lanes, dtype=np.bool_)
        self.lost: Reals = np.zeros(lanes)
        self.distance: Reals = np.zeros(lanes)
        self.fingerprint: NDArray[np.uint64] = np.zeros(lanes, dtype=np.uint64)

    def note_skips(self, skipped: Flags, applied: Flags) -> None:
        """Count a step that was skipped in some lanes and applied in others."""
        self.skipped += skipped
        self.streak += 1
        self.streak *= skipped
        np.maximum(self.longest_streak, self.streak, out=self.longest_streak)
        self.waiting &= ~applied
        self.calibration += self.waiting & skipped

    def note_losses(self, scale: Reals, applied: Flags, table: Reals, row: Counts | int) -> None:
        """Add the lost share of an applied step, from its row of `Probe.lost_table`."""
        index, weight = interpolate(scale)
        if isinstance(row, int):
            table, lower, upper = table[row], index, index + 1
        else:
            start = row * table.shape[1] + index
            table, lower, upper = table.ravel(), start, start + 1
        lost = weight * table[lower] + (1 - weight) * table[upper]
        self.below_window += applied & (lost > self.epsilon)
        self.lost += lost * applied

    def note_scale(self, scale: Reals, running: Flags, log2_oracle: Reals) -> None:
        """Hold the scale in use against the oracle's, and remember it in the fingerprint."""
        self.steps_run += running
        known = np.isfinite(log2_oracle)
        if known.any():
            judged = running & known
            self.judged += judged
            bits = np.clip(np.log2(scale), _LOWEST, _HIGHEST)
            self.distance += np.where(judged, np.abs(bits - log2_oracle), 0.0)
        self.fingerprint = _mixed(self.fingerprint, scale.view(np.uint64))

    def note_move(self, before: Reals, after: Reals) -> None:
        """Count what the policies did to the scale."""
        self.growths += after > before
        self.backoffs += after < before

    def measures(self, steps: int, final_scale: Reals, running: Flags) -> dict[str, NDArray[Any]]:
        """Everything counted, by name.

        Args:
            steps: The steps of the probe.
            final_scale: The scale each policy leaves behind, shape (lanes,).
            running: The lanes that have not aborted, shape (lanes,).

        Returns:
            Arrays of shape (lanes,), of the types in `DTYPES`.
        """
        applied = self.steps_run - self.skipped
        ends = _mixed(self.fingerprint, (self.steps_run * 2 + running).view(np.uint64))
        return {
            "steps_run": self.steps_run,
            "skipped": self.skipped,
            "longest_streak": self.longest_streak,
            "calibration": self.calibration,
            "growths": self.growths,
            "backoffs": self.backoffs,
            "below_window": self.below_window,
            "final_scale": final_scale,
            "lost_steps": self.lost,
            "mean_lost": self.lost / np.maximum(applied, 1),
            "regret": self.distance / np.maximum(self.judged, 1),
            "aborted": ~running,
            "stuck": running & (self.streak > 0) & (2 * self.streak >= steps),
            "fingerprint": ends,
        }


def _mixed(state: NDArray[np.uint64], value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Take one more number into a hash.

    Each operation can be undone, so different numbers never meet from the same state. The high
    half goes into the low one first: a power of two has all its bits there, and a product only
    carries upward.
    """
    state = state ^ value
    state ^= state >> np.uint64(32)
    state *= _MIXER
    state ^= state >> np.uint64(29)
    return state
