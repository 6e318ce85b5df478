"""Settings and fixtures of the unit tests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import halfscale
from pretended import NVML

from .crafted import Made, make_contested, make_hopeless, make_tied

# Before torch is imported: two threads that wait for a core are slower than one by far.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "unit",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit tests ask the same questions on every machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def awkward(tmp_path: Path) -> Path:
    """A folder whose name has spaces, quotes and letters beyond ASCII."""
    folder = tmp_path / 'it\'s a "test" for José & 神'
    folder.mkdir()
    return folder


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which a child process finds this package, installed or not."""
    package = str(Path(halfscale.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)
    return dict(os.environ)


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """Put back the global settings that a training makes."""
    import torch

    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="session")
def contested(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Crafted runs with a winner, a rejected configuration and a pair of identical ones."""
    return make_contested(tmp_path_factory.mktemp("contested"))


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Crafted runs of configurations that train alike."""
    return make_tied(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def hopeless(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Crafted runs of configurations that are all rejected."""
    return make_hopeless(tmp_path_factory.mktemp("hopeless"))


@pytest.fixture
def pretended_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """A driver that no mask hides; it answers once it is given GPUs, see `pretended.boards`."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PRETENDED_GPUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(NVML)

    def install(gpus: list[dict[str, Any]]) -> None:
        monkeypatch.setenv("PRETENDED_GPUS", json.dumps(gpus))

    yield install
    sys.modules.pop("pynvml", None)
