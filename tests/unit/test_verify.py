"""The verification passes, and each of its checks fails for a scaler broken in its way."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfscale import verify
from halfscale.scaling import ManualGradScaler
from halfscale.verify import Check, run_checks, sweep_scales

RATIO = "ratio of scaled to unscaled gradients"
BITS = "unscaled gradients in fp32, powers of two"
OTHER = "unscaled gradients in fp32, other scales"
UNDERFLOW = "underflow in fp16"
OVERFLOW = "overflow in fp16"
INPUTS = "overflow with inputs × 1e4"
TORCH = "200 steps against torch.amp.GradScaler: ManualGradScaler at a fixed scale"
POLICY = "200 steps against torch.amp.GradScaler: LossScaler with the policy torch"
ALL = [RATIO, BITS, OTHER, UNDERFLOW, OVERFLOW, INPUTS, TORCH, POLICY]

Optimizer = torch.optim.Optimizer


@pytest.fixture(scope="module")
def checks() -> dict[str, Check]:
    return {check.name: check for check in run_checks(sweep_scales())}


@pytest.mark.parametrize("name", ALL)
def test_every_check_passes_and_says_what_it_measured(checks: dict[str, Check], name: str) -> None:
    check = checks[name]
    assert check.passed, check
    assert any(character.isdigit() for character in check.measured)
    assert check.expected
    assert check.as_row() == {
        "name": name,
        "measured": check.measured,
        "expected": check.expected,
        "passed": True,
    }


def test_no_check_is_left_out(checks: dict[str, Check]) -> None:
    assert list(checks) == ALL


def test_the_published_numbers(checks: dict[str, Check]) -> None:
    # Linear(4, 2), 8 standard normal samples × 100, seed 0, mean squared error.
    assert "25 of 25" in checks[RATIO].measured
    assert "ratio 65536" in checks[RATIO].measured
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    inputs, targets = torch.randn(8, 4) * 100, torch.randn(8, 2) * 100
    nn.functional.mse_loss(model(inputs), targets).backward()
    largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    assert f"{largest:.6g} unscaled" in checks[RATIO].measured
    assert f"{largest * 65536:.6g} scaled" in checks[RATIO].measured


def test_the_sweep_shows_that_a_larger_scale_never_cures_an_overflow() -> None:
    sweep = sweep_scales()
    assert [row["scale"] for row in sweep] == [2.0**exponent for exponent in range(-24, 25)]
    overflow = [bool(row["overflow"]) for row in sweep]
    assert overflow == sorted(overflow)
    assert overflow[24], "S = 1 must overflow"
    assert not overflow[0]
    for row in sweep:
        assert math.isinf(row["fp16_largest"]) == row["overflow"]
        assert row["overflow"] or row["fp16_largest"] <= 65504
        if 64 < row["fp16_largest"] < math.inf:
            assert row["fp16_largest"] == pytest.approx(row["fp32_largest"], rel=0.01)


original_unscale = ManualGradScaler.unscale_grads
original_step = ManualGradScaler.step


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def unscale_times(factor: float) -> Callable[[ManualGradScaler, nn.Module], None]:
    def unscale(self: ManualGradScaler, model: nn.Module) -> None:
        original_unscale(self, model)
        for gradient in gradients(model):
            gradient.mul_(factor)

    return unscale


def no_unscale(self: ManualGradScaler, model: nn.Module) -> None:
    kept = [gradient.clone() for gradient in gradients(model)]
    original_unscale(self, model)
    for gradient, scaled in zip(gradients(model), kept, strict=True):
        gradient.copy_(scaled)


def first_only(self: ManualGradScaler, model: nn.Module) -> None:
    kept = [gradient.clone() for gradient in gradients(model)[1:]]
    original_unscale(self, model)
    for gradient, scaled in zip(gradients(model)[1:], kept, strict=True):
        gradient.copy_(scaled)


def through_fp16(self: ManualGradScaler, model: nn.Module) -> None:
    original_unscale(self, model)
    for gradient in gradients(model):
        gradient.copy_(gradient.half())


def never_skip(self: ManualGradScaler, optimizer: Optimizer) -> bool:
    original_step(self, _Nothing())  # type: ignore[arg-type]
    optimizer.step()
    return True


class _Nothing:
    def step(self) -> None: ...


def always_skip(self: ManualGradScaler, optimizer: Optimizer) -> bool:
    original_step(self, _Nothing())  # type: ignore[arg-type]
    return False


def step_then_report_skip(self: ManualGradScaler, optimizer: Optimizer) -> bool:
    """Take every step, but report overflows as skipped."""
    taken = original_step(self, _Nothing())  # type: ignore[arg-type]
    optimizer.step()
    return taken


def skip_without_report(self: ManualGradScaler, optimizer: Optimizer) -> bool:
    original_step(self, optimizer)
    return True


def zero_instead_of_skip(self: ManualGradScaler, optimizer: Optimizer) -> bool:
    """On an overflow, zero the gradients and step all the same: momentum then moves on."""
    if original_step(self, _Nothing()):  # type: ignore[arg-type]
        optimizer.step()
        return True
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return False


def only_nan(self: ManualGradScaler, model: nn.Module) -> None:
    """Take Inf for a number like any other."""
    original_unscale(self, model)
    has_nan = any(bool(gradient.isnan().any()) for gradient in gradients(model))
    self._non_finite = [torch.tensor(float(has_nan))]


def no_scaling(self: ManualGradScaler, loss: Tensor) -> Tensor:
    return loss * 1.0


def inverse_scaling(self: ManualGradScaler, loss: Tensor) -> Tensor:
    return loss / self.scale


def double_scaling(self: ManualGradScaler, loss: Tensor) -> Tensor:
    return loss * self.scale * 2


BROKEN: dict[str, tuple[str, Callable[..., object], set[str]]] = {
    "gradients are not unscaled": ("unscale_grads", no_unscale, {RATIO, BITS, OTHER, UNDERFLOW}),
    "gradients are halved": ("unscale_grads", unscale_times(0.5), {RATIO, BITS, OTHER, UNDERFLOW}),
    "gradients are off by one bit": ("unscale_grads", unscale_times(1 + 2.0**-22), {RATIO, BITS}),
    "gradients are off by 0.1 %": ("unscale_grads", unscale_times(1.001), {RATIO, BITS, OTHER}),
    "only the first is unscaled": ("unscale_grads", first_only, {BITS, OTHER, UNDERFLOW}),
    "gradients pass through fp16": ("unscale_grads", through_fp16, {BITS, OTHER, UNDERFLOW}),
    "Inf is not seen": ("unscale_grads", only_nan, {TORCH}),
    "no step is ever skipped": ("step", never_skip, {OVERFLOW, TORCH}),
    "every step is skipped": ("step", always_skip, {OVERFLOW, TORCH}),
    "skipped steps are taken": ("step", step_then_report_skip, {OVERFLOW, TORCH}),
    "skipped steps are not reported": ("step", skip_without_report, {OVERFLOW, TORCH}),
    "momentum moves in skipped steps": ("step", zero_instead_of_skip, {TORCH}),
    "the loss is not scaled": ("scale_loss", no_scaling, {BITS, OTHER, UNDERFLOW, INPUTS}),
    "the loss is divided": ("scale_loss", inverse_scaling, {BITS, OTHER, INPUTS}),
    "the loss is scaled twice": ("scale_loss", double_scaling, {BITS, OTHER, UNDERFLOW}),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_scaler_fails_the_checks_that_are_there_for_it(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    method, replacement, expected = BROKEN[broken]
    monkeypatch.setattr(ManualGradScaler, method, replacement)
    failed = {check.name for check in run_checks(sweep_scales()) if not check.passed}
    assert expected <= failed


def test_every_check_fails_for_some_broken_scaler() -> None:
    # What is broken here is the manual scaler; the other one has tests of its own.
    failing = set().union(*(expected for _, _, expected in BROKEN.values()))
    assert failing == set(ALL) - {POLICY}


def test_a_loss_that_nothing_scales_does_not_pass_for_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ManualGradScaler, "scale_loss", no_scaling)
    monkeypatch.setattr(ManualGradScaler, "unscale_grads", no_unscale)
    failed = {check.name for check in run_checks(sweep_scales()) if not check.passed}
    assert {RATIO, OTHER, UNDERFLOW} <= failed


def test_checks_do_not_depend_on_each_other_or_on_the_generator() -> None:
    torch.manual_seed(4321)
    alone = verify.check_against_torch()
    assert alone in list(run_checks(sweep_scales()))
