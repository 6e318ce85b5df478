"""What a run takes of its GPU, as a pretended driver tells it; without one nothing fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfscale import gpu_use
from halfscale.gpu_use import GpuUse, watch_gpu
from halfscale.machine import watched_gpu
from halfscale.plan import JobSpec
from halfscale.records import RecordError, checksum_of, read_run
from pretended import boards, uuid

from .crafted import tiny_spec, write_crafted

QUESTIONS = {
    "nvmlDeviceGetUtilizationRates": "utilisation",
    "nvmlDeviceGetComputeRunningProcesses": "process",
    "nvmlSystemGetDriverVersion": "driver",
}
FIRST_QUESTIONS = (
    *("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"),
    "nvmlDeviceGetHandleByUUID",
)
TOLD = {"uuid": uuid(0), "driver": "999.99", "process": 5, "utilisation": 0.5}
ON_GPU = tiny_spec().model_copy(update={"device": "cuda"})

Install = Callable[[list[dict[str, Any]]], None]


@pytest.fixture
def install(pretended_driver: Install, monkeypatch: pytest.MonkeyPatch) -> Install:
    # Only when it is asked for.
    monkeypatch.setattr(gpu_use, "_SECONDS_BETWEEN_SAMPLES", 600.0)
    return pretended_driver


def figures() -> dict[str, Any]:
    with watch_gpu() as watch:
        assert watch is not None
        return watch.figures()


def test_the_driver_tells_of_this_process_alone(install: Install) -> None:
    install(boards(1, busy=50, used=5))
    assert figures() == TOLD


def test_of_several_gpus_the_one_that_is_visible_is_watched(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(boards(2, busy=50, used=5))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid(1))
    assert figures() == TOLD | {"uuid": uuid(1)}


@pytest.mark.parametrize("mask", [None, "0,1", "1,0"])
def test_where_several_are_visible_the_driver_is_not_asked_about_one(
    install: Install, monkeypatch: pytest.MonkeyPatch, mask: str | None
) -> None:
    small, large = boards(2)
    # Without a mask jobs are given the larger one alone, but CUDA shows both.
    install([small | {"model": "Small", "memory": 1}, large] if mask is None else [small, large])
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    with watch_gpu() as watch:
        assert watch is None


def test_most_memory_and_mean_utilisation_are_kept(install: Install) -> None:
    with_most = [(10, 7), (40, 9), (70, 2)]
    install(boards(1))
    with watch_gpu() as watch:
        assert watch is not None
        for busy, used in with_most[:-1]:
            install(boards(1, busy=busy, used=used))
            watch.sample()
        busy, used = with_most[-1]
        install(boards(1, busy=busy, used=used))
        assert watch.figures() == TOLD | {"process": 9, "utilisation": pytest.approx(0.4)}


def test_the_driver_is_asked_until_the_end(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_use, "_SECONDS_BETWEEN_SAMPLES", 0.001)
    install(boards(1))
    third = threading.Event()
    asked = []

    def ask(watch: gpu_use.GpuWatch) -> None:
        asked.append(threading.current_thread().name)
        if len(asked) == 3:
            third.set()

    monkeypatch.setattr(gpu_use.GpuWatch, "sample", ask)
    with watch_gpu():
        assert third.wait(60)
    assert set(asked) == {"gpu-watch"}
    assert "gpu-watch" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("refused", QUESTIONS)
def test_what_the_driver_refuses_is_none_and_the_rest_is_told(
    install: Install, refused: str
) -> None:
    install(boards(1, busy=50, used=5, refuses=[refused]))
    assert figures() == TOLD | {QUESTIONS[refused]: None}


def test_memory_that_is_not_told_is_none(install: Install) -> None:
    install(boards(1, busy=50, used=None))
    assert figures() == TOLD | {"process": None}


def test_an_instance_is_asked_about_itself(install: Install) -> None:
    instance = {"uuid": uuid(3, "MIG"), "gi": 1, "ci": 0, "used": 8}
    instance["refuses"] = ["nvmlDeviceGetUtilizationRates"]
    install([{"uuid": uuid(9), "busy": 90, "used": 99, "instances": [instance]}])
    assert figures() == TOLD | {"uuid": uuid(3, "MIG"), "process": 8, "utilisation": None}


@pytest.mark.parametrize(
    ("spec", "told"),
    [(tiny_spec(), None), (ON_GPU, GpuUse(allocated=0, reserved=0, **TOLD))],
    ids=["cpu", "cuda"],
)
def test_a_run_tells_of_a_gpu_if_it_is_on_one(
    install: Install, spec: JobSpec, told: GpuUse | None
) -> None:
    install(boards(1, busy=50, used=5))
    with watched_gpu(spec) as use:
        assert use() == told


@pytest.mark.parametrize(
    "gpus", [None, [], *(boards(1, refuses=[refused]) for refused in FIRST_QUESTIONS)]
)
def test_without_the_driver_torch_alone_tells(
    install: Install, monkeypatch: pytest.MonkeyPatch, gpus: list[dict[str, Any]] | None
) -> None:
    if gpus is not None:
        install(gpus)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 11)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 12)
    with watched_gpu(ON_GPU) as use:
        assert use() == GpuUse(allocated=11, reserved=12)


def test_it_is_said_in_a_line() -> None:
    gibibyte = 1 << 30
    use = GpuUse(allocated=gibibyte, reserved=2 * gibibyte)
    assert str(use) == "at most 1.00 GiB in tensors, 2.00 GiB held by torch"
    more = use.model_copy(update={"process": 3 * gibibyte, "utilisation": 0.256})
    assert str(more) == f"{use}, 3.00 GiB in all; computing 26% of the time"


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], sealed: bool = True) -> None:
    """Change a record and, if it is to be sealed, give it the checksum of what it then holds."""
    content = json.loads(path.read_bytes())
    checksum = content.pop("checksum")
    change(content)
    checksum = checksum_of(content) if sealed else checksum
    path.write_text(json.dumps({**content, "checksum": checksum}), encoding="utf-8")


def test_what_a_run_took_is_kept_and_guarded_like_the_rest(tmp_path: Path) -> None:
    spec = tiny_spec(steps=3)
    write_crafted(tmp_path, spec)
    path = tmp_path / spec.folder / spec.record_name
    use = GpuUse(allocated=1, reserved=2, **TOLD)
    rewrite(path, lambda content: content.update(gpu=use.model_dump()))
    assert read_run(tmp_path, spec)[0].gpu == use
    rewrite(path, lambda content: content["gpu"].update(process=6), sealed=False)
    with pytest.raises(RecordError, match="was edited after it was written"):
        read_run(tmp_path, spec)


def test_a_record_that_is_older_than_the_field_is_read(tmp_path: Path) -> None:
    spec = tiny_spec(steps=3)
    write_crafted(tmp_path, spec)
    path = tmp_path / spec.folder / spec.record_name
    rewrite(path, lambda content: content.pop("gpu"))
    assert read_run(tmp_path, spec)[0].gpu is None
    rewrite(path, lambda content: content.update(seconds=0.5), sealed=False)
    with pytest.raises(RecordError, match="was edited after it was written"):
        read_run(tmp_path, spec)
