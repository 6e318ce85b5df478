"""Single precision without a tensor library.

Most projects hold their scale in a float32 variable. Python's floats are doubles, so a policy
that claims to follow such a project rounds after every operation.
"""

import math
import struct

_SINGLE = struct.Struct("<f")

FP32_MAX = float.fromhex("0x1.fffffep+127")
FP32_SMALLEST_NORMAL = 2.0**-126


def to_fp32(value: float) -> float:
    """Round to the nearest float32, ties to even; beyond the largest one, to infinity."""
    try:
        return float(_SINGLE.unpack(_SINGLE.pack(value))[0])
    except OverflowError:
        # struct refuses what a conversion in C turns into infinity.
        return math.copysign(math.inf, value)


def grown_if_finite(scale: float, factor: float) -> float:
    """The scale times the factor in float32, or the scale itself where that would be infinite."""
    product = to_fp32(scale * factor)
    return product if math.isfinite(product) else scale
