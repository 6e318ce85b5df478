"""``halfscale check-workload``: what it shows of a user's own model, and when it refuses one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from halfscale.cli import app
from halfscale.planner import build_plan

pytestmark = pytest.mark.usefixtures("torch_settings")

FILE = """\
import torch
from torch import nn


def build(seed, device, *, size=3, rate=1.0, kind="plain"):
    model = nn.Sequential(nn.Linear(size, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    batches = [{"inputs": torch.randn(8, size), "kind": "train"}]
    extra = {}

    def loss(model, batch):
        return model(batch["inputs"]).float().pow(2).mean() / 100

    if kind == "large":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        loss = lambda model, batch: 1e6 * model(batch["inputs"]).float().pow(2).mean()
    if kind == "forward":
        loss = lambda model, batch: (model(batch["inputs"]) @ torch.full((1, 1), 1e6)).mean()
    if kind == "constant":
        loss = lambda model, batch: model(batch["inputs"]).float().mean() * 0 + 1
    if kind == "unseeded":
        model[0].weight.data += torch.randn((), generator=GENERATOR)
    if kind == "leaves out":
        optimizer = torch.optim.SGD(model[0].parameters(), lr=rate)
    if kind == "options":
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        extra = dict(clip_norm=1.0, accumulate=2, scheduler=schedule, evaluate=lambda model: 0.5)
    if kind == "bad data":
        batches = [{"inputs": torch.full((8, size), float("nan"))}]
    return dict(model=model, optimizer=optimizer, batches=batches, loss=loss, **extra)


GENERATOR = torch.Generator()
GENERATOR.seed()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a user's file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["check-workload", *arguments, "--device", "cpu"])
    return result.exit_code, result.stdout, result.stderr


def show(*settings: str) -> str:
    words = [word for setting in settings for word in ("--set", setting)]
    code, out, err = invoke("mine.py:build", *words)
    assert (code, err) == (0, "")
    return out


def refuse(*arguments: str) -> str:
    code, out, err = invoke(*arguments)
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    prefix = "halfscale check-workload: "
    assert line.startswith(prefix)
    return line.removeprefix(prefix)


def test_it_shows_model_optimizer_batch_and_each_precision() -> None:
    lines = show().splitlines()
    assert lines[:4] == [
        "model      Sequential, 29 parameters, float32, cpu",
        "optimizer  SGD, lr 1",
        "batch      inputs: float32 [8, 3], kind: str",
        "also       no clip_norm, accumulate, scheduler or evaluate",
    ]
    head, *rows = lines[5:9]
    assert head.split() == [
        *("loss", "0", "loss", "1", "loss", "2", "headroom", "skipped", "ms", "a", "step"),
        "arithmetic",
    ]
    assert [row.split()[0] for row in rows] == ["fp32", "bf16", "fp16"]
    for row in rows:
        losses = [float(word) for word in row.split()[1:4]]
        assert losses[2] < losses[0]
        assert row.split()[5:7] == ["bits", "0"]
    assert rows[0].split()[-1] == "fp32"


def test_the_block_it_prints_can_be_used() -> None:
    out = show("size=5", "rate=1e-2")
    text = out.partition("Write into config.yaml:\n")[2]
    workloads = yaml.safe_load(text)["workloads"]
    assert workloads == {
        "mine": {"entry": "mine.py:build", "steps": 100, "size": 5, "rate": "1e-2"}
    }
    plan = build_plan({"configurations": {"a": {}}, "workloads": workloads, "device": "cpu"})
    assert plan.workloads["mine"].parameters == {"size": 5, "rate": 0.01, "kind": "plain"}
    assert "# it also takes kind: plain" in text


def test_a_name_of_a_built_in_workload_is_not_suggested(folder: Path) -> None:
    (folder / "digits.py").write_text(FILE)
    code, out, _ = invoke("digits.py:build")
    assert code == 0
    assert "  digits-2: {entry: 'digits.py:build', steps: 100}" in out


def test_options_and_evaluation_are_shown() -> None:
    out = show("kind=options")
    assert "also       clip_norm 1, accumulate 2, ExponentialLR, evaluate" in out
    assert "evaluate" in out.splitlines()[5].split()
    assert sum(row.split()[8] == "0.5" for row in out.splitlines()[6:9]) == 3
    assert "optimizer  SGD, lr 1\n" in out, "before the schedule moved it"
    assert "clip_norm is not set" not in out
    assert "no scheduler" not in out


NOTES = {
    "plain": ["BatchNorm: an overflow in the forward", "clip_norm is not set", "no scheduler"],
    "large": ["3 of 3 steps overflow in fp16 from a scale of 2^16"],
    "forward": [
        "fp16: the loss became",
        "the forward pass leaves the range of fp16, which no loss scaling mends",
    ],
    "constant": [
        "the loss did not change in fp32",
        "all gradients are zero in some step of fp16: they may be lost to underflow",
    ],
    "unseeded": ["two builds from one seed began with other weights or another first batch"],
    "leaves out": ["the optimizer leaves out 1.weight, 1.bias, 2.weight and 1 more"],
}


@pytest.mark.parametrize("kind", NOTES)
def test_notes_say_what_to_know(kind: str) -> None:
    notes = [line for line in show(f"kind={kind}").splitlines() if line.startswith("- ")]
    for expected in NOTES[kind]:
        assert any(note.startswith(f"- {expected}") for note in notes), notes
    others = {note for key, value in NOTES.items() if key not in (kind, "plain") for note in value}
    for other in others:
        assert not any(note.startswith(f"- {other}") for note in notes), notes


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("mien.py:build",),
            "the command line: workloads.mien.entry: 'mien.py:build': no such file",
        ),
        (
            ("mine.py:make",),
            "the command line: workloads.mine.entry: 'mine.py:make': mine.py defines",
        ),
        (("mine",), "the command line: workloads.mine.entry: 'mine': has no colon before"),
        (
            ("mine.py:build", "--set", "siez=3"),
            "the command line: workloads.mine.siez: 3: unknown key; mine has steps, size",
        ),
        (("mine.py:build", "--set", "size"), "--set size: write it as key=value"),
        (
            ("mine.py:build", "--set", "kind=bad data"),
            "mine.py:build: in fp32: failed: the batch of step 0 holds NaN; clean the data",
        ),
        (
            ("mine.py:build", "--set", "rate=-1"),
            "mine.py:build: in fp32: failed: building the workload: ValueError: Invalid learning "
            "rate: -1.0 (mine.py, line 7)",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_one_line(
    arguments: tuple[str, ...], line: str
) -> None:
    assert refuse(*arguments).startswith(line)
