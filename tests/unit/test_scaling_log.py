"""The README's callbacks: each writes a log of a real fp16 training, which is then replayed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from halfscale.cli import app
from halfscale.logs import read_log

from .test_readme import REPOSITORY, blocks

pytestmark = pytest.mark.usefixtures("torch_settings")

STEPS = 30
# Large enough to overflow from a scale of 2^16 in the first steps.
LOSS_FACTOR = 100.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield tmp_path


def shown(word: str) -> str:
    """The one block of the README that holds a word."""
    (block,) = (block for block in blocks("python") if word in block)
    return block


def load(file: str, word: str) -> Any:
    """The class of a block, which is also a file in the examples."""
    text = shown(word)
    assert (REPOSITORY / "examples" / file).read_text(encoding="utf-8") == text
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names)
    return names["ScalingLog"]


def replay_log(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["replay", "--log", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def check_log(scales: list[float], overflows: list[bool], largest: list[float]) -> None:
    """The log holds what the training did, and its replay knows its scaler."""
    log = read_log(Path("run.csv"))
    assert (log.first, log.steps, log.rows, log.notes) == (0, len(scales), len(scales), ())
    assert log.scale.tolist() == scales
    assert log.overflowed.tolist() == overflows
    assert True in overflows and False in overflows
    clean = ~log.overflowed
    np.testing.assert_allclose(log.largest_gradient[clean], np.array(largest)[clean], rtol=1e-5)
    out = replay_log("run.csv", "--compare", "init_scale=65536,growth_interval=100")
    assert "the scale moved as torch.amp.GradScaler moves it: init_scale=2**16" in out
    data = json.loads(replay_log("run.csv", "--json"))
    own = data["compared"][0]
    assert own["name"] == "this log's own"
    assert own["bounds"]["least"] == own["bounds"]["most"] == sum(overflows)


def largest_of(model: nn.Module, scale: float = 1.0) -> float:
    return max(
        parameter.grad.abs().max().item() / scale
        for parameter in model.parameters()
        if parameter.grad is not None
    )


def test_a_loop_in_plain_pytorch() -> None:
    log = load("scaling_log.py", "def __call__(self, scaler, parameters)")("run.csv")
    step = compile(shown("log(scaler, model.parameters())"), "README", "exec")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    scales, overflows, largest = [], [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = LOSS_FACTOR * model(torch.randn(16, 4)).float().pow(2).mean()
        scales.append(scaler.get_scale())
        exec(
            step,
            {"scaler": scaler, "loss": loss, "model": model, "optimizer": optimizer, "log": log},
        )
        overflows.append(scaler.get_scale() < scales[-1])
        unscaled = scales[-1] if overflows[-1] else 1.0
        largest.append(largest_of(model, unscaled))
    check_log(scales, overflows, largest)


def test_an_accelerate_loop() -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    log = load("scaling_log.py", "def __call__(self, scaler, parameters)")("run.csv")
    step = compile(shown("accelerator.backward(loss)"), "README", "exec")
    accelerator = accelerate.Accelerator(
        mixed_precision="fp16", cpu=True, gradient_accumulation_steps=2
    )
    assert accelerator.scaler is None, "the README says that it scales nothing on a CPU"
    # What it does on a GPU.
    accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    accelerator.native_amp = True
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1e-5))
    scales, overflows, largest = [], [], []
    for _ in range(STEPS * 2):
        with accelerator.accumulate(model):
            loss = LOSS_FACTOR * model(torch.randn(16, 4)).float().pow(2).mean()
            before = accelerator.scaler.get_scale()
            names = {"accelerator": accelerator, "loss": loss, "model": model, "log": log}
            exec(step, names | {"optimizer": optimizer})
            if accelerator.sync_gradients:
                scales.append(before)
                overflows.append(optimizer.step_was_skipped)
                largest.append(largest_of(plain, before if overflows[-1] else 1.0))
            optimizer.zero_grad()
    assert len(scales) == STEPS, "micro-batches are no steps"
    check_log(scales, overflows, largest)


def test_a_lightning_trainer() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.plugins import MixedPrecision

    callback = load("scaling_log_lightning.py", "from lightning.pytorch import Callback")

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return LOSS_FACTOR * self.net(batch).float().pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-5)

    scales, overflows, largest = [], [], []

    class Truth(lightning.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            scales.append(scaler.get_scale())
            largest.append(largest_of(module))

        def on_train_batch_end(self, trainer: Any, *rest: object) -> None:
            if len(scales) > len(overflows):
                overflows.append(scaler.get_scale() < scales[-1])

    scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        callbacks=[callback("run.csv"), Truth()],
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1e-3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(STEPS * 2 * 16, 4)
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=16))
    assert len(scales) == STEPS, "micro-batches are no steps"
    check_log(scales, overflows, largest)
    assert all(math.isfinite(value) for value in read_log(Path("run.csv")).scale)


def test_lightning_needs_a_scaler_of_its_own_on_a_cpu() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    trainer = lightning.Trainer(
        accelerator="cpu", precision="16-mixed", logger=False, enable_checkpointing=False
    )
    assert trainer.precision_plugin.scaler is None
    assert trainer.precision == "bf16-mixed"
