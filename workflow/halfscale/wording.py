"""How numbers, usable scales, configurations and tables are written."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from halfscale.plan import PolicyChoice


def power(exponent: float) -> str:
    """A power of two by its exponent: ``2^14``, ``0`` and ``inf`` at the ends."""
    if math.isinf(exponent):
        return "any scale" if exponent > 0 else "0"
    return f"2^{exponent:g}"


def name_window(low: float, high: float) -> str:
    """The usable powers of two in words: ``2^5 to 2^17``, ``none``, ``every scale``.

    Args:
        low: log2 of the smallest useful scale; -inf where no element can be lost.
        high: log2 of the largest safe scale; inf where nothing can overflow, -inf where a gradient
            is not finite at any scale.
    """
    if not low <= high or high == -math.inf:
        return "none"
    if math.isinf(low):
        return "every scale" if math.isinf(high) else f"up to 2^{high:g}"
    return f"from 2^{low:g} on" if math.isinf(high) else f"2^{low:g} to 2^{high:g}"


def show_number(value: object) -> str:
    """A parameter as it may be written again: ``2**14``, ``1.5``, ``20``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value) and value > 0:
        mantissa, exponent = math.frexp(value)
        if mantissa == 0.5 and abs(exponent - 1) >= 5:
            return f"2**{exponent - 1}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def describe(choice: PolicyChoice) -> str:
    """A configuration by what differs from its policy's defaults, as ``--compare`` takes it."""
    default = PolicyChoice.of(choice.policy).parameters
    named = [] if choice.policy == "torch" else [f"policy={choice.policy}"]
    changed = [
        f"{key}={show_number(value)}"
        for key, value in choice.parameters.items()
        if value != default[key]
    ]
    return ",".join(named + changed) or "PyTorch's defaults"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """One number where all are equal, else from the least to the largest."""
    low, high = (f"{value:.{digits}g}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def tabulate(rows: Sequence[Sequence[str]]) -> str:
    """A table with a head; columns are set flush right, the last one flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows
    )


def fill(text: str) -> str:
    """A paragraph, or an item of a list, in lines of at most 100 characters."""
    return textwrap.fill(text, 100, subsequent_indent="  " if text.startswith("- ") else "")
