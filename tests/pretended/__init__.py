"""Machines with GPUs that are not there: a driver that lists them, and a torch built for them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NVML = Path(__file__).with_name("nvml")
CUDA = Path(__file__).with_name("cuda")


def uuid(number: int, kind: str = "GPU") -> str:
    """A UUID in the driver's form; the first differ from each other in their first digit."""
    return f"{kind}-{number:x}0a1b2c3-1111-2222-3333-444455556666"


def boards(count: int, **shared: Any) -> list[dict[str, Any]]:
    """So many GPUs of one model, as PRETENDED_GPUS has them."""
    return [{"uuid": uuid(number), **shared} for number in range(count)]


def pretend_gpus(folder: Path, gpus: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The environment of a machine with these GPUs, its locks in a folder of its own."""
    metadata = folder / "torch-2.13.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n", encoding="utf-8"
    )
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), str(NVML)]),
        "PRETENDED_GPUS": json.dumps(gpus),
        "HALFSCALE_GPU_LOCKS": str(folder / "locks"),
    }


def pretend_cuda(folder: Path, gpus: Sequence[dict[str, Any]], together: int) -> dict[str, str]:
    """The same, on which runs for CUDA train as well, so many of them at a time.

    The first so many note what they see in the folder ``seen``.
    """
    environment = pretend_gpus(folder, gpus)
    seen = folder / "seen"
    seen.mkdir()
    return environment | {
        "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(CUDA)]),
        "PRETENDED_SEEN": str(seen),
        "PRETENDED_TOGETHER": str(together),
    }
