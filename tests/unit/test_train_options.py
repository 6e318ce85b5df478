"""What a workload may ask of the training: clipping, accumulation, a schedule; and a floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from halfscale import train as training
from halfscale.plan import RunSpec
from halfscale.records import RunRecord, read_run
from halfscale.workloads import Workload

from .crafted import make_plan, tiny_spec

pytestmark = pytest.mark.usefixtures("torch_settings")


def spec_of(arm: str = "a", steps: int = 10, **configuration: object) -> RunSpec:
    workloads = {"binary": {"steps": steps}}
    return make_plan({"a": configuration}, seeds=[0], workloads=workloads).run("binary", arm, 0)


def run(spec: RunSpec, results: Path) -> tuple[RunRecord, pa.Table]:
    training.train(spec, results / spec.folder, lambda line: None)
    return read_run(results, spec)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().pow(2).mean()


def use(
    monkeypatch: pytest.MonkeyPatch,
    batches: Callable[[], Iterator[Tensor]],
    finish: Callable[[torch.optim.Optimizer], dict[str, Any]],
) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    built = Workload(model, optimizer, batches(), mean_square, **finish(optimizer))
    monkeypatch.setattr(training, "build_workload", lambda *_: built)
    return model


def ones() -> Iterator[Tensor]:
    return repeat(torch.ones(4, 3))


def test_gradients_are_clipped_after_they_were_unscaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = use(monkeypatch, ones, lambda _: {"clip_norm": 0.01})
    before = [p.detach().clone() for p in model.parameters()]
    _, trace = run(spec_of(steps=2, init_scale=2.0**10), tmp_path)
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    # Two steps of lr × the clipped norm in one direction; clipped while scaled, it were 2^10 less.
    assert moved.norm().item() == pytest.approx(2 * 0.1 * 0.01, rel=0.01)
    assert trace["grad_norm"][0].as_py() > 0.1, "the trace shows the norm before clipping"


def test_micro_batches_are_averaged_into_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [torch.ones(4, 3), 2 * torch.ones(4, 3)]
    whole = use(monkeypatch, lambda: repeat(torch.cat(parts)), lambda _: {})
    _, together = run(spec_of("fp32", steps=5), tmp_path / "together")
    split = use(monkeypatch, lambda: iter(parts * 5), lambda _: {"accumulate": 2})
    _, apart = run(spec_of("fp32", steps=5), tmp_path / "apart")
    assert apart["loss"].to_pylist() == pytest.approx(together["loss"].to_pylist(), rel=1e-5)
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5)


def test_the_schedule_moves_on_taken_steps_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.optim.lr_scheduler.LRScheduler] = []

    def schedule(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        made.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        return {"scheduler": made[0]}

    use(monkeypatch, ones, schedule)
    record, _ = run(spec_of(steps=20, init_scale=2.0**24), tmp_path)
    taken = record.steps_done - record.skipped_steps
    assert 0 < record.skipped_steps < 20
    assert made[0].get_last_lr() == pytest.approx([0.1 * 0.5**taken])


def test_a_policy_that_gives_up_leaves_a_stuck_run_that_names_its_floor(tmp_path: Path) -> None:
    start = {"policy": "fairseq", "init_scale": 2.0**40, "min_scale": 2.0**37}
    record, trace = run(spec_of(steps=20, **start), tmp_path)
    assert record.outcome == "stuck"
    assert "fairseq" in (record.error or "") and f"{2.0**37:g}" in (record.error or "")
    # 2^40 and three halvings: the overflow that would reach the floor is the last row.
    assert trace["scale"].to_pylist() == [2.0**40, 2.0**39, 2.0**38]
    assert not any(trace["applied"].to_pylist())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "default"])
def test_the_record_says_which_arithmetic_computed_it(tmp_path: Path, precision: str) -> None:
    spec = tiny_spec(precision)
    record, _ = run(spec, tmp_path)
    said = str(record.environment["arithmetic"])
    assert said.startswith(spec.precision)
    assert ("autocast" in said) == (precision != "fp32")


class HeadOnly(nn.Module):
    """A body that nobody trains, though it receives gradients, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.body(batch))


@pytest.mark.parametrize("arm", ["a", "fp32"])
def test_only_what_the_optimizer_trains_is_measured_and_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    torch.manual_seed(0)
    model = HeadOnly()
    with torch.no_grad():
        model.head.weight.mul_(1000.0)  # the body's gradients are the largest by far
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    built = Workload(model, optimizer, ones(), mean_square, clip_norm=1.0)
    monkeypatch.setattr(training, "build_workload", lambda *_: built)
    before = [p.detach().clone() for p in model.head.parameters()]
    record, trace = run(spec_of(arm, steps=2, init_scale=2.0**-10), tmp_path)
    assert record.outcome == "ok"
    moved = [p.detach() - b for p, b in zip(model.head.parameters(), before, strict=True)]
    # Two steps of rate 0.1 along gradients of norm 1: nothing of the body's counts.
    assert float(torch.cat([m.flatten() for m in moved]).norm()) == pytest.approx(0.2, rel=0.05)
    first, second = trace["grad_norm"].to_pylist()
    assert second == pytest.approx(first, rel=0.05)


@pytest.mark.parametrize("arm", ["a", "fp32"])
def test_an_optimizer_whose_parameters_get_no_gradient_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    torch.manual_seed(0)
    model, unused = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(unused.parameters(), lr=0.1)
    built = Workload(model, optimizer, ones(), mean_square)
    monkeypatch.setattr(training, "build_workload", lambda *_: built)
    record, _ = run(spec_of(arm), tmp_path)
    assert record.outcome == "failed"
    assert record.error == "no parameter that the optimizer trains received a gradient"
