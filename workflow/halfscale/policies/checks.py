"""What a parameter of a policy may be.

Each check takes a parameter's name and the value given, returns the value in its proper type,
and raises a ValueError that names the parameter. Numbers written another way are accepted
(2000.0 for 2000), because a configuration file may normalise them.
"""

import math
from collections.abc import Callable
from typing import TypeVar

from halfscale.policies.fp32 import to_fp32

T = TypeVar("T")
Check = Callable[[str, object], T]

LARGEST_COUNT = 2**31 - 1


def number(name: str, value: object) -> float:
    """Any number except NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        checked = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float, got {value!r}") from None
    if math.isnan(checked):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return checked


def positive(name: str, value: object) -> float:
    """A finite number above zero."""
    checked = number(name, value)
    if not 0 < checked < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return checked


def positive_fp32(name: str, value: object) -> float:
    """A finite number above zero, rounded to float32."""
    checked = to_fp32(positive(name, value))
    if not 0 < checked < math.inf:
        raise ValueError(f"{name} must be within the range of fp32, got {value!r}")
    return checked


def above_one(name: str, value: object) -> float:
    """A finite factor by which something grows."""
    checked = number(name, value)
    if not 1 < checked < math.inf:
        raise ValueError(f"{name} must be greater than 1, got {value!r}")
    return checked


def below_one(name: str, value: object) -> float:
    """A factor by which something shrinks without vanishing."""
    checked = number(name, value)
    if not 0 < checked < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")
    return checked


def not_negative(name: str, value: object) -> float:
    """A finite number, zero included."""
    checked = number(name, value)
    if not 0 <= checked < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {value!r}")
    return checked


def share(name: str, value: object) -> float:
    """A share of a whole, both ends included."""
    checked = number(name, value)
    if not 0 <= checked <= 1:
        raise ValueError(f"{name} must be a share from 0 to 1, got {value!r}")
    return checked


def integer(name: str, value: object) -> int:
    """A whole number of either sign."""
    checked = number(name, value)
    if not checked.is_integer():
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(checked)


def count(name: str, value: object) -> int:
    """A whole number of steps, at least one and no more than a 32-bit counter holds."""
    checked = integer(name, value)
    if checked < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    if checked > LARGEST_COUNT:
        raise ValueError(f"{name} must be at most {LARGEST_COUNT}, got {value!r}")
    return checked


def flag(name: str, value: object) -> bool:
    """True or False, nothing that merely resembles them."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def optional(check: Check[T]) -> Check[T | None]:
    """The given check, with None allowed for "not set"."""

    def checked(name: str, value: object) -> T | None:
        return None if value is None else check(name, value)

    return checked


def rising_steps(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Pairs (first step, floor), by step; the floors never fall and fit float32."""
    shape = f"{name} must be a list of [step, floor] pairs, got {value!r}"
    if not isinstance(value, list | tuple):
        raise ValueError(shape)
    pairs: list[tuple[int, float]] = []
    for item in value:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise ValueError(shape)
        step = integer(f"{name}: the step", item[0])
        pairs.append((step, positive_fp32(f"{name}: the floor from step {step}", item[1])))
    steps = [step for step, _ in pairs]
    if steps != sorted(set(steps)) or min(steps, default=0) < 0:
        raise ValueError(f"{name} must have steps that increase from 0 or later, got {steps}")
    floors = [floor for _, floor in pairs]
    if floors != sorted(floors):
        raise ValueError(f"{name} must not fall, got {floors}")
    return tuple(pairs)
