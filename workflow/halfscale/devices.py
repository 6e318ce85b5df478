"""Which GPUs the runs may use, decided without importing torch.

Asks the driver through NVML, which creates no CUDA context, and reads ``CUDA_VISIBLE_DEVICES`` as
CUDA and torch do: entry by entry, up to the first that names no GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MASK = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
RUNS_PER_GPU = "HALFSCALE_RUNS_PER_GPU"
"""The environment variable in which a job finds the plan's ``runs_per_gpu``."""


class GpuError(ValueError):
    """A GPU cannot be used as asked; the message is one line that says what to write instead."""


class NoDriverError(GpuError):
    """There is no NVIDIA driver that answers."""


@dataclass(frozen=True)
class Gpu:
    """What a process can be given alone: a GPU, or an instance of one that is in MIG mode.

    Attributes:
        uuid: Its one name, which ``CUDA_VISIBLE_DEVICES`` takes: ``GPU-…`` or ``MIG-…``.
        model: The product's name; empty if the driver does not tell.
        memory: Bytes; 0 if the driver does not tell.
        place: Of an instance: its GPU's UUID, its GPU instance and its compute instance.
    """

    uuid: str
    model: str = ""
    memory: int = 0
    place: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class Board:
    """One index of the driver: a GPU, or the instances it is divided into.

    Attributes:
        uuid: The GPU's own UUID; empty if it does not answer.
        gpus: What processes can be given of it; nothing if it does not answer, or tells nothing of
            its instances.
        model: The GPU's own product name, without that of its instances; empty if not told.
    """

    uuid: str
    gpus: tuple[Gpu, ...]
    model: str = ""


