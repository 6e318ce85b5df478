"""One run: train a workload under one arm from one seed, and record every step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from halfscale.faults import Ended as _Ended
from halfscale.faults import check_loss, find_non_finite, workload_code
from halfscale.imported import stop_if_edited
from halfscale.machine import describe_machine, make_deterministic
from halfscale.plan import LARGEST_FP16, ProbeSpec, RunSpec
from halfscale.policies import FloorReached
from halfscale.precision import Arithmetic, arithmetic
from halfscale.records import TRACE_SCHEMA, Outcome, RunRecord, write_run
from halfscale.scaling import LossScaler
from halfscale.workloads import Workload, build_workload


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


def train(spec: RunSpec, folder: Path, progress: Callable[[str], None] = print) -> RunRecord:
    """Train one run and write its trace and record.

    Training that diverges, gets stuck, runs out of memory or raises inside the workload is a result
    with that outcome; only an error of halfscale or of the disk raises.

    Args:
        spec: What to run.
        folder: Where ``trace.parquet`` and ``run.json`` go.
        progress: Is given one line at about every tenth of the steps.

    Raises:
        OSError: If the files cannot be written.
        RuntimeError: If a user's own workload was edited after the run was planned.
    """
    trace: dict[str, list[Any]] = {name: [] for name in TRACE_SCHEMA.names}

    def record(row: Mapping[str, Any]) -> None:
        for name, column in trace.items():
            column.append(row[name])

    result = run_training(spec, record, progress)
    return write_run(folder, trace, spec=spec, **asdict(result))


@dataclass(frozen=True)
class Result:
    """How a training ended, in the words of `RunRecord`."""

    outcome: Outcome
    error: str | None
    final_scale: float | None
    evaluation: float | None
    environment: dict[str, str | int]


Observe = Callable[[torch.Tensor], AbstractContextManager[None]]


def run_training(
    spec: RunSpec | ProbeSpec,
    record: Callable[[Mapping[str, Any]], None],
    progress: Callable[[str], None],
    observe: Observe = lambda loss: nullcontext(),
) -> Result:
    """Train as the specification says; what the workload's own code raises is an outcome.

    Args:
        spec: What to run.
        record: Is given the figures of each step: the columns of `TRACE_SCHEMA` and
            ``largest_gradient``, the largest magnitude of the unscaled parameter gradients.
        progress: Is given one line at about every tenth of the steps.
        observe: Given a loss, a context in which its backward pass is run.

    Raises:
        RuntimeError: If a user's own workload was edited after the run was planned.
    """
    scaler = make_scaler(spec)
    outcome: Outcome
    evaluation = None
    with arithmetic(spec.precision, spec.device) as used:
        try:
            training = start_training(spec, scaler, used, observe)
            outcome, error = _run_steps(training, record, progress), None
            evaluation = evaluate_model(training)
        except _Ended as ended:
            outcome, error = ended.outcome, str(ended)
    return Result(
        outcome=outcome,
        error=error,
        final_scale=scaler.get_scale() if spec.policy else None,
        evaluation=evaluation,
        environment=describe_machine(spec, str(used)),
    )


@dataclass(frozen=True)
class Training:
    """What a step needs.

    Attributes:
        spec: The run's specification.
        workload: The workload, built.
        scaler: What scales its loss.
        arithmetic: How it computes.
        taken: A counter that the optimizer itself raises.
        observe: Given a loss, a context for its backward pass.
        batches: The micro-batches of the step.
        usual: What the first batch held of NaN or Inf though its loss was finite.
    """

    spec: RunSpec | ProbeSpec
    workload: Workload
    scaler: LossScaler | Unscaled
    arithmetic: Arithmetic
    taken: list[int]
    observe: Observe
    batches: list[Any] = field(default_factory=list)
    usual: list[str | None] = field(default_factory=list)


def make_scaler(spec: RunSpec | ProbeSpec) -> LossScaler | Unscaled:
    """The scaler of a run, at its initial scale."""
    return LossScaler(spec.policy.make()) if spec.policy else Unscaled()


def start_training(
    spec: RunSpec | ProbeSpec,
    scaler: LossScaler | Unscaled,
    used: Arithmetic,
    observe: Observe = lambda loss: nullcontext(),
) -> Training:
    """Build the workload of a run; call it inside the run's arithmetic.

    Raises:
        Ended: If its own code cannot build it.
        RuntimeError: If its own code was edited after the run was planned.
    """
    if spec.entry:
        stop_if_edited(spec.entry, spec.source)
    make_deterministic(spec)
    with workload_code("building the workload", spec.entry):
        workload = build_workload(
            spec.workload, spec.seed, spec.device, dict(spec.parameters), spec.entry
        )
        taken = _count_taken_steps(workload.optimizer)
    make_deterministic(spec)  # whatever the workload's own code has set
    return Training(spec, workload, scaler, used, taken, observe)


def _run_steps(
    training: Training,
    record: Callable[[Mapping[str, Any]], None],
    progress: Callable[[str], None],
) -> Outcome:
    spec, workload, scaler = training.spec, training.workload, training.scaler
    applied: list[bool] = []
    every = max(1, spec.steps // 10)
    for step in range(spec.steps):
        row = train_step(training, step)
        record(row)
        applied.append(row["applied"])
        if (step + 1) % every == 0 or step + 1 == spec.steps:
            progress(
                f"step {step + 1}/{spec.steps}  loss {row['loss']:.6g}  scale {row['scale']:g}"
                f"  skipped {step + 1 - training.taken[0]}"
            )
        stop_if_not_finite(training, step, row["loss"])
        try:
            scaler.update()
        except FloorReached as floor:
            raise _Ended("stuck", f"step {step}: {floor}") from floor
    largest = torch.stack(torch._foreach_norm(list(workload.model.parameters()), math.inf))
    if not bool(torch.isfinite(largest).all()):
        raise _Ended("diverged", "a parameter is not finite after the last step")
    return _stuck_or_ok(applied)


def _stuck_or_ok(applied: list[bool]) -> Outcome:
    """A run is stuck if its last half or more was nothing but skipped steps."""
    still_skipping = next((i for i, taken in enumerate(reversed(applied)) if taken), len(applied))
    return "stuck" if 2 * still_skipping >= len(applied) else "ok"


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
        training.batches.clear()
        losses = [_backward(training, step) for _ in range(workload.accumulate)]
    gradients = _gradients(workload.model)
    scaler.unscale_(workload.optimizer)
    # One transfer from the device for all figures of the step.
    loss, grad_norm, largest = torch.stack(
        [
            torch.stack(losses).sum(),
            torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))),
            torch.stack(torch._foreach_norm(gradients, math.inf)).max(),
        ]
    ).tolist()
    with workload_code(f"the optimizer in step {step}", training.spec.entry):
        if workload.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(workload.model.parameters(), workload.clip_norm)
        scaler.step(workload.optimizer)
        applied = training.taken[0] > taken_before
        if applied and workload.scheduler is not None:
            workload.scheduler.step()
    return {
        "step": step,
        "loss": loss,
        "scale": scale,
        # With scaling a step is skipped exactly on an overflow; without, it is taken all the same.
        "overflow": not math.isfinite(largest) if isinstance(scaler, Unscaled) else not applied,
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
        loss = check_loss(workload.loss(workload.model, batch), step) / workload.accumulate
    with training.observe(loss):
        training.scaler.scale(loss).backward()
    return loss.detach().float().squeeze()


def _next_batch(training: Training, step: int) -> Any:
    try:
        batch = next(training.workload.batches)
    except StopIteration:
        raise _Ended(
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
            # A mask of -inf, say, is in every batch and harms no loss.
            training.usual.append(find_non_finite(training.batches))
        return
    found = find_non_finite(training.batches)
    if found and found not in training.usual:
        raise _Ended("failed", f"the batch of step {step} holds {found}; clean the data")
    raise _Ended("diverged", f"the loss became {loss} in step {step}")


def evaluate_model(training: Training) -> float | None:
    """What the workload's own ``evaluate`` says of the trained model; None if not finite.

    Raises:
        Ended: If it raises, or returns what is no number.
    """
    model, evaluate = training.workload.model, training.workload.evaluate
    if evaluate is None:
        return None
    modes = [(module, module.training) for module in model.modules()]
    with (
        workload_code("evaluate", training.spec.entry),
        torch.no_grad(),
        training.arithmetic.autocast(),
    ):
        model.eval()
        value = evaluate(model)
    for module, mode in modes:
        module.training = mode
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise _Ended("failed", f"evaluate returned a {kind}; return one number") from None
    return number if math.isfinite(number) else None


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """The gradients of the model, if they are such that they can be unscaled and measured."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        raise _Ended("failed", "no parameter of the model received a gradient")
    if any(gradient.is_sparse for gradient in gradients):
        raise _Ended("failed", "a gradient is sparse; build the embedding with sparse=False")
    if any(gradient.dtype in (torch.float16, torch.bfloat16) for gradient in gradients):
        raise _Ended("failed", "a parameter is in half precision; keep the parameters in float32")
    return gradients


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
