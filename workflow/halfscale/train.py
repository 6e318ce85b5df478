"""One run: train a workload under one arm from one seed, and record every step."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from halfscale.plan import LARGEST_FP16, RunSpec
from halfscale.policies import FloorReached
from halfscale.precision import Arithmetic, arithmetic
from halfscale.records import TRACE_SCHEMA, Outcome, RunRecord, write_run
from halfscale.scaling import LossScaler, figures
from halfscale.workloads import Workload, build_workload

Trace = dict[str, list[Any]]
FULL_PRECISION = (torch.float32, torch.float64)


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
    _make_deterministic(spec)
    trace: Trace = {name: [] for name in TRACE_SCHEMA.names}
    scaler = LossScaler(spec.policy.make()) if spec.policy else _Unscaled()
    outcome: Outcome
    with arithmetic(spec.precision, spec.device) as used:
        try:
            outcome, error = _run_steps(spec, scaler, used, trace, progress), None
        except _Ended as ended:
            outcome, error = ended.outcome, str(ended)
    return write_run(
        folder,
        trace,
        spec=spec,
        outcome=outcome,
        error=error,
        final_scale=scaler.get_scale() if spec.policy else None,
        environment=_environment(spec, str(used)),
    )


@dataclass(frozen=True)
class _Training:
    """What a step needs; ``taken`` is a counter that the optimizer itself raises."""

    workload: Workload
    scaler: LossScaler | _Unscaled
    arithmetic: Arithmetic
    taken: list[int]
    parameters: list[torch.Tensor]  # of the model, without those that have no element

    @classmethod
    def of(
        cls, workload: Workload, scaler: LossScaler | _Unscaled, arithmetic: Arithmetic
    ) -> _Training:
        taken = _count_taken_steps(workload.optimizer)
        filled: list[torch.Tensor] = [
            p for p in workload.model.parameters() if is_lazy(p) or p.numel()
        ]
        return cls(workload, scaler, arithmetic, taken, filled)


def _run_steps(
    spec: RunSpec,
    scaler: LossScaler | _Unscaled,
    used: Arithmetic,
    trace: Trace,
    progress: Callable[[str], None],
) -> Outcome:
    with _workload_code("building the workload"):
        workload = build_workload(spec.workload, spec.seed, spec.device, dict(spec.parameters))
        training = _Training.of(workload, scaler, used)
        # Such as the -Inf of a mask.
        from_the_start = set(_not_finite(workload.model))
    every = max(1, spec.steps // 10)
    for step in range(spec.steps):
        row = _train_step(training, step)
        for name, value in row.items():
            trace[name].append(value)
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
    for name in _not_finite(workload.model):
        if name not in from_the_start:
            cause = ": an overflow in forward poisons it" if name.startswith("the buffer") else ""
            raise _Ended("diverged", f"{name} is not finite after the last step{cause}")
    return _stuck_or_ok(trace["applied"])


def _not_finite(model: torch.nn.Module) -> list[str]:
    """Which parameters and buffers hold an Inf or NaN; waits for the device once."""
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    flags = {
        f"the {kind} {name}": tensor.detach().isfinite().all()
        for kind, named in kinds.items()
        for name, tensor in named
        if not is_lazy(tensor) and tensor.layout is torch.strided
    }
    finite = torch.stack(list(flags.values())).tolist() if flags else []
    return [name for name, good in zip(flags, finite, strict=True) if not good]


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
    gradients = _gradients(training)
    scaler.unscale_(workload.optimizer)
    loss, grad_norm, largest = figures(losses, gradients)
    # A loss of NaN may have finite gradients; the run ends with the parameters that gave it.
    stepped = math.isfinite(loss)
    if stepped:
        with _workload_code(f"the optimizer in step {step}"):
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
        "seconds": time.perf_counter() - started,
    }


def _backward(training: _Training) -> torch.Tensor:
    """One micro-batch forward and backward; returns its share of the step's loss, fp32."""
    workload = training.workload
    batch = next(workload.batches)
    with training.arithmetic.autocast():
        loss = workload.loss(workload.model, batch)
        if workload.accumulate > 1:
            loss = loss / workload.accumulate
    training.scaler.scale(loss).backward()
    loss = loss.detach().float()
    return loss.squeeze() if loss.ndim else loss


def _gradients(training: _Training) -> list[torch.Tensor]:
    """The gradients of the model, if they are such that they can be unscaled and measured."""
    gradients = [gradient for p in training.parameters if (gradient := p.grad) is not None]
    if not gradients:
        raise _Ended("failed", "no parameter of the model received a gradient")
    for gradient in gradients:
        if gradient.dtype not in FULL_PRECISION:
            error = f"a parameter is in {gradient.dtype}; keep the parameters in float32"
            raise _Ended("failed", error)
    clipped = training.workload.clip_norm is not None
    if clipped and any(gradient.is_sparse for gradient in gradients):
        error = "PyTorch cannot clip a sparse gradient; leave out clip_norm or use sparse=False"
        raise _Ended("failed", error)
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


class _workload_code:
    """A context that turns what the workload's own code raises into an outcome.

    A class, since entering and leaving a generator would cost a small step 1 % of its time.
    """

    def __init__(self, doing: str) -> None:
        self.doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            text = str(error) or "out of memory"
            raise _Ended("out-of-memory", f"{self.doing}: {text}") from error
        if isinstance(error, Exception):
            outcome: Outcome = "failed"
            if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
                outcome = "out-of-memory"
            raise _Ended(outcome, f"{self.doing}: {type(error).__name__}: {error}") from error


def _make_deterministic(spec: RunSpec) -> None:
    """Let nothing but the specification decide a number."""
    # cuBLAS reads this once, when CUDA is initialised.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # The fp32 control is to compute in fp32.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def _environment(spec: RunSpec, used: str) -> dict[str, str | int]:
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
