"""What users of a gradient scaler get wrong, on the workloads, and what it costs them.

Where PyTorch's scaler does the same, both do it here and must agree bit for bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from halfscale import train as training
from halfscale.plan import RunSpec
from halfscale.policies import make_policy
from halfscale.precision import arithmetic
from halfscale.records import RunRecord, read_run
from halfscale.scaling import LossScaler
from halfscale.workloads import Workload, build_workload

from .crafted import make_plan

Scaler = LossScaler | torch.amp.GradScaler
NEVER = 10**9  # as a growth interval

SCALERS: dict[str, Callable[..., Scaler]] = {
    "ours": lambda **settings: LossScaler(make_policy("torch", **settings)),
    "torch": lambda **settings: torch.amp.GradScaler("cpu", **settings),
}
either_scaler = pytest.mark.parametrize("make", SCALERS.values(), ids=SCALERS)

pytestmark = pytest.mark.usefixtures("torch_settings")


@pytest.fixture(autouse=True)
def _fp16(torch_settings: None) -> Iterator[None]:
    torch.set_num_threads(1)
    with arithmetic("fp16", "cpu", native=False):
        yield


def forward(workload: Workload, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return workload.loss(workload.model, batch)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten().clone() for tensor in tensors])


def weights(workload: Workload) -> Tensor:
    return flat(workload.model.parameters())


def gradients(workload: Workload) -> Tensor:
    return flat(p.grad for p in workload.model.parameters() if p.grad is not None)


def train(
    monkeypatch: pytest.MonkeyPatch, results: Path, workload: Workload, arm: str = "a", **how: Any
) -> tuple[RunRecord, dict[str, list[Any]]]:
    """Train a workload through `halfscale.train`, with the given initial scale or control."""
    steps = how.pop("steps", 10)
    plan = make_plan({"a": how}, seeds=[0], workloads={"binary": {"steps": steps}})
    spec: RunSpec = plan.run("binary", arm, 0)
    monkeypatch.setattr(training, "build_workload", lambda *_: workload)
    training.train(spec, results / spec.folder, lambda line: None)
    record, trace = read_run(results, spec)
    return record, trace.to_pydict()


# Clipping


def clipped_steps(scaler: Scaler, *, before: bool) -> tuple[float, float, bytes]:
    """Ten steps of `text`: the last gradients' norm, the weights' way, every bit of the weights."""
    workload = build_workload("text", 0, "cpu", {})
    start, parameters = weights(workload), list(workload.model.parameters())
    for batch in islice(workload.batches, 10):
        workload.optimizer.zero_grad()
        scaler.scale(forward(workload, batch)).backward()
        if before:
            nn.utils.clip_grad_norm_(parameters, workload.clip_norm)
        scaler.unscale_(workload.optimizer)
        if not before:
            nn.utils.clip_grad_norm_(parameters, workload.clip_norm)
        norm = float(gradients(workload).norm())
        scaler.step(workload.optimizer)
        scaler.update()
        workload.scheduler.step()
    end = weights(workload)
    return norm, float((end - start).norm()), end.numpy().tobytes()


def test_gradients_clipped_before_they_are_unscaled_are_clipped_to_almost_nothing() -> None:
    right, wrong = (clipped_steps(SCALERS["ours"](), before=before) for before in (False, True))
    assert right[0] == pytest.approx(0.5, rel=1e-3)
    assert wrong[0] == pytest.approx(0.5 / 2**16, rel=1e-3)
    # AdamW divides by the gradients' size and hides most of it, as long as they exceed its epsilon.
    assert wrong[1] < 0.8 * right[1]
    for before, ours in ((False, right), (True, wrong)):
        assert clipped_steps(SCALERS["torch"](), before=before)[2] == ours[2]


# Accumulation


def digits() -> tuple[Workload, Any, list[Any]]:
    """`digits`, a batch of it, and the same in four parts."""
    workload = build_workload("digits", 0, "cpu", {})
    images, labels = next(workload.batches)
    return workload, (images, labels), list(zip(images.chunk(4), labels.chunk(4), strict=True))


def full_batch() -> Tensor:
    workload, whole, _ = digits()
    scaler = SCALERS["ours"]()
    scaler.scale(forward(workload, whole)).backward()
    scaler.unscale_(workload.optimizer)
    return gradients(workload)


@either_scaler
def test_micro_batches_unscaled_once_give_the_full_batchs_gradients(
    make: Callable[..., Scaler],
) -> None:
    (workload, _, parts), scaler = digits(), make()
    for part in parts:
        scaler.scale(forward(workload, part) / len(parts)).backward()
    scaler.unscale_(workload.optimizer)
    whole = full_batch()
    assert (gradients(workload) - whole).norm() < 2.0**-10 * whole.norm()


@either_scaler
def test_unscaling_after_each_micro_batch_is_refused(make: Callable[..., Scaler]) -> None:
    (workload, _, parts), scaler = digits(), make()
    scaler.scale(forward(workload, parts[0])).backward()
    scaler.unscale_(workload.optimizer)
    scaler.scale(forward(workload, parts[1])).backward()
    with pytest.raises(RuntimeError, match=r"unscale_\(\)"):
        scaler.unscale_(workload.optimizer)


@either_scaler
def test_updating_after_each_micro_batch_loses_all_but_the_last(
    make: Callable[..., Scaler],
) -> None:
    """An ``update`` in between silences the refusal: what was unscaled is unscaled once more."""
    (workload, _, parts), scaler = digits(), make()
    for part in parts:
        scaler.scale(forward(workload, part) / len(parts)).backward()
        scaler.unscale_(workload.optimizer)
        scaler.update()
    wrong = gradients(workload)
    last, _, _ = digits()
    forward(last, parts[-1]).backward()
    assert (wrong - gradients(last) / len(parts)).norm() < 2.0**-8 * wrong.norm()
    assert (wrong - full_batch()).norm() > 0.5 * full_batch().norm()


# Several optimizers, several losses


def two_optimizers(workload: Workload) -> list[Optimizer]:
    """One over the convolutions of `digits`, one over its last layer."""
    *body, head = workload.model
    first = [parameter for layer in body for parameter in layer.parameters()]
    return [SGD(first, lr=0.01, momentum=0.9), AdamW(head.parameters(), lr=0.001)]


def train_in_two_parts(scaler: Scaler) -> tuple[list[list[bool]], list[float], bytes]:
    """Which part moved in each step, the scales after it, every bit of the weights."""
    workload = build_workload("digits", 0, "cpu", {})
    optimizers = two_optimizers(workload)
    moved, scales = [], []
    for batch in islice(workload.batches, 6):
        workload.model.zero_grad()
        scaler.scale(forward(workload, batch)).backward()
        parts = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
        before = [flat(part) for part in parts]
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        moved.append([not torch.equal(flat(p), b) for p, b in zip(parts, before, strict=True)])
        scales.append(scaler.get_scale())
    return moved, scales, weights(workload).numpy().tobytes()


def test_of_two_optimizers_the_one_that_overflows_skips_and_the_scale_backs_off_once() -> None:
    # At 2^20 only the last layer's bias overflows, which sums the scaled loss's own gradients; at
    # 2^22 the convolutions do as well.
    settings = {"init_scale": 2.0**22, "growth_interval": NEVER}
    moved, scales, bits = train_in_two_parts(SCALERS["ours"](**settings))
    assert moved[:2] == [[False, False], [True, False]]
    assert moved[-1] == [True, True]
    assert scales[:2] == [2.0**21, 2.0**20]
    assert (moved, scales, bits) == train_in_two_parts(SCALERS["torch"](**settings))


def backward_of_two_losses(scaler: Scaler, *, scaled: bool) -> Tensor:
    """Cross entropy and a penalty on large logits, each with a backward pass of its own."""
    workload, (images, labels), _ = digits()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = workload.model(images)
        main, penalty = cross_entropy(logits, labels), 1e-2 * logits.float().square().mean()
    first, second = scaler.scale([main, penalty])
    first.backward(retain_graph=True)
    (second if scaled else penalty).backward()
    scaler.unscale_(workload.optimizer)
    return gradients(workload)


def test_two_losses_share_a_scaler_and_both_are_to_be_scaled() -> None:
    ours, wrong = (backward_of_two_losses(SCALERS["ours"](), scaled=s) for s in (True, False))
    workload, (images, labels), _ = digits()
    logits = workload.model(images)
    (cross_entropy(logits, labels) + 1e-2 * logits.square().mean()).backward()
    exact = gradients(workload)
    assert (ours - exact).norm() < 2.0**-8 * exact.norm()
    # The loss that was not scaled is unscaled all the same: what is left is the other loss alone.
    assert torch.allclose(wrong, full_batch(), atol=1e-5)
    assert torch.equal(ours, backward_of_two_losses(SCALERS["torch"](), scaled=True))


# Parameters without gradients


class WithUnused(nn.Module):
    """A model beside a layer that takes no part."""

    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used, self.unused = used, nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.used(inputs)
        return output


def partly_frozen() -> Workload:
    """`digits` whose first convolution is frozen, in the optimizer, beside an unused layer."""
    workload = build_workload("digits", 0, "cpu", {})
    workload.model[0].requires_grad_(False)
    model = WithUnused(workload.model)
    return replace(workload, model=model, optimizer=SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("arm", ["a", "fp32"])
def test_frozen_and_unused_parameters_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    workload = partly_frozen()
    model = workload.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    record, trace = train(monkeypatch, tmp_path, workload, arm)
    assert (record.outcome, record.skipped_steps) == ("ok", 0)
    assert all(norm > 0 for norm in trace["grad_norm"])
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if not n.startswith(("unused", "used.0"))}


def test_a_model_that_is_frozen_altogether_is_a_failed_run_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = build_workload("digits", 0, "cpu", {})
    inputs = nn.Parameter(torch.zeros(()))
    workload.model.requires_grad_(False)
    loss = workload.loss
    workload = replace(workload, loss=lambda model, batch: loss(model, batch) + inputs)
    record, _ = train(monkeypatch, tmp_path, workload)
    assert (record.outcome, record.steps_done) == ("failed", 0)
    assert record.error == "no parameter that the optimizer trains received a gradient"


def test_a_parameter_without_elements_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = build_workload("digits", 0, "cpu", {})
    workload.model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    loss = workload.loss
    workload = replace(workload, loss=lambda m, batch: loss(m, batch) + m.empty.sum())
    record, _ = train(monkeypatch, tmp_path, workload)
    assert record.outcome == "ok"


# Sparse gradients


def text(sparse: bool, optimizer: Callable[[Any], Optimizer], **fields: Any) -> Workload:
    """`text` whose table of characters has sparse gradients, or dense ones."""
    workload = build_workload("text", 0, "cpu", {})
    workload.model.characters.sparse = sparse
    fields = {"clip_norm": None, "scheduler": None} | fields
    return replace(workload, optimizer=optimizer(workload.model.parameters()), **fields)


def test_sparse_gradients_train_like_dense_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = {}
    for sparse in (True, False):
        workload = text(sparse, lambda parameters: SGD(parameters, lr=0.3))
        folder = tmp_path / str(sparse)
        # It starts with overflows.
        record, traces[sparse] = train(monkeypatch, folder, workload, init_scale=2.0**22, steps=12)
        assert workload.model.characters.weight.grad.is_sparse == sparse
        assert record.outcome == "ok"
        assert 0 < record.skipped_steps < 6
    assert traces[True]["applied"] == traces[False]["applied"]
    for column in ("loss", "grad_norm", "headroom"):
        # Repeated characters add up in another order.
        assert traces[True][column] == pytest.approx(traces[False][column], rel=2.0**-10), column


def test_sparse_adam_trains_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = text(True, SGD)
    table = workload.model.characters.weight
    workload.model.requires_grad_(False)
    table.requires_grad_(True)
    workload = replace(workload, optimizer=torch.optim.SparseAdam([table], lr=0.1))
    record, trace = train(monkeypatch, tmp_path, workload, init_scale=2.0**10)
    assert (record.outcome, record.skipped_steps) == ("ok", 0)
    assert trace["loss"][-1] < trace["loss"][0]


def test_a_sparse_gradient_without_entries_is_one_of_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = text(True, lambda parameters: SGD(parameters, lr=0.1))
    none = torch.zeros(0, dtype=torch.int64)
    workload = replace(workload, loss=lambda model, batch: model.characters(none).sum())
    record, trace = train(monkeypatch, tmp_path, workload, steps=2)
    assert record.outcome == "ok"
    assert trace["grad_norm"] == [0.0, 0.0]
    assert trace["headroom"] == [math.inf, math.inf]


UNUSABLE = {
    "PyTorch cannot clip a sparse gradient": {"clip_norm": 0.5},
    "Adam does not support sparse gradients": {"optimizer": torch.optim.Adam},
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_what_pytorch_cannot_do_with_sparse_gradients_is_a_failed_run_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    workload = text(True, **{"optimizer": SGD} | UNUSABLE[reason])
    record, _ = train(monkeypatch, tmp_path, workload)
    assert record.outcome == "failed"
    assert reason in (record.error or "")
    assert "\n" not in (record.error or "")


# Batch normalisation


def normalised(scores: Callable[[Tensor], Tensor] = lambda logits: logits) -> Workload:
    """`digits` with batch normalisation after its first convolution."""
    workload = build_workload("digits", 0, "cpu", {})
    first, *rest = workload.model
    model = nn.Sequential()
    model.add_module("first", first)
    model.add_module("bn", nn.BatchNorm2d(first.out_channels))
    model.add_module("rest", nn.Sequential(*rest))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(scores(model(batch[0])), batch[1])

    return replace(workload, model=model, optimizer=SGD(model.parameters(), lr=0.01), loss=loss)


@either_scaler
def test_running_statistics_move_in_a_skipped_step_too(make: Callable[..., Scaler]) -> None:
    workload, scaler = normalised(), make(init_scale=2.0**30)
    before, bn = weights(workload), workload.model.bn
    scaler.scale(forward(workload, next(workload.batches))).backward()
    scaler.step(workload.optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**29
    assert torch.equal(weights(workload), before)
    assert bn.running_mean.abs().min() > 0
    assert bn.running_var.isfinite().all()
    assert bn.num_batches_tracked == 1


def one_dazzling_batch(workload: Workload, at: int) -> Workload:
    """One batch so bright that the first convolution overflows in fp16."""

    def batches() -> Iterator[Any]:
        for step, (images, labels) in enumerate(workload.batches):
            yield images * (1e6 if step == at else 1.0), labels

    return replace(workload, batches=batches())


def test_an_overflow_in_forward_poisons_the_running_statistics_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss stays finite here, and the scaler skips the step: nothing else would tell."""
    workload = normalised(lambda logits: logits.nan_to_num(0.0))
    record, trace = train(monkeypatch, tmp_path, one_dazzling_batch(workload, at=3))
    assert trace["applied"] == [step != 3 for step in range(10)]
    assert all(map(math.isfinite, trace["loss"]))
    assert weights(workload).isfinite().all()
    assert not workload.model.bn.running_var.isfinite().any()
    assert record.outcome == "diverged"
    assert record.error is not None
    assert record.error.startswith("the buffer bn.running_")
    assert record.error.endswith(
        " is not finite after the last step: an overflow in forward poisons it"
    )


