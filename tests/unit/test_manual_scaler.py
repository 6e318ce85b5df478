"""The hand-written scaler, against torch.amp.GradScaler and by what loss scaling promises."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfscale.scaling import ManualGradScaler

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
}


class Weights(nn.Module):
    """A parameter per list of numbers; its loss has exactly the given numbers as gradients."""

    def __init__(self, *gradients: list[float], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(len(g), dtype=dtype) for g in gradients)
        self.wanted = [torch.tensor(g, dtype=dtype) for g in gradients]

    def loss(self) -> Tensor:
        pairs = zip(self.weights, self.wanted, strict=True)
        return torch.stack([(w * g).sum() for w, g in pairs]).sum()

    def gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def parameter_bits(self) -> list[bytes]:
        return [weight.detach().numpy().tobytes() for weight in self.weights]


def state_bits(optimizer: Optimizer) -> list[bytes]:
    """The optimizer's state, tensor by tensor, bit by bit."""
    return [
        value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        for state in optimizer.state.values()
        for _, value in sorted(state.items())
    ]


def manual_step(model: Weights, optimizer: Optimizer, scale: float) -> bool:
    optimizer.zero_grad()
    scaler = ManualGradScaler(scale)
    scaler.scale_loss(model.loss()).backward()
    scaler.unscale_grads(model)
    return scaler.step(optimizer)


def torch_step(model: Weights, optimizer: Optimizer, scale: float) -> bool:
    optimizer.zero_grad()
    taken: list[bool] = []
    hook = optimizer.register_step_post_hook(lambda *_: taken.append(True))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(model.loss()).backward()
    scaler.step(optimizer)
    scaler.update(scale)
    hook.remove()
    return bool(taken)


