"""The arithmetic of a run: fp32, or autocast to bf16 or fp16 on either device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from halfscale.plan import Precision

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: str) -> AbstractContextManager[object]:
    """The context in which a forward pass runs: real autocast, or nothing for fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device, dtype=_DTYPES[precision])


def describe_arithmetic(precision: Precision, device: str) -> str:
    """What computed the run, for its record."""
    if precision == "fp32":
        return f"fp32 ({device})"
    return f"{precision} autocast ({device}, native kernels)"
