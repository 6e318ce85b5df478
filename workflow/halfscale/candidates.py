"""Which configurations to replay, as a command line states them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from halfscale.config import parse_number
from halfscale.grid import Range
from halfscale.plan import PolicyChoice
from halfscale.policies import POLICIES, make_policy
from halfscale.replay import grid

_GRID = "write it as --grid init_scale=2**8,2**12,2**16 or --grid growth_interval=5..2000*2"
_COMPARE = "write it as --compare init_scale=65536,growth_interval=100"
_WORDS = {"true": True, "false": False, "none": None, "null": None}
# A stride is one sign that is not half of a power's.
_RANGE = re.compile(r"(?P<low>.+?)\.\.(?P<high>.+)(?<!\*)(?P<sign>[*+])(?!\*)(?P<by>[^*+]+)")


def make_grid(policies: Sequence[str], texts: Sequence[str], steps: int) -> list[PolicyChoice]:
    """Every configuration that is asked for.

    Args:
        policies: Names of policies; PyTorch's if there is none.
        texts: ``key=value,value`` or ``key=from..to*factor`` (``+`` to add) each; the key may be
            that of one policy, ``deepspeed.hysteresis=1,2``. None for each policy's own ranges.
        steps: The length of the runs.

    Raises:
        ValueError: If a policy is unknown or a range cannot be used, in one line.
    """
    names = list(dict.fromkeys(policies)) or ["torch"]
    for name in names:
        make_policy(name)  # refuses an unknown name
    ranges: dict[str, dict[str, Range]] = {name: {} for name in names}
    for text in texts:
        key, values = _parse_range(text)
        takers = _takers(key, names, text)
        for name in takers:
            if (bare := key.rpartition(".")[2]) in ranges[name]:
                raise ValueError(f"--grid {text}: {bare} is given twice; give all its values once")
            ranges[name][bare] = values
    try:
        grids = [grid(name, ranges[name] if texts else None, steps=steps) for name in names]
    except ValueError as error:
        raise ValueError(f"{error}; {_GRID}") from None
    return [choice for choices in grids for choice in choices]


def _takers(key: str, names: list[str], text: str) -> list[str]:
    """The policies whose parameter a key is."""
    policy, dot, bare = key.rpartition(".")
    if dot and policy not in names:
        raise ValueError(f"--grid {text}: {policy!r} is no --policy given; write --policy {policy}")
    takers = [n for n in ([policy] if dot else names) if bare in POLICIES[n].parameters()]
    if not takers:
        asked = policy or " or ".join(names)
        has = ", ".join(POLICIES[policy or names[0]].parameters())
        raise ValueError(f"--grid {text}: {asked} has no parameter {bare!r}; it has {has}")
    return takers


def _parse_range(text: str) -> tuple[str, Range]:
    key, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not key or not values:
        raise ValueError(f"--grid {text}: {_GRID}")
    if ".." not in values:
        return key, [
            _WORDS.get(value.strip().lower(), value.strip()) for value in values.split(",")
        ]
    if not (found := _RANGE.fullmatch(values)):
        better = f"--grid {key}={values}*2" if re.fullmatch(r".+\.\..+", values) else _GRID
        raise ValueError(f"--grid {text}: a range needs a stride; write {better}")
    stride = "times" if found["sign"] == "*" else "plus"
    return key, {"from": found["low"], "to": found["high"], stride: found["by"]}


def parse_choice(text: str) -> PolicyChoice:
    """Read one configuration: ``init_scale=65536,growth_interval=100``, ``policy=deepspeed,…``.

    Raises:
        ValueError: If it is none, in one line.
    """
    parameters: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not key or key in parameters:
            reason = f"{key} is given twice" if key in parameters else f"{part!r} is not key=value"
            raise ValueError(f"--compare {text}: {reason}; {_COMPARE}")
        try:
            parameters[key] = value if key == "policy" else _parse_value(value)
        except ValueError as error:
            raise ValueError(f"--compare {text}: {value!r} {error}; {_COMPARE}") from None
    try:
        return PolicyChoice.of(parameters.pop("policy", "torch"), **parameters)
    except ValueError as error:
        raise ValueError(f"--compare {text}: {error}; {_COMPARE}") from None


def _parse_value(text: str) -> Any:
    return _WORDS[text.lower()] if text.lower() in _WORDS else parse_number(text)
