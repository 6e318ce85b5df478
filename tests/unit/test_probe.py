"""Probes: every half-precision gradient counted once, and the training none the wiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.checkpoint import checkpoint

from halfscale import train as training
from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.plan import Plan, ProbeSpec
from halfscale.probe import MagnitudeRecorder, count_exponents, probe
from halfscale.records import ProbeRecord, read_probe, read_run
from halfscale.workload_plan import workload_names
from halfscale.workloads import Workload, build_workload

from .crafted import make_plan

pytestmark = pytest.mark.usefixtures("torch_settings")

BF16 = torch.bfloat16
ZERO = "zero"


# Counting by exponent.


def expected_counts(values: Tensor) -> tuple[dict[int | str, int], float]:
    """Counts by `math.frexp`, one element at a time, and the largest magnitude."""
    counts: dict[int | str, int] = {}
    largest = 0.0
    for value in values.double().flatten().abs().tolist():
        largest = math.nan if math.isnan(value) or math.isnan(largest) else max(largest, value)
        if math.isfinite(value):
            key = math.frexp(value)[1] - 1 if value else ZERO
            counts[key] = counts.get(key, 0) + 1
    return counts, largest


def counted(values: Tensor) -> tuple[dict[int | str, int], float]:
    counts, largest = count_exponents(values.view(torch.int16) & 0x7FFF)
    assert counts.shape == (BINS + 1,)
    keys: list[int | str] = [*range(LOWEST_EXPONENT, LOWEST_EXPONENT + BINS), ZERO]
    found = {key: int(n) for key, n in zip(keys, counts.tolist(), strict=True) if n}
    return found, float(largest)


@given(bits=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=50))
def test_any_bf16_numbers_are_counted_by_exponent(bits: list[int]) -> None:
    values = torch.tensor(bits, dtype=torch.int16).view(BF16)
    found, largest = counted(values)
    expected, expected_largest = expected_counts(values)
    assert found == expected
    assert largest == pytest.approx(expected_largest, abs=0, rel=0, nan_ok=True)


def test_every_bf16_number_is_counted() -> None:
    values = torch.arange(-(2**15), 2**15).short().view(BF16)
    found, largest = counted(values)
    finite = values[values.isfinite()].double().abs().numpy()
    exponents = np.frexp(finite[finite > 0])[1] - 1
    assert found == {**dict(zip(*np.unique(exponents, return_counts=True), strict=True)), ZERO: 2}
    assert min(exponents) == -133
    assert max(exponents) == 127
    assert math.isnan(largest)


def test_counts_worked_by_hand() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0, 0.75, 2.0**-126, 2.0**-127, 3 * 2.0**-133])
    found, largest = counted(values.to(BF16))
    assert found == {ZERO: 2, 0: 2, 1: 1, -1: 1, -126: 1, -127: 1, -132: 1}
    assert largest == 2.0
    assert counted(torch.tensor([1.0, -math.inf]).to(BF16)) == ({0: 1}, math.inf)


# What of a backward pass is counted.


class Figures:
    """What a recorder took, in short."""

    def __init__(self, taken: dict[str, Any]) -> None:
        self.largest = taken["largest"]
        self.activations = self._by_exponent(taken["activation_counts"])
        self.weights = self._by_exponent(taken["weight_counts"])
        self.zeros = taken["activation_zeros"], taken["weight_zeros"]

    @staticmethod
    def _by_exponent(counts: list[int]) -> dict[int, int]:
        assert len(counts) == BINS
        assert min(counts) >= 0
        return {b + LOWEST_EXPONENT: n for b, n in enumerate(counts) if n}

    @property
    def elements(self) -> tuple[int, int]:
        """Of activations and of weights, with those of zero."""
        activations, weights = sum(self.activations.values()), sum(self.weights.values())
        return activations + self.zeros[0], weights + self.zeros[1]


def record(*losses: Callable[[], Tensor]) -> Figures:
    recorder = MagnitudeRecorder()
    for forward in losses:
        with torch.autocast("cpu", BF16):
            loss = forward()
        with recorder.watch(loss):
            loss.backward()
    return Figures(recorder.take())


def linear(bias: bool = False) -> nn.Linear:
    """Two outputs, each the sum of three inputs."""
    layer = nn.Linear(3, 2, bias=bias)
    nn.init.ones_(layer.weight)
    return layer


ONES = torch.ones(4, 3)


def total(outputs: Tensor, factor: float = 1.0) -> Tensor:
    """A loss in fp32 that gives every output the gradient ``factor``."""
    return outputs.float().sum() * factor


def test_of_a_linear_layer_the_output_and_the_weight_are_counted() -> None:
    layer = linear()
    figures = record(lambda: total(layer(ONES), 0.5))
    # Each of 8 outputs has the gradient 1/2; each of 6 weights the sum over 4 rows of 1/2 × 1.
    # The loss itself, the sum and their gradients are in fp32.
    assert figures.activations == {-1: 8}
    assert figures.weights == {1: 6}
    assert figures.zeros == (0, 0)
    assert figures.largest == 2.0


def test_a_bias_is_a_weight() -> None:
    layer = linear(bias=True)
    figures = record(lambda: total(layer(ONES), 0.5))
    assert figures.activations == {-1: 8}
    assert figures.weights == {1: 6 + 2}


def test_the_gradient_between_two_layers_is_counted_once() -> None:
    first, second = linear(), nn.Linear(2, 1, bias=False)
    nn.init.constant_(second.weight, 0.25)
    figures = record(lambda: total(second(first(ONES))))
    # Outputs: 4 of 1, then 8 of 1 × 1/4. Weights: 2 of 4 × 3, then 6 of 4 × 1/4.
    assert figures.activations == {0: 4, -2: 8}
    assert figures.weights == {3: 2, 0: 6}


def test_zeros_are_counted_apart() -> None:
    layer = linear()
    figures = record(lambda: total(torch.relu(layer(-ONES))))
    # 8 of 1 reach the relu, which passes none of them on.
    assert figures.activations == {0: 8}
    assert figures.weights == {}
    assert figures.zeros == (8, 6)


def test_numbers_that_are_not_finite_are_in_no_bin_and_the_largest_is_endless() -> None:
    layer = linear()
    for factor in (math.inf, math.nan):
        figures = record(lambda factor=factor: total(layer(ONES), factor))
        assert figures.elements == (0, 0)
        assert figures.largest == math.inf


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda y: y.view(2, 4),
    "transposed": lambda y: y.t(),
    "expanded": lambda y: y.unsqueeze(0),
    "permuted and reshaped": lambda y: y.t().unsqueeze(1).permute(2, 1, 0),
    "flattened": lambda y: y.reshape(4, 2, 1).flatten(),
    "detached by hand": lambda y: torch.ops.aten.alias(y),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_gradient_are_not_counted_again(name: str) -> None:
    layer = linear()
    assert record(lambda: total(VIEWS[name](layer(ONES)))).elements == (8, 6)


def test_a_product_with_more_than_two_dimensions_is_not_counted_again() -> None:
    """Its result is reshaped by an operation that shares its memory but is not called a view."""
    layer = linear()
    inputs = torch.ones(2, 5, 3)
    other = torch.ones(2, 5, requires_grad=True)
    figures = record(lambda: total(torch.matmul(layer(inputs), other)))
    # Results: 2 × 5 × 5. The layer's outputs: 2 × 5 × 2. Weights: 6, and 2 × 5 of the other.
    assert figures.elements == (50 + 20, 6 + 10)


def test_a_gradient_that_a_reshape_has_to_copy_is_counted_once_more() -> None:
    layer = linear()
    # The outputs' gradient and the product's; turned around, that one has no strides for 4 × 2.
    figures = record(lambda: total(layer(ONES).view(2, 4).t() * 1.0))
    assert figures.elements == (8 + 8 + 8, 6)


def test_what_an_operation_makes_of_a_gradient_is_a_tensor_of_its_own() -> None:
    layer = linear()
    figures = record(lambda: total(layer(ONES) * 0.5))
    assert figures.activations == {0: 8, -1: 8}


def test_a_weight_used_twice_has_one_gradient_the_sum() -> None:
    layer = linear()
    figures = record(lambda: total(layer(ONES)) + total(layer(ONES)))
    # Of the weight 6 elements of 4 + 4; the two parts of 4 are what products made on the way.
    assert figures.weights == {3: 6}
    assert figures.activations == {0: 8 + 8, 2: 6 + 6}


def test_a_residual_adds_the_gradients_of_both_ways() -> None:
    layer = nn.Linear(3, 3, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    first = nn.Linear(3, 3, bias=False)

    def forward() -> Tensor:
        hidden = first(ONES)
        return total(hidden + layer(hidden))

    # 12 of 1 for the sum; 12 of 3 through the layer; 12 of 1 + 3. Weights: 9 each, the first's
    # 4 × 4.
    figures = record(forward)
    assert figures.activations == {0: 12, 1: 12, 2: 12}
    assert figures.weights[4] == 9
    assert figures.elements[1] == 18


def test_several_backward_passes_add_up_until_they_are_taken() -> None:
    layer = linear()
    recorder = MagnitudeRecorder()

    def run(factor: float) -> None:
        with torch.autocast("cpu", BF16):
            loss = total(layer(ONES), factor)
        with recorder.watch(loss):
            loss.backward()

    run(1.0)
    run(8.0)
    figures = Figures(recorder.take())
    assert figures.activations == {0: 8, 3: 8}
    assert figures.weights == {2: 6, 5: 6}
    assert figures.largest == 32.0
    run(1.0)
    again = Figures(recorder.take())
    assert (again.activations, again.largest) == ({0: 8}, 4.0)
    nothing = Figures(recorder.take())
    assert (nothing.elements, nothing.largest) == ((0, 0), 0.0)


def test_more_elements_than_are_kept_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(linear(), nn.Tanh(), nn.Linear(2, 2))
    whole = record(lambda: total(model(ONES)))
    monkeypatch.setattr("halfscale.probe._MOST_WAITING", 1)
    piecemeal = record(lambda: total(model(ONES)))
    assert vars(piecemeal) == vars(whole)


def test_of_a_layer_norm_only_what_is_in_half_precision_is_counted() -> None:
    layer, norm = linear(), nn.LayerNorm(2)
    with torch.autocast("cpu", BF16):
        in_half = norm(layer(ONES)).dtype is BF16
    figures = record(lambda: total(norm(layer(ONES))))
    # On a CPU its outputs are in bf16 and have 8 gradients, which are no weight's though its own
    # weights, in fp32, hang on the same node.
    assert figures.elements == ((8 + 8, 6) if in_half else (8, 6))


def test_a_model_in_fp32_has_nothing_to_count() -> None:
    layer = linear()
    recorder = MagnitudeRecorder()
    loss = layer(ONES).sum()
    with recorder.watch(loss):
        loss.backward()
    assert Figures(recorder.take()).elements == (0, 0)


def test_a_loss_in_half_precision_starts_with_a_gradient_of_one() -> None:
    layer = nn.Linear(3, 1, bias=False)
    figures = record(lambda: layer(torch.ones(1, 3)).squeeze())
    assert figures.activations == {0: 1}
    assert figures.weights == {0: 3}


def test_a_gradient_that_is_broadcast_to_a_weight_is_a_weights() -> None:
    bias = nn.Parameter(torch.ones(5))
    figures = record(lambda: torch.ops.aten.sum(bias.to(BF16)))
    assert figures.weights == {0: 5}
    assert figures.activations == {}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_pass_repeated_in_the_backward_pass_is_not_counted(reentrant: bool) -> None:
    first, second = nn.Linear(3, 3, bias=False), linear()
    plain = record(lambda: total(second(torch.tanh(first(ONES)))))

    def inner(hidden: Tensor) -> Tensor:
        return second(torch.tanh(hidden))

    def forward() -> Tensor:
        return total(checkpoint(inner, first(ONES), use_reentrant=reentrant))

    figures = record(forward)
    assert sum(figures.elements) == sum(plain.elements)
    assert figures.largest == plain.largest
    if not reentrant:  # else the graph, and which node is a weight's, is not there beforehand
        assert vars(figures) == vars(plain)


class Buffered(torch.autograd.Function):
    """Doubles, with a backward pass that fills uninitialised memory and computes beside."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        assert (inputs * 2.0**60).isfinite().all()
        buffer = torch.empty_like(gradients[0])
        return buffer.copy_(gradients[0] * 2)


