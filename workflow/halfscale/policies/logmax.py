"""A policy that sets the scale from the statistics of gradients rather than from overflows."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from halfscale.policies.base import Policy, parameter
from halfscale.policies.checks import below_one, not_negative, positive


@dataclass
class OpenSeq2SeqLogMax(Policy):
    """Set the scale so that the largest gradient will rarely pass the range of fp16.

    The largest gradient magnitude of a step is taken to be log-normal. Its log2 feeds a fast
    average (`beta1`) and a slow average and mean square (`beta2`), all corrected for their start
    at zero. The scale leaves room for the fast mean plus `overflow_std_dev` standard deviations
    below 2^16, within `min_scale` and `max_scale`. An overflow shows no magnitude and counts as
    `overflow_log2`.

    Two departures: an overflow never raises the scale, which the averages alone would allow
    where the mean magnitude is above 2^16 or by rounding; and a step whose gradients are all
    zero, whose logarithm would spoil the averages for good, is passed over.

    Source: OpenSeq2Seq, `LogMaxScaler`. Its code feeds an overflow as 2^16 where a log2 is
    expected, which pins the scale to the floor for thousands of steps; set `overflow_log2` to
    65536 to have that. Later revisions of it have a ceiling of 2^24.
    """

    name: ClassVar[str] = "openseq2seq-logmax"
    uses_largest_gradient: ClassVar[bool] = True

    init_scale: float = parameter(1.0, positive)
    min_scale: float = parameter(1.0, positive)
    max_scale: float = parameter(2.0**14, positive)
    beta1: float = parameter(0.99, below_one)
    beta2: float = parameter(0.999, below_one)
    overflow_std_dev: float = parameter(3.09, not_negative)
    overflow_log2: float = parameter(16.0, not_negative)
    fast_mean: float = field(init=False, default=0.0)
    slow_mean: float = field(init=False, default=0.0)
    slow_square: float = field(init=False, default=0.0)
    fast_decay: float = field(init=False, default=1.0)
    slow_decay: float = field(init=False, default=1.0)

    def update(self, overflow: bool, *, largest_gradient: float | None = None) -> float:
        """Take note of one step and return the scale for the next.

        Args:
            overflow: Whether some gradient of the step came out Inf or NaN.
            largest_gradient: The largest unscaled gradient magnitude of the step; required
                unless the step overflowed.

        Returns:
            The scale for the next step.

        Raises:
            ValueError: If `largest_gradient` is missing on a finite step, or no magnitude.
        """
        if overflow:
            before = self.scale
            self._observe(self.overflow_log2)
            self.scale = min(before, self.scale)
        elif magnitude := self._magnitude(largest_gradient):
            self._observe(math.log2(magnitude))
        return self.scale

    def _magnitude(self, largest_gradient: float | None) -> float:
        if largest_gradient is None:
            raise ValueError(f"policy {self.name} needs largest_gradient on a finite step")
        return not_negative("largest_gradient", largest_gradient)

    def _observe(self, x: float) -> None:
        """Take one log2 magnitude into the averages and set the scale from them."""
        self.fast_mean = self.beta1 * self.fast_mean + (1 - self.beta1) * x
        self.slow_mean = self.beta2 * self.slow_mean + (1 - self.beta2) * x
        self.slow_square = self.beta2 * self.slow_square + (1 - self.beta2) * x * x
        self.fast_decay *= self.beta1
        self.slow_decay *= self.beta2
        mean = self.fast_mean / (1 - self.fast_decay)
        slow_mean = self.slow_mean / (1 - self.slow_decay)
        variance = self.slow_square / (1 - self.slow_decay) - slow_mean * slow_mean
        deviation = math.sqrt(max(0.0, variance))
        log_scale = 16 - (mean + self.overflow_std_dev * deviation)
        # Bounded before the power, which a vanishing gradient would overflow.
        log_scale = min(log_scale, math.log2(self.max_scale))
        self.scale = min(max(2.0**log_scale, self.min_scale), self.max_scale)
