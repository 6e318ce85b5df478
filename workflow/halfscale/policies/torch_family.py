"""PyTorch's rule and the rules derived from it.

The scale is a float32, the factors are doubles, and each product is rounded once to float32.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from halfscale.policies.base import OverflowPolicy, parameter
from halfscale.policies.checks import above_one, below_one, count, positive_fp32, rising_steps
from halfscale.policies.fp32 import grown_if_finite, to_fp32


@dataclass
class Torch(OverflowPolicy):
    """Back off on every overflow; grow after `growth_interval` finite steps in a row.

    A growth that would leave the range of fp32 is left out. There is no floor: enough overflows
    bring the scale to exactly 0, from where no growth leads back.

    Source: PyTorch, `torch.amp.GradScaler`.
    """

    name: ClassVar[str] = "torch"

    init_scale: float = parameter(2.0**16, positive_fp32)
    growth_factor: float = parameter(2.0, above_one)
    backoff_factor: float = parameter(0.5, below_one)
    growth_interval: int = parameter(2000, count)
    tracker: int = field(init=False, default=0)

    def _on_overflow(self) -> None:
        self.scale = to_fp32(self.scale * self.backoff_factor)
        self.tracker = 0

    def _on_finite(self) -> None:
        self.tracker += 1
        # Equality, not "at least": an interval lowered below the running tracker is passed by,
        # and growth stops until an overflow resets the tracker. PyTorch does the same.
        if self.tracker == self.growth_interval:
            self.scale = grown_if_finite(self.scale, self.growth_factor)
            self.tracker = 0


@dataclass
class ApexHysteresis(Torch):
    """PyTorch's rule, but only the `hysteresis`-th overflow in a row lowers the scale.

    Every overflow resets the growth tracker. One finite step restores the whole hysteresis, so
    overflows count only while they are truly consecutive; once it is used up, each further
    overflow of the same streak lowers the scale again. With a hysteresis of 1 it is PyTorch's
    rule.

    Source: Apex, the `update_scale_hysteresis` kernel. The kernel has no default hysteresis; the
    default here is the one Megatron-LM and DeepSpeed use.
    """

    name: ClassVar[str] = "apex-hysteresis"

    hysteresis: int = parameter(2, count)
    hysteresis_left: int = field(init=False)

    def __post_init__(self) -> None:
        """Start with the whole hysteresis."""
        super().__post_init__()
        self.hysteresis_left = self.hysteresis

    def _on_overflow(self) -> None:
        self.hysteresis_left -= 1
        if self.hysteresis_left > 0:
            self.tracker = 0
        else:
            super()._on_overflow()

    def _on_finite(self) -> None:
        super()._on_finite()
        self.hysteresis_left = self.hysteresis


@dataclass
class Continuous(OverflowPolicy):
    """Back off on every overflow; grow a little on every finite step.

    Neither floor nor counter; a growth that would leave the range of fp32 is left out.

    Source: PyTorch before 2020, the `AmpScaler` prototype, some revisions of which started at
    2^24 instead of 1.
    """

    name: ClassVar[str] = "continuous"

    init_scale: float = parameter(1.0, positive_fp32)
    growth_factor: float = parameter(1.001, above_one)
    backoff_factor: float = parameter(0.5, below_one)

    def _on_overflow(self) -> None:
        self.scale = to_fp32(self.scale * self.backoff_factor)

    def _on_finite(self) -> None:
        self.scale = grown_if_finite(self.scale, self.growth_factor)


@dataclass
class RisingFloor(Torch):
    """PyTorch's rule over a floor that rises as training goes on.

    `floors` lists pairs of a step and the floor that holds from that step on; before the first
    there is none. Steps are counted from 0, skipped ones included. An overflow backs off, though
    not below the floor of its step: at the floor the step is skipped and the scale kept. A floor
    that has risen above the scale does not lift it, it only stops it from falling.

    Source: Mellempudi et al. 2019, "Mixed Precision Training With 8-bit Floating Point"; the
    default floors are halfscale's own, for trainings of some hundred thousand steps.
    """

    name: ClassVar[str] = "rising-floor"

    floors: tuple[tuple[int, float], ...] = parameter(
        ((40_000, 8192.0), (150_000, 32768.0)), rising_steps
    )
    step: int = field(init=False, default=0)

    def current_floor(self) -> float:
        """The floor at the current step, 0 where there is none yet."""
        return max((floor for start, floor in self.floors if start <= self.step), default=0.0)

    def _on_overflow(self) -> None:
        # The floor is cut to the scale: an overflow must never raise it.
        lowest = min(self.scale, self.current_floor())
        super()._on_overflow()
        self.scale = max(self.scale, lowest)
        self.step += 1

    def _on_finite(self) -> None:
        super()._on_finite()
        self.step += 1