@contextmanager
def nvml() -> Iterator[Any]:
    """The driver's library (the module ``pynvml``), started.

    Raises:
        NoDriverError: If there is none.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDriverError(f"no NVIDIA driver answers ({error}); write device: cpu") from None
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def list_boards() -> list[Board]:
    """Every GPU of the machine, in the order of the bus.

    Raises:
        NoDriverError: If there is no driver.
    """
    with nvml() as library:
        try:
            count = library.nvmlDeviceGetCount()
        except library.NVMLError as error:
            raise NoDriverError(f"the NVIDIA driver fails ({error}); write device: cpu") from None
        return [_describe_board(library, index) for index in range(count)]


def _describe_board(library: Any, index: int) -> Board:
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
        uuid = str(library.nvmlDeviceGetUUID(handle))
    except library.NVMLError:
        # Fallen off the bus, or not for this user; it keeps its index.
        return Board("", ())
    try:
        divided = bool(library.nvmlDeviceGetMigMode(handle)[0])
        numbers = range(library.nvmlDeviceGetMaxMigDeviceCount(handle) if divided else 0)
    except library.NVMLError:
        divided, numbers = False, range(0)
    whole = _describe(library, handle, uuid)
    if not divided:
        return Board(uuid, (whole,), whole.model)
    instances = []
    for number in numbers:
        try:
            instance = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            name = str(library.nvmlDeviceGetUUID(instance))
            gi = library.nvmlDeviceGetGpuInstanceId(instance)
            ci = library.nvmlDeviceGetComputeInstanceId(instance)
        except library.NVMLError:
            continue
        instances.append(_describe(library, instance, name, (uuid, str(gi), str(ci))))
    return Board(uuid, tuple(instances), whole.model)


def _describe(
    library: Any, handle: Any, uuid: str, place: tuple[str, str, str] | None = None
) -> Gpu:
    try:
        model = str(library.nvmlDeviceGetName(handle))
    except library.NVMLError:
        model = ""
    try:
        memory = int(library.nvmlDeviceGetMemoryInfo(handle).total)
    except library.NVMLError:
        memory = 0
    return Gpu(uuid, model, memory, place)


def visible_gpus() -> list[Gpu]:
    """The GPUs this process may use, in the order of ``CUDA_VISIBLE_DEVICES``.

    Raises:
        NoDriverError: If there is no driver.
        GpuError: If ``CUDA_VISIBLE_DEVICES`` cannot be used, see `read_mask`.
    """
    bus_order = os.environ.get(ORDER) == "PCI_BUS_ID"
    return read_mask(os.environ.get(MASK), list_boards(), bus_order)


def read_mask(mask: str | None, boards: Sequence[Board], bus_order: bool) -> list[Gpu]:
    """What a value of ``CUDA_VISIBLE_DEVICES`` stands for, in its order.

    Args:
        mask: Indices, UUIDs or their beginnings, or names of MIG instances, with commas between.
            None: all GPUs of one model, that with the most memory, since models round differently;
            instances of different sizes are different models.
        boards: What the driver lists. A GPU in MIG mode stands for all its instances.
        bus_order: Whether an index counts along the bus (``CUDA_DEVICE_ORDER=PCI_BUS_ID``).

    Raises:
        GpuError: If a GPU is named twice, for which CUDA shows none at all, or by an index where
            CUDA sorts different models by speed.
    """
    if mask is None:
        return _of_one_model([gpu for board in boards for gpu in board.gpus])
    entries = _split(mask)
    found: list[Gpu] = []
    for entry in entries:
        gpus = _resolve(entry, boards)
        if not gpus:
            break
        found += gpus
    if len({*entries}) < len(entries) or len({*found}) < len(found):
        once = ",".join(dict.fromkeys(gpu.uuid for gpu in found)) or entries[0]
        raise GpuError(f"{MASK}={mask} names a GPU twice; write {MASK}={once}")
    models = {board.model for board in boards if board.uuid}
    if found and isinstance(entries[0], int) and not bus_order and len(models) > 1:
        named = ",".join(gpu.uuid for gpu in found)
        raise GpuError(
            f"{MASK}={mask}: among GPUs of several models CUDA counts otherwise than nvidia-smi; "
            f"if nvidia-smi's count is meant, write {MASK}={named} or {ORDER}=PCI_BUS_ID"
        )
    return found


def _of_one_model(gpus: list[Gpu]) -> list[Gpu]:
    """Those of the model with the most memory."""
    if not gpus:
        return []
    chosen = max(gpus, key=lambda gpu: gpu.memory).model
    return [gpu for gpu in gpus if gpu.model == chosen]


def _split(mask: str) -> list[int] | list[str]:
    """The entries up to the first that is of another kind than the first one."""
    entries = [entry.strip() for entry in mask.split(",")]
    for kind in ("GPU-", "MIG-"):
        if entries[0].startswith(kind):
            others = (i for i, entry in enumerate(entries) if not entry.startswith(kind))
            return entries[: next(others, None)]
    indices = [_read_index(entry) for entry in entries]
    return indices[: next((i for i, index in enumerate(indices) if index < 0), None)]


def _read_index(entry: str) -> int:
    """The number that an entry begins with, as C reads it; -1 if there is none."""
    found = re.match(r"[+-]?[0-9]+", entry)
    return int(found[0]) if found else -1


def _resolve(entry: int | str, boards: Sequence[Board]) -> list[Gpu]:
    """What one entry stands for; nothing if it names no GPU, or could be several."""
    if isinstance(entry, int):
        return list(boards[entry].gpus) if entry < len(boards) else []
    if entry.startswith("GPU-"):
        meant = [list(board.gpus) for board in boards if board.uuid.startswith(entry)]
        return meant[0] if len(meant) == 1 else []
    instances = [gpu for board in boards for gpu in board.gpus if gpu.place]
    named = [gpu for gpu in instances if _is_named(entry, gpu)]
    # Inside a container a divided GPU may not tell its instances; CUDA will know this one.
    untold = not named and any(board.uuid and not board.gpus for board in boards)
    return [Gpu(entry)] if untold else named if len(named) == 1 else []


def _is_named(entry: str, gpu: Gpu) -> bool:
    """Whether an entry names an instance: by its UUID, or by its place as ``MIG-GPU-…/gi/ci``."""
    parts = entry.split("/")
    if gpu.place and len(parts) == 3:
        board, *place = gpu.place
        return board.startswith(parts[0].removeprefix("MIG-")) and parts[1:] == place
    return gpu.uuid.startswith(entry)


def count_gpus() -> int:
    """The number of GPUs that this process may use; 0 if there is none.

    A torch build without CUDA can use none.

    Raises:
        GpuError: If ``CUDA_VISIBLE_DEVICES`` cannot be used, see `read_mask`.
    """
    try:
        if version("torch").endswith("+cpu"):
            return 0
    except PackageNotFoundError:
        return 0
    mask = os.environ.get(MASK)
    if mask is not None and not _split(mask):
        return 0
    try:
        return len(visible_gpus())
    except NoDriverError:
        return 0
