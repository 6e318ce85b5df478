"""One run: its outcome is data, its trace is what really happened, its numbers are its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from halfscale import records
from halfscale import train as training
from halfscale.plan import CONTROLS, RunSpec
from halfscale.precision import arithmetic
from halfscale.records import RunRecord, read_run
from halfscale.workload_plan import workload_names
from halfscale.workloads import Workload, build_workload

from .crafted import make_plan, tiny_spec

pytestmark = pytest.mark.usefixtures("torch_settings")


def run(spec: RunSpec, results: Path) -> tuple[RunRecord, pa.Table]:
    record = training.train(spec, results / spec.folder, lambda line: None)
    stored, trace = read_run(results, spec)
    assert stored == record
    return record, trace


def digits_spec(arm: str = "default", steps: int = 12, **scaler: object) -> RunSpec:
    plan = make_plan(
        {"default": {"growth_interval": 2, **scaler}},
        seeds=[1],
        workloads={"digits": {"steps": steps, "batch_size": 16, "channels": 2}},
    )
    return plan.run("digits", arm, 1)


@pytest.mark.parametrize("arm", ["default", *CONTROLS])
def test_a_run_that_trains_is_ok(tmp_path: Path, arm: str) -> None:
    spec = tiny_spec(arm, steps=30)
    record, trace = run(spec, tmp_path)
    assert (record.outcome, record.error) == ("ok", None)
    assert record.steps_done == len(trace) == 30
    assert trace["step"].to_pylist() == list(range(30))
    losses = trace["loss"].to_pylist()
    assert losses[-1] < losses[0]
    assert all(seconds > 0 for seconds in trace["seconds"].to_pylist())
    assert record.skipped_steps == trace["applied"].to_pylist().count(False)
    assert record.spec == spec
    assert record.environment["source"] == spec.source
    if arm in CONTROLS:
        assert record.final_scale is None
        assert set(trace["scale"].to_pylist()) == {1.0}
        assert all(trace["applied"].to_pylist())


def replay(spec: RunSpec) -> dict[str, list[Any]]:
    """The same training, written out with torch.amp.GradScaler as its documentation shows it."""
    assert spec.policy is not None
    workload = build_workload(spec.workload, spec.seed, "cpu", dict(spec.parameters))
    scaler = torch.amp.GradScaler("cpu", **spec.policy.parameters)
    seen: dict[str, list[Any]] = {"loss": [], "scale": [], "applied": [], "overflow": []}
    before = [p.detach().clone() for p in workload.model.parameters()]
    with arithmetic(spec.precision, "cpu") as used:
        for batch in islice(workload.batches, spec.steps):
            workload.optimizer.zero_grad()
            with used.autocast():
                loss = workload.loss(workload.model, batch)
            scaler.scale(loss).backward()
            gradients = [p.grad for p in workload.model.parameters() if p.grad is not None]
            seen["loss"].append(loss.item())
            seen["scale"].append(scaler.get_scale())
            seen["overflow"].append(not all(bool(g.isfinite().all()) for g in gradients))
            scaler.step(workload.optimizer)
            scaler.update()
            after = [p.detach().clone() for p in workload.model.parameters()]
            seen["applied"].append(not all(map(torch.equal, before, after)))
            before = after
    seen["final_scale"] = [scaler.get_scale()]
    return seen


@pytest.mark.parametrize("spec", [digits_spec(init_scale=2.0**22), tiny_spec(init_scale=2.0**22)])
def test_the_trace_is_what_torch_does_step_by_step(tmp_path: Path, spec: RunSpec) -> None:
    record, trace = run(spec, tmp_path)
    torch.use_deterministic_algorithms(False)
    expected = replay(spec)
    assert trace["overflow"].to_pylist() == expected["overflow"]
    assert trace["applied"].to_pylist() == expected["applied"]
    assert trace["scale"].to_pylist() == expected["scale"]
    assert trace["loss"].to_pylist() == expected["loss"]
    assert record.final_scale == expected["final_scale"][0]
    assert 0 < record.skipped_steps < spec.steps, "the example must skip some steps and take some"


def test_headroom_is_negative_exactly_on_an_overflow(tmp_path: Path) -> None:
    _, trace = run(digits_spec(init_scale=2.0**22), tmp_path)
    for overflow, headroom, norm in zip(
        *(trace[name].to_pylist() for name in ("overflow", "headroom", "grad_norm")), strict=True
    ):
        assert (headroom < 0) == overflow
        assert math.isfinite(norm) != overflow


def test_headroom_falls_by_one_bit_when_the_scale_doubles(tmp_path: Path) -> None:
    first = [
        run(digits_spec(init_scale=2.0**exponent), tmp_path)[1]["headroom"][0].as_py()
        for exponent in (4, 5, 9)
    ]
    assert first[0] - first[1] == pytest.approx(1, abs=0.02)
    assert first[0] - first[2] == pytest.approx(5, abs=0.02)


def test_a_gradient_of_zero_has_endless_headroom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, workload(loss=lambda model, batch: (model(batch) * 0.0).float().mean()))
    _, trace = run(tiny_spec(init_scale=2.0**8), tmp_path)
    assert set(trace["headroom"].to_pylist()) == {math.inf}


def test_the_same_specification_gives_the_same_numbers(tmp_path: Path) -> None:
    spec = digits_spec(init_scale=2.0**20)
    _, one = run(spec, tmp_path / "one")
    torch.manual_seed(12345)
    _, other = run(spec, tmp_path / "other")
    for name in one.column_names:
        if name != "seconds":
            assert one[name].to_pylist() == other[name].to_pylist(), name


def weights_and_batches(name: str, seed: int) -> list[bytes]:
    built = build_workload(name, seed, "cpu", {})
    tensors = list(built.model.state_dict().values())
    for batch in islice(built.batches, 20):
        tensors += batch
    return [tensor.numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("name", workload_names())
def test_a_seed_alone_decides_initial_weights_and_batch_order(name: str) -> None:
    first = weights_and_batches(name, 3)
    torch.manual_seed(99)
    torch.rand(7)
    assert weights_and_batches(name, 3) == first
    assert weights_and_batches(name, 4) != first


@pytest.mark.parametrize("name", workload_names())
def test_a_workload_is_in_fp32_and_its_loss_a_scalar(name: str) -> None:
    built = build_workload(name, 0, "cpu", {})
    assert {p.dtype for p in built.model.parameters()} == {torch.float32}
    loss = built.loss(built.model, next(built.batches))
    assert loss.shape == ()
    assert loss.isfinite()


def test_all_arms_of_a_seed_start_alike(tmp_path: Path) -> None:
    plan = make_plan(
        {"a": {}, "b": {"init_scale": 2.0**8}},
        seeds=[5],
        workloads={"digits": {"steps": 4, "batch_size": 16, "channels": 2}},
    )
    losses = {spec.arm: run(spec, tmp_path)[1]["loss"].to_pylist() for spec in plan.runs()}
    assert losses["a"][0] == losses["b"][0] == losses["fp16-unscaled"][0]
    for name, values in losses.items():
        # Without training the losses of later batches differ by more than fp16 rounds.
        assert values == pytest.approx(losses["fp32"], rel=0.01), name


def test_two_names_for_one_configuration_train_alike(tmp_path: Path) -> None:
    plan = make_plan(
        {"a": {"init_scale": 2.0**20}, "b": {"init_scale": 2.0**20}},
        seeds=[0],
        workloads={"binary": {"steps": 10, "samples": 64, "hidden": 8}},
    )
    one, other = (run(plan.run("binary", name, 0), tmp_path)[1] for name in ("a", "b"))
    assert one.drop(["seconds"]).equals(other.drop(["seconds"]))


def test_a_learning_rate_too_large_diverges(tmp_path: Path) -> None:
    plan = make_plan(
        workloads={"binary": {"steps": 50, "samples": 64, "hidden": 8, "learning_rate": 1e6}}
    )
    for arm in ("default", "fp32"):
        record, trace = run(plan.run("binary", arm, 0), tmp_path)
        assert record.outcome == "diverged"
        assert "step" in (record.error or "")
        assert 0 < record.steps_done < 50
        assert not math.isfinite(trace["loss"].to_pylist()[-1])


def test_parameters_that_end_non_finite_are_a_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.fill_(math.inf)

    use(monkeypatch, workload(optimizer=lambda model: Breaks(model.parameters(), lr=0.1)))
    record, _ = run(tiny_spec(steps=2), tmp_path)
    assert record.outcome == "diverged"


@pytest.mark.parametrize("steps", [2, 3, 20])
def test_a_run_that_never_leaves_overflow_is_stuck(tmp_path: Path, steps: int) -> None:
    record, trace = run(tiny_spec(steps=steps, init_scale=2.0**120), tmp_path)
    assert record.outcome == "stuck"
    assert record.skipped_steps == record.steps_done == steps
    assert record.final_scale == 2.0 ** (120 - steps)
    assert len(set(trace["loss"].to_pylist())) == 1


def test_a_run_that_leaves_overflow_late_but_trains_is_not_stuck(tmp_path: Path) -> None:
    record, trace = run(tiny_spec(steps=40, init_scale=2.0**40), tmp_path)
    assert not trace["applied"][20].as_py(), "the example must skip half of its steps"
    assert trace["applied"][39].as_py()
    assert record.outcome == "ok"


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().pow(2).mean()


def workload(
    model: Callable[[], nn.Module] = linear,
    loss: Callable[[nn.Module, Any], Tensor] = mean_square,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    batches: Callable[[], Iterator[Any]] = lambda: repeat(torch.ones(4, 3)),
) -> Callable[..., Workload]:
    def build(*_: object) -> Workload:
        built = model()
        chosen = optimizer(built) if optimizer else torch.optim.SGD(built.parameters(), lr=0.1)
        return Workload(built, chosen, batches(), loss)

    return build


def use(monkeypatch: pytest.MonkeyPatch, build: Callable[..., Any]) -> None:
    monkeypatch.setattr(training, "build_workload", build)


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise error

    return function


def fails_after(steps: int, error: Exception) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        yield from repeat(torch.ones(4, 3), steps)
        raise error

    return batches


class BadOptimizer(torch.optim.SGD):
    """An optimizer that raises in its step."""

    def step(self, closure: Any = None) -> None:
        raise ValueError("<script>alert(1)</script>")


ERROR = ValueError("<script>alert(1)</script>")
RAISING = {
    "in build": (raising(ERROR), 0),
    "in a batch": (workload(batches=fails_after(3, ERROR)), 3),
    "in the loss": (workload(loss=raising(ERROR)), 0),
    "in the optimizer": (workload(optimizer=lambda m: BadOptimizer(m.parameters(), lr=1)), 0),
}


@pytest.mark.parametrize("where", RAISING)
def test_an_error_in_the_workload_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    build, steps = RAISING[where]
    use(monkeypatch, build)
    record, trace = run(tiny_spec(init_scale=2.0**8), tmp_path)
    assert record.outcome == "failed"
    assert "ValueError: <script>alert(1)</script>" in (record.error or "")
    assert record.steps_done == len(trace) == steps


class HalfUsed(nn.Module):
    """A model that uses only one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)  # type: ignore[no-any-return]


