"""The scaler in real fp16 trainings: against PyTorch's own, and in what that one does not have."""

import copy
import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, SparseAdam
from torch.overrides import TorchFunctionMode

from halfscale.policies import POLICIES, FloorReached, Static, make_policy
from halfscale.scaling import LossScaler
from halfscale.workloads import build_workload

Scaler = LossScaler | torch.amp.GradScaler
Parameters = Iterable[Tensor]

# Odd factors and scales that are no powers of two are where an order of operations shows.
SETTINGS: dict[str, dict[str, Any]] = {
    "powers of two": {"init_scale": 1024.0, "growth_interval": 3},
    "1.5 and 0.7": {
        "init_scale": 1000.7,
        "growth_factor": 1.5,
        "backoff_factor": 0.7,
        "growth_interval": 2,
    },
    "3 and 0.3": {
        "init_scale": 3.3,
        "growth_factor": 3.0,
        "backoff_factor": 0.3,
        "growth_interval": 1,
    },
    "1.001": {"init_scale": 777.77, "growth_factor": 1.001, "growth_interval": 1},
}
each_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
either_way = pytest.mark.parametrize("unscale", [True, False], ids=["unscale_", "step alone"])

OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.05, foreach=False),
    "SGD foreach": lambda p: SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "SGD fused": lambda p: SGD(p, lr=0.05, momentum=0.9, fused=True),
    "AdamW foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "Adagrad fused": lambda p: Adagrad(p, lr=0.01, fused=True),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Nets this small are slowed down by threads, the more so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Training:
    """What to train: `losses(k)` gives the losses of batch k, each with a graph of its own."""

    optimizers: list[Optimizer]
    losses: Callable[[int], list[Tensor]]

    def parameters(self) -> list[Tensor]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]


