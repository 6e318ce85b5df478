"""How many steps a configuration would have skipped: from at least to at most.

A log tells of each step one scale that was safe, or one that was not. Where a configuration has
another scale on the unknown side of it, the step may overflow or not, and its scale goes on
differently in either case. All these ways are followed at once, each with the fewest and the most
skipped steps on the ways to it. So the bounds hold whatever the gradients were, as long as they
agree with the log; to assume an overflow wherever one is possible would not give the most, since
an overflow also keeps the scale from growing into later ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfscale.logs.log import ScalingLog
from halfscale.plan import PolicyChoice
from halfscale.policies.fp32 import FP32_MAX
from halfscale.replay.rules import to_fp32

Reals = NDArray[np.float64]
Flags = NDArray[np.bool_]
Counts = NDArray[np.int32]
Rows = NDArray[np.intp]

MOST_SCALES = 64
"""Beyond so many scales at a time, neighbouring ones are taken together as a range."""

# Fewer where a log and an interval are long: scales × slots × steps decide how long it takes.
_LEAST_SCALES, _WORK = 8, 2**30

# More than any count.
_NEVER = np.int32(2**30)
# Points of the lattice in an octave.
_LATTICE = 4
# Below every float32, for a scale of 0.
_TINY = 2.0**-150


@dataclass(frozen=True)
class Bounds:
    """What is certain about a configuration.

    Attributes:
        least: The fewest steps it can have skipped.
        most: The most steps it can have skipped.
        final_scale: The least and the largest scale it can have ended with.
        exact: Whether both bounds are attained by gradients that agree with the log; otherwise
            scales were taken together and the bounds may be wider than need be.
    """

    least: int
    most: int
    final_scale: tuple[float, float]
    exact: bool


def bound_skips(choice: PolicyChoice, log: ScalingLog) -> Bounds:
    """Bound the skipped steps of a configuration of PyTorch's rule, begun at the log's first step.

    Args:
        choice: The configuration.
        log: What is known.

    Raises:
        ValueError: If it is of another policy.
    """
    if choice.policy != "torch":
        raise ValueError(f"bounds are those of policy torch, not of {choice.policy}")
    ways = _Ways(choice, log.steps)
    safe, unsafe = log.safe_up_to, log.unsafe_from
    step = 0
    while step < log.steps:
        if safe[step] < ways.highest() or not (calm := ways.until_growth()):
            ways.take(float(safe[step]), float(unsafe[step]))
            step += 1
            continue
        (unsafe_ahead,) = np.nonzero(safe[step : step + calm] < ways.highest())
        passed = int(unsafe_ahead[0]) if len(unsafe_ahead) else min(calm, log.steps - step)
        ways.pass_over(passed)
        step += passed
    return ways.bounds()


class _Ways:
    """All states that a configuration can be in: scale (rows) × clean steps in a row (slots).

    The slots are a ring that the clean steps turn: a state that takes one stays in its slot. The
    slot `turn` is that of the states that grow with the next clean step, and afterwards of those
    that have just grown or backed off. A row may stand for a range of scales.
    """

    def __init__(self, choice: PolicyChoice, steps: int) -> None:
        parameters = choice.parameters
        self.up, self.down = parameters["growth_factor"], parameters["backoff_factor"]
        # An interval that never passes needs no longer ring.
        self.slots = min(int(parameters["growth_interval"]), steps + 1)
        self.turn = self.slots - 1
        affordable = _WORK // (self.slots * max(steps, 1))
        self.limit = max(_LEAST_SCALES, min(MOST_SCALES, affordable))
        self.exact = True
        self.low = self.high = np.array([parameters["init_scale"]])
        self.fewest = np.full((1, self.slots), _NEVER)
        self.most = np.full((1, self.slots), -_NEVER)
        self.fewest[0, 0] = self.most[0, 0] = 0
        self.rows = {(self.low[0], self.low[0]): 0}

    def highest(self) -> float:
        """No state has a larger scale."""
        return float(self.high.max())

    def until_growth(self) -> int:
        """The clean steps before the first state grows."""
        (filled,) = np.nonzero((self.fewest < _NEVER).any(axis=0))
        return int(((self.turn - filled) % self.slots).min())

    def pass_over(self, steps: int) -> None:
        """Take clean steps in which no state grows."""
        self.turn = (self.turn - steps) % self.slots

    def take(self, safe: float, unsafe: float) -> None:
        """Take one step: safe up to one scale, an overflow from another on, unknown between."""
        fewest, most = self._tidy()
        slot = self.turn
        over, must = self.high > safe, self.low >= unsafe
        grows = ~must & (self.fewest[:, slot] < _NEVER)
        off, grown = self._backed_off(over), self._grown(grows)
        arrivals = (
            np.concatenate([off[0], grown[0]]),
            np.concatenate([off[1], grown[1]]),
            np.concatenate([fewest[over] + 1, self.fewest[grows, slot]]),
            np.concatenate([most[over] + 1, self.most[grows, slot]]),
        )
        for counts, nothing in ((self.fewest, _NEVER), (self.most, -_NEVER)):
            counts[must] = nothing
            counts[:, slot] = nothing
        self.turn = (slot - 1) % self.slots
        self._put(slot, *arrivals)

    def bounds(self) -> Bounds:
        """The bounds over all states there are."""
        fewest, most = self._tidy()
        ends = float(self.low.min()), float(self.high.max())
        return Bounds(int(fewest.min()), int(most.max()), ends, self.exact)

    def _backed_off(self, rows: Flags) -> tuple[Reals, Reals]:
        return to_fp32(self.low[rows] * self.down), to_fp32(self.high[rows] * self.down)

    def _grown(self, rows: Flags) -> tuple[Reals, Reals]:
        low, high = self.low[rows], self.high[rows]
        # What would leave fp32 stays. Of a range that reaches so far a part grows and a part stays.
        grown_low, grown_high = to_fp32(low * self.up), to_fp32(high * self.up)
        stays = ~np.isfinite(grown_high)
        return np.where(stays, low, grown_low), np.where(
            stays, np.where(np.isfinite(grown_low), FP32_MAX, high), grown_high
        )

    def _put(self, slot: int, low: Reals, high: Reals, fewest: Counts, most: Counts) -> None:
        """Let states arrive in a slot; those with the same scale are counted together."""
        low, high = _snapped(low, high)
        known = len(self.rows)
        keys = zip(low.tolist(), high.tolist(), strict=True)
        at = [self.rows.setdefault(key, len(self.rows)) for key in keys]
        if len(self.rows) > known:
            added = np.array(list(self.rows)[known:])
            self.low = np.concatenate([self.low, added[:, 0]])
            self.high = np.concatenate([self.high, added[:, 1]])
            empty = np.full((len(added), self.slots), _NEVER)
            self.fewest = np.concatenate([self.fewest, empty])
            self.most = np.concatenate([self.most, -empty])
        np.minimum.at(self.fewest[:, slot], at, fewest)
        np.maximum.at(self.most[:, slot], at, most)

    def _tidy(self) -> tuple[Counts, Counts]:
        """Forget the scales that no state has, and take some together if they are too many.

        Returns:
            The fewest and the most skipped steps with each scale.
        """
        fewest = self.fewest.min(axis=1)
        if (fewest == _NEVER).any():
            (filled,) = np.nonzero(fewest < _NEVER)
            self._keep(filled, np.arange(len(filled)))
        while len(self.low) > self.limit:
            self.exact = False
            self._keep(*self._neighbours())
        return self.fewest.min(axis=1), self.most.max(axis=1)

    def _neighbours(self) -> tuple[Rows, Rows]:
        """The rows in order, and where each group begins: narrow pairs, the others alone."""
        order = np.lexsort((self.high, self.low))
        low, high = (np.log2(np.maximum(end[order], _TINY)) for end in (self.low, self.high))
        widths = np.maximum(high[1:], high[:-1]) - low[:-1]
        begins = np.ones(len(order), dtype=np.bool_)
        spare = len(order) - self.limit * 3 // 4
        for first in np.argsort(widths, kind="stable").tolist():
            beside = begins[first : first + 3]
            if spare and beside.all():  # neither of the two is in a pair already
                begins[first + 1] = False
                spare -= 1
        return order, np.flatnonzero(begins)

    def _keep(self, order: Rows, starts: Rows) -> None:
        """Make one row of each group of rows."""
        self.low = np.minimum.reduceat(self.low[order], starts)
        self.high = np.maximum.reduceat(self.high[order], starts)
        self.fewest = np.minimum.reduceat(self.fewest[order], starts, axis=0)
        self.most = np.maximum.reduceat(self.most[order], starts, axis=0)
        ends = zip(self.low.tolist(), self.high.tolist(), strict=True)
        self.rows = {pair: row for row, pair in enumerate(ends)}


def _snapped(low: Reals, high: Reals) -> tuple[Reals, Reals]:
    """Ranges widened to a fixed lattice, so that they meet again; single scales as they are."""
    ranges = low < high
    with np.errstate(divide="ignore"):
        wide_low = np.exp2(np.floor(np.log2(low) * _LATTICE) / _LATTICE)
        wide_high = np.exp2(np.ceil(np.log2(high) * _LATTICE) / _LATTICE)
    wide_high = np.minimum(wide_high, FP32_MAX)
    return (
        np.where(ranges, np.minimum(low, wide_low), low),
        np.where(ranges, np.maximum(high, wide_high), high),
    )
