"""Grids of configurations to replay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from halfscale.config import parse_number
from halfscale.plan import PolicyChoice
from halfscale.policies import POLICIES, make_policy

Range = Sequence[Any] | Mapping[str, Any]

DEFAULT_RANGES: dict[str, tuple[float, ...]] = {
    "init_scale": tuple(2.0**power for power in range(0, 25, 2)),
    "growth_factor": (1.5, 2.0, 4.0),
    "backoff_factor": (0.25, 0.5, 0.75),
    "growth_interval": (5, 10, 20, 50, 100, 200, 500, 1000, 2000),
}
"""What `grid` varies if nothing is asked for."""

LARGEST_GRID = 200_000

# Metaseq's window shrinks on overflows, so a long one may come to act.
_SHRINKING = ("metaseq",)


def grid(
    policy: str = "torch", ranges: Mapping[str, Range] | None = None, *, steps: int | None = None
) -> list[PolicyChoice]:
    """Every combination of the parameters' values.

    Args:
        policy: A policy's name.
        ranges: The values of the parameters to vary, each a list, or a range with both ends:
            `{"from": 1, "to": "2**24", "times": 4}` or `{"from": 5, "to": 50, "plus": 5}`. Numbers
            may be written as in a configuration file. Parameters left out keep the policy's
            default. Without any ranges those of `DEFAULT_RANGES` which the policy has and takes.
        steps: The length of the runs. Growth intervals that are no shorter cannot change the
            scale of any step; of those one is kept, the nearest to PyTorch's default.

    Returns:
        The configurations without repetition, the last parameter varying fastest.

    Raises:
        ValueError: If the policy is unknown or refuses a parameter or a combination, or a range is
            empty or not of these forms, or there are more than 200,000 combinations.
    """
    make_policy(policy)  # refuses an unknown name
    expanded = {
        name: expand(policy, name, values)
        for name, values in (_defaults(policy) if ranges is None else ranges).items()
    }
    if steps is not None and "growth_interval" in expanded and policy not in _SHRINKING:
        intervals = expanded["growth_interval"]
        expanded["growth_interval"] = _one_that_never_acts(policy, intervals, steps)
    if (size := math.prod(map(len, expanded.values()))) > LARGEST_GRID:
        raise ValueError(f"grid of {policy}: {size} combinations, more than {LARGEST_GRID}")
    return [
        _choice(policy, dict(zip(expanded, values, strict=True)))
        for values in itertools.product(*expanded.values())
    ]


def _defaults(policy: str) -> dict[str, Range]:
    """The default ranges of the parameters a policy has, without the values it refuses."""
    ranges: dict[str, Range] = {}
    for name in POLICIES[policy].parameters():
        if name in DEFAULT_RANGES:
            ranges[name] = [v for v in DEFAULT_RANGES[name] if _takes(policy, name, v)]
    return ranges


def _takes(policy: str, name: str, value: object) -> bool:
    try:
        make_policy(policy, **{name: value})
    except ValueError:
        return False
    return True


def _choice(policy: str, parameters: dict[str, Any]) -> PolicyChoice:
    try:
        return PolicyChoice.of(policy, **parameters)
    except ValueError as error:
        raise ValueError(f"grid of {policy}: {error}") from None


def expand(policy: str, name: str, values: Range) -> list[Any]:
    """The distinct values of one parameter, numbers read as people write them.

    Raises:
        ValueError: If the range is empty or of no known form.
    """
    where = f"grid of {policy}: {name}"
    if isinstance(values, Mapping):
        expanded = _expand_range(where, values)
    elif isinstance(values, Sequence) and not isinstance(values, str):
        expanded = [_number(where, value) if isinstance(value, str) else value for value in values]
    else:
        raise ValueError(f"{where} must be a list or a range, got {values!r}")
    if not expanded:
        raise ValueError(f"{where} has no values")
    # By their text where they cannot be hashed, such as a list of floors; 1 and 1.0 are one value.
    distinct: dict[object, Any] = {}
    for value in expanded:
        distinct.setdefault(_key(value), value)
    return list(distinct.values())


def _key(value: object) -> object:
    return value if isinstance(value, Hashable) else repr(value)


def _number(where: str, value: object) -> float:
    try:
        return parse_number(value)
    except ValueError as error:
        raise ValueError(f"{where}: {value!r} {error}") from None


def _expand_range(where: str, given: Mapping[str, Any]) -> list[float]:
    """The values of a range, both ends included where the stride meets them."""
    stride = [key for key in ("times", "plus") if key in given]
    if set(given) != {"from", "to", *stride} or len(stride) != 1:
        raise ValueError(f"{where} must have the keys from, to and either times or plus")
    low, high, by = (_number(where, given[key]) for key in ("from", "to", stride[0]))
    multiplies = stride[0] == "times"
    if low > high or by <= multiplies or (multiplies and low <= 0):
        raise ValueError(f"{where} must rise from {low} to {high}, which {stride[0]} {by} does not")
    length = math.log(high / low) / math.log(by) if multiplies else (high - low) / by
    if length > LARGEST_GRID:
        raise ValueError(f"{where} has more than {LARGEST_GRID} values")
    count = math.floor(length * (1 + 1e-12) + 1e-9) + 1  # roots and tenths are not exact
    return [low * by**i if multiplies else low + i * by for i in range(count)]


def _one_that_never_acts(policy: str, intervals: list[Any], steps: int) -> list[Any]:
    """The intervals shorter than a run, and of the others the nearest to PyTorch's default."""
    for interval in intervals:
        _choice(policy, {"growth_interval": interval})  # refuses what is no interval
    longer = [interval for interval in intervals if interval >= steps]
    default = POLICIES["torch"].parameters()["growth_interval"]
    kept = min(longer, key=lambda interval: abs(math.log2(interval / default)), default=None)
    return [interval for interval in intervals if interval < steps or interval == kept]
