"""Which arithmetic a precision means on a device, and the context that provides it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from halfscale.precision.emulation import emulation

PRECISIONS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The dtype of matrix products and convolutions under each precision."""


@dataclass(frozen=True)
class Arithmetic:
    """How a run computes. ``str()`` of it is a short text for the run's record.

    Attributes:
        precision: A key of `PRECISIONS`.
        device_type: ``"cpu"``, ``"cuda"``, …, without an index.
        emulated: Whether fp16 products are computed in fp32 and rounded to fp16, as tensor cores
            do (see `halfscale.precision.emulation`).
    """

    precision: str
    device_type: str
    emulated: bool

    def autocast(self) -> torch.autocast:
        """A context for one forward pass and its loss. Under fp32 it turns autocast off.

        Leave it before ``backward()``: backward operations take the dtype of their forward
        operations by themselves, and autocast would lower those that ran in fp32.
        """
        return torch.autocast(
            self.device_type,
            dtype=PRECISIONS[self.precision],
            enabled=self.precision != "fp32",
        )

    def __str__(self) -> str:
        if self.precision == "fp32":
            return "fp32"
        how = "fp32 products rounded to fp16" if self.emulated else "native"
        return f"{self.precision} autocast, {how}"


def native_fp16(device: str | torch.device) -> bool:
    """Whether fp16 products run on the device's own fp16 units.

    Accelerators have them. A CPU counts if oneDNN, which then takes torch's fp16 products, finds
    AVX512-FP16 or AMX-FP16 (or their Arm counterparts); elsewhere torch falls back on loops that
    convert every element and are 10 to 40 times slower than fp32.
    """
    if torch.device(device).type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )


def choose(
    precision: str, device: str | torch.device = "cpu", *, native: bool | None = None
) -> Arithmetic:
    """The arithmetic for a precision on a device; changes nothing.

    Args:
        precision: A key of `PRECISIONS`.
        device: Where the run computes.
        native: Overrides `native_fp16` for fp16 on a CPU; ignored elsewhere, where there is no
            emulation to choose.

    Raises:
        ValueError: If the precision is not in `PRECISIONS`.
        RuntimeError: If torch does not know the device.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
    device_type = torch.device(device).type
    emulated = False
    if precision == "fp16" and device_type == "cpu":
        emulated = not (native_fp16(device) if native is None else native)
    return Arithmetic(precision, device_type, emulated)


@contextmanager
def arithmetic(
    precision: str, device: str | torch.device = "cpu", *, native: bool | None = None
) -> Iterator[Arithmetic]:
    """Compute in the arithmetic that `choose` returns until the context ends, in this thread.

    Backward passes belong inside, forward passes into its `Arithmetic.autocast` as well. Open it
    once around a run rather than around each step: with emulation, opening takes 0.1 ms. Contexts
    nest, and the innermost decides.

    Args:
        precision: A key of `PRECISIONS`.
        device: Where the run computes.
        native: See `choose`.

    Raises:
        ValueError: If the precision is not in `PRECISIONS`.
        RuntimeError: If torch does not know the device.
    """
    used = choose(precision, device, native=native)
    with emulation(used.emulated):
        yield used
