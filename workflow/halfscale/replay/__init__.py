"""What any scaler configuration would have done, from one recorded run that never overflows.

Whether a step overflows depends on the scale and on that step's largest gradient. A probe records
the latter once; every configuration is then replayed over it in arithmetic alone, thousands in a
second. The prediction takes the gradients to be those of the probe, which skips no step: those of
the same step, or where every step has the same batch, those after as many steps taken. Nothing
here imports torch.
"""

from halfscale.grid import DEFAULT_RANGES, grid
from halfscale.replay.choosing import OBJECTIVE, Proposal, cost, mean_cost, propose, rank
from halfscale.replay.engine import Replay, Traces, replay, replay_traces
from halfscale.replay.probe import Probe, overflows

__all__ = [
    "DEFAULT_RANGES",
    "OBJECTIVE",
    "Probe",
    "Proposal",
    "Replay",
    "Traces",
    "cost",
    "grid",
    "mean_cost",
    "overflows",
    "propose",
    "rank",
    "replay",
    "replay_traces",
]
