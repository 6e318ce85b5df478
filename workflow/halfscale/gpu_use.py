"""What a run takes of its GPU, asked of the driver while it trains; without torch.

The driver need not answer: inside a container, of an instance in MIG mode or for another user it
refuses some questions. What it does not tell is None, and no run fails for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from pydantic import BaseModel, ConfigDict

from halfscale.devices import MASK, Gpu, GpuError, list_boards, nvml, visible_gpus

_SECONDS_BETWEEN_SAMPLES = 0.25


class GpuUse(BaseModel):
    """What a run took of its GPU; what the driver did not tell is None.

    Attributes:
        uuid: The GPU's, or that of an instance in MIG mode.
        driver: The version of the NVIDIA driver.
        allocated: Most bytes that tensors held at a time, by torch.
        reserved: Most bytes that torch held at a time, those kept for later tensors counted.
        process: Most bytes that the driver saw this process hold, CUDA's own counted.
        utilisation: Mean share of the time, 0 to 1, in which the GPU computed, for whomever.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    uuid: str | None = None
    driver: str | None = None
    allocated: int
    reserved: int
    process: int | None = None
    utilisation: float | None = None

    def __str__(self) -> str:
        whole = "" if self.process is None else f", {_gibibytes(self.process)} in all"
        busy = "" if self.utilisation is None else f"; computing {self.utilisation:.0%} of the time"
        return (
            f"at most {_gibibytes(self.allocated)} in tensors, "
            f"{_gibibytes(self.reserved)} held by torch{whole}{busy}"
        )


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


class GpuWatch:
    """Asks the driver about one GPU, again and again.

    Args:
        library: The module ``pynvml``, started.
        uuid: The GPU's.
    """

    def __init__(self, library: Any, uuid: str) -> None:
        self._library = library
        self._handle = library.nvmlDeviceGetHandleByUUID(uuid)
        self._uuid = uuid
        self._shares: list[float] = []
        self._most: int | None = None

    def sample(self) -> None:
        """Ask once."""
        library, handle = self._library, self._handle
        with suppress(library.NVMLError):
            self._shares.append(library.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        with suppress(library.NVMLError):
            for process in library.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    self._most = max(self._most or 0, int(process.usedGpuMemory))

    def figures(self) -> dict[str, Any]:
        """The fields of `GpuUse` that the driver tells, once it was asked again."""
        self.sample()
        driver = None
        with suppress(self._library.NVMLError):
            driver = str(self._library.nvmlSystemGetDriverVersion())
        shares = list(self._shares)
        return {
            "uuid": self._uuid,
            "driver": driver,
            "process": self._most,
            "utilisation": sum(shares) / len(shares) if shares else None,
        }


@contextmanager
def watch_gpu() -> Iterator[GpuWatch | None]:
    """Ask the driver four times a second, from a thread, about the GPU that is visible.

    None if the driver knows none, or if there are several: torch may compute on any of them.
    """
    with ExitStack() as stack:
        watch = None
        with suppress(GpuError):
            gpus = _candidates()
            library = stack.enter_context(nvml())
            with suppress(library.NVMLError):
                if len(gpus) == 1:
                    watch = GpuWatch(library, gpus[0].uuid)
                    stack.enter_context(_repeated(watch))
        yield watch


def _candidates() -> list[Gpu]:
    """All that CUDA may show; without a mask those as well that halfscale gives no job."""
    if MASK in os.environ:
        return visible_gpus()
    return [gpu for board in list_boards() for gpu in board.gpus]


@contextmanager
def _repeated(watch: GpuWatch) -> Iterator[None]:
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(_SECONDS_BETWEEN_SAMPLES):
            watch.sample()

    thread = threading.Thread(target=repeat, daemon=True, name="gpu-watch")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=5)
