"""The ``search`` block of a configuration: what to try of the settings nobody listed."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

from halfscale.config import parse_whole, refuse_key
from halfscale.grid import LARGEST_GRID, Range, expand, grid
from halfscale.plan import SearchPlan
from halfscale.policies import POLICIES
from halfscale.sources import SEARCH, source_digest

PROPOSALS = 2
MOST_PROPOSALS = 20
MOST_VALUES = 1000
_OWN = ("proposals", "policy")


def plan_search(block: object, source: str) -> SearchPlan | None:
    """Check a ``search`` block and resolve it.

    Args:
        block: What the configuration says: on or off, or a block with ``proposals``, ``policy`` and
            a list or range for each parameter to vary.
        source: What errors call the configuration.

    Returns:
        What to search; None for ``search: off``.

    Raises:
        ConfigError: With what to write instead, on one line.
    """
    # On Snakemake's command line, --config search=off, they are texts.
    if block is False or block == "off":
        return None
    if block is True or block is None or block == "on":
        block = {}
    if not isinstance(block, Mapping) or not all(isinstance(key, str) for key in block):
        example = {"proposals": PROPOSALS}
        refuse_key(source, ("search",), block, "must be on, off or a block of ranges", example)
    try:
        proposals = parse_whole(block.get("proposals", PROPOSALS), 1, MOST_PROPOSALS)
    except ValueError as error:
        refuse_key(source, ("search", "proposals"), block["proposals"], str(error), PROPOSALS)
    policy = block.get("policy", "torch")
    if not isinstance(policy, str) or policy not in POLICIES:
        better = difflib.get_close_matches(str(policy), POLICIES, n=1) or ["torch"]
        reason = f"unknown policy; known: {', '.join(POLICIES)}"
        refuse_key(source, ("search", "policy"), policy, reason, better[0])
    ranges = {key: value for key, value in block.items() if key not in _OWN}
    return SearchPlan(
        proposals=proposals,
        policy=policy,
        ranges=_check_ranges(policy, ranges, source) if ranges else None,
        source=source_digest(*SEARCH),
    )


def _check_ranges(policy: str, ranges: dict[str, Range], source: str) -> dict[str, Any]:
    """The distinct values of each parameter, numbers read as people write them."""
    parameters, values = POLICIES[policy].parameters(), dict[str, list[Any]]()
    beside = {} if policy == "torch" else {"policy": policy}
    for key, value in ranges.items():
        example: object = [_plain(parameters.get(key))]
        if key not in parameters:
            known = [*_OWN, *parameters]
            better = (difflib.get_close_matches(key, known, n=1, cutoff=0.5) or ["init_scale"])[0]
            reason = f"unknown key; a search of policy {policy} has {', '.join(known)}"
            example = PROPOSALS if better == "proposals" else [_plain(parameters.get(better))]
            refuse_key(source, ("search", key), value, reason, example, better, beside)
        try:
            values[key] = expand(policy, key, value)
            if len(values[key]) > MOST_VALUES:
                raise ValueError(f"has {len(values[key])} values, more than {MOST_VALUES}")
            choices = grid(policy, {key: values[key]})
        except ValueError as error:
            reason = str(error).removeprefix(f"grid of {policy}: ").removeprefix(f"{key} ")
            refuse_key(source, ("search", key), value, reason, example, None, beside)
        # As a specification has them, and in one order, whatever that of the writing.
        plain = {json.dumps(choice.parameters[key]) for choice in choices}
        values[key] = sorted(map(json.loads, plain), key=repr)
    try:
        if (size := math.prod(map(len, values.values()))) > LARGEST_GRID:
            raise ValueError(f"{size} combinations, more than {LARGEST_GRID}")
        # What one parameter allows another is between bounds, so the ends of all tell.
        grid(policy, {key: [min(of, key=_size), max(of, key=_size)] for key, of in values.items()})
    except ValueError as error:
        fewer = {key: [_plain(parameters[key])] for key in ranges}
        refuse_key(source, ("search",), ranges, str(error), {**beside, **fewer})
    return dict(sorted(values.items()))


def _size(value: object) -> float:
    return float(value) if isinstance(value, bool | int | float) else 0.0


def _plain(value: object) -> object:
    return json.loads(json.dumps(value))
