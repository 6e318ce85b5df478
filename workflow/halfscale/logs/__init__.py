"""What a log of a training's own scale says of other settings: with certainty, and probably.

A log has a row an optimizer step: its scale, and whether it overflowed. Nothing here imports torch.
"""

from halfscale.logs.bounds import Bounds, bound_skips
from halfscale.logs.infer import Inferred, infer
from halfscale.logs.log import ScalingLog
from halfscale.logs.reading import read_log
from halfscale.logs.report import LogReport, describe_log, examine, log_as_json

__all__ = [
    "Bounds",
    "Inferred",
    "LogReport",
    "ScalingLog",
    "bound_skips",
    "describe_log",
    "examine",
    "infer",
    "log_as_json",
    "read_log",
]