class Net(nn.Module):
    """A small net with a layer that never receives a gradient."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.head = nn.Linear(12, 3)
        self.unused = nn.Linear(2, 2)

    def loss(self, batch: int, bursts: Iterable[int]) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        inputs = torch.randn(16, 6, generator=generator)
        targets = torch.randn(16, 3, generator=generator)
        with torch.autocast("cpu", dtype=torch.float16):
            output = self.head(self.body(inputs))
        loss = nn.functional.mse_loss(output.float(), targets)
        return loss * 2.0**30 if batch in bursts else loss


def one_net(optimizer: str = "SGD foreach", bursts: Iterable[int] = (3, 4, 9)) -> Training:
    net = Net()
    return Training([OPTIMIZERS[optimizer](net.parameters())], lambda k: [net.loss(k, bursts)])


def found_inf(reference: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    return any(flag.item() > 0 for flag in reference._found_inf_per_device(optimizer).values())


def fingerprint(training: Training) -> bytes:
    """Every bit of the parameters and of their gradients."""
    tensors = [p.detach() for p in training.parameters()]
    tensors += [p.grad.to_dense() for p in training.parameters() if p.grad is not None]
    return b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def run(
    scaler: Scaler,
    training: Training,
    steps: Iterable[int],
    *,
    unscale: bool = True,
    clip: float | None = None,
    accumulate: int = 1,
) -> list[tuple[float, list[bool], bytes]]:
    """Train, and note after each step the scale, who skipped, and every bit of the parameters."""
    trace = []
    for step in steps:
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        for batch in range(step * accumulate, (step + 1) * accumulate):
            for loss in scaler.scale(training.losses(batch)):
                loss.backward()
        for optimizer in training.optimizers:
            if unscale:
                scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
        skips = []
        for optimizer in training.optimizers:
            applied = scaler.step(optimizer)
            ours = isinstance(scaler, LossScaler)
            skips.append(not applied if ours else found_inf(scaler, optimizer))
        scaler.update()
        trace.append((scaler.get_scale(), skips, fingerprint(training)))
    return trace


def skips_equal_to_torch(
    build: Callable[[], Training], settings: dict[str, Any], steps: int = 14, **how: Any
) -> list[list[bool]]:
    """Train twice; whatever is not the same bit for bit fails. Returns who skipped, by step."""
    ours = run(LossScaler(make_policy("torch", **settings)), build(), range(steps), **how)
    theirs = run(torch.amp.GradScaler("cpu", **settings), build(), range(steps), **how)
    for step, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        assert mine[:2] == reference[:2], f"step {step}"
        assert mine[2] == reference[2], f"parameters or gradients differ after step {step}"
    skips = [row[1] for row in ours]
    assert any(map(any, skips)), "without an overflow the comparison shows little"
    assert not all(map(any, skips)), "without an applied step the comparison shows little"
    return skips


# The policy torch, bit for bit


@each_setting
@either_way
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_torch_with_every_optimizer(
    optimizer: str, unscale: bool, settings: dict[str, Any]
) -> None:
    skips_equal_to_torch(lambda: one_net(optimizer), settings, unscale=unscale)


@pytest.mark.parametrize(
    ("name", "parameters", "init_scale"),
    [("binary", {}, 2.0**18), ("digits", {"batch_size": 32, "channels": 4}, 2.0**18 * 1.1)],
    ids=["binary", "digits"],
)
def test_equals_torch_on_the_workloads(
    name: str, parameters: dict[str, Any], init_scale: float
) -> None:
    def build() -> Training:
        workload = build_workload(name, 0, "cpu", dict(parameters))

        def losses(_: int) -> list[Tensor]:
            with torch.autocast("cpu", dtype=torch.float16):
                return [workload.loss(workload.model, next(workload.batches))]

        return Training([workload.optimizer], losses)

    skips_equal_to_torch(build, {"init_scale": init_scale, "growth_interval": 2}, steps=8)


@each_setting
@pytest.mark.parametrize("optimizer", ["SGD foreach", "AdamW fused"])
def test_equals_torch_with_clipping(optimizer: str, settings: dict[str, Any]) -> None:
    skips_equal_to_torch(lambda: one_net(optimizer), settings, clip=0.05)


@each_setting
@either_way
def test_equals_torch_with_accumulation(unscale: bool, settings: dict[str, Any]) -> None:
    def build() -> Training:
        return one_net("AdamW foreach", bursts=(5, 12, 13, 20))

    skips_equal_to_torch(build, settings, unscale=unscale, accumulate=2)


@each_setting
@either_way
def test_equals_torch_where_two_optimizers_share_an_overflow(
    unscale: bool, settings: dict[str, Any]
) -> None:
    def build() -> Training:
        net = Net()
        optimizers = [
            OPTIMIZERS["SGD foreach"](net.body.parameters()),
            OPTIMIZERS["AdamW fused"](net.head.parameters()),
        ]
        return Training(optimizers, lambda k: [net.loss(k, (3, 4, 9))])

    skips = skips_equal_to_torch(build, settings, unscale=unscale)
    assert skips[3] == [True, True]


@each_setting
@either_way
def test_equals_torch_where_only_one_optimizer_overflows(
    unscale: bool, settings: dict[str, Any]
) -> None:
    def build() -> Training:
        first, second = Net(1), Net(2)
        optimizers = [
            OPTIMIZERS["AdamW fused"](first.parameters()),
            OPTIMIZERS["SGD foreach"](second.parameters()),
        ]
        return Training(optimizers, lambda k: [first.loss(k, (3, 8)), second.loss(k, (5, 8))])

    skips = skips_equal_to_torch(build, settings, unscale=unscale)
    assert [skips[step] for step in (3, 5, 8)] == [[True, False], [False, True], [True, True]]


@each_setting
@pytest.mark.parametrize("optimizer", [SGD, SparseAdam])
def test_equals_torch_with_sparse_gradients(
    optimizer: type[Optimizer], settings: dict[str, Any]
) -> None:
    def build() -> Training:
        torch.manual_seed(0)
        table, net = nn.Embedding(7, 6, sparse=True), Net()

        def losses(k: int) -> list[Tensor]:
            # Repeated rows, so that the gradient comes uncoalesced.
            rows = table(torch.tensor([0, 0, 0, 1, 1, k % 7])) * torch.linspace(0.1, 3, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net.head(net.body(rows)).float().square().mean()
            return [loss * 2.0**30 if k in (3, 4, 9) else loss]

        sparse = optimizer(table.parameters(), lr=0.05)
        return Training([sparse, OPTIMIZERS["SGD"](net.parameters())], losses)

    skips_equal_to_torch(build, settings)


def linear(
    settings: dict[str, Any], dtypes: Iterable[torch.dtype], bursts: Iterable[int], **how: Any
) -> None:
    """Compare on parameters of several types, whose gradients are the loss's own weights."""

    def build() -> Training:
        parameters = [torch.ones(5, dtype=dtype).requires_grad_() for dtype in dtypes]
        weights = torch.tensor([1e-4, -0.3, 0.0, 2.7, 1000.0])

        def losses(k: int) -> list[Tensor]:
            factor = math.inf if k in bursts else 1.0 + k / 7
            return [sum((p.float() * weights).sum() for p in parameters) * factor]

        return Training([SGD(parameters, lr=0.01)], losses)

    skips_equal_to_torch(build, settings, steps=8, **how)