def test_a_parameter_that_is_not_finite_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = partly_frozen()

    def spoil(*_: object) -> None:
        workload.model.unused.bias.data[1] = math.nan

    workload.optimizer.register_step_post_hook(spoil)
    record, trace = train(monkeypatch, tmp_path, workload, steps=2)
    assert all(map(math.isfinite, trace["loss"]))
    assert record.outcome == "diverged"
    assert record.error == "the parameter unused.bias is not finite after the last step"


def test_a_buffer_that_was_never_finite_is_no_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = build_workload("text", 0, "cpu", {})
    assert workload.model.mask.isinf().any()
    record, _ = train(monkeypatch, tmp_path, workload, steps=2)
    assert record.outcome == "ok"


# Schedules


@pytest.mark.parametrize("each", [True, False], ids=["each step", "applied steps"])
@either_scaler
def test_a_warm_up_that_counts_skipped_steps_is_over_too_early(
    make: Callable[..., Scaler], each: bool
) -> None:
    workload, scaler = build_workload("text", 0, "cpu", {"warmup": 10}), make(init_scale=2.0**24)
    applied = 0
    with warnings.catch_warnings():
        # PyTorch warns of a schedule that starts before the optimizer, once a process.
        warnings.simplefilter("ignore")
        for batch in islice(workload.batches, 10):
            workload.optimizer.zero_grad()
            scaler.scale(forward(workload, batch)).backward()
            before = scaler.get_scale()
            scaler.step(workload.optimizer)
            scaler.update()
            skipped = scaler.get_scale() < before
            if isinstance(scaler, LossScaler):
                assert scaler.skipped == skipped
            applied += not skipped
            if each or not skipped:
                workload.scheduler.step()
    assert 1 < applied < 7
    (rate,) = workload.scheduler.get_last_lr()
    assert rate == pytest.approx(0.005 * (0.1 + 0.9 * (10 if each else applied) / 10))


