"""One run: train a workload under one arm from one seed, and record every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from halfscale.faults import Ended, list_non_finite, workload_code
from halfscale.gpu_use import GpuUse
from halfscale.imported import stop_if_edited
from halfscale.machine import (
    describe_machine,
    make_deterministic,
    stop_without_gpu,
    watched_gpu,
)
from halfscale.plan import ProbeSpec, RunSpec
from halfscale.policies import FloorReached
from halfscale.precision import Arithmetic, arithmetic
from halfscale.records import TRACE_SCHEMA, Outcome, RunRecord, write_run
from halfscale.scaling import LossScaler
from halfscale.steps import (
    Observe,
    Training,
    Unscaled,
    stop_if_not_finite,
    train_step,
    unobserved,
)
from halfscale.workloads import build_workload


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
    gpu: GpuUse | None = None


def run_training(
    spec: RunSpec | ProbeSpec,
    record: Callable[[Mapping[str, Any]], None],
    progress: Callable[[str], None],
    observe: Observe = unobserved,
) -> Result:
    """Train as the specification says; what the workload's own code raises is an outcome.

    Args:
        spec: What to run.
        record: Is given the figures of each step: the columns of `TRACE_SCHEMA` and
            ``largest_gradient``, the largest magnitude of the unscaled parameter gradients.
        progress: Is given one line at about every tenth of the steps.
        observe: Given a loss and its batch, a context in which its backward pass is run.

    Raises:
        RuntimeError: If a user's own workload was edited after the run was planned.
    """
    scaler = make_scaler(spec)
    outcome: Outcome
    evaluation = None
    with watched_gpu(spec) as gpu_use, arithmetic(spec.precision, spec.device) as used:
        try:
            training = start_training(spec, scaler, used, observe)
            outcome, error = _run_steps(training, record, progress), None
            evaluation = evaluate_model(training)
        except Ended as ended:
            outcome, error = ended.outcome, str(ended)
        gpu = gpu_use()
    return Result(
        outcome=outcome,
        error=error,
        final_scale=scaler.get_scale() if spec.policy else None,
        evaluation=evaluation,
        environment=describe_machine(spec, str(used)),
        gpu=gpu,
    )


def make_scaler(spec: RunSpec | ProbeSpec) -> LossScaler | Unscaled:
    """The scaler of a run, at its initial scale."""
    return LossScaler(spec.policy.make()) if spec.policy else Unscaled()


def start_training(
    spec: RunSpec | ProbeSpec,
    scaler: LossScaler | Unscaled,
    used: Arithmetic,
    observe: Observe = unobserved,
) -> Training:
    """Build the workload of a run; call it inside the run's arithmetic.

    Raises:
        Ended: If its own code cannot build it.
        RuntimeError: If its own code was edited after the run was planned, or if there is no GPU
            for a run that was planned for one.
    """
    if spec.entry:
        stop_if_edited(spec.entry, spec.source)
    stop_without_gpu(spec)
    make_deterministic(spec)
    with workload_code("building the workload", spec.entry):
        workload = build_workload(
            spec.workload, spec.seed, spec.device, dict(spec.parameters), spec.entry
        )
        training = Training.of(spec, workload, scaler, used, observe)
    make_deterministic(spec)  # whatever the workload's own code has set
    return training


def _run_steps(
    training: Training,
    record: Callable[[Mapping[str, Any]], None],
    progress: Callable[[str], None],
) -> Outcome:
    spec, scaler = training.spec, training.scaler
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
            raise Ended("stuck", f"step {step}: {floor}") from floor
    for name in list_non_finite(training.workload.model):
        if name not in training.usual:
            cause = ": an overflow in forward poisons it" if name.startswith("the buffer") else ""
            raise Ended("diverged", f"{name} is not finite after the last step{cause}")
    return _stuck_or_ok(applied)


def _stuck_or_ok(applied: list[bool]) -> Outcome:
    """A run is stuck if its last half or more was nothing but skipped steps."""
    still_skipping = next((i for i, taken in enumerate(reversed(applied)) if taken), len(applied))
    return "stuck" if 2 * still_skipping >= len(applied) else "ok"


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
        raise Ended("failed", f"evaluate returned a {kind}; return one number") from None
    return number if math.isfinite(number) else None
