"""What every policy is: a small state machine that moves the scale."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from halfscale.policies.checks import Check, integer, number, positive

T = TypeVar("T")


def parameter(default: T, check: Check[object]) -> T:
    """A dataclass field the user may set, held to a check when the policy is built."""
    return field(default=default, metadata={"check": check})


class FloorReached(Exception):
    """A policy gave up: an overflow asked for a scale below what it allows.

    The policy's state is what its project leaves behind at that moment.

    Attributes:
        policy: The policy's name.
        floor: The floor that stopped it.
        scale: The scale as the policy leaves it.
    """

    def __init__(self, policy: str, floor: float, scale: float) -> None:
        """Remember which policy stopped, at which floor and scale."""
        super().__init__(policy, floor, scale)
        self.policy = policy
        self.floor = floor
        self.scale = scale

    def __str__(self) -> str:
        """One sentence for a log or a report."""
        return f"policy {self.policy} reached its floor {self.floor:g} (scale {self.scale:g})"


@dataclass
class Policy(ABC):
    """The rule that moves the scale; knows nothing of models, gradients or devices.

    Fields that `__init__` takes are the parameters, with the project's own values as defaults.
    All others, the scale among them, are the state.
    """

    name: ClassVar[str]
    """The name by which a configuration asks for the policy."""

    uses_largest_gradient: ClassVar[bool] = False
    """Whether a finite step must report its largest unscaled gradient magnitude."""

    init_scale: float = parameter(2.0**16, positive)
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        """Check the parameters and start from the initial scale."""
        for spec in fields(self):
            if "check" in spec.metadata:
                given = getattr(self, spec.name)
                setattr(self, spec.name, spec.metadata["check"](spec.name, given))
        self._check_bounds()
        self.scale = self.init_scale

    @abstractmethod
    def update(self, overflow: bool, *, largest_gradient: float | None = None) -> float:
        """Take note of one step and return the scale for the next.

        Args:
            overflow: Whether some gradient of the step came out Inf or NaN.
            largest_gradient: The largest unscaled gradient magnitude of a finite step; only
                policies with `uses_largest_gradient` look at it.

        Returns:
            The scale for the next step.

        Raises:
            FloorReached: If the policy aborts training here.
        """

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """The names of the parameters and their defaults."""
        return {spec.name: spec.default for spec in fields(cls) if spec.init}

    def state_dict(self) -> dict[str, Any]:
        """Every field of the state, in plain numbers."""
        return {name: getattr(self, name) for name in self._state_names()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state.

        Args:
            state: What `state_dict` of a policy of this kind returned.

        Raises:
            ValueError: If a field is missing, unknown or of another kind. Nothing is taken over
                then.
        """
        names = self._state_names()
        missing = [name for name in names if name not in state]
        unknown = [str(name) for name in state if name not in names]
        if missing or unknown:
            raise ValueError(
                f"not a state of policy {self.name}: "
                f"missing {', '.join(missing) or 'nothing'}, "
                f"unknown {', '.join(unknown) or 'nothing'}"
            )
        loaded = {name: self._like_current(name, state[name]) for name in names}
        for name, value in loaded.items():
            setattr(self, name, value)

    @classmethod
    def _state_names(cls) -> list[str]:
        return [spec.name for spec in fields(cls) if not spec.init]

    def _like_current(self, name: str, value: object) -> float:
        """A saved value in the type of the field it goes to."""
        check = integer if isinstance(getattr(self, name), int) else number
        return check(f"state of policy {self.name}: {name}", value)

    def _check_bounds(self) -> None:
        """A start outside the bounds would let a clamp raise the scale on an overflow."""
        for name in ("min_scale", "threshold"):
            low = getattr(self, name, None)
            if low is not None and low > self.init_scale:
                raise ValueError(
                    f"{name} must not exceed init_scale, which is {self.init_scale}, got {low}"
                )
        high = getattr(self, "max_scale", None)
        if high is not None and high < self.init_scale:
            raise ValueError(
                f"max_scale must not be below init_scale, which is {self.init_scale}, got {high}"
            )


@dataclass
class OverflowPolicy(Policy):
    """A policy that looks at nothing but whether a step overflowed."""

    def update(self, overflow: bool, *, largest_gradient: float | None = None) -> float:
        """Take note of one step, whatever its largest gradient, and return the next scale."""
        if overflow:
            self._on_overflow()
        else:
            self._on_finite()
        return self.scale

    @abstractmethod
    def _on_overflow(self) -> None: ...

    @abstractmethod
    def _on_finite(self) -> None: ...
