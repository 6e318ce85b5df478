"""The policies' rules over many configurations at once, one lane each.

Each class here repeats, in arrays, the arithmetic of a class in `halfscale.policies`, operation by
operation and rounding by rounding; the tests hold the two together. Only lanes that a rule moves
are touched, since overflows and growths are rare.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halfscale.policies import FloorReached, Policy
from halfscale.policies.fp32 import FP32_MAX

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]
Reals = NDArray[np.float64]
Lane = NDArray[np.intp]
Gradient = np.float64 | NDArray[np.float64]


class Lanes(ABC):
    """Policies of one kind side by side, each at its initial scale.

    Attributes:
        scale: The scale of each lane for the next step, shape (lanes,), float64.
        running: The lanes that have not aborted, shape (lanes,).
    """

    def __init__(self, machines: Sequence[Policy]) -> None:
        """Take the parameters over from state machines that have not moved yet."""
        self.machines = machines
        self.scale = self.reals("scale")
        self.running: Flags = np.ones(len(machines), dtype=np.bool_)

    def reals(self, name: str, unset: float = 0.0) -> Reals:
        """One parameter of every lane, `unset` where it is None."""
        values = (getattr(machine, name) for machine in self.machines)
        return np.array([unset if value is None else value for value in values], dtype=np.float64)

    def counts(self, name: str) -> Counts:
        """One whole number, or flag, of every lane."""
        return np.array([getattr(machine, name) for machine in self.machines], dtype=np.int64)

    def constant(self, value: int) -> Counts:
        """A counter of every lane at its first value."""
        return np.full(len(self.machines), value, dtype=np.int64)

    @abstractmethod
    def update(self, step: int, skipped: Flags, applied: Flags, largest_gradient: Gradient) -> None:
        """Take note of one step.

        Args:
            step: Its index, from 0.
            skipped: The running lanes in which it overflowed, shape (lanes,).
            applied: The running lanes in which it did not, shape (lanes,).
            largest_gradient: Its largest unscaled parameter gradient: of no dimension, or one a
                lane, where lanes are at different rows of the probe.
        """


class StaticLanes(Lanes):
    """The rule that never moves the scale."""

    def update(self, step: int, skipped: Flags, applied: Flags, largest_gradient: Gradient) -> None:
        """Leave the scale alone."""


class PlainLanes(Lanes):
    """Any rule, by its state machines one after the other."""

    def __init__(self, machines: Sequence[Policy]) -> None:
        """Drive copies, so that the given machines stay at their start."""
        super().__init__([copy.copy(machine) for machine in machines])

    def update(self, step: int, skipped: Flags, applied: Flags, largest_gradient: Gradient) -> None:
        """Update each running machine."""
        largest = np.broadcast_to(largest_gradient, self.scale.shape).tolist()
        for lane in np.flatnonzero(skipped | applied).tolist():
            machine = self.machines[lane]
            try:
                machine.update(bool(skipped[lane]), largest_gradient=largest[lane])
            except FloorReached:
                self.running[lane] = False
            self.scale[lane] = machine.scale


class CountingLanes(Lanes):
    """The rules that grow after a number of finite steps and back off by a factor."""

    def __init__(self, machines: Sequence[Policy]) -> None:
        """Gather what these rules differ in: bounds, roundings, hysteresis."""
        super().__init__(machines)
        self.name = machines[0].name
        has = machines[0].parameters()
        self.fp32_scale = self.name != "apex"
        # A growth beyond the range of fp32 is left out; elsewhere it is cut to the ceiling.
        self.finite_only = self.name in ("torch", "apex-hysteresis", "continuous", "jmp")
        self.interval = self.counts("growth_interval") if "growth_interval" in has else None
        if self.interval is not None and self.name == "flax":
            self.interval += 1
        self.up, self.down = self._factors()
        self.floor = self.reals("min_scale") if "min_scale" in has else 0.0
        ceiling = FP32_MAX if self.name == "flax" else np.inf
        self.ceiling = self.reals("max_scale", np.inf) if "max_scale" in has else ceiling
        self.hysteresis = self.counts("hysteresis") if "hysteresis" in has else None
        self.left = self.constant(0) if self.hysteresis is None else self.hysteresis.copy()
        self.tracker = self.constant(0)

    def _factors(self) -> tuple[Reals, Reals]:
        """By what the scale is multiplied to grow and (for jmp: divided) to back off."""
        if self.name == "jmp":
            factor = to_fp32(self.reals("factor"))
            return factor, factor
        if self.name in ("apex", "keras"):
            return np.full(len(self.machines), 2.0), np.full(len(self.machines), 0.5)
        up, down = self.reals("growth_factor"), self.reals("backoff_factor")
        return (to_fp32(up), to_fp32(down)) if self.name in ("flax", "megatron") else (up, down)

    def update(self, step: int, skipped: Flags, applied: Flags, largest_gradient: Gradient) -> None:
        """Back off where the hysteresis is used up; grow where the interval has passed."""
        over = np.flatnonzero(skipped)
        if over.size:
            self.tracker[over] = 0
            if self.hysteresis is not None:
                self.left[over] -= 1
                over = over[self.left[over] <= 0]
            self._back_off(over)
        self.tracker += applied
        due = applied if self.interval is None else applied & (self.tracker == self.interval)
        grows = np.flatnonzero(due)
        if grows.size:
            self.tracker[grows] = 0
            self._grow(grows)
        if self.hysteresis is not None:
            # Megatron counts overflows until a growth, Apex those that are truly consecutive.
            restored = due if self.name == "megatron" else applied
            np.copyto(self.left, self.hysteresis, where=restored)

    def _back_off(self, lanes: Lane) -> None:
        scale, factor = self.scale[lanes], self.down[lanes]
        lowered = self._rounded(scale / factor if self.name == "jmp" else scale * factor)
        floor = self.floor if isinstance(self.floor, float) else self.floor[lanes]
        self.scale[lanes] = np.maximum(lowered, floor)

    def _grow(self, lanes: Lane) -> None:
        scale = self.scale[lanes]
        grown = self._rounded(scale * self.up[lanes])
        if self.finite_only:
            grown = np.where(np.isfinite(grown), grown, scale)
        ceiling = self.ceiling if isinstance(self.ceiling, float) else self.ceiling[lanes]
        self.scale[lanes] = np.minimum(grown, ceiling)

    def _rounded(self, scale: Reals) -> Reals:
        return to_fp32(scale) if self.fp32_scale else scale


class DeepSpeedLanes(Lanes):
    """DeepSpeed's rule."""

    def __init__(self, machines: Sequence[Policy]) -> None:
        """Start with the whole hysteresis."""
        super().__init__(machines)
        self.interval = self.counts("growth_interval")
        self.hysteresis = self.counts("hysteresis")
        self.consecutive = self.counts("consecutive_hysteresis").astype(np.bool_)
        self.floor = self.reals("min_scale")
        self.raises = self.counts("raise_at_floor").astype(np.bool_)
        self.last_overflow = self.constant(-1)
        self.left = self.hysteresis.copy()

    def update(self, step: int, skipped: Flags, applied: Flags, largest_gradient: Gradient) -> None:
        """Use up the hysteresis, then halve or abort; double each interval after an overflow."""
        used_up = skipped & (self.left == 1)
        self.running &= ~(used_up & self.raises & (self.scale == self.floor))
        halves = np.flatnonzero(used_up & self.running)
        self.scale[halves] = np.maximum(self.scale[halves] / 2, self.floor[halves])
        self.left -= skipped & ~used_up
        self.last_overflow[skipped] = step
        counted = step - self.last_overflow - 1
        due = applied & (counted > 0) & (counted % self.interval == 0)
        np.copyto(self.left, self.hysteresis, where=due | (applied & self.consecutive))
        self.scale[due] *= 2


