"""The policy that never moves the scale."""

from dataclasses import dataclass
from typing import ClassVar

from halfscale.policies.base import OverflowPolicy


@dataclass
class Static(OverflowPolicy):
    """A fixed scale: overflows skip their step but leave the scale alone.

    Source: the static mode of DeepSpeed (`LossScaler`), Megatron-LM (`ConstantGradScaler`) and
    Apex (`LossScaler` with a number for its scale). None of them has a default of its own; the
    default here is the scale the dynamic policies start from.
    """

    name: ClassVar[str] = "static"

    def _on_overflow(self) -> None:
        pass

    def _on_finite(self) -> None:
        pass
