"""fairseq's rule, which weighs the rate of overflows, and metaseq's descendant of it."""

from dataclasses import dataclass, field
from typing import ClassVar

from halfscale.policies.base import FloorReached, OverflowPolicy, parameter
from halfscale.policies.checks import count, optional, positive, share

# What fairseq divides by where no step has passed since the last rescale: an overflow repeated
# after an abort, which leaves the iteration where it was.
_STEPS_AFTER_ABORT = 1000


@dataclass
class _OverflowRate(OverflowPolicy):
    """What both share: the books on overflows and rescales, and growth by the window."""

    growth_interval: int = parameter(2000, count)
    tolerance: float = parameter(0.0, share)
    threshold: float | None = parameter(None, optional(positive))
    min_scale: float = parameter(1e-4, positive)
    iteration: int = field(init=False, default=0)
    last_overflow: int = field(init=False, default=-1)
    last_rescale: int = field(init=False, default=-1)
    overflows: int = field(init=False, default=0)

    def _note_overflow(self) -> bool:
        """Book an overflow; whether there have been too many since the last rescale."""
        since = self.iteration - self.last_rescale or _STEPS_AFTER_ABORT
        self.last_overflow = self.iteration
        self.overflows += 1
        return self.overflows / since >= self.tolerance

    def _halve(self) -> None:
        self.scale = max(self.scale / 2, self.threshold or 0.0)
        self.last_rescale = self.iteration
        self.overflows = 0

    def _double_after(self, window: float) -> bool:
        """Double where the window has passed since the last overflow; whether it had."""
        due = (self.iteration - self.last_overflow) % window == 0
        if due:
            self.scale *= 2
            self.last_rescale = self.iteration
        self.iteration += 1
        return due


@dataclass
class Fairseq(_OverflowRate):
    """Halve when the share of overflows since the last rescale reaches `tolerance`.

    At the default tolerance of 0 every overflow halves. The scale doubles after each
    `growth_interval` steps without an overflow; both factors are fixed. It never falls below
    `threshold` where one is set. An overflow that leaves it at or below `min_scale` gives back
    the scale it had and aborts training, whether or not that overflow halved it. No ceiling: the
    scale, a Python float, can grow to infinity.

    Source: fairseq, `DynamicLossScaler`. The defaults are the class's own; fairseq's command
    line starts from 128 and derives the window from the number of workers.
    """

    name: ClassVar[str] = "fairseq"

    init_scale: float = parameter(2.0**15, positive)

    def _on_overflow(self) -> None:
        before = self.scale
        if self._note_overflow():
            self._halve()
        if self.scale <= self.min_scale:
            self.scale = before
            raise FloorReached(self.name, self.min_scale, before)
        self.iteration += 1

    def _on_finite(self) -> None:
        self._double_after(self.growth_interval)


@dataclass
class Metaseq(_OverflowRate):
    """fairseq's rule with a window that moves with the scale, and no abort.

    A growth doubles the window as well as the scale; a backoff halves both, the window down to a
    whole number and not below 1. Where halving would take the scale below `min_scale` the scale
    is kept, the window is halved all the same, and training goes on skipping. `tolerance` and
    `threshold` are fairseq's. No ceiling: the scale, a Python float, can grow to infinity.

    Source: metaseq (OPT), `DynamicLossScaler`.
    """

    name: ClassVar[str] = "metaseq"

    init_scale: float = parameter(4.0, positive)
    growth_interval: int = parameter(256, count)
    min_scale: float = parameter(2.0**-5, positive)
    window: int = field(init=False)

    def __post_init__(self) -> None:
        """Start with the window the parameters give."""
        super().__post_init__()
        self.window = self.growth_interval

    def _on_overflow(self) -> None:
        before = self.scale
        if self._note_overflow():
            self._halve()
            self.window = max(1, self.window // 2)
        if self.scale < self.min_scale:
            self.scale = before
        self.iteration += 1

    def _on_finite(self) -> None:
        if self._double_after(self.window):
            self.window *= 2