@pytest.mark.filterwarnings("ignore:bfloat16 has the range")
@each_setting
def test_equals_torch_with_parameters_of_several_types(settings: dict[str, Any]) -> None:
    linear(settings, [torch.float32, torch.bfloat16, torch.float64, torch.float32], bursts=(2, 5))


@pytest.mark.parametrize("init_scale", [2.0**-100, 2.0**-126, 2.0**-140, 1e-45, 1e35])
def test_equals_torch_at_the_ends_of_fp32(init_scale: float) -> None:
    linear({"init_scale": init_scale, "growth_interval": 3}, [torch.float32], bursts=(2, 5, 6))


def test_equals_torch_when_an_optimizer_is_unscaled_but_not_stepped() -> None:
    def trace(scaler: Scaler) -> list[tuple[float, bytes]]:
        first, second = Net(1), Net(2)
        training = Training([SGD(net.parameters(), lr=0.1) for net in (first, second)], list)
        rows = []
        for step in range(6):
            for net, bursts in ((first, ()), (second, (1, 4))):
                net.zero_grad()
                scaler.scale(net.loss(step, bursts)).backward()
            scaler.unscale_(training.optimizers[1])
            if step != 4:
                scaler.step(training.optimizers[0])
            scaler.update()
            rows.append((scaler.get_scale(), fingerprint(training)))
        return rows

    settings = SETTINGS["1.5 and 0.7"]
    ours = trace(LossScaler(make_policy("torch", **settings)))
    assert ours == trace(torch.amp.GradScaler("cpu", **settings))
    assert ours[1][0] < ours[0][0]


@pytest.mark.parametrize("optimizer", ["SGD fused", "AdamW fused"])
def test_equals_torch_with_fp16_parameters_that_the_fused_kernel_unscales(optimizer: str) -> None:
    def build() -> Training:
        weights = torch.linspace(-1, 1, 5).half().requires_grad_()
        burst = (2, 3, 6)
        return Training(
            [OPTIMIZERS[optimizer]([weights])],
            lambda k: [(weights * (6e4 if k in burst else 0.01 * k)).sum().float()],
        )

    skips_equal_to_torch(build, {"init_scale": 5.3, "growth_interval": 4}, 9, unscale=False)


def test_equals_torch_where_the_caller_gives_a_fused_optimizer_a_factor_of_its_own() -> None:
    def trace(scaler: Scaler) -> list[bytes]:
        training, rows = one_net("AdamW fused"), []
        for step in range(4):
            training.optimizers[0].zero_grad()
            scaler.scale(training.losses(step))[0].backward()
            training.optimizers[0].grad_scale = torch.tensor(3.0)
            scaler.step(training.optimizers[0])
            scaler.update()
            assert not hasattr(training.optimizers[0], "grad_scale")
            rows.append(fingerprint(training))
        return rows

    settings = SETTINGS["1.5 and 0.7"]
    ours = trace(LossScaler(make_policy("torch", **settings)))
    assert ours == trace(torch.amp.GradScaler("cpu", **settings))


