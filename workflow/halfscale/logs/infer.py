"""Which `torch.amp.GradScaler` wrote a log, if one did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from halfscale.logs.log import NONE, OVERFLOW, UNKNOWN, ScalingLog
from halfscale.plan import PolicyChoice
from halfscale.policies.fp32 import FP32_MAX, to_fp32

# Half a unit of the last of six decimal digits, as scales are often printed, and a division.
_PRINTED = 1e-5


@dataclass(frozen=True)
class Inferred:
    """What the movements of a scale say about the parameters that moved it.

    Attributes:
        init_scale: The log's first scale; None if no scale is known.
        growth_factor: None if the scale never grew.
        backoff_factor: None if there was no overflow whose effect is known.
        growth_interval: None if it is not known exactly.
        longest_clean: The most finite steps in a row without a growth: the interval is longer,
            where it is not known.
        fault: The first step at which no parameters explain the scale any more, in words; None if
            there is none.
    """

    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: int | None = None
    longest_clean: int = 0
    fault: str | None = None

    def choice(self) -> PolicyChoice | None:
        """The configuration, with what never acted in the log at PyTorch's default.

        An interval that is not known is at least longer than all the log shows. None if the log
        is not that of a GradScaler.
        """
        if self.fault or self.init_scale is None or not 0 < self.init_scale <= FP32_MAX:
            return None
        given = {
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval or max(2000, self.longest_clean + 1),
        }
        known = {name: value for name, value in given.items() if value is not None}
        return PolicyChoice.of("torch", init_scale=self.init_scale, **known)


def infer(log: ScalingLog) -> Inferred:
    """Infer the parameters of the `torch.amp.GradScaler` whose scale a log shows.

    Args:
        log: The log; where a row is missing nothing is concluded.
    """
    exact = _Movements(log, exact=True).follow()
    if not exact.fault:
        return exact
    printed = _Movements(log, exact=False).follow()
    return exact if printed.fault else printed


def drop_doubtful(log: ScalingLog) -> tuple[ScalingLog, Inferred]:
    """Take overflow flags that contradict the scale as unknown, and infer the parameters.

    Returns:
        The log without them, and what was inferred up to the first of them.
    """
    inferred = infer(log)
    here, after = log.scale, np.append(log.scale[1:], np.nan)
    doubtful = (log.clean & (after < here)) | (log.overflowed & (after > here))
    if not doubtful.any():
        return log, inferred
    overflow = np.where(doubtful, UNKNOWN, log.overflow).astype(np.int8)
    count = int(doubtful.sum())
    text = (
        f"the overflow column contradicts the scale at {count} step{'s' * (count > 1)}, the first "
        f"{log.first + int(doubtful.argmax())} (a fall without an overflow, or a rise after one); "
        "whether they overflowed is taken as unknown"
    )
    return replace(log, overflow=overflow).noted(text), inferred


@dataclass
class _Factor:
    """A factor that every one of its movements must agree on, between two limits."""

    name: str
    low: float
    high: float
    exact: bool
    seen: tuple[int, float] | None = None
    moves: set[tuple[float, float]] = field(default_factory=set)

    def take(self, step: int, before: float, after: float) -> str | None:
        """Narrow the limits by one movement; in words if that leaves nothing."""
        if (before, after) in self.moves:
            return None
        ratio = after / before
        spare = float(np.spacing(np.float32(after))) / 2 if self.exact else _PRINTED * after
        low, high = (
            max(self.low, (after - spare) / before),
            min(self.high, (after + spare) / before),
        )
        if low > high and self.seen:
            at, usual = self.seen
            return f"step {step} multiplied the scale by {ratio:g}, step {at} by {usual:g}"
        if low > high:
            return f"step {step} multiplied the scale by {ratio:g}, which no {self.name} does"
        self.low, self.high = low, high
        self.seen = self.seen or (step, ratio)
        self.moves.add((before, after))
        return None

    def value(self) -> float | None:
        """The number of fewest digits that makes every movement."""
        if not self.seen:
            return None
        middle = self.low + (self.high - self.low) / 2
        for digits in range(1, 17):
            if self._makes_all(short := float(f"{middle:.{digits}g}")):
                return short
        return middle

    def _makes_all(self, factor: float) -> bool:
        if self.exact:
            within = factor > 1 if self.name == "growth_factor" else 0 < factor < 1
            moves = self.moves
            return within and all(to_fp32(before * factor) == after for before, after in moves)
        return self.low <= factor <= self.high


@dataclass
class _Movements:
    """Follow a log from row to row and narrow what can have moved its scale."""

    log: ScalingLog
    exact: bool
    growth: _Factor = field(init=False)
    backoff: _Factor = field(init=False)
    interval: int | None = None
    longest: int = 0
    clean: int = 0
    counted: bool = False  # whether `clean` is the scaler's own count, or only a part of it

    def __post_init__(self) -> None:
        self.growth = _Factor("growth_factor", math.nextafter(1, 2), math.inf, self.exact)
        self.backoff = _Factor("backoff_factor", 0.0, math.nextafter(1, 0), self.exact)
        self.counted = self.log.first == 0

    def follow(self) -> Inferred:
        """Everything that the log's rows say, up to the first that contradicts the others."""
        scale, overflow = self.log.scale.tolist(), self.log.overflow.tolist()
        fault = None
        for index in range(len(scale) - 1):
            before, after = scale[index], scale[index + 1]
            if math.isnan(before) or math.isnan(after) or overflow[index] == UNKNOWN:
                self._lose_count(overflow[index])
                continue
            take = self._take_overflow if overflow[index] == OVERFLOW else self._take_clean
            fault = take(self.log.first + index, before, after)
            if fault:
                break
        known = [value for value in scale if not math.isnan(value)]
        return Inferred(
            init_scale=known[0] if known else None,
            growth_factor=self.growth.value(),
            backoff_factor=self.backoff.value(),
            growth_interval=self.interval,
            longest_clean=self.longest,
            fault=fault,
        )

    def _lose_count(self, overflow: int) -> None:
        self.clean, self.counted = 0, overflow == OVERFLOW

    def _take_overflow(self, step: int, before: float, after: float) -> str | None:
        self.clean, self.counted = 0, True
        if after > before:
            return f"the scale rises from {before:g} to {after:g} after the overflow of step {step}"
        if not before:
            return None
        fault = self.backoff.take(step, before, after)
        if not fault:
            return None
        one_stays = after == before or (self.backoff.seen or (0, 0.0))[1] == 1
        why = "; a hysteresis, as DeepSpeed and Megatron have, does that" if one_stays else ""
        return f"the overflow of {fault}{why}"

    def _take_clean(self, step: int, before: float, after: float) -> str | None:
        if after < before:
            return f"the scale falls from {before:g} to {after:g} after step {step}, no overflow"
        self.clean += 1
        if after > before == 0:
            return f"the scale rises from 0 to {after:g} after step {step}, which no factor does"
        if after > before:
            fault = self.growth.take(step, before, after)
            return f"the growth of {fault}" if fault else self._take_growth(step)
        if before * min(self.growth.low, 2.0) > FP32_MAX / 2:
            self._lose_count(NONE)  # a growth may have been left out
            return None
        if self.interval and self.clean >= self.interval:
            return (
                f"the scale does not grow after {self.clean} finite steps, at step {step}, though "
                f"it did after {self.interval} before"
            )
        self.longest = max(self.longest, self.clean)
        return None

    def _take_growth(self, step: int) -> str | None:
        clean, counted = self.clean, self.counted
        self.clean, self.counted = 0, True
        if not counted:
            longer = self.interval is None or clean <= self.interval
            return None if longer else f"the scale grows after {clean} finite steps, at step {step}"
        if self.interval not in (None, clean):
            return (
                f"the scale grows after {clean} finite steps, at step {step}, and after "
                f"{self.interval} before"
            )
        if clean <= self.longest:
            return (
                f"the scale grows after {clean} finite steps, at step {step}, but not after "
                f"{self.longest} before"
            )
        self.interval = clean
        return None
