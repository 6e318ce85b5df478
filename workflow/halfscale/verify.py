"""Does the hand-written scaler do what loss scaling promises? Named checks, in real fp16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from halfscale.plan import Precision
from halfscale.policies import make_policy
from halfscale.precision import choose
from halfscale.scaling import LossScaler, ManualGradScaler

POWERS_OF_TWO = [2.0**exponent for exponent in range(25)]
Build = Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor], bool]]

# An interval that acts often, and a factor that is no power of two.
_MOVING: dict[str, Any] = {"growth_factor": 1.5, "growth_interval": 9}
SWEEP = [2.0**exponent for exponent in range(-24, 25)]


@dataclass(frozen=True)
class Check:
    """One check: its name, what it measured, what was expected, whether they agree."""

    name: str
    measured: str
    expected: str
    passed: bool

    def as_row(self) -> dict[str, str | bool]:
        return asdict(self)


def _published_case(factor: float = 100.0) -> tuple[nn.Linear, Tensor, Tensor]:
    """Linear(4, 2) on 8 standard normal samples times ``factor``, everything from seed 0."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.randn(8, 4) * factor, torch.randn(8, 2) * factor


def _backward(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    precision: Precision,
    scale: float | None,
    loss_factor: float = 1.0,
) -> None:
    """Leave the gradients of the mean squared error in the model's parameters.

    Without a scale the scaler has no hand in them: they are what it is measured against.
    """
    model.zero_grad(set_to_none=True)
    with choose(precision, inputs.device).autocast():
        loss = mse_loss(model(inputs).float(), targets) * loss_factor
    if scale is not None:
        loss = ManualGradScaler(scale).scale_loss(loss)
    loss.backward()


def _gradients(model: nn.Module) -> Tensor:
    """All gradients of the model as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _unscaled(model: nn.Module, scale: float) -> Tensor:
    ManualGradScaler(scale).unscale_grads(model)
    return _gradients(model)


def _unscaling_case() -> tuple[Tensor, Callable[[float], Tensor]]:
    """Never-scaled fp32 gradients, and what unscaling leaves of those scaled by a factor."""
    model, inputs, targets = _published_case()
    _backward(model, inputs, targets, "fp32", None)
    never_scaled = _gradients(model).clone()

    def unscaled(scale: float) -> Tensor:
        _backward(model, inputs, targets, "fp32", scale)
        return _unscaled(model, scale)

    return never_scaled, unscaled


def check_ratio() -> Check:
    """The largest scaled gradient is S times the largest unscaled one, for every S = 2^0…2^24."""
    model, inputs, targets = _published_case()
    ratios = []
    for scale in POWERS_OF_TWO:
        _backward(model, inputs, targets, "fp32", scale)
        scaled = _gradients(model).abs().max().item()
        unscaled = _unscaled(model, scale).abs().max().item()
        ratios.append(scaled / unscaled)
        if scale == 65536.0:
            shown = f"at 2^16: {scaled:.6g} scaled, {unscaled:.6g} unscaled, ratio {ratios[-1]:g}"
    exact = sum(ratio == scale for ratio, scale in zip(ratios, POWERS_OF_TWO, strict=True))
    return Check(
        "ratio of scaled to unscaled gradients",
        f"{exact} of {len(ratios)} scales exact; {shown}",
        "the scale itself, for every power of two from 2^0 to 2^24; 65536 at 2^16",
        exact == len(ratios),
    )


def check_bit_equality() -> Check:
    """In fp32 a power of two changes exponents only, so unscaling restores every bit."""
    never_scaled, unscaled = _unscaling_case()
    equal = 0
    for scale in POWERS_OF_TWO:
        equal += torch.equal(unscaled(scale), never_scaled)
    return Check(
        "unscaled gradients in fp32, powers of two",
        f"{equal} of {len(POWERS_OF_TWO)} scales bit-equal to never-scaled gradients",
        "all bit-equal",
        equal == len(POWERS_OF_TWO),
    )


def check_other_scales() -> Check:
    """Any other factor rounds; the error stays within a few units in the last place of fp32."""
    never_scaled, unscaled = _unscaling_case()
    worst = 0.0
    for scale in (3.0, 1000.0, 12345.678, 1e6):
        error = (unscaled(scale) - never_scaled).abs() / never_scaled.abs()
        worst = max(worst, error.max().item())
    return Check(
        "unscaled gradients in fp32, other scales",
        f"largest relative error {worst:.2g} over S = 3, 1000, 12345.678, 1e6",
        "not above 1e-5: rounding of fp32, a few units of 1.2e-7 amplified by cancellation",
        0 < worst <= 1e-5,
    )


def check_underflow() -> Check:
    """A loss times 1e-9 loses every fp16 gradient at S=1 and none of the largest at S=2^24."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    inputs, targets = torch.randn(64, 16), torch.randn(64, 1)
    tiny = 1e-9
    _backward(model, inputs, targets, "fp32", None, tiny)
    reference = _gradients(model).clone()
    _backward(model, inputs, targets, "fp16", None, tiny)
    survivors = int(_gradients(model).count_nonzero())
    scale = 2.0**24
    _backward(model, inputs, targets, "fp16", scale, tiny)
    recovered = _unscaled(model, scale)
    error = ((recovered - reference).norm() / reference.norm()).item()
    return Check(
        "underflow in fp16",
        f"S=1: {survivors} of {reference.numel()} gradient elements survive; "
        f"S=2^24: relative error {error:.2g} against fp32",
        "none at S=1; at S=2^24 an error below 2^-9 = 0.002, the precision of fp16",
        survivors == 0 and error < 2.0**-9,
    )