powers = st.integers(-100, 100).map(lambda exponent: 2.0**exponent)
scales = st.one_of(powers, st.floats(2.0**-100, 2.0**100))
numbers = st.floats(-1e6, 1e6, width=32)
any_number = st.one_of(numbers, st.sampled_from([math.inf, -math.inf, math.nan, 3e38, 1e-45]))
gradients = st.lists(st.lists(any_number, min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(batches=st.lists(gradients, min_size=1, max_size=3), scale=scales)
@example([[[1.0]], [[math.inf]], [[2.0]]], 2.0**16)
@example([[[1.0]]], 65535.99)
def test_it_trains_bit_for_bit_like_torch_at_any_fixed_scale(
    name: str, batches: list[list[list[float]]], scale: float
) -> None:
    ours, theirs = Weights(*batches[0]), Weights(*batches[0])
    our_optimizer, their_optimizer = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    for batch in batches:
        if [len(g) for g in batch] != [len(g) for g in batches[0]]:
            continue
        ours.wanted = theirs.wanted = [torch.tensor(g) for g in batch]
        taken = manual_step(ours, our_optimizer, scale)
        assert taken == torch_step(theirs, their_optimizer, scale)
        assert ours.parameter_bits() == theirs.parameter_bits()
        assert state_bits(our_optimizer) == state_bits(their_optimizer)
        pairs = zip(ours.gradients(), theirs.gradients(), strict=True)
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


@given(gradient=st.lists(numbers, min_size=1, max_size=8), exponent=st.integers(-20, 20))
def test_a_power_of_two_comes_back_bit_for_bit(gradient: list[float], exponent: int) -> None:
    model = Weights(gradient)
    scaler = ManualGradScaler(2.0**exponent)
    scaler.scale_loss(model.loss()).backward()
    scaler.unscale_grads(model)
    # Subnormal numbers have no spare exponents; torch.amp loses their bits as well.
    normal = model.wanted[0].abs() > 1e-30
    assert torch.equal(model.gradients()[0][normal], model.wanted[0][normal])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_leaves_parameters_and_optimizer_state_bit_identical(
    name: str, bad: float
) -> None:
    model = Weights([1.0, -2.0], [3.0])
    optimizer = OPTIMIZERS[name](model)
    assert manual_step(model, optimizer, 256.0)
    before = model.parameter_bits(), state_bits(optimizer), copy.deepcopy(optimizer.param_groups)
    model.wanted = [torch.tensor([1.0, 1.0]), torch.tensor([bad])]
    assert not manual_step(model, optimizer, 256.0)
    assert (model.parameter_bits(), state_bits(optimizer)) == before[:2]
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in before[2]]
    model.wanted = [torch.tensor([1.0, 1.0]), torch.tensor([1.0])]
    assert manual_step(model, optimizer, 256.0)
    assert model.parameter_bits() != before[0]


def test_skipped_steps_are_counted() -> None:
    model = Weights([1.0])
    optimizer = OPTIMIZERS["sgd"](model)
    scaler = ManualGradScaler()
    for value in (1.0, math.inf, math.nan, 2.0, math.inf):
        model.wanted = [torch.tensor([value])]
        optimizer.zero_grad()
        scaler.scale_loss(model.loss()).backward()
        scaler.unscale_grads(model)
        assert scaler.step(optimizer) == math.isfinite(value)
    assert scaler.skipped_steps == 3


def test_the_default_scale_is_two_to_the_sixteen() -> None:
    assert ManualGradScaler().scale == 65536.0
    assert ManualGradScaler().scale_loss(torch.tensor(2.0)).item() == 131072.0


def test_gradients_are_unscaled_in_place() -> None:
    model = Weights([1.0, 2.0])
    scaler = ManualGradScaler(8.0)
    scaler.scale_loss(model.loss()).backward()
    (gradient,) = model.gradients()
    address = gradient.data_ptr()
    assert gradient.tolist() == [8.0, 16.0]
    scaler.unscale_grads(model)
    assert model.gradients()[0] is gradient
    assert gradient.data_ptr() == address
    assert gradient.tolist() == [1.0, 2.0]


def test_parameters_without_gradients_are_passed_over() -> None:
    model = Weights([1.0], [2.0])
    unused, frozen = model.weights[1], nn.Parameter(torch.ones(1), requires_grad=False)
    model.weights.append(frozen)
    scaler = ManualGradScaler(4.0)
    scaler.scale_loss((model.weights[0] * 3).sum()).backward()
    scaler.unscale_grads(model)
    assert unused.grad is None
    assert scaler.step(OPTIMIZERS["sgd"](model))
    assert unused.item() == frozen.item() == 1.0
    assert model.weights[0].item() == pytest.approx(0.7)


def test_double_precision_works_beside_single() -> None:
    model = nn.ModuleList([Weights([1.5]), Weights([2.5], dtype=torch.float64)])
    scaler = ManualGradScaler(1024.0)
    scaler.scale_loss(model[0].loss() + model[1].loss()).backward()
    scaler.unscale_grads(model)
    assert [model[i].gradients()[0].item() for i in range(2)] == [1.5, 2.5]


def embedding(sparse: bool) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(6, 3, sparse=sparse)


@pytest.mark.parametrize("factor", [1.0, math.inf, math.nan])
def test_sparse_gradients_with_repeated_indices_train_like_dense_ones(factor: float) -> None:
    trained = []
    for sparse in (True, False):
        model = embedding(sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = ManualGradScaler(2.0**10)
        loss = (model(torch.tensor([1, 4, 1, 1])) * factor).pow(2).sum()
        scaler.scale_loss(loss).backward()
        scaler.unscale_grads(model)
        assert scaler.step(optimizer) == math.isfinite(factor)
        trained.append(model.weight.detach())
    assert torch.equal(trained[0], trained[1])
    assert torch.equal(trained[0], embedding(False).weight) == (not math.isfinite(factor))


def test_sparse_gradients_whose_sum_overflows_are_seen() -> None:
    model = embedding(sparse=True)
    indices = torch.tensor([[2, 2]])
    values = torch.full((2, 3), 3e38)
    model.weight.grad = torch.sparse_coo_tensor(indices, values, (6, 3), check_invariants=True)
    scaler = ManualGradScaler(1.0)
    scaler.unscale_grads(model)
    before = model.weight.detach().clone()
    assert not scaler.step(torch.optim.SGD(model.parameters(), lr=0.5))
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_refused(dtype: torch.dtype) -> None:
    model = Weights([1.0, 2.0], dtype=dtype)
    model.loss().backward()
    before = model.gradients()[0].clone()
    scaler = ManualGradScaler(4.0)
    with pytest.raises(ValueError, match=r"\(2,\).*float16.*float32"):
        scaler.unscale_grads(model)
    assert torch.equal(model.gradients()[0], before)
    with pytest.raises(RuntimeError, match="unscale_grads"):
        scaler.step(OPTIMIZERS["sgd"](model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_loss_of_any_precision_is_scaled_like_torch_does(dtype: torch.dtype) -> None:
    # Under autocast a mean over a layer's outputs is a loss in fp16; times 2^16 it would be Inf.
    loss = torch.tensor(3.0, dtype=dtype)
    expected = torch.amp.GradScaler("cpu", init_scale=2.0**16).scale(loss)
    scaled = ManualGradScaler(2.0**16).scale_loss(loss)
    assert scaled.item() == expected.item() == 3 * 2.0**16


def test_step_without_unscale_is_refused() -> None:
    model = Weights([1.0])
    optimizer = OPTIMIZERS["sgd"](model)
    scaler = ManualGradScaler()
    scaler.scale_loss(model.loss()).backward()
    before = model.parameter_bits()
    with pytest.raises(RuntimeError, match="unscale_grads"):
        scaler.step(optimizer)
    assert model.parameter_bits() == before
    scaler.unscale_grads(model)
    assert scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="unscale_grads"):
        scaler.step(optimizer)


def test_unscaling_twice_is_refused_and_changes_nothing() -> None:
    model = Weights([1.0])
    scaler = ManualGradScaler(16.0)
    scaler.scale_loss(model.loss()).backward()
    scaler.unscale_grads(model)
    with pytest.raises(RuntimeError, match="already"):
        scaler.unscale_grads(model)
    assert model.gradients()[0].item() == 1.0
    assert scaler.step(OPTIMIZERS["sgd"](model))


@pytest.mark.parametrize(
    "scale", [0, 0.0, -1, -65536.0, math.nan, math.inf, -math.inf, 1e39, 1e-39, 2.0**-128, 2**128]
)
def test_a_scale_that_fp32_cannot_hold_or_invert_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="init_scale"):
        ManualGradScaler(scale)


@given(scale=scales)
def test_every_other_scale_is_taken(scale: float) -> None:
    assert ManualGradScaler(scale).scale == pytest.approx(scale, rel=1e-7)


def test_it_is_importable_alone() -> None:
    from halfscale import scaling

    assert scaling.__all__ == ["LossScaler", "ManualGradScaler"]
    assert "scale_loss" in (ManualGradScaler.__doc__ or "")


def test_an_in_loop_use_with_autocast_trains() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ManualGradScaler(2.0**8)
    inputs = torch.randn(32, 8)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(inputs).float() - inputs[:, :1]).pow(2).mean()
        scaler.scale_loss(loss).backward()
        scaler.unscale_grads(model)
        scaler.step(optimizer)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
