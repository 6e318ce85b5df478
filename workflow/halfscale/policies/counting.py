"""Policies that count finite steps and differ in bounds, precision and when they grow."""

from dataclasses import dataclass, field
from typing import ClassVar

from halfscale.policies.base import OverflowPolicy, parameter
from halfscale.policies.checks import above_one, below_one, count, optional, positive, positive_fp32
from halfscale.policies.fp32 import FP32_MAX, FP32_SMALLEST_NORMAL, grown_if_finite, to_fp32


@dataclass
class Apex(OverflowPolicy):
    """Halve on every overflow; double after `growth_interval` finite steps in a row.

    Both factors are fixed. The scale never exceeds `max_scale`, and never falls below
    `min_scale` where one is set; without one it can reach 0.

    Source: NVIDIA Apex, `apex.amp.scaler.LossScaler` in its dynamic mode.
    """

    name: ClassVar[str] = "apex"

    growth_interval: int = parameter(2000, count)
    min_scale: float | None = parameter(None, optional(positive))
    max_scale: float = parameter(2.0**24, positive)
    unskipped: int = field(init=False, default=0)

    def _on_overflow(self) -> None:
        self.scale = max(self.scale / 2, self.min_scale or 0.0)
        self.unskipped = 0

    def _on_finite(self) -> None:
        self.unskipped += 1
        if self.unskipped == self.growth_interval:
            self.scale = min(self.scale * 2, self.max_scale)
            self.unskipped = 0


@dataclass
class Keras(OverflowPolicy):
    """Halve on every overflow; double after `growth_interval` finite steps in a row.

    Both factors are fixed, and there are no bounds: the float32 scale can fall to 0, and can
    grow to infinity, from where every step overflows and no halving leads back.

    Source: Keras 3, `LossScaleOptimizer`.
    """

    name: ClassVar[str] = "keras"

    init_scale: float = parameter(2.0**15, positive_fp32)
    growth_interval: int = parameter(2000, count)
    counter: int = field(init=False, default=0)

    def _on_overflow(self) -> None:
        self.scale = to_fp32(self.scale / 2)
        self.counter = 0

    def _on_finite(self) -> None:
        if self.counter == self.growth_interval - 1:
            self.scale = to_fp32(self.scale * 2)
            self.counter = 0
        else:
            self.counter += 1


@dataclass
class Jmp(OverflowPolicy):
    """Divide by `factor` on every overflow, multiply by it each `growth_interval` finite steps.

    The scale never falls below `min_scale`; a growth that would leave the range of fp32 is left
    out.

    Source: DeepMind's jmp, `DynamicLossScale`; TensorFlow 2's `DynamicLossScale` has the same
    rule. jmp has no default scale to start from; the default here is TensorFlow's.
    """

    name: ClassVar[str] = "jmp"

    init_scale: float = parameter(2.0**15, positive_fp32)
    growth_interval: int = parameter(2000, count)
    factor: float = parameter(2.0, above_one)
    min_scale: float = parameter(1.0, positive_fp32)
    counter: int = field(init=False, default=0)

    def _on_overflow(self) -> None:
        self.scale = max(self.min_scale, to_fp32(self.scale / to_fp32(self.factor)))
        self.counter = 0

    def _on_finite(self) -> None:
        if self.counter == self.growth_interval - 1:
            self.scale = grown_if_finite(self.scale, to_fp32(self.factor))
        self.counter = (self.counter + 1) % self.growth_interval


@dataclass
class Flax(OverflowPolicy):
    """Back off on every overflow; grow on the finite step after `growth_interval` finite ones.

    The counter is compared before it is raised, so the period is one step longer than its name
    says. Growth stops at the largest float32, backoff at `min_scale` where one is set.

    Source: Flax, `flax.training.dynamic_scale.DynamicScale`.
    """

    name: ClassVar[str] = "flax"

    init_scale: float = parameter(2.0**16, positive_fp32)
    growth_factor: float = parameter(2.0, above_one)
    backoff_factor: float = parameter(0.5, below_one)
    growth_interval: int = parameter(2000, count)
    min_scale: float | None = parameter(FP32_SMALLEST_NORMAL, optional(positive_fp32))
    fin_steps: int = field(init=False, default=0)

    def _on_overflow(self) -> None:
        lowered = to_fp32(self.scale * to_fp32(self.backoff_factor))
        self.scale = max(lowered, self.min_scale or 0.0)
        self.fin_steps = 0

    def _on_finite(self) -> None:
        if self.fin_steps == self.growth_interval:
            grown = to_fp32(self.scale * to_fp32(self.growth_factor))
            self.scale = min(grown, FP32_MAX)
            self.fin_steps = 0
        else:
            self.fin_steps += 1