def check_overflow() -> Check:
    """A scale too large gives Inf, the step is skipped, training goes on at a smaller scale."""
    model, inputs, targets = _published_case(factor=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    taken = _manual_step(model, optimizer, inputs, targets, ManualGradScaler(2.0**24))
    after = list(model.parameters())
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    scaler = ManualGradScaler(2.0**8)
    start = mse_loss(model(inputs), targets).item()
    resumed = [_manual_step(model, optimizer, inputs, targets, scaler) for _ in range(50)]
    end = mse_loss(model(inputs), targets).item()
    return Check(
        "overflow in fp16",
        f"S=2^24: step {'taken' if taken else 'skipped'}, parameters "
        f"{'bit-identical' if same else 'changed'}; then S=2^8: {sum(resumed)} of 50 steps taken, "
        f"loss {start:.3g} to {end:.3g}",
        "skipped, bit-identical; then all steps taken and the loss falls",
        not taken and same and all(resumed) and end < start,
    )


def _manual_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    scaler: ManualGradScaler,
) -> bool:
    optimizer.zero_grad(set_to_none=True)
    with choose("fp16", inputs.device).autocast():
        loss = mse_loss(model(inputs).float(), targets)
    scaler.scale_loss(loss).backward()
    scaler.unscale_grads(model)
    return scaler.step(optimizer)


def sweep_scales() -> list[dict[str, float | bool]]:
    """Inputs × 1e4 in fp16: the largest scaled gradient at every scale from 2^-24 to 2^24.

    Returns:
        Rows with ``scale``, ``fp16_largest`` (Inf where fp16 overflows), ``fp32_largest`` (what it
        would be without the limit) and ``overflow``.
    """
    model, inputs, targets = _published_case(factor=1e4)
    rows: list[dict[str, float | bool]] = []
    for scale in SWEEP:
        _backward(model, inputs, targets, "fp32", scale)
        fp32_largest = _gradients(model).abs().max().item()
        _backward(model, inputs, targets, "fp16", scale)
        gradients = _gradients(model)
        overflow = not bool(torch.isfinite(gradients).all())
        rows.append(
            {
                "scale": scale,
                "fp16_largest": math.inf if overflow else gradients.abs().max().item(),
                "fp32_largest": fp32_largest,
                "overflow": overflow,
            }
        )
    return rows


