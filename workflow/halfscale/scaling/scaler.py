"""The scaler that drives any policy in training: scale, unscale, check, step or skip."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from halfscale.policies import Policy
from halfscale.policies.fp32 import to_fp32
from halfscale.scaling.gradients import gradients_by_kind, largest_magnitude


@dataclass(slots=True)
class _Check:
    """What an optimizer's gradients showed since the last update."""

    # One fp32 element: 1 for an overflow, else 0; where the policy uses it, the largest unscaled
    # magnitude instead, infinite for an overflow.
    on_device: Tensor
    left_to_kernel: bool  # whether the optimizer is to unscale by itself
    figure: float | None = None  # the same on the host, once it was read
    overflow: bool = False
    skipped: bool | None = None  # None until the step is asked for


class LossScaler:
    """Scale the loss as a policy says, unscale the gradients, step or skip, tell the policy.

    Used like ``torch.amp.GradScaler``, which it equals bit for bit with the policy ``torch``::

        scaler = LossScaler(make_policy("megatron", hysteresis=4))
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(loss(model, batch)).backward()
            scaler.unscale_(optimizer)  # optional: to clip or look at the gradients after it
            scaler.step(optimizer)
            scaler.update()
            if not scaler.skipped:
                schedule.step()

    An optimizer whose own gradients are finite steps, whatever another's are; the policy is told
    of an overflow if any had one. Processes of ``torch.distributed`` must make the same calls; an
    overflow in one is one in all. The device is synchronised once a step, in the first ``step``
    after ``unscale_``, for all optimizers unscaled by then. With several, unscale all before the
    first step: one that ``step`` has to unscale costs a synchronisation of its own.

    A skipped step leaves alone what the optimizer writes, not what forward wrote: the running
    statistics of batch normalisation have moved on, as under torch's scaler. If the first step
    shows bfloat16, in a loss, a gradient or the autocast around ``scale``, a warning says that it
    needs no scaling.

    Source: Micikevicius et al., "Mixed Precision Training" (2018); arithmetic and interface are
    torch's, the retry is fairseq's. Written for CPU and CUDA; the latter is untested.

    Args:
        policy: The rule that moves the scale; the scaler starts from its current one.
        process_group: The processes that decide together. By default all of them where
            ``torch.distributed`` is initialised by the time of the step, else this one alone.
        max_retries: How often ``should_retry`` asks for one batch again; 0 for never.

    Raises:
        TypeError: If the policy is none, but for instance a policy's name.
        ValueError: If ``max_retries`` is negative.
    """

    def __init__(
        self, policy: Policy, *, process_group: ProcessGroup | None = None, max_retries: int = 0
    ) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be a halfscale.policies.Policy, got {policy!r}")
        if max_retries < 0:
            raise ValueError(f"max_retries must not be negative, got {max_retries!r}")
        self.policy = policy
        self.process_group = process_group
        self.max_retries = max_retries
        self._retries = 0
        self._looks_for_bfloat16 = True  # in the first step only
        self._factors: dict[torch.device, tuple[Tensor, Tensor]] = {}  # S and 1/S
        # By the optimizer's id: since the last update, and who skipped in the step it ended.
        self._checks: dict[int, _Check] = {}
        self._ended: dict[int, bool] = {}

    def scale(self, loss: Tensor | Iterable[Any]) -> Any:
        """Multiply one or more losses by the scale, an fp32 tensor of no dimension.

        Args:
            loss: A floating tensor of any shape and device, or a possibly nested iterable of them.

        Returns:
            The scaled tensor, in fp32 for a half-precision scalar; a tuple for a tuple, a list for
            any other iterable.

        Raises:
            TypeError: If there is anything else in it.
        """
        if isinstance(loss, Tensor):
            if self._looks_for_bfloat16 and _in_bfloat16(loss):
                self._warn_of_bfloat16(stacklevel=3)
            return loss * self._factors_on(loss.device)[0]
        if isinstance(loss, str) or not isinstance(loss, Iterable):
            raise TypeError(f"scale() takes a tensor or an iterable of tensors, got {loss!r}")
        scaled = [self.scale(part) for part in loss]
        return tuple(scaled) if isinstance(loss, tuple) else scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Multiply the gradients of an optimizer's parameters by 1/S, in place, and check them.

        ``step`` does it where this was not called. With gradient accumulation, call it after the
        last backward pass. Parameters without a gradient are passed over. A sparse gradient is not
        coalesced first, as in torch: summing its duplicates before would round differently.

        Raises:
            RuntimeError: If it or ``step`` was already called for this optimizer since the last
                ``update``, no loss was ever scaled, or no parameter has a gradient.
            ValueError: If a gradient is in fp16, where unscaled values would round to zero again.
                Bfloat16 has the range of fp32 and is let through.
        """
        if check := self._checks.get(id(optimizer)):
            earlier = "unscale_()" if check.skipped is None else "step()"
            since = f"{earlier} was already called for this optimizer since the last update()"
            raise RuntimeError(f"{since}; unscale_() is called once, before step()")
        self._check(optimizer, in_kernel=False)

    def step(self, optimizer: Optimizer) -> bool:
        """Let the optimizer step unless its gradients overflowed; unscale them first if need be.

        A skipped step does not call the optimizer, so that its hooks see applied steps only.
        PyTorch's fused optimizers, where ``unscale_`` was not called, divide by the scale in their
        own kernel, as under torch's scaler; only then may gradients be in fp16.

        Returns:
            Whether the step was applied.

        Raises:
            RuntimeError: If it was already called since the last ``update``.
            RuntimeError, ValueError: As ``unscale_``, where that was not called.
        """
        check = self._checks.get(id(optimizer))
        if check is None:
            check = self._check(optimizer, in_kernel=self._left_to_kernel(optimizer))
        elif check.skipped is not None:
            raise RuntimeError("step() was already called for this optimizer; call update() first")
        self._read_figures()
        if check.left_to_kernel:
            scale = self._factors_on(check.on_device.device)[0]
            vars(optimizer)["grad_scale"] = scale * getattr(optimizer, "grad_scale", 1)
        try:
            if not check.overflow:
                optimizer.step()
        finally:
            vars(optimizer).pop("grad_scale", None)
        check.skipped = check.overflow
        return not check.overflow

    def update(self) -> None:
        """End the step: tell the policy what happened and take over its scale for the next.

        Raises:
            RuntimeError: If no optimizer was stepped or unscaled since the last ``update``.
            FloorReached: If the policy aborts training here. The step is over all the same.
        """
        if not self._checks:
            raise RuntimeError("there is no step to end: call step(optimizer) before update()")
        self._read_figures()
        self._looks_for_bfloat16 = False
        self._ended = self._skips()
        checks, self._checks = list(self._checks.values()), {}
        retries, self._retries, before = self._retries, 0, self.policy.scale
        overflow = any(check.overflow for check in checks)
        largest = max(check.figure or 0.0 for check in checks)
        measured = self.policy.uses_largest_gradient and not overflow
        try:
            self.policy.update(overflow, largest_gradient=largest if measured else None)
        finally:
            if self.policy.scale != before:
                self._write_factors(*self._factors)
        lost = overflow and not any(check.skipped is False for check in checks)
        if lost and self.policy.scale < before and retries < self.max_retries:
            self._retries = retries + 1

    @property
    def skipped(self) -> bool:
        """Whether any optimizer skipped its step, in the step under way or else just ended."""
        return any(self._skips().values())

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer skipped its step, in the step under way or else just ended."""
        return self._skips().get(id(optimizer), False)

    @property
    def should_retry(self) -> bool:
        """Whether, after ``update``, to run the same batch again instead of losing it.

        False where the policy kept the scale, at which the batch would overflow again; where some
        optimizer did step and would see the batch twice; and after ``max_retries`` retries of the
        batch. To the policy a retry is a step like any other.
        """
        return self._retries > 0

    def get_scale(self) -> float:
        """The scale for the next loss, in the policy's precision; needs no synchronisation."""
        return self.policy.scale

    def state_dict(self) -> dict[str, Any]:
        """The state between two steps in plain numbers; to be taken after ``update``."""
        state = self.policy.state_dict()
        return {"policy": self.policy.name, "state": state, "retries": self._retries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a ``state_dict``, which has no policy's parameters; forget a step under way.

        Raises:
            ValueError: If it is no such state; nothing is taken over then.
        """
        if set(state) != {"policy", "state", "retries"} or state["policy"] != self.policy.name:
            raise ValueError(f"not a state of a scaler with policy {self.policy.name}: {state}")
        self.policy.load_state_dict(state["state"])
        self._retries = state["retries"]
        self._checks, self._ended = {}, {}
        self._write_factors(*self._factors)

    @torch.no_grad()
    def _check(self, optimizer: Optimizer, *, in_kernel: bool) -> _Check:
        """Unscale and check, one pass a device and dtype; the scaled values tell an overflow."""
        if not self._factors:
            raise RuntimeError("no loss was scaled yet: call scale(loss).backward() first")
        flags: dict[torch.device, Tensor] = {}
        for (device, dtype), gradients in gradients_by_kind(optimizer, in_kernel).items():
            if self._looks_for_bfloat16 and dtype is torch.bfloat16:
                self._warn_of_bfloat16(stacklevel=5)
            if (flag := flags.get(device)) is None:
                flag = flags[device] = torch.zeros(1, dtype=torch.float32, device=device)
            inverse = torch.ones_like(flag) if in_kernel else self._factors_on(device)[1]
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse)
        figures = list(flags.values())
        if self.policy.uses_largest_gradient:
            kinds = gradients_by_kind(optimizer, summed=True).values()
            figures = [largest_magnitude(gradients) for gradients in kinds]
        highest = figures[0] if len(figures) == 1 else _gather(figures).amax(0, keepdim=True)
        return self._checks.setdefault(id(optimizer), _Check(highest, in_kernel))

    def _read_figures(self) -> None:
        """Bring the figures not read yet to the host at once, as agreed on by all processes."""
        if not (unread := [check for check in self._checks.values() if check.figure is None]):
            return
        figures = _gather([check.on_device for check in unread])
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(figures, distributed.ReduceOp.MAX, self.process_group)
        limit = math.inf if self.policy.uses_largest_gradient else 1.0
        for check, figure in zip(unread, figures.tolist(), strict=True):
            check.figure, check.overflow = figure, figure >= limit

    def _left_to_kernel(self, optimizer: Optimizer) -> bool:
        # Magnitudes are wanted unscaled, and before the step.
        fused = optimizer.defaults.get("fused") and hasattr(optimizer, "_step_supports_amp_scaling")
        return bool(fused) and not self.policy.uses_largest_gradient

    def _warn_of_bfloat16(self, stacklevel: int) -> None:
        self._looks_for_bfloat16 = False
        text = "bfloat16 has the range of float32 and needs no loss scaling; leave the scaler out"
        warnings.warn(text, stacklevel=stacklevel)

    def _skips(self) -> dict[int, bool]:
        now = {key: c.skipped for key, c in self._checks.items() if c.skipped is not None}
        return now or self._ended

    def _factors_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._factors:
            one = torch.ones((), dtype=torch.float32, device=device)
            self._factors[device] = (one, one.clone())
            self._write_factors(device)
        return self._factors[device]

    def _write_factors(self, *devices: torch.device) -> None:
        """In place, so that autograd refuses the backward pass of a loss scaled before."""
        scale = to_fp32(self.policy.scale)
        for device in devices:
            self._factors[device][0].fill_(scale)
            self._factors[device][1].fill_(to_fp32(1.0 / scale) if scale else math.inf)


def _gather(figures: list[Tensor]) -> Tensor:
    return torch.cat([figure.to(figures[0].device, non_blocking=True) for figure in figures])


def _in_bfloat16(loss: Tensor) -> bool:
    """Whether the loss is in bfloat16, or what is computed here and now."""
    if loss.dtype is torch.bfloat16:
        return True
    kind = loss.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16