def test_a_skipped_first_step_leaves_fused_momentum_alone() -> None:
    # PyTorch's scaler enters the fused kernel even to skip, whereupon the momentum starts from
    # memory that nobody initialised; the unfused optimizer is the reference here.
    def final(optimizer: str) -> Tensor:
        training = one_net(optimizer, bursts=(0,))
        scaler = LossScaler(make_policy("torch", init_scale=1024.0))
        assert next(row[1] for row in run(scaler, training, range(3), unscale=False)) == [True]
        return torch.cat([p.detach().flatten() for p in training.parameters()])

    torch.testing.assert_close(final("SGD fused"), final("SGD foreach"))


# Any policy


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_trains_and_is_told_what_happened(name: str) -> None:
    training, alone = one_net("AdamW fused"), make_policy(name)
    scaler = LossScaler(make_policy(name))
    (optimizer,) = training.optimizers
    applied = []
    for step in range(20):
        assert scaler.get_scale() == alone.scale
        optimizer.zero_grad()
        scaler.scale(training.losses(step))[0].backward()
        now = training.parameters()
        overflow = not all(bool(p.grad.isfinite().all()) for p in now if p.grad is not None)
        before = [p.detach().clone() for p in now]
        applied.append(scaler.step(optimizer))
        scaler.update()
        changed = any(not torch.equal(p, old) for p, old in zip(now, before, strict=True))
        assert (applied[-1], changed) == (not overflow, not overflow)
        # The optimizer's kernel or the scaler has unscaled them by now.
        largest = max(float(p.grad.abs().max()) for p in now if p.grad is not None)
        alone.update(overflow, largest_gradient=None if overflow else largest)
    assert any(applied)
    assert not all(applied)


def test_the_largest_gradient_is_that_of_all_optimizers_unclipped_with_duplicates_summed() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    weight, empty = torch.ones(2, requires_grad=True), torch.ones(0, requires_grad=True)
    first, second = SGD(table.parameters(), lr=0.1), SGD([weight, empty], lr=0.1)
    scaler, alone = LossScaler(make_policy("openseq2seq-logmax")), make_policy("openseq2seq-logmax")
    for rows, factor, largest in (([0, 0, 1], 3.0, 6.0), ([2], 9.0, 9.0), ([0, 1], -0.5, 1.0)):
        table.zero_grad()
        second.zero_grad()
        loss = (table(torch.tensor(rows)) * factor).sum() + weight.sum() + empty.sum()
        scaler.scale(loss).backward()
        scaler.unscale_(first)
        scaler.unscale_(second)
        nn.utils.clip_grad_value_([weight], 1e-3)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        assert scaler.get_scale() == alone.update(False, largest_gradient=largest)


def test_gradients_that_only_unscaling_makes_infinite_are_no_magnitude() -> None:
    weight = torch.ones(2, requires_grad=True)
    policy = make_policy("openseq2seq-logmax", init_scale=2.0**-100, min_scale=2.0**-120)
    scaler, optimizer = LossScaler(policy), SGD([weight], lr=0.1)
    scaler.scale((weight * 2.0**127).sum() * 2.0**100).backward()
    weight.grad.fill_(2.0**100)
    assert not scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.ones(2))


