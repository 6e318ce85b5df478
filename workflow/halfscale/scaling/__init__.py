"""Loss scaling: the hand-written scaler."""

from halfscale.scaling.manual import ManualGradScaler

__all__ = ["ManualGradScaler"]