def test_memory_and_numbers_that_no_gradient_went_into_are_not_counted() -> None:
    layer = linear()
    figures = record(lambda: total(Buffered.apply(layer(ONES))))
    # 8 of 1; 8 of 2 as the product, and copied.
    assert figures.activations == {0: 8, 1: 8 + 8}
    assert figures.largest == 8.0


def test_what_a_derivative_computes_from_activations_alone_is_not_counted() -> None:
    layer = linear()
    nn.init.constant_(layer.weight, 2.0**20)
    figures = record(lambda: total(torch.sin(layer(ONES)), 2.0**-10))
    # sin' = cos, made in bf16 in the backward pass: up to 1, far above every gradient here.
    assert figures.largest <= 4 * 2.0**-10


class AllHooks:
    """An independent reference: gradients of every layer's output and every autocast copy."""

    def __init__(self, workload: Workload, batch: object) -> None:
        outputs: list[Tensor] = []

        def keep(_: nn.Module, __: object, output: Tensor) -> None:
            if output.dtype is BF16 and not output._is_view():
                output.retain_grad()
                outputs.append(output)

        layers = [m for m in workload.model.modules() if not list(m.children())]
        hooks = [layer.register_forward_hook(keep) for layer in layers]
        with torch.autocast("cpu", BF16):
            loss = workload.loss(workload.model, batch)
        loss.backward()
        for hook in hooks:
            hook.remove()
        self.outputs = [y.grad for y in outputs if y.grad is not None]
        self.weights = [p.grad for p in workload.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["binary", "small_signal", "deep_tanh"])