@pytest.mark.parametrize("name", ["torch", "megatron", "fairseq", "openseq2seq-logmax"])
def test_saving_and_restoring_changes_nothing(name: str) -> None:
    def start() -> tuple[LossScaler, Training]:
        settings = {"init_scale": 1000.7} | ({} if name[0] == "o" else {"growth_interval": 3})
        return LossScaler(make_policy(name, **settings)), one_net("AdamW foreach")

    uninterrupted = run(*start(), range(14))
    for stop in (4, 5, 8):
        scaler, training = start()
        rows = run(scaler, training, range(stop))
        saved = json.loads(json.dumps(scaler.state_dict()))
        later_scaler, later = start()
        # One that was already in use, in the middle of a step.
        later_scaler.scale(later.losses(0))[0].backward()
        later_scaler.unscale_(later.optimizers[0])
        later_scaler.load_state_dict(saved)
        with torch.no_grad():
            for mine, theirs in zip(later.parameters(), training.parameters(), strict=True):
                mine.copy_(theirs)
        later.optimizers[0].load_state_dict(copy.deepcopy(training.optimizers[0].state_dict()))
        assert rows + run(later_scaler, later, range(stop, 14)) == uninterrupted


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"policy": "another", "state": {"scale": 1.0, "tracker": 0}, "retries": 0},
        {"policy": "torch", "state": {"scale": 1.0}, "retries": 0},
        {"policy": "torch", "state": {"scale": "x", "tracker": 0}, "retries": 0},
        {"scale": 1.0, "growth_factor": 2.0, "_growth_tracker": 0},
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(state: dict[str, Any]) -> None:
    scaler = LossScaler(make_policy("torch"))
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="state of"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


# What a caller learns


def test_skipped_tells_of_each_optimizer_and_of_all_until_the_next_step() -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    first, second = (SGD([weight], lr=0.1) for weight in weights)
    scaler = LossScaler(make_policy("torch"))
    assert not scaler.skipped
    assert not scaler.was_skipped(first)
    for factors, skips in (((1.0, math.inf), [False, True]), ((1.0, 1.0), [False, False])):
        for weight, factor in zip(weights, factors, strict=True):
            weight.grad = None
            scaler.scale((weight * factor).sum()).backward()
        assert [not scaler.step(first), not scaler.step(second)] == skips
        assert [scaler.was_skipped(first), scaler.was_skipped(second)] == skips
        assert scaler.skipped == any(skips)
        scaler.update()
        assert [scaler.was_skipped(first), scaler.was_skipped(second)] == skips
        assert scaler.skipped == any(skips)


def test_an_optimizers_hooks_see_applied_steps_only() -> None:
    training, seen = one_net("AdamW fused"), []
    training.optimizers[0].register_step_post_hook(lambda *_: seen.append(None))
    rows = run(LossScaler(make_policy("torch")), training, range(12), unscale=False)
    assert len(seen) == sum(not skips[0] for _, skips, _ in rows) < 12


def test_an_error_in_a_fused_optimizer_leaves_no_factor_on_it() -> None:
    training = one_net("AdamW fused")
    (optimizer,) = training.optimizers
    scaler = LossScaler(make_policy("torch", init_scale=8.0))
    scaler.scale(training.losses(0))[0].backward()

    def fail(*_: object) -> None:
        raise KeyError("the caller's")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    hook.remove()
    assert scaler.step(optimizer)


def test_only_pytorchs_own_fused_optimizers_are_left_to_unscale() -> None:
    class Recording(SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: None = None) -> None:
            (parameter,) = self.param_groups[0]["params"]
            self.seen = parameter.grad.tolist()

    weight = torch.ones(2, requires_grad=True)
    optimizer, scaler = Recording([weight], lr=0.1), LossScaler(make_policy("torch"))
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.seen == [1.0, 1.0]


@pytest.mark.parametrize("nested", [True, False])
def test_scale_keeps_tuples_and_takes_any_iterable(nested: bool) -> None:
    scaler = LossScaler(make_policy("torch", init_scale=3.0))
    one = torch.ones((), dtype=torch.float16)
    assert scaler.scale(one).dtype == torch.float32
    assert scaler.scale(torch.ones(2, dtype=torch.float16)).tolist() == [3.0, 3.0]
    given = [one, (one, one * 2)] if nested else [one, one]
    expected = [3.0, (3.0, 6.0)] if nested else [3.0, 3.0]
    for as_given, as_expected in ((given, expected), (tuple(given), tuple(expected))):
        assert scaler.scale(as_given) == as_expected
    assert scaler.scale(part for part in given) == expected
    with pytest.raises(TypeError, match="iterable of tensors, got 'loss'"):
        scaler.scale("loss")