def check_large_inputs(sweep: list[dict[str, float | bool]]) -> Check:
    """Only S < 1 protects against overflow; a larger scale makes it more likely, never less."""
    overflow = {row["scale"]: bool(row["overflow"]) for row in sweep}
    largest_safe = max((s for s in overflow if not overflow[s]), default=math.nan)
    above_one = sum(overflow[s] for s in overflow if s > 1)
    monotone = all(overflow[s] == (s > largest_safe) for s in overflow)
    return Check(
        "overflow with inputs × 1e4",
        f"S=1: {'Inf' if overflow[1.0] else 'finite'}; finite up to S=2^"
        f"{math.log2(largest_safe):.0f}; Inf at {above_one} of "
        f"{sum(s > 1 for s in overflow)} larger scales",
        "Inf at S=1 and at every larger scale; finite below some S < 1",
        overflow[1.0] and monotone and largest_safe < 1,
    )


def check_against_torch(steps: int = 200) -> Check:
    """ManualGradScaler and torch.amp.GradScaler at one fixed scale, some batches overflowing."""
    return _compare_with_torch("ManualGradScaler at a fixed scale", steps, _manual_steps, 2.0**12)


def check_policy_against_torch(steps: int = 200) -> Check:
    """LossScaler with the policy torch and torch.amp.GradScaler, the scale moving for both."""
    return _compare_with_torch("LossScaler with the policy torch", steps, _policy_steps, None)


def _compare_with_torch(name: str, steps: int, build: Build, fixed: float | None) -> Check:
    ours, our_skips = _train_with(build, steps)
    theirs, their_skips = _train_with(partial(_torch_steps, fixed=fixed), steps)
    same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return Check(
        f"{steps} steps against torch.amp.GradScaler: {name}",
        f"parameters {'bit-identical' if same else 'different'}; skipped {sum(our_skips)} and "
        f"{sum(their_skips)} steps, decisions {'equal' if our_skips == their_skips else 'differ'}",
        "bit-identical parameters, equal decisions, some steps skipped and some taken",
        same and our_skips == their_skips and 0 < sum(our_skips) < steps,
    )


def _manual_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], bool]:
    scaler = ManualGradScaler(2.0**12)

    def step(loss: Tensor) -> bool:
        scaler.scale_loss(loss).backward()
        scaler.unscale_grads(model)
        return scaler.step(optimizer)

    return step


def _policy_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], bool]:
    scaler = LossScaler(make_policy("torch", **_MOVING))

    def step(loss: Tensor) -> bool:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return not scaler.skipped

    return step


def _torch_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, fixed: float | None
) -> Callable[[Tensor], bool]:
    scaler = torch.amp.GradScaler("cpu", **({"init_scale": fixed} if fixed else _MOVING))
    taken: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(True))

    def step(loss: Tensor) -> bool:
        taken.clear()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(fixed)
        return bool(taken)

    return step


def _train_with(build: Build, steps: int) -> tuple[list[Tensor], list[bool]]:
    """Train a small network in fp16; every 16th batch is 1000 times larger and overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = build(model, optimizer)
    skips = []
    for index in range(steps):
        inputs = torch.randn(32, 16) * (1000.0 if index % 16 == 5 else 1.0)
        optimizer.zero_grad(set_to_none=True)
        with choose("fp16").autocast():
            loss = mse_loss(model(inputs).float(), inputs[:, :1])
        skips.append(not step(loss))
    return [p.detach() for p in model.parameters()], skips


def run_checks(sweep: list[dict[str, float | bool]]) -> Iterator[Check]:
    """Run every check; each is yielded as soon as it is known."""
    yield check_ratio()
    yield check_bit_equality()
    yield check_other_scales()
    yield check_underflow()
    yield check_overflow()
    yield check_large_inputs(sweep)
    yield check_against_torch()
    yield check_policy_against_torch()
