"""A gradient scaler written by hand, without ``torch.amp``."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class ManualGradScaler:
    """Scale the loss by a fixed factor, unscale the gradients, skip the step on an overflow.

    The algorithm is the loss scaling of Micikevicius et al., "Mixed Precision Training" (2018):

    1. multiply the loss by the scale S before ``backward``, so that every gradient is S times
       larger and small ones do not round to zero in fp16;
    2. if a gradient came out Inf or NaN (an overflow), skip the optimizer step: the parameters stay
       as they are;
    3. else multiply the gradients by 1/S, in place, and let the optimizer step.

    The scale is fixed; which rule should move it is the question halfscale answers elsewhere::

        scaler = ManualGradScaler()
        scaler.scale_loss(loss).backward()
        scaler.unscale_grads(model)
        scaler.step(optimizer)

    Written on torch's fused foreach primitive, the one pass over all gradients that unscales in
    place and notes Inf and NaN; one device synchronisation a step, in ``step``.

    Attributes:
        scale: The factor S, a positive finite float.
        skipped_steps: How many optimizer steps were not taken so far.
    """

    def __init__(self, init_scale: float = 2.0**16) -> None:
        """Create a scaler.

        Raises:
            ValueError: If ``init_scale`` or its inverse is not a positive number that fp32 holds.
        """
        if not (math.isfinite(init_scale) and 2.0**-127 <= init_scale <= 2.0**127):
            raise ValueError(f"init_scale must lie between 2**-127 and 2**127, got {init_scale!r}")
        # As fp32 holds it: the factor that the loss is really multiplied with.
        self.scale = torch.tensor(init_scale, dtype=torch.float32).item()
        self.skipped_steps = 0
        self._non_finite: list[Tensor] | None = None

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss * S``, in fp32 if ``loss`` is in half precision."""
        # An fp16 loss times 2**16 would overflow by itself.
        half = loss.dtype in (torch.float16, torch.bfloat16)
        return (loss.float() if half else loss) * self.scale

    def unscale_grads(self, model: torch.nn.Module) -> None:
        """Multiply every gradient of the model's parameters by 1/S, in place.

        Parameters without a gradient are passed over; a sparse gradient is coalesced first, since
        repeated indices add up only then.

        Raises:
            ValueError: If a gradient is in half precision: the unscaled value would round to zero
                again. Keep the parameters in fp32 and use autocast.
            RuntimeError: If it is called twice without ``step``, which would unscale twice.
        """
        if self._non_finite is not None:
            raise RuntimeError("unscale_grads was already called since the last step")
        gradients = _dense_gradients(model.parameters())
        self._non_finite = []
        for device, same_device in gradients.items():
            # One pass over all tensors of a device. The scaled values decide, as in torch.amp:
            # multiplying by 1/S could itself turn a finite value Inf.
            non_finite = torch.zeros(1, device=device)
            inverse = torch.full((1,), 1.0 / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(same_device, non_finite, inverse)
            self._non_finite.append(non_finite)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer, or skip the step if a gradient overflowed.

        Returns:
            Whether the step was taken.

        Raises:
            RuntimeError: If ``unscale_grads`` was not called since the last step.
        """
        if self._non_finite is None:
            raise RuntimeError("call unscale_grads(model) before step(optimizer)")
        overflow = any(bool(flag) for flag in self._non_finite)
        self._non_finite = None
        if overflow:
            self.skipped_steps += 1
            return False
        optimizer.step()
        return True


def _dense_gradients(parameters: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """The gradients' storage by device, in fp32 or fp64."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"a gradient of shape {tuple(gradient.shape)} is in {gradient.dtype}; keep the "
                "parameters in float32 and use autocast"
            )
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient.values()
        by_device.setdefault(gradient.device, []).append(gradient)
    return by_device
