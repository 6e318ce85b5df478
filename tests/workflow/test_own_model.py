"""A user's own model under the real Snakemake: it trains, and an edit reruns exactly its runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .driver import ARMS, NOTHING, PREDICTORS, PROBE, REPOSITORY, Bench, Planned, trains

MODEL = """\
import torch
from torch import nn

from sizes import WIDTH


def build(seed, device, *, rate=0.1):
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(device)
    inputs = torch.randn(16, 4).to(device)

    def loss(model, batch):
        return (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()

    def evaluate(model):
        return loss(model, inputs)

    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return dict(
        model=model, optimizer=optimizer, batches=[inputs], loss=loss, evaluate=evaluate
    )
"""
# One sibling reads another: an edit two imports away counts as well.
SIBLINGS = {
    "sizes.py": "from parts.width import WIDTH\n",
    "parts/__init__.py": "",
    "parts/width.py": "WIDTH = 8\n",
    "unrelated.py": "x = 1\n",
    "parts/unrelated.py": "x = 1\n",
}
OWN = trains(*ARMS, PROBE, workload="mine")


@pytest.fixture
def own(bench: Bench) -> Bench:
    """The finished workflow and, beside its workload, a user's own that has trained as well."""
    models = bench.path / "models"
    for name, text in {"net.py": MODEL, **SIBLINGS}.items():
        (models / name).parent.mkdir(parents=True, exist_ok=True)
        (models / name).write_text(text, encoding="utf-8")
    bench.edit("device:", '  mine: {entry: "models/net.py:build", steps: 5}\ndevice:')
    assert bench.plan() == Planned(OWN, PREDICTORS | {"train", "probe"})
    bench.make()
    assert bench.plan() == NOTHING
    return bench


def test_it_trains_and_an_edit_reruns_its_runs_and_the_readers(own: Bench) -> None:
    table = own.table().set_index(["workload", "configuration"])
    assert set(table.loc["mine", "outcome"]) == {"ok"}
    assert table.loc["mine", "evaluation"].notna().all()
    assert table.loc["binary", "evaluation"].isna().all()
    page = (own.path / "reports/summary.html").read_text(encoding="utf-8")
    assert "mine" in page

    rerun = Planned(OWN, PREDICTORS | {"train", "probe"})
    for file in ("net.py", "sizes.py", "parts/__init__.py", "parts/width.py"):
        path = own.path / "models" / file
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        assert own.plan() == rerun, file
        path.write_bytes(before)
        assert own.plan() == NOTHING, file
    for file in ("unrelated.py", "parts/unrelated.py"):
        path = own.path / "models" / file
        path.write_bytes(path.read_bytes() + b"\n")
    for path in (own.path / "models").rglob("*"):
        os.utime(path)
    assert own.plan() == NOTHING
    own.edit("models/net.py", "./models//net.py")
    assert own.plan() == NOTHING, "another spelling of the same place"

    own.edit("WIDTH = 8", "WIDTH = 4", "models/parts/width.py")
    own.make()
    changed = own.table().set_index(["workload", "configuration"])
    assert (changed.loc["binary", "digest"] == table.loc["binary", "digest"]).all()
    assert (changed.loc["mine", "digest"] != table.loc["mine", "digest"]).all()
    assert (changed.loc["mine", "final_loss"] != table.loc["mine", "final_loss"]).all()
    assert own.plan() == NOTHING


def test_its_path_is_relative_to_the_directory(empty: Bench, tmp_path: Path) -> None:
    empty.edit("binary: {steps: 5}", 'mine: {entry: "models/net.py:build", steps: 5}')
    models = empty.path / "models"
    (models / "parts").mkdir(parents=True)
    for name, text in {"net.py": MODEL, **SIBLINGS}.items():
        (models / name).write_text(text, encoding="utf-8")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = "results/runs/mine/fp32/seed0/run.json"
    directory = ("--directory", str(empty.path))
    made = empty.snakemake(target, *directory, cwd=elsewhere)
    assert made.code == 0, made.text
    assert (empty.path / target).exists()
    assert empty.plan(target, *directory, cwd=elsewhere) == NOTHING
    assert empty.plan(target) == NOTHING


def test_its_mistakes_are_refused_or_become_outcomes(empty: Bench) -> None:
    empty.edit("binary: {steps: 5}", 'mine: {entry: "net.py:build", steps: 5}')
    stopped = empty.snakemake("-n")
    assert stopped.code != 0
    (complaint,) = stopped.complaints
    assert "workloads.mine.entry: 'net.py:build': no such file" in complaint
    # An own example that raises: a result, and the command succeeds.
    text = (REPOSITORY / "examples/own_model.py").read_text(encoding="utf-8")
    (empty.path / "net.py").write_text(text.replace("batch[1])", "batch[2])"), encoding="utf-8")
    folder = "results/runs/mine/fp32/seed0"
    empty.make(f"{folder}/run.json")
    log = (empty.path / "results/logs/train/mine/fp32/seed0.log").read_text(encoding="utf-8")
    assert "outcome: failed (step 0: IndexError: " in log
    assert "(net.py, line 17))" in log
