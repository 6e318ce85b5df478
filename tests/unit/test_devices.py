"""Whether there is a GPU, asked without torch."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from halfscale import devices


class NvmlError(Exception):
    """The error of the fake driver."""


def fake_nvml(gpus: int, driver: bool = True) -> SimpleNamespace:
    def start() -> None:
        if not driver:
            raise NvmlError

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=start,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: gpus,
    )


@pytest.fixture(autouse=True)
def _cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "version", lambda name: "2.13.0+cu130")


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_the_driver_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(gpus))
    assert devices.count_gpus() == gpus


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(1, driver=False))
    assert devices.count_gpus() == 0


@pytest.mark.parametrize("hidden", ["", " ", "-1"])
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert devices.count_gpus() == 0


def test_a_torch_build_without_cuda_can_use_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(1))
    monkeypatch.setattr(devices, "version", lambda name: "2.13.0+cpu")
    assert devices.count_gpus() == 0


def test_without_torch_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(1))
    monkeypatch.setattr(devices, "version", missing)
    assert devices.count_gpus() == 0