def test_a_perceptron_is_counted_as_by_hooks_on_all_of_its_layers(name: str) -> None:
    workload = build_workload(name, 0, "cpu", {})
    batch = next(workload.batches)
    hooked = AllHooks(workload, batch)
    # Every output of a layer has one gradient; all weights are copied to bf16 and back exactly.
    expected: dict[int | str, int] = {}
    largest = 0.0
    for gradient in hooked.weights:
        counts, top = expected_counts(gradient)
        largest = max(largest, top)
        for key, n in counts.items():
            expected[key] = expected.get(key, 0) + n
    workload.model.zero_grad()
    figures = record(lambda: workload.loss(workload.model, batch))
    zeros = expected.pop(ZERO, 0)
    assert figures.weights == expected
    assert figures.zeros[1] == zeros
    activations: dict[int | str, int] = {}
    for gradient in hooked.outputs:
        for key, n in expected_counts(gradient)[0].items():
            activations[key] = activations.get(key, 0) + n
    zeros = activations.pop(ZERO, 0)
    assert (figures.activations, figures.zeros[0]) == (activations, zeros)
    assert figures.largest == max(largest, *(g.abs().max().item() for g in hooked.outputs))


@pytest.mark.parametrize("name", workload_names())
def test_all_that_hooks_see_of_a_workload_is_counted(name: str) -> None:
    workload = build_workload(name, 0, "cpu", {})
    batch = next(workload.batches)
    hooked = AllHooks(workload, batch)
    workload.model.zero_grad()
    figures = record(lambda: workload.loss(workload.model, batch))
    seen = sum((expected_counts(g.bfloat16())[0].get(ZERO, 0)) for g in hooked.outputs)
    assert figures.zeros[0] >= seen
    assert figures.elements[0] >= sum(g.numel() for g in hooked.outputs)
    assert figures.elements[1] <= sum(g.numel() for g in hooked.weights)
    in_half = [m for m in workload.model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert figures.elements[1] >= sum(p.numel() for m in in_half for p in m.parameters())
    assert figures.largest >= max(g.abs().max().item() for g in hooked.outputs)


# Watching changes nothing.


def train_watched(name: str, watched: bool, steps: int = 3) -> list[Tensor]:
    workload = build_workload(name, 0, "cpu", {})
    recorder = MagnitudeRecorder()
    for batch in islice(workload.batches, steps):
        workload.optimizer.zero_grad()
        with torch.autocast("cpu", BF16):
            loss = workload.loss(workload.model, batch)
        if watched:
            with recorder.watch(loss):
                loss.backward()
            assert sum(recorder.take()["activation_counts"]) > 0
        else:
            loss.backward()
        workload.optimizer.step()
    return [p.detach() for p in workload.model.parameters()]


@pytest.mark.parametrize("name", workload_names())
def test_watching_changes_no_bit_of_a_training(name: str) -> None:
    watched = train_watched(name, True)
    state = torch.get_rng_state()
    alone = train_watched(name, False)
    assert all(map(torch.equal, watched, alone))
    assert torch.equal(state, torch.get_rng_state())


def test_watching_leaves_the_state_of_random_numbers_alone() -> None:
    layer = linear()
    state = torch.get_rng_state()
    record(lambda: total(layer(ONES)))
    assert torch.equal(state, torch.get_rng_state())


class Raises(torch.autograd.Function):
    """An operation whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("in the backward pass")


def test_an_error_in_the_backward_pass_leaves_nothing_behind() -> None:
    layer = linear()
    recorder = MagnitudeRecorder()
    with torch.autocast("cpu", BF16):
        loss = total(Raises.apply(layer(ONES)))
    with pytest.raises(ValueError, match="in the backward pass"), recorder.watch(loss):
        loss.backward()
    assert _len_torch_dispatch_stack() == 0
    recorder.take()
    with torch.autocast("cpu", BF16):
        total(layer(ONES)).backward()
    assert Figures(recorder.take()).elements == (0, 0)


def test_hooks_are_gone_after_the_watch() -> None:
    layer = linear()
    recorder = MagnitudeRecorder()
    with torch.autocast("cpu", BF16):
        loss = total(layer(ONES))
    with recorder.watch(loss):
        loss.backward(retain_graph=True)
    once = Figures(recorder.take())
    loss.backward(retain_graph=True)
    assert Figures(recorder.take()).elements == (0, 0)
    with recorder.watch(loss):
        loss.backward()
    assert vars(Figures(recorder.take())) == vars(once)


# Whole probes.


def plan_of(name: str = "binary", steps: int = 12, **parameters: object) -> Plan:
    if name == "binary":
        parameters = {"samples": 64, "hidden": 8, **parameters}
    return make_plan(seeds=[0], workloads={name: {"steps": steps, **parameters}})


def run(spec: ProbeSpec, results: Path) -> tuple[ProbeRecord, pa.Table]:
    written = probe(spec, results / spec.folder, lambda line: None)
    stored, table = read_probe(results, spec)
    assert stored == written
    return stored, table


def test_a_probe_writes_what_is_read_back(tmp_path: Path) -> None:
    spec = plan_of().probe("binary", 0)
    written, table = run(spec, tmp_path)
    assert (written.outcome, written.error, written.steps_done) == ("ok", None, 12)
    assert table["step"].to_pylist() == list(range(12))
    assert written.environment["source"] == spec.source
    assert str(written.environment["arithmetic"]).startswith("bf16 autocast")
    for step in range(12):
        kinds = ("activation", "weight")
        counts = [sum(table[f"{k}_counts"][step].as_py()) for k in kinds]
        zeros = [table[f"{k}_zeros"][step].as_py() for k in kinds]
        # Logits 2, hidden units before and after the relu 2 × 8; and all weights and biases.
        assert counts[0] + zeros[0] == 64 * (2 + 2 * 8)
        assert counts[1] + zeros[1] == 16 * 8 + 8 + 8 * 2 + 2


@pytest.mark.parametrize("name", workload_names())
def test_the_losses_are_those_of_the_bf16_control(tmp_path: Path, name: str) -> None:
    plan = plan_of(name, steps=3)
    _, table = run(plan.probe(name, 0), tmp_path)
    control = plan.run(name, "bf16", 0)
    training.train(control, tmp_path / control.folder, lambda line: None)
    _, trace = read_run(tmp_path, control)
    assert table["loss"].to_pylist() == trace["loss"].to_pylist()


@pytest.mark.parametrize("name", workload_names())
def test_the_largest_is_in_the_topmost_bin_that_is_filled(tmp_path: Path, name: str) -> None:
    _, table = run(plan_of(name, steps=3).probe(name, 0), tmp_path)
    for row in table.to_pylist():
        counts = np.add(row["activation_counts"], row["weight_counts"])
        top = int(np.flatnonzero(counts)[-1]) + LOWEST_EXPONENT
        assert 2.0**top <= row["largest"] < 2.0 ** (top + 1)
        # Gradients of layer norms and embeddings are in fp32 and may be larger.
        if name not in ("text", "bursts"):
            assert row["largest_gradient"] <= row["largest"]


@pytest.mark.parametrize("name", ["binary", "bursts"])
def test_a_probe_run_twice_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    spec = plan_of(name, steps=8).probe(name, 0)
    assert spec.threads == 1
    run(spec, tmp_path / "one")
    torch.manual_seed(99)
    torch.rand(7)
    run(spec, tmp_path / "other")
    for file in ("probe.parquet", "probe.json"):
        one, other = (tmp_path / folder / spec.folder / file for folder in ("one", "other"))
        assert one.read_bytes() == other.read_bytes()


def test_progress_counts_the_steps(tmp_path: Path) -> None:
    lines: list[str] = []
    spec = plan_of(steps=20).probe("binary", 0)
    probe(spec, tmp_path, lines.append)
    assert len(lines) == 10
    assert lines[-1].startswith("step 20/20")


def use(
    monkeypatch: pytest.MonkeyPatch,
    batches: Callable[[], Iterator[Tensor]] = lambda: repeat(ONES),
    loss: Callable[[nn.Module, Tensor], Tensor] = lambda model, batch: total(model(batch)),
    rate: float = 0.1,
    **options: Any,
) -> None:
    def build(*_: object) -> Workload:
        layer = linear()
        optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
        return Workload(layer, optimizer, batches(), loss, **options)

    monkeypatch.setattr(training, "build_workload", build)


def raises_after(steps: int) -> Callable[[], Iterator[Tensor]]:
    def batches() -> Iterator[Tensor]:
        yield from repeat(ONES, steps)
        raise ValueError("no more")

    return batches


@pytest.mark.parametrize("steps", [0, 3])
def test_a_workload_that_raises_leaves_the_steps_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    use(monkeypatch, raises_after(steps))
    written, table = run(plan_of().probe("binary", 0), tmp_path)
    assert written.outcome == "failed"
    assert "ValueError: no more" in (written.error or "")
    assert written.steps_done == len(table) == steps
    assert [sum(counts) for counts in table["activation_counts"].to_pylist()] == [8] * steps


def test_a_workload_that_raises_in_its_backward_pass_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, loss=lambda model, batch: total(Raises.apply(model(batch))))
    written, table = run(plan_of().probe("binary", 0), tmp_path)
    assert (written.outcome, len(table)) == ("failed", 0)
    assert "in the backward pass" in (written.error or "")
    assert _len_torch_dispatch_stack() == 0


def test_a_training_that_diverges_leaves_the_steps_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, loss=lambda m, b: m(b).float().pow(2).sum(), rate=1e6)
    written, table = run(plan_of(steps=50).probe("binary", 0), tmp_path)
    assert written.outcome == "diverged"
    assert 1 < len(table) < 50
    losses, largest = table["loss"].to_pylist(), table["largest"].to_pylist()
    assert math.isfinite(losses[-2]) and not math.isfinite(losses[-1])
    assert largest[-1] > 1e6 * largest[0]


def test_micro_batches_of_a_step_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, accumulate=4)
    _, table = run(plan_of(steps=3).probe("binary", 0), tmp_path)
    # Each of 4 losses counts a quarter: 4 × 8 outputs of 1/4, 4 × 6 weights of 4 × 1/4.
    for row in table.to_pylist():
        assert row["activation_counts"][-2 - LOWEST_EXPONENT] == 32
        assert row["weight_counts"][0 - LOWEST_EXPONENT] == 24
        assert (sum(row["activation_counts"]), sum(row["weight_counts"])) == (32, 24)
        assert row["largest"] == 1.0
        assert row["largest_gradient"] == 4.0  # of the sum, which is in fp32
