"""One step of a training: forward, backward, unscale, step or skip, and what is recorded of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from halfscale.faults import (
    Ended,
    check_loss,
    find_non_finite,
    list_non_finite,
    usable_gradients,
    workload_code,
)
from halfscale.plan import LARGEST_FP16, ProbeSpec, RunSpec
from halfscale.precision import Arithmetic
from halfscale.scaling import LossScaler
from halfscale.scaling.gradients import figures
from halfscale.workloads import Workload

Observe = Callable[[torch.Tensor, Any], AbstractContextManager[None]]
"""Given a loss and the batch it is of, a context in which its backward pass is run."""


def unobserved(loss: torch.Tensor, batch: object) -> AbstractContextManager[None]:
    """Nobody looks at the backward pass."""
    return nullcontext()


class Unscaled:
    """The controls' scaler: nothing is scaled and every step is taken."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def update(self) -> None:
        pass

    def get_scale(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Training:
    """What a step needs.

    Attributes:
        spec: The run's specification.
        workload: The workload, built.
        scaler: What scales its loss.
        arithmetic: How it computes.
        taken: A counter that the optimizer itself raises.
        observe: Given a loss and its batch, a context for its backward pass.
        parameters: Those that the optimizer trains, without those that have no element.
        others: The model's other parameters; what backward leaves on them is thrown away.
        usual: What was not finite from the start, such as the -Inf of a mask: parameters, buffers,
            and what the first batch held though its loss was finite.
        batches: The micro-batches of the step.
    """

    spec: RunSpec | ProbeSpec
    workload: Workload
    scaler: LossScaler | Unscaled
    arithmetic: Arithmetic
    taken: list[int]
    observe: Observe
    parameters: list[torch.Tensor]
    others: list[torch.Tensor]
    usual: set[str | None]
    batches: list[Any] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        spec: RunSpec | ProbeSpec,
        workload: Workload,
        scaler: LossScaler | Unscaled,
        used: Arithmetic,
        observe: Observe = unobserved,
    ) -> Training:
        """The training of a workload that was built, at its beginning."""
        optimizer, model = workload.optimizer, workload.model
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        filled: list[torch.Tensor] = [p for p in trained if is_lazy(p) or p.numel()]
        held = {id(p) for p in trained}
        return cls(
            spec=spec,
            workload=workload,
            scaler=scaler,
            arithmetic=used,
            taken=_count_taken_steps(optimizer),
            observe=observe,
            parameters=filled,
            others=[p for p in model.parameters() if id(p) not in held],
            usual=set(list_non_finite(model)),
        )


def train_step(training: Training, step: int) -> dict[str, Any]:
    """Everything of one step but the scaler's update; returns its row of the trace.

    Raises:
        Ended: If the workload's own code raises, or gives what cannot be trained with.
    """
    started = time.perf_counter()
    workload, scaler = training.workload, training.scaler
    scale, taken_before = scaler.get_scale(), training.taken[0]
    with workload_code(f"step {step}", training.spec.entry):
        workload.optimizer.zero_grad(set_to_none=True)
        for parameter in training.others:
            parameter.grad = None
        training.batches.clear()
        losses = [_backward(training, step) for _ in range(workload.accumulate)]
    gradients = usable_gradients(training.parameters, clipped=workload.clip_norm is not None)
    scaler.unscale_(workload.optimizer)
    loss, grad_norm, largest = figures(losses, gradients)
    # A loss of NaN may have finite gradients; the run ends with the parameters that gave it.
    stepped = math.isfinite(loss)
    if stepped:
        with workload_code(f"the optimizer in step {step}", training.spec.entry):
            if workload.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(training.parameters, workload.clip_norm)
            scaler.step(workload.optimizer)
            if training.taken[0] > taken_before and workload.scheduler is not None:
                workload.scheduler.step()
    applied = training.taken[0] > taken_before
    asked = stepped and isinstance(scaler, LossScaler)
    return {
        "step": step,
        "loss": loss,
        "scale": scale,
        # A scaler that is asked skips a step exactly on an overflow.
        "overflow": not applied if asked else not math.isfinite(largest),
        "applied": applied,
        "grad_norm": grad_norm,
        "headroom": _headroom(largest * scale),
        "largest_gradient": largest,
        "seconds": time.perf_counter() - started,
    }


def _backward(training: Training, step: int) -> torch.Tensor:
    """One micro-batch forward and backward; returns its share of the step's loss, fp32."""
    workload = training.workload
    batch = _next_batch(training, step)
    with training.arithmetic.autocast():
        loss = check_loss(workload.loss(workload.model, batch), step)
        if workload.accumulate > 1:
            loss = loss / workload.accumulate
    with training.observe(loss, batch):
        training.scaler.scale(loss).backward()
    loss = loss.detach().float()
    return loss.squeeze() if loss.ndim else loss


def _next_batch(training: Training, step: int) -> Any:
    try:
        batch = next(training.workload.batches)
    except StopIteration:
        raise Ended(
            "failed",
            f"batches ended after {step} of {training.spec.steps} steps; return a list or a "
            "DataLoader, which can start again, or a generator that never ends (while True:)",
        ) from None
    training.batches.append(batch)
    return batch


def stop_if_not_finite(training: Training, step: int, loss: float) -> None:
    """End the training if the loss of a step is not finite, and say if the data is the reason.

    Raises:
        Ended: As diverged, or as failed if the batch itself holds NaN or Inf.
    """
    if math.isfinite(loss):
        if step == 0:
            training.usual.add(find_non_finite(training.batches))
        return
    found = find_non_finite(training.batches)
    if found and found not in training.usual:
        raise Ended("failed", f"the batch of step {step} holds {found}; clean the data")
    raise Ended("diverged", f"the loss became {loss} in step {step}")


def _headroom(largest: float) -> float:
    """log2(65504 / largest), in bits; -inf for a gradient of Inf or NaN, inf for one of zero."""
    if not math.isfinite(largest):
        return -math.inf
    return math.log2(LARGEST_FP16 / largest) if largest else math.inf


def _count_taken_steps(optimizer: torch.optim.Optimizer) -> list[int]:
    """A counter that the optimizer itself raises, so that skipped steps are seen, not inferred."""
    count = [0]

    def raise_count(*_: object) -> None:
        count[0] += 1

    optimizer.register_step_post_hook(raise_count)
    return count
