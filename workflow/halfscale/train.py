"""One run: train a workload under one arm from one seed, and record every step."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfscale.plan import LARGEST_FP16, ProbeSpec, RunSpec
from halfscale.policies import FloorReached
from halfscale.precision import Arithmetic, arithmetic
from halfscale.records import TRACE_SCHEMA, Outcome, RunRecord, write_run
from halfscale.scaling import LossScaler
from halfscale.workloads import Workload, build_workload


class _Unscaled:
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


class _Ended(Exception):
    """The training cannot go on: an outcome, not an error of halfscale."""

    def __init__(self, outcome: Outcome, error: str) -> None:
        super().__init__(error)
        self.outcome = outcome


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
    """
    trace: dict[str, list[Any]] = {name: [] for name in TRACE_SCHEMA.names}

    def record(row: Mapping[str, Any]) -> None:
        for name, column in trace.items():
            column.append(row[name])

    ended = run_training(spec, record, progress)
    return write_run(
        folder,
        trace,
        spec=spec,
        outcome=ended.outcome,
        error=ended.error,
        final_scale=ended.final_scale,
        environment=ended.environment,
    )


@dataclass(frozen=True)
class Ended:
    """How a training ended.

    Attributes:
        outcome: See `RunRecord`.
        error: The error's text, or None.
        final_scale: The scale after the last step; None where nothing was scaled.
        environment: What computed it.
    """

    outcome: Outcome
    error: str | None
    final_scale: float | None
    environment: dict[str, str | int]


Observe = Callable[[torch.Tensor], AbstractContextManager[None]]


def run_training(
    spec: RunSpec | ProbeSpec,
    record: Callable[[Mapping[str, Any]], None],
    progress: Callable[[str], None],
    observe: Observe = lambda loss: nullcontext(),
) -> Ended:
    """Train as the specification says; what the workload's own code raises is an outcome.

    Args:
        spec: What to run.
        record: Is given the figures of each step: the columns of `TRACE_SCHEMA` and
            ``largest_gradient``, the largest magnitude of the unscaled parameter gradients.
        progress: Is given one line at about every tenth of the steps.
        observe: Given a loss, a context in which its backward pass is run.
    """
    _make_deterministic(spec)
    scaler = LossScaler(spec.policy.make()) if spec.policy else _Unscaled()
    outcome: Outcome
    with arithmetic(spec.precision, spec.device) as used:
        try:
            training = _build(spec, scaler, used, observe)
            outcome, error = _run_steps(spec, training, record, progress), None
        except _Ended as ended:
            outcome, error = ended.outcome, str(ended)
    scale = scaler.get_scale() if spec.policy else None
    return Ended(outcome, error, scale, _environment(spec, str(used)))


@dataclass(frozen=True)
class _Training:
    """What a step needs; ``taken`` is a counter that the optimizer itself raises."""

    workload: Workload
    scaler: LossScaler | _Unscaled
    arithmetic: Arithmetic
    taken: list[int]
    observe: Observe


def _build(
    spec: RunSpec | ProbeSpec, scaler: LossScaler | _Unscaled, used: Arithmetic, observe: Observe
) -> _Training:
    with _workload_code("building the workload"):
        workload = build_workload(spec.workload, spec.seed, spec.device, dict(spec.parameters))
        return _Training(workload, scaler, used, _count_taken_steps(workload.optimizer), observe)


def _run_steps(
    spec: RunSpec | ProbeSpec,
    training: _Training,
    record: Callable[[Mapping[str, Any]], None],
    progress: Callable[[str], None],
) -> Outcome:
    workload, scaler = training.workload, training.scaler
    applied: list[bool] = []
    every = max(1, spec.steps // 10)
    for step in range(spec.steps):
        row = _train_step(training, step)
        record(row)
        applied.append(row["applied"])
        if (step + 1) % every == 0 or step + 1 == spec.steps:
            progress(
                f"step {step + 1}/{spec.steps}  loss {row['loss']:.6g}  scale {row['scale']:g}"
                f"  skipped {step + 1 - training.taken[0]}"
            )
        if not math.isfinite(row["loss"]):
            raise _Ended("diverged", f"the loss became {row['loss']} in step {step}")
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


def _train_step(training: _Training, step: int) -> dict[str, Any]:
    """Everything of one step but the scaler's update; returns its row of the trace."""
    started = time.perf_counter()
    workload, scaler = training.workload, training.scaler
    scale, taken_before = scaler.get_scale(), training.taken[0]
    with _workload_code(f"step {step}"):
        workload.optimizer.zero_grad(set_to_none=True)
        losses = [_backward(training) for _ in range(workload.accumulate)]
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
    with _workload_code(f"the optimizer in step {step}"):
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
        "overflow": not math.isfinite(largest) if isinstance(scaler, _Unscaled) else not applied,
        "applied": applied,
        "grad_norm": grad_norm,
        "headroom": _headroom(largest * scale),
        "largest_gradient": largest,
        "seconds": time.perf_counter() - started,
    }


def _backward(training: _Training) -> torch.Tensor:
    """One micro-batch forward and backward; returns its share of the step's loss, fp32."""
    workload = training.workload
    batch = next(workload.batches)
    with training.arithmetic.autocast():
        loss = workload.loss(workload.model, batch) / workload.accumulate
    with training.observe(loss):
        training.scaler.scale(loss).backward()
    return loss.detach().float().squeeze()


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


@contextmanager
def _workload_code(doing: str) -> Iterator[None]:
    """Turn what the workload's own code raises into an outcome."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _Ended("out-of-memory", f"{doing}: {str(error) or 'out of memory'}") from error
    except Exception as error:
        outcome: Outcome = "failed"
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            outcome = "out-of-memory"
        raise _Ended(outcome, f"{doing}: {type(error).__name__}: {error}") from error


def _make_deterministic(spec: RunSpec | ProbeSpec) -> None:
    """Let nothing but the specification decide a number."""
    # cuBLAS reads this once, when CUDA is initialised.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # The fp32 control is to compute in fp32.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def _environment(spec: RunSpec | ProbeSpec, used: str) -> dict[str, str | int]:
    on_gpu = spec.device == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "arithmetic": used,
        "threads": spec.threads,
        "source": spec.source,
    }
