"""A driver that lists the GPUs of the environment variable PRETENDED_GPUS, and knows no others.

The variable holds a JSON list, an object an index: ``uuid``, ``model``, ``memory``, ``busy``
(percent), ``used`` (bytes that every process holds), ``refuses`` (functions that are not supported)
and, in MIG mode, ``instances`` (objects with ``uuid``, ``model``, ``memory``, ``gi``, ``ci``).
Without the variable no driver answers.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


Handle = dict[str, Any]
_started = 0


def _refuse_if_told(handle: Handle) -> None:
    """Be as strict as the driver: started first, and only what this GPU supports."""
    if _started < 1:
        raise NVMLError("Uninitialized")
    if sys._getframe(1).f_code.co_name in handle.get("refuses", ()):
        raise NVMLError("Not Supported")


def _boards() -> list[Handle]:
    return json.loads(os.environ["PRETENDED_GPUS"])


def _find(uuid: str) -> Handle:
    """A GPU or an instance as it is now."""
    for board in _boards():
        for handle in (board, *board.get("instances", ())):
            if handle["uuid"] == uuid:
                return handle
    raise NVMLError("Not Found")


def nvmlInit() -> None:
    global _started
    if "PRETENDED_GPUS" not in os.environ:
        raise NVMLError("Driver Not Loaded")
    _started += 1


def nvmlShutdown() -> None:
    global _started
    if _started < 1:
        raise NVMLError("Uninitialized")
    _started -= 1


def nvmlDeviceGetCount() -> int:
    _refuse_if_told(next(iter(_boards()), {}))
    return len(_boards())


def nvmlDeviceGetHandleByIndex(index: int) -> Handle:
    handle = _boards()[index]
    _refuse_if_told(handle)
    return handle


def nvmlDeviceGetHandleByUUID(uuid: str) -> Handle:
    handle = _find(uuid)
    _refuse_if_told(handle)
    return handle


def nvmlDeviceGetUUID(handle: Handle) -> str:
    _refuse_if_told(handle)
    return handle["uuid"]


def nvmlDeviceGetName(handle: Handle) -> str:
    _refuse_if_told(handle)
    return handle.get("model", "Pretended GPU")


def nvmlDeviceGetMemoryInfo(handle: Handle) -> SimpleNamespace:
    _refuse_if_told(handle)
    return SimpleNamespace(total=handle.get("memory", 1 << 30))


def nvmlDeviceGetMigMode(handle: Handle) -> list[int]:
    _refuse_if_told(handle)
    if "instances" not in handle:
        raise NVMLError("Not Supported")
    return [1, 1]


def nvmlDeviceGetMaxMigDeviceCount(handle: Handle) -> int:
    _refuse_if_told(handle)
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle: Handle, number: int) -> Handle:
    _refuse_if_told(handle)
    if number >= len(handle["instances"]):
        raise NVMLError("Not Found")
    return handle["instances"][number]


def nvmlDeviceGetGpuInstanceId(handle: Handle) -> int:
    _refuse_if_told(handle)
    return handle["gi"]


def nvmlDeviceGetComputeInstanceId(handle: Handle) -> int:
    _refuse_if_told(handle)
    return handle["ci"]


def nvmlSystemGetDriverVersion() -> str:
    _refuse_if_told(_boards()[0])
    return "999.99"


def nvmlDeviceGetUtilizationRates(handle: Handle) -> SimpleNamespace:
    _refuse_if_told(handle)
    return SimpleNamespace(gpu=_find(handle["uuid"]).get("busy", 0), memory=0)


def nvmlDeviceGetComputeRunningProcesses(handle: Handle) -> list[SimpleNamespace]:
    _refuse_if_told(handle)
    used = _find(handle["uuid"]).get("used", 0)
    return [
        SimpleNamespace(pid=1, usedGpuMemory=1 << 40),
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=used),
    ]