# A loss of NaN


def reports_nan() -> Workload:
    """`digits` with a NaN in the loss that no gradient passes through."""
    workload = build_workload("digits", 0, "cpu", {})
    loss = workload.loss
    return replace(workload, loss=lambda model, batch: loss(model, batch) + math.nan)


@either_scaler
def test_a_loss_of_nan_with_finite_gradients_is_no_overflow_to_a_scaler(
    make: Callable[..., Scaler],
) -> None:
    workload, scaler = reports_nan(), make()
    before = weights(workload)
    loss = forward(workload, next(workload.batches))
    scaler.scale(loss).backward()
    assert loss.isnan()
    assert gradients(workload).isfinite().all()
    scaler.step(workload.optimizer)
    scaler.update()
    assert not torch.equal(weights(workload), before)
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("arm", ["a", "fp32"])
def test_a_run_ends_on_a_loss_of_nan_before_the_step_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    workload = reports_nan()
    before = weights(workload)
    record, trace = train(monkeypatch, tmp_path, workload, arm)
    assert (record.outcome, record.error) == ("diverged", "the loss became nan in step 0")
    assert torch.equal(weights(workload), before)
    assert (trace["applied"], trace["overflow"]) == ([False], [False])
    assert math.isfinite(trace["grad_norm"][0])