class Transfers(TorchFunctionMode):
    """Counts what waits for a device."""

    waiting = frozenset({"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"})

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.waiting:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["torch", "openseq2seq-logmax", "continuous"])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_step_waits_for_the_device_once(policy: str, overflow: bool) -> None:
    nets = [Net(1), Net(2), Net(3)]
    optimizers = [SGD(net.parameters(), lr=0.1) for net in nets]
    scaler = LossScaler(make_policy(policy))
    with Transfers() as warm_up:
        assert torch.ones(1).tolist() == [1.0]
    assert warm_up.seen
    for net in nets:
        net.loss(0, (0,) if overflow else ()).mul(scaler.scale(torch.ones(()))).backward()
    with Transfers() as transfers:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            assert scaler.step(optimizer) != overflow
        scaler.update()
        scaler.scale(torch.ones(()))
        scaler.get_scale()
    assert len(transfers.seen) == 1


# Misuse


def overflow_and_update(scaler: Scaler, optimizer: Optimizer, stale: Tensor) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    stale.backward()


MISUSE: dict[str, tuple[Callable[[Scaler, Optimizer, Tensor], object], str]] = {
    "unscale_ twice": (
        lambda s, o, _: (s.unscale_(o), s.unscale_(o)),
        r"unscale_\(\) was already called",
    ),
    "unscale_ after step": (
        lambda s, o, _: (s.step(o), s.unscale_(o)),
        r"step\(\) was already called",
    ),
    "step twice": (lambda s, o, _: (s.step(o), s.step(o)), r"step\(\) was already called"),
    "update alone": (lambda s, o, _: s.update(), "no step to end"),
    "update twice": (lambda s, o, _: (s.step(o), s.update(), s.update()), "no step to end"),
    "no gradient": (lambda s, o, _: (o.zero_grad(), s.step(o)), "has a gradient"),
    "a loss that is none": (lambda s, o, _: s.scale(1.0), "a tensor or an iterable"),
    "a loss scaled before": (overflow_and_update, "modified by an inplace operation"),
}


@pytest.mark.parametrize(("misuse", "text"), MISUSE.values(), ids=MISUSE)
def test_misuse_that_torch_refuses_is_refused_with_a_clear_text(
    misuse: Callable[[Scaler, Optimizer, Tensor], object], text: str
) -> None:
    for scaler in (torch.amp.GradScaler("cpu"), LossScaler(make_policy("torch"))):
        weight = torch.ones(2, requires_grad=True)
        optimizer = SGD([weight], lr=0.1)
        scaler.scale(weight.square().sum()).backward()
        stale = scaler.scale(weight.square().sum())
        ours = isinstance(scaler, LossScaler)
        with pytest.raises(Exception, match=text if ours else None) as raised:
            misuse(scaler, optimizer, stale)
        assert isinstance(raised.value, RuntimeError | TypeError | ValueError | AssertionError)


@pytest.mark.parametrize("call", [LossScaler.unscale_, LossScaler.step])
def test_gradients_that_no_scaled_loss_made_are_refused(call: Callable[..., object]) -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"call scale\(loss\)\.backward\(\) first"):
        call(LossScaler(make_policy("torch")), SGD([weight], lr=0.1))


