"""Try a user's own workload before it is compared: a few steps in each precision."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfscale.config import flow
from halfscale.faults import Ended, tensors_of
from halfscale.plan import RunSpec
from halfscale.precision import arithmetic
from halfscale.single import name_workload, plan_single, read_settings
from halfscale.steps import Training, stop_if_not_finite, train_step
from halfscale.train import evaluate_model, make_scaler, start_training
from halfscale.workloads import Workload

STEPS = 3
ARMS = ("fp32", "bf16", "default")


class Unusable(ValueError):
    """The workload cannot be trained; the message is one line that says what to change."""


@dataclass(frozen=True)
class Attempt:
    """What the steps in one precision showed.

    Attributes:
        precision: fp32, bf16 or fp16.
        rows: The steps, as a run's trace has them.
        evaluation: What ``evaluate`` returned.
        arithmetic: What computed them.
        ended: Why they ended early, or None.
        start: Figures by which two builds from one seed can be told apart.
        training: The trained workload.
    """

    precision: str
    rows: Sequence[Mapping[str, Any]]
    evaluation: float | None
    arithmetic: str
    ended: str | None
    start: tuple[str, ...]
    training: Training


def check_workload(entry: str, settings: Sequence[str] = (), device: str = "auto") -> str:
    """Train a few steps in fp32, bf16 and fp16 and describe what happened.

    Args:
        entry: ``path/to/file.py:build`` or ``package.module:build``.
        settings: ``key=value`` each, for ``build``'s parameters.
        device: auto, cpu or cuda.

    Raises:
        ConfigError: If the entry or a setting cannot be used.
        Unusable: If the workload cannot be trained.
    """
    name, block = name_workload(entry), {"entry": entry, **read_settings(settings)}
    plan = plan_single(name, block, device)
    attempts = [_attempt(plan.run(name, arm, 0)) for arm in ARMS]
    parts = [
        _describe(attempts[0].training),
        _tabulate(attempts),
        "\n".join(f"- {note}" for note in _find_notes(attempts)),
        _block_to_write(name, block, plan.workloads[name].parameters),
    ]
    return "\n\n".join(part for part in parts if part)


def _attempt(spec: RunSpec) -> Attempt:
    scaler, rows = make_scaler(spec), []
    evaluation = ended = None
    try:
        with arithmetic(spec.precision, spec.device) as used:
            training = start_training(spec, scaler, used)
            start = _fingerprint(list(training.workload.model.parameters()))
            try:
                for step in range(min(STEPS, spec.steps)):
                    rows.append(train_step(training, step))
                    if step == 0:
                        start += _fingerprint(training.batches)
                    stop_if_not_finite(training, step, rows[-1]["loss"])
                    scaler.update()
                evaluation = evaluate_model(training)
            except Ended as error:
                # What only lower precision cannot do is a finding, and what a run would record.
                if error.outcome != "diverged" or spec.precision == "fp32":
                    raise
                ended = str(error)
    except Ended as error:
        text = " ".join(str(error).split())
        raise Unusable(f"{spec.entry}: in {spec.precision}: {error.outcome}: {text}") from error
    return Attempt(spec.precision, rows, evaluation, str(used), ended, start, training)


def _fingerprint(parts: object) -> tuple[str, ...]:
    return tuple(repr(part.detach().double().sum().item()) for part in tensors_of(parts))


def _describe(training: Training) -> str:
    workload, model = training.workload, training.workload.model
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    dtypes = ", ".join(sorted({_short(parameter.dtype) for parameter in parameters}))
    groups = [group for group in workload.optimizer.param_groups if "lr" in group]
    rates = sorted({f"{group.get('initial_lr', group['lr']):g}" for group in groups})
    also = [
        *([] if workload.clip_norm is None else [f"clip_norm {workload.clip_norm:g}"]),
        *([f"accumulate {workload.accumulate}"] if workload.accumulate > 1 else []),
        *([type(workload.scheduler).__name__] if workload.scheduler else []),
        *(["evaluate"] if workload.evaluate else []),
    ]
    lines = {
        "model": f"{type(model).__name__}, {count:,} parameters, {dtypes}, {training.spec.device}",
        "optimizer": f"{type(workload.optimizer).__name__}, lr {', '.join(rates) or '-'}",
        "batch": _describe_batch(training.batches[-1]),
        "also": ", ".join(also) or "no clip_norm, accumulate, scheduler or evaluate",
    }
    return "\n".join(f"{name:<10} {value}" for name, value in lines.items())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_batch(batch: object) -> str:
    if isinstance(batch, torch.Tensor):
        return f"{_short(batch.dtype)} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{key}: {_describe_batch(part)}" for key, part in batch.items())
    if isinstance(batch, list | tuple):
        return f"({', '.join(map(_describe_batch, batch))})"
    return type(batch).__name__


def _tabulate(attempts: Sequence[Attempt]) -> str:
    head = ["", *(f"loss {step}" for step in range(STEPS)), "headroom", "skipped", "ms a step"]
    evaluated = any(attempt.evaluation is not None for attempt in attempts)
    rows = [[*head, *(["evaluate"] if evaluated else []), "arithmetic"]]
    for attempt in attempts:
        losses = [f"{row['loss']:.6g}" for row in attempt.rows]
        skipped = sum(not row["applied"] for row in attempt.rows)
        seconds = statistics.median(row["seconds"] for row in attempt.rows)
        value = "-" if attempt.evaluation is None else f"{attempt.evaluation:.6g}"
        rows.append(
            [
                attempt.precision,
                *(losses + ["-"] * (STEPS - len(losses))),
                _headroom(min(row["headroom"] for row in attempt.rows)),
                str(skipped),
                f"{seconds * 1e3:.1f}",
                *([value] if evaluated else []),
                attempt.arithmetic,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def _headroom(bits: float) -> str:
    if math.isinf(bits):
        return "overflow" if bits < 0 else "all zero"
    return f"{bits:.1f} bits"


def _find_notes(attempts: Sequence[Attempt]) -> list[str]:
    """What the user should know before a comparison, most serious first."""
    fp32, _, fp16 = attempts
    notes = []
    if len({attempt.start for attempt in attempts}) > 1:
        notes.append(
            "two builds from one seed began with other weights or another first batch: draw all of "
            "them from the seed, or the comparison with fp32 is not paired"
        )
    notes += [f"{a.precision}: {a.ended}" for a in attempts if a.ended]
    if fp16.ended:
        notes.append("the forward pass leaves the range of fp16, which no loss scaling mends")
    if len({row["loss"] for row in fp32.rows}) == 1:
        notes.append("the loss did not change in fp32: does it come from what the optimizer moves?")
    overflows = sum(bool(row["overflow"]) for row in fp16.rows)
    if overflows:
        notes.append(f"{overflows} of {len(fp16.rows)} steps overflow in fp16 from a scale of 2^16")
    if any(row["headroom"] == math.inf for row in fp16.rows):
        notes.append("all gradients are zero in some step of fp16: they may be lost to underflow")
    return notes + _note_workload(fp32.training.workload)


def _note_workload(workload: Workload) -> list[str]:
    notes = []
    model = workload.model
    held = {id(p) for group in workload.optimizer.param_groups for p in group["params"]}
    trained = {name: id(p) for name, p in model.named_parameters() if p.requires_grad}
    if left_out := [name for name, identity in trained.items() if identity not in held]:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        notes.append(f"the optimizer leaves out {', '.join(left_out[:3])}{more}")
    if any("BatchNorm" in type(module).__name__ for module in model.modules()):
        notes.append(
            "BatchNorm: an overflow in the forward pass stays in its running statistics, though "
            "the step is skipped"
        )
    if workload.clip_norm is None:
        notes.append("clip_norm is not set: if your training clips gradients, return it")
    if workload.scheduler is None:
        notes.append("no scheduler: if your training has one, return it")
    return notes


def _block_to_write(name: str, block: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    written = {"entry": block["entry"], "steps": 100, **block}
    line = f"workloads:\n  {flow({name: written})}"
    left = {key: value for key, value in parameters.items() if key not in written}
    also = f"\n  # it also takes {flow(left)}" if left else ""
    return f"Write into config.yaml:\n\n{line}{also}"