UNUSABLE = {
    "no gradients": workload(loss=lambda m, b: torch.tensor(1.0, requires_grad=True)),
    "a loss without a graph": workload(loss=lambda m, b: torch.tensor(1.0)),
    "a loss that is no tensor": workload(loss=lambda m, b: 1.0),  # type: ignore[arg-type, return-value]
    "a loss per sample": workload(loss=lambda m, b: m(b).float()),
    "batches that end": workload(batches=lambda: iter([torch.ones(4, 3)] * 3)),
    "parameters in fp16": workload(model=lambda: linear().half()),
    "complex parameters": workload(
        model=lambda: linear().to(torch.complex64), loss=lambda m, b: m(b + 0j).abs().mean()
    ),
    "no workload": lambda *_: None,
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_workload_that_cannot_be_trained_is_an_outcome_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use(monkeypatch, UNUSABLE[kind])
    record, _ = run(tiny_spec(), tmp_path)
    assert record.outcome == "failed"
    assert record.error


USABLE = {
    "unused parameters": workload(model=HalfUsed),
    "a loss of one element": workload(loss=lambda m, b: mean_square(m, b).reshape(1)),
    "double precision": workload(
        model=lambda: linear().double(), loss=lambda m, b: m(b.double()).float().pow(2).mean()
    ),
    "sparse gradients": workload(
        model=lambda: nn.Embedding(4, 2, sparse=True),
        loss=lambda m, b: m(torch.tensor([1, 1])).pow(2).mean(),
    ),
    "parameters the optimizer leaves out": workload(
        optimizer=lambda m: torch.optim.SGD([m.weight], lr=0.1)  # type: ignore[list-item]
    ),
}


@pytest.mark.parametrize("kind", USABLE)
def test_an_unusual_workload_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use(monkeypatch, USABLE[kind])
    record, _ = run(tiny_spec(init_scale=2.0**8), tmp_path)
    assert (record.outcome, record.error) == ("ok", None)
    assert record.skipped_steps == 0


MEMORY_ERRORS = {
    "python": MemoryError(),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
}


@pytest.mark.parametrize("kind", MEMORY_ERRORS)
@pytest.mark.parametrize("where", ["build", "loss"])
def test_memory_that_runs_out_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    error = raising(MEMORY_ERRORS[kind])
    use(monkeypatch, error if where == "build" else workload(loss=error))
    record, _ = run(tiny_spec(), tmp_path)
    assert record.outcome == "out-of-memory"
    assert "memory" in (record.error or "")


def test_real_memory_that_runs_out_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, workload(loss=lambda m, b: m(torch.ones(2**50, 3)).mean()))
    assert run(tiny_spec(), tmp_path)[0].outcome == "out-of-memory"


def test_an_interrupt_is_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, workload(loss=raising(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        training.train(tiny_spec(), tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_disk_that_is_full_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "write_text", raising(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="space"):
        training.train(tiny_spec(), tmp_path / "run", lambda line: None)
    assert not (tmp_path / "run" / "run.json").exists()


def test_progress_counts_the_steps(tmp_path: Path) -> None:
    lines: list[str] = []
    training.train(tiny_spec(steps=25), tmp_path / "run", lines.append)
    counters = [line.split()[1] for line in lines]
    assert counters[-1] == "25/25"
    assert 10 <= len(counters) <= 14
    assert all("loss" in line and "scale" in line for line in lines)


def test_threads_come_from_the_specification(tmp_path: Path) -> None:
    spec = tiny_spec().model_copy(update={"threads": 2})
    training.train(spec, tmp_path / "run", lambda line: None)
    assert torch.get_num_threads() == 2


def test_a_workload_can_not_be_changed_behind_a_run() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload()().model = linear()  # type: ignore[misc]