@pytest.mark.parametrize("call", [LossScaler.unscale_, LossScaler.step])
@pytest.mark.parametrize("fused", [False, True])
def test_fp16_gradients_are_refused_before_any_is_touched(
    call: Callable[..., object], fused: bool
) -> None:
    single, half = torch.ones(2, requires_grad=True), torch.ones(2).half().requires_grad_()
    scaler, optimizer = LossScaler(make_policy("torch")), SGD([single, half], lr=0.1, fused=fused)
    scaler.scale(single.sum() + half.sum().float() * 0.1).backward()
    if fused and call is LossScaler.step:
        assert scaler.step(optimizer)
        return
    with pytest.raises(ValueError, match="keep the parameters in fp32 and use autocast"):
        call(scaler, optimizer)
    assert single.grad.tolist() == [2.0**16, 2.0**16]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"policy": "torch"}, TypeError, "must be a halfscale.policies.Policy, got 'torch'"),
        ({"policy": make_policy("torch"), "max_retries": -1}, ValueError, "not be negative"),
    ],
)
def test_a_scaler_is_built_from_a_policy_only(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        LossScaler(**arguments)


# Giving up, and trying again


def fp16_loss(weight: Tensor, x: float) -> Tensor:
    """A loss whose one gradient is x, computed in fp16: an overflow where x × scale > 65504."""
    return (weight.half() * torch.tensor(x, dtype=torch.float16)).sum().float()


def attempt(scaler: LossScaler, optimizer: Optimizer, x: float) -> bool:
    optimizer.zero_grad()
    (weight,) = optimizer.param_groups[0]["params"]
    scaler.scale(fp16_loss(weight, x)).backward()
    applied = scaler.step(optimizer)
    scaler.update()
    return applied


def train_with_retries(scaler: LossScaler, batches: list[float]) -> tuple[list[str], float]:
    """One letter an attempt, F or X, by batch; and where plain SGD with rate -1 has come to."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = SGD([weight], lr=1.0, maximize=True)
    attempts = []
    for x in batches:
        attempts.append("")
        while True:
            attempts[-1] += "F" if attempt(scaler, optimizer, x) else "X"
            if not scaler.should_retry:
                break
    return attempts, weight.item()


@pytest.mark.parametrize(
    ("max_retries", "attempts", "sum_of_applied"),
    [
        (0, ["F", "X", "F", "X"], 2.0),
        (1, ["F", "XF", "F", "XX"], 102.0),
        (2, ["F", "XF", "F", "XXX"], 102.0),
        (4, ["F", "XF", "F", "XXXF"], 1102.0),
    ],
)
def test_a_lost_batch_is_retried_at_the_lowered_scale_up_to_a_limit(
    max_retries: int, attempts: list[str], sum_of_applied: float
) -> None:
    scaler = LossScaler(make_policy("torch", init_scale=1024.0), max_retries=max_retries)
    batches = [1.0, 100.0, 1.0, 1000.0]
    assert train_with_retries(scaler, batches) == (attempts, sum_of_applied)
    assert scaler.get_scale() == 1024.0 / 2 ** "".join(attempts).count("X")


@pytest.mark.parametrize(
    ("name", "parameters", "attempts"),
    [
        ("static", {}, ["X", "X", "F"]),
        ("megatron", {"hysteresis": 2}, ["X", "XF", "F"]),
        ("metaseq", {"min_scale": 1024.0}, ["X", "X", "F"]),
    ],
)
def test_a_batch_is_not_retried_where_the_policy_kept_the_scale(
    name: str, parameters: dict[str, Any], attempts: list[str]
) -> None:
    scaler = LossScaler(make_policy(name, init_scale=1024.0, **parameters), max_retries=3)
    assert train_with_retries(scaler, [100.0, 100.0, 1.0])[0] == attempts


def test_a_batch_is_not_retried_where_some_optimizer_has_applied_it() -> None:
    scaler = LossScaler(make_policy("torch", init_scale=1024.0), max_retries=3)
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizers = [SGD([weight], lr=1.0) for weight in weights]
    for gradients, retry in (((1.0, 100.0), False), ((200.0, 200.0), True)):
        for optimizer, weight, x in zip(optimizers, weights, gradients, strict=True):
            optimizer.zero_grad()
            scaler.scale(fp16_loss(weight, x)).backward()
            scaler.step(optimizer)
        scaler.update()
        assert scaler.should_retry == retry


def test_the_retries_left_are_saved_and_restored() -> None:
    def build() -> tuple[LossScaler, Optimizer]:
        scaler = LossScaler(make_policy("torch", init_scale=1024.0), max_retries=2)
        return scaler, SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    scaler, optimizer = build()
    asked = []
    for _ in range(4):
        assert not attempt(scaler, optimizer, 60_000.0)
        asked.append(scaler.should_retry)
        state = scaler.state_dict()
        scaler, optimizer = build()
        scaler.load_state_dict(state)
        assert scaler.should_retry == asked[-1]
    assert asked == [True, True, False, True]


@pytest.mark.parametrize(
    ("name", "parameters", "floor", "left"),
    [
        ("fairseq", {"min_scale": 300.0}, 300.0, 512.0),
        ("deepspeed", {"hysteresis": 1, "min_scale": 512.0, "raise_at_floor": True}, 512.0, 512.0),
    ],
)
def test_a_policy_that_aborts_at_its_floor_ends_the_step_with_its_state_fit_to_save(
    name: str, parameters: dict[str, Any], floor: float, left: float
) -> None:
    scaler = LossScaler(make_policy(name, init_scale=1024.0, **parameters), max_retries=9)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = SGD([weight], lr=1.0)
    assert not attempt(scaler, optimizer, 60_000.0)
    assert scaler.should_retry
    with pytest.raises(FloorReached) as stopped:
        attempt(scaler, optimizer, 60_000.0)
    assert (stopped.value.policy, stopped.value.floor) == (name, floor)
    assert weight.item() == 0
    assert scaler.skipped
    assert not scaler.should_retry
    assert scaler.get_scale() == scaler.state_dict()["state"]["scale"] == left
    assert scaler.scale(torch.ones(())).item() == left
    with pytest.raises(RuntimeError, match="no step to end"):
        scaler.update()
    assert attempt(scaler, optimizer, 1.0)


def test_a_scale_that_a_policy_leaves_behind_on_aborting_is_taken_over() -> None:
    class Lowering(Static):
        def _on_overflow(self) -> None:
            self.scale = 2.0
            raise FloorReached("lowering", 4.0, self.scale)

    scaler = LossScaler(Lowering(init_scale=1024.0))
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(FloorReached):
        attempt(scaler, optimizer, 100.0)
    assert scaler.scale(torch.ones(())).item() == scaler.get_scale() == 2.0


# Several processes


def train_on_one_rank(rank: int, folder: Path) -> None:
    """Rank 1 overflows in step 2, rank 0 in step 4; what happened goes to a file."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder / 'rendezvous'}"
    limit = timedelta(seconds=45)
    distributed.init_process_group("gloo", rendezvous, limit, world_size=2, rank=rank)
    alone = [distributed.new_group([each]) for each in range(2)][rank]
    told: dict[str, list[Any]] = {}
    for name, policy, group in (
        ("together", "torch", None),
        ("alone", "torch", alone),
        ("magnitudes", "openseq2seq-logmax", None),
    ):
        scaler = LossScaler(make_policy(policy, init_scale=64.0), process_group=group)
        weights = [torch.zeros(3, requires_grad=True) for _ in range(2)]
        optimizers = [SGD([weights[0]], lr=0.1), AdamW([weights[1]], lr=0.1, fused=True)]
        told[name] = []
        for step in range(6):
            for optimizer, weight in zip(optimizers, weights, strict=True):
                optimizer.zero_grad()
                burst = step == (4, 2)[rank] and optimizer is optimizers[0]
                scaler.scale((weight * (math.inf if burst else 1.0 + 8 * rank)).sum()).backward()
            applied = [scaler.step(optimizer) for optimizer in optimizers]
            scaler.update()
            told[name].append([scaler.get_scale(), *applied])
    distributed.destroy_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


def test_an_overflow_in_one_process_is_an_overflow_in_all(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=train_on_one_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()  # no more than a precaution
    assert [process.exitcode for process in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["together"] == second["together"]
    assert [scale for scale, *_ in first["together"]] == [64.0, 64.0, 32.0, 32.0, 16.0, 16.0]
    # The other optimizer's own gradients are finite everywhere.
    assert [applied for _, *applied in first["together"]] == [
        [step not in (2, 4), True] for step in range(6)
    ]
    assert [scale for scale, *_ in first["alone"]] == [64.0] * 4 + [32.0] * 2
    assert [scale for scale, *_ in second["alone"]] == [64.0] * 2 + [32.0] * 4
    policy = make_policy("openseq2seq-logmax", init_scale=64.0)
    scales = [policy.update(step in (2, 4), largest_gradient=9.0) for step in range(6)]
    assert [scale for scale, *_ in first["magnitudes"]] == scales
    assert first["magnitudes"] == second["magnitudes"]
