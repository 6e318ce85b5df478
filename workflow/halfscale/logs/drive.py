"""Drive configurations over estimated magnitudes, and rank them by what they skip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfscale.logs.estimate import Estimate
from halfscale.magnitudes import largest_safe_exponent
from halfscale.plan import PolicyChoice, canonical_json
from halfscale.replay import overflows
from halfscale.replay.rules import make_lanes

# The powers of two just beyond a float32 scale; it may be 0.
_LOWEST, _HIGHEST = -150.0, 128.0
_MIXER = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
# Sums of logarithms differ in their last bits by the order of adding.
_DIGITS = 9


@dataclass(frozen=True, eq=False)
class Driven:
    """What configurations of one policy probably did; arrays of shape (configurations,).

    Attributes:
        choices: The configurations.
        skipped: Skipped steps, int64.
        longest_streak: The most steps skipped in a row, int64.
        final_scale: The scale each leaves behind, float64.
        distance: The mean of |log2(scale / largest safe power of two)|, in bits, float64.
        mark: Equal where the scale is the same at every step, uint64.
    """

    choices: tuple[PolicyChoice, ...]
    skipped: NDArray[np.int64]
    longest_streak: NDArray[np.int64]
    final_scale: NDArray[np.float64]
    distance: NDArray[np.float64]
    mark: NDArray[np.uint64]

    def ranked(self) -> list[list[int]]:
        """The rows by what they do, best first; those that do the same are together."""

        def key(row: int) -> tuple[object, ...]:
            choice = self.choices[row]
            distance = round(float(self.distance[row]), _DIGITS)
            return int(self.skipped[row]), distance, choice.distance, canonical_json(choice)

        groups: dict[int, list[int]] = {}
        for row in sorted(range(len(self.choices)), key=key):
            groups.setdefault(int(self.mark[row]), []).append(row)
        return list(groups.values())


def drive(choices: Sequence[PolicyChoice], estimated: Estimate) -> Driven:
    """Drive configurations of one policy over the magnitudes of a log.

    Args:
        choices: At least one.
        estimated: The magnitudes.
    """
    lanes = make_lanes([choice.make() for choice in choices])
    largest = estimated.largest
    safe = np.clip(largest_safe_exponent(largest), _LOWEST, _HIGHEST)
    skipped, streak, longest = np.zeros((3, len(choices)), dtype=np.int64)
    distance, mark = np.zeros(len(choices)), np.zeros(len(choices), dtype=np.uint64)
    with np.errstate(all="ignore"):  # scales reach 0
        for step, magnitude in enumerate(largest.tolist()):
            overflow = overflows(lanes.scale, magnitude)
            skipped += overflow
            streak += 1
            streak *= overflow
            np.maximum(longest, streak, out=longest)
            distance += np.abs(np.clip(np.log2(lanes.scale), _LOWEST, _HIGHEST) - safe[step])
            bits = lanes.scale.view(np.uint64)
            # The high half goes into the low one: a power of two has all its bits there.
            mark = mark * _MIXER + (bits ^ (bits >> _HALF))
            lanes.update(step, overflow, ~overflow, magnitude)
    steps = max(len(largest), 1)
    return Driven(tuple(choices), skipped, longest, lanes.scale, distance / steps, mark)