# bfloat16


def in_bfloat16(workload: Workload, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return workload.loss(workload.model, batch)


def scaled_inside(scaler: Scaler, workload: Workload, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scaled: Tensor = scaler.scale(workload.loss(workload.model, batch))
    return scaled


def with_bfloat16_parameters(scaler: Scaler, workload: Workload, batch: Any) -> Tensor:
    workload.model.bfloat16()
    logits = workload.model(batch[0].bfloat16())
    scaled: Tensor = scaler.scale(cross_entropy(logits.float(), batch[1]))
    return scaled


BFLOAT16: dict[str, Callable[[Scaler, Workload, Any], Tensor]] = {
    "a loss in bfloat16": lambda s, w, b: s.scale(in_bfloat16(w, b).bfloat16()),
    "scaled inside autocast": scaled_inside,
    "gradients in bfloat16": with_bfloat16_parameters,
}


@pytest.mark.parametrize("kind", BFLOAT16)
def test_bfloat16_is_said_to_need_no_scaling_once(kind: str) -> None:
    workload, scaler = build_workload("digits", 0, "cpu", {}), SCALERS["ours"]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in islice(workload.batches, 3):
            workload.optimizer.zero_grad()
            BFLOAT16[kind](scaler, workload, batch).backward()
            scaler.step(workload.optimizer)
            scaler.update()
    (warning,) = (w for w in caught if "bfloat16" in str(w.message))
    assert warning.category is UserWarning
    assert "range of float32 and needs no loss scaling" in str(warning.message)
    assert warning.filename == __file__, "it points to the caller"


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_nothing_is_said_under_fp16_and_fp32(precision: str) -> None:
    workload, scaler = build_workload("digits", 0, "cpu", {}), SCALERS["ours"]()
    with warnings.catch_warnings(), arithmetic(precision, "cpu") as used:
        warnings.simplefilter("error")
        for batch in islice(workload.batches, 3):
            workload.optimizer.zero_grad()
            with used.autocast():
                scaled = scaler.scale(workload.loss(workload.model, batch))
            scaled.backward()
            scaler.step(workload.optimizer)
            scaler.update()
