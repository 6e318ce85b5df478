"""Loss scaling: the hand-written scaler, and the one that drives any policy."""

from halfscale.scaling.manual import ManualGradScaler
from halfscale.scaling.scaler import LossScaler

__all__ = ["LossScaler", "ManualGradScaler"]
