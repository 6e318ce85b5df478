"""Policies of large-model trainers, which forgive a number of overflows before backing off."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from halfscale.policies.base import FloorReached, OverflowPolicy, parameter
from halfscale.policies.checks import (
    above_one,
    below_one,
    count,
    flag,
    optional,
    positive,
    positive_fp32,
)
from halfscale.policies.fp32 import to_fp32


@dataclass
class DeepSpeed(OverflowPolicy):
    """Halve once the hysteresis is down to 1; double each `growth_interval` steps after that.

    An overflow first uses up the hysteresis, one at a time, and halves the scale only when 1 is
    left. The hysteresis is restored by a growth, or by every finite step with
    `consecutive_hysteresis`. The first finite step after an overflow (or at the start) is not
    counted, so the first growth comes on finite step `growth_interval` + 1; after it, every
    `growth_interval` steps. Both factors are fixed. At `min_scale` the scale stays, or, with
    `raise_at_floor`, training is aborted before anything of the state moves. No ceiling: the
    scale, a Python float, can grow to infinity.

    Source: DeepSpeed, `DynamicLossScaler`.
    """

    name: ClassVar[str] = "deepspeed"

    growth_interval: int = parameter(1000, count)
    hysteresis: int = parameter(2, count)
    consecutive_hysteresis: bool = parameter(False, flag)
    min_scale: float = parameter(1.0, positive)
    raise_at_floor: bool = parameter(False, flag)
    iteration: int = field(init=False, default=0)
    last_overflow: int = field(init=False, default=-1)
    hysteresis_left: int = field(init=False)

    def __post_init__(self) -> None:
        """Start with the whole hysteresis."""
        super().__post_init__()
        self.hysteresis_left = self.hysteresis

    def _on_overflow(self) -> None:
        if self.hysteresis == 1 or self.hysteresis_left == 1:
            if self.raise_at_floor and self.scale == self.min_scale:
                raise FloorReached(self.name, self.min_scale, self.scale)
            self.scale = max(self.scale / 2, self.min_scale)
        else:
            self.hysteresis_left -= 1
        self.last_overflow = self.iteration
        self.iteration += 1

    def _on_finite(self) -> None:
        if self.consecutive_hysteresis:
            self.hysteresis_left = self.hysteresis
        counted = self.iteration - self.last_overflow - 1
        if counted > 0 and counted % self.growth_interval == 0:
            self.hysteresis_left = self.hysteresis
            self.scale *= 2
        self.iteration += 1


@dataclass
class Megatron(OverflowPolicy):
    """Back off once `hysteresis` overflows have come; grow after `growth_interval` finite steps.

    The overflows are counted cumulatively, although Megatron's own text calls them consecutive:
    finite steps in between do not restore the hysteresis, only a growth does. Once it is used
    up, every overflow backs off until the next growth. The scale never falls below `min_scale`.
    There is no ceiling unless `max_scale` sets one (as ColossalAI does, at 2^32): the float32
    scale can grow to infinity, from where every step overflows and no backoff leads back.

    Source: Megatron-LM, `DynamicGradScaler`; ColossalAI's class of the same name.
    """

    name: ClassVar[str] = "megatron"

    init_scale: float = parameter(2.0**32, positive_fp32)
    growth_factor: float = parameter(2.0, above_one)
    backoff_factor: float = parameter(0.5, below_one)
    growth_interval: int = parameter(1000, count)
    hysteresis: int = parameter(2, count)
    min_scale: float = parameter(1.0, positive_fp32)
    max_scale: float | None = parameter(None, optional(positive_fp32))
    tracker: int = field(init=False, default=0)
    hysteresis_left: int = field(init=False)

    def __post_init__(self) -> None:
        """Start with the whole hysteresis."""
        super().__post_init__()
        self.hysteresis_left = self.hysteresis

    def _on_overflow(self) -> None:
        self.tracker = 0
        self.hysteresis_left -= 1
        if self.hysteresis_left <= 0:
            # Megatron keeps the factors in float32 too, so they are rounded before the product.
            lowered = to_fp32(self.scale * to_fp32(self.backoff_factor))
            self.scale = max(lowered, self.min_scale)

    def _on_finite(self) -> None:
        self.tracker += 1
        if self.tracker == self.growth_interval:
            self.tracker = 0
            self.hysteresis_left = self.hysteresis
            grown = to_fp32(self.scale * to_fp32(self.growth_factor))
            self.scale = min(grown, math.inf if self.max_scale is None else self.max_scale)