class OverflowRateLanes(Lanes):
    """fairseq's rule and metaseq's."""

    def __init__(self, machines: Sequence[Policy]) -> None:
        """Start with the whole window."""
        super().__init__(machines)
        self.aborts = machines[0].name == "fairseq"
        self.window = self.counts("growth_interval")
        self.tolerance = self.reals("tolerance")
        self.threshold = self.reals("threshold")
        self.floor = self.reals("min_scale")
        self.last_overflow = self.constant(-1)
        self.last_rescale = self.constant(-1)
        self.overflows = self.constant(0)

    def update(self, step: int, skipped: Flags, applied: Flags, largest_gradient: Gradient) -> None:
        """Halve where overflows are too frequent; double where the window has passed."""
        over = np.flatnonzero(skipped)
        if over.size:
            self._note_overflow(step, over)
        due = np.flatnonzero(applied & ((step - self.last_overflow) % self.window == 0))
        self.scale[due] *= 2
        self.last_rescale[due] = step
        if not self.aborts:
            self.window[due] *= 2

    def _note_overflow(self, step: int, lanes: Lane) -> None:
        before = self.scale[lanes]
        self.last_overflow[lanes] = step
        self.overflows[lanes] += 1
        rate = self.overflows[lanes] / (step - self.last_rescale[lanes])
        halves = lanes[rate >= self.tolerance[lanes]]
        self.scale[halves] = np.maximum(self.scale[halves] / 2, self.threshold[halves])
        self.last_rescale[halves] = step
        self.overflows[halves] = 0
        lowered, floor = self.scale[lanes], self.floor[lanes]
        if self.aborts:
            restored = lowered <= floor
            self.running[lanes[restored]] = False
        else:
            restored = lowered < floor
            self.window[halves] = np.maximum(1, self.window[halves] // 2)
        self.scale[lanes[restored]] = before[restored]


# Logarithms differ in their last bit between numpy and the standard library, and few will want
# many floors that rise: those two rules are left to their state machines.
_LANES: dict[str, type[Lanes]] = {
    "static": StaticLanes,
    "deepspeed": DeepSpeedLanes,
    **dict.fromkeys(("fairseq", "metaseq"), OverflowRateLanes),
    **dict.fromkeys(("torch", "apex", "apex-hysteresis", "continuous"), CountingLanes),
    **dict.fromkeys(("flax", "jmp", "keras", "megatron"), CountingLanes),
}


def make_lanes(machines: Sequence[Policy]) -> Lanes:
    """Set policies of one kind side by side.

    Args:
        machines: At least one policy, all of one class, none of them moved yet. They stay so.

    Returns:
        The lanes, in the same order.
    """
    return _LANES.get(machines[0].name, PlainLanes)(machines)


def to_fp32(value: Reals) -> Reals:
    """Round each number to the nearest float32, ties to even; beyond the largest, to infinity."""
    with np.errstate(over="ignore"):
        return value.astype(np.float32).astype(np.float64)
