"""An optimizer's gradients as the fused kernels take them, and figures of theirs."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer


def gradients_by_kind(
    optimizer: Optimizer, allow_fp16: bool = False, *, summed: bool = False
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The gradients by device and dtype; of a sparse one its values, duplicates summed or not.

    Raises:
        RuntimeError: If no parameter of the optimizer has a gradient.
        ValueError: If a gradient is in fp16 and that is not allowed.
    """
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is None:
                continue
            if gradient.is_sparse:
                gradient = gradient.coalesce().values() if summed else gradient._values()
            found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    if not found:
        raise RuntimeError("no parameter of the optimizer has a gradient: call backward() first")
    if not allow_fp16 and any(dtype == torch.float16 for _, dtype in found):
        raise ValueError("a gradient is in fp16; keep the parameters in fp32 and use autocast")
    return found


def largest_magnitude(tensors: list[Tensor]) -> Tensor:
    """The largest magnitude, one element in fp32; infinite unless finite, zero where all are empty.

    Args:
        tensors: At least one; dense, real and all on one device.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    largest = torch.stack([tensors[0].new_zeros(()), *_extremes(filled)]).abs().amax()
    return largest.float().nan_to_num(math.inf, math.inf).reshape(1)


def figures(losses: list[Tensor], gradients: list[Tensor]) -> tuple[float, float, float]:
    """The sum of the losses, the L2 norm and the largest magnitude of all gradients, on the host.

    One transfer from the device for the three.

    Args:
        losses: Of no dimension, in fp32.
        gradients: Of one device, real, none empty; sparse ones may have duplicates.
    """
    values = [_summed(grad) if grad.is_sparse else grad for grad in gradients]
    loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    total, length, *extremes = torch.stack([loss, norm, *_extremes(values)]).tolist()
    # Python's max would pass over a NaN.
    return total, length, length if math.isnan(length) else max(map(abs, extremes))


def _summed(sparse: Tensor) -> Tensor:
    """The values of a sparse tensor, duplicates summed; one zero if there are none."""
    values = sparse.coalesce().values()
    return values if values.numel() else values.new_zeros(1)


def _extremes(tensors: list[Tensor]) -> list[Tensor]:
    """Numbers, each a tensor of no dimension, whose largest magnitude is that of the tensors.

    An Inf or NaN in the tensors is among them. They are dense, real, on one device, none is empty.
    """
    # On a CPU torch's infinity norm is not vectorised and takes up to 18 times as long.
    if tensors and tensors[0].is_cpu:
        return [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
    return list(torch._foreach_norm(tensors, math.inf)) if tensors else []
