"""Give each job its own GPU: Snakemake counts GPUs, but does not say which one is whose.

A job holds a slot of one GPU for as long as it lives: a lock of the operating system on a file,
which ends with the process, whatever way it ends. All workflows of all users of a machine meet in
one folder. Who looks for a slot locks that folder first, so that nobody chooses at the same time.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from halfscale.devices import MASK, RUNS_PER_GPU, Gpu, GpuError, visible_gpus

LOCKS = "HALFSCALE_GPU_LOCKS"
"""The environment variable that names another folder for the locks."""

# Not TMPDIR, which often differs from job to job.
_FOLDER = Path("/tmp/halfscale-gpus")  # noqa: S108 - what it is gets checked
_READABLE = 0o644
_SECONDS_BETWEEN_LOOKS = 0.2
# Who chooses needs some milliseconds; longer, and something is wrong.
_LOOKS_IN_SILENCE = 25


@contextmanager
def hold_gpu(runs: int | None = None, say: Callable[[str], object] = print) -> Iterator[Gpu]:
    """Hold one GPU and let this process see no other; wait while none is free.

    Of the GPUs that ``CUDA_VISIBLE_DEVICES`` allows, the one with the fewest runs is taken. Call it
    before CUDA is initialised; torch may be imported.

    Args:
        runs: How many runs may be on one GPU at a time; of two with different numbers the smaller
            one holds for both. None: ``HALFSCALE_RUNS_PER_GPU``, or 1.
        say: Is given one line if none is free, and one that names the GPU.

    Raises:
        GpuError: If there is no GPU, or the folder of the locks cannot be used.
        RuntimeError: If CUDA is initialised already.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("CUDA was initialised before a GPU was chosen")
    before, gpus = os.environ.get(MASK), visible_gpus()
    if not gpus:
        where = "" if before is None else f" and {MASK}={before} allows"
        raise GpuError(
            f"{platform.node()} has no GPU that torch can use{where}; "
            "let the job ask the cluster for one, or write device: cpu"
        )
    gpu, lock = _wait_for_slot(gpus, runs or _planned_runs(), say)
    try:
        os.environ[MASK] = gpu.uuid
        say(f"gpu: {gpu.model or 'of an unknown model'}, {gpu.uuid}")
        yield gpu
    finally:
        if before is None:
            os.environ.pop(MASK, None)
        else:
            os.environ[MASK] = before
        lock.release()


def _planned_runs() -> int:
    text = os.environ.get(RUNS_PER_GPU, "1")
    if not text.isdecimal() or not int(text):
        raise GpuError(f"{RUNS_PER_GPU}={text}: must be a whole number; write {RUNS_PER_GPU}=1")
    return int(text)


def _wait_for_slot(
    gpus: Sequence[Gpu], runs: int, say: Callable[[str], object]
) -> tuple[Gpu, FileLock]:
    folder = Path(os.environ.get(LOCKS) or _FOLDER)
    busy, told = 0, {""}
    try:
        while True:
            line = ""
            # Each time anew: what cleans /tmp may remove the folder while a job waits.
            _make(folder)
            try:
                with _locked(folder):
                    if taken := _take_slot(folder, gpus, runs):
                        return taken
                busy, line = 0, _describe_wait(folder, gpus, runs)
            except FileNotFoundError:
                pass  # the folder, removed since
            except BlockingIOError:
                busy += 1
                if busy == _LOOKS_IN_SILENCE:
                    line = f"waiting: a process keeps {folder} locked; fuser {folder} names it"
            if line not in told:
                say(line)
                told.add(line)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    except OSError as error:
        remove = error.filename is not None and os.path.lexists(error.filename)
        raise GpuError(
            f"{error.filename or folder}: {error.strerror}; {'remove it, or ' if remove else ''}"
            f"set {LOCKS} to a folder on a local disk that all users of the GPUs can write"
        ) from error


def _describe_wait(folder: Path, gpus: Sequence[Gpu], runs: int) -> str:
    names = tuple(f"{_file_name(gpu)}." for gpu in gpus)
    closed = [
        str(slot)
        for slot in sorted(folder.iterdir())
        if slot.name.startswith(names) and not os.access(slot, os.R_OK)
    ]
    unread = f"; counted as runs, since they cannot be read: {', '.join(closed)}" if closed else ""
    return (
        f"waiting: all GPUs this job may use ({len(gpus)}) are taken by halfscale runs; "
        f"runs_per_gpu: {runs}{unread}"
    )


@contextmanager
def _no_umask() -> Iterator[None]:
    """Make files with the rights that are asked for, from their first moment."""
    umask = os.umask(0)
    try:
        yield
    finally:
        os.umask(umask)


def _make(folder: Path) -> None:
    """The folder in which all users lock, like ``/tmp``: nobody removes another one's files.

    Raises:
        GpuError: If it is a link, or others could remove files in it.
    """
    with suppress(FileExistsError), _no_umask():
        folder.mkdir(mode=0o1777)
    mode = folder.lstat().st_mode
    if not stat.S_ISDIR(mode) or (mode & 0o022 and not mode & stat.S_ISVTX):
        raise GpuError(f"{folder} is not a folder with the rights of /tmp; chmod 1777 {folder}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Choose alone. The lock is on the folder itself, which every user can open.

    Raises:
        BlockingIOError: If another process has it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _take_slot(folder: Path, gpus: Sequence[Gpu], runs: int) -> tuple[Gpu, FileLock] | None:
    """Lock a slot of the GPU with the fewest runs; None if no GPU has one free."""
    held = {gpu: _limits_of_runs(folder, gpu) for gpu in gpus}
    for gpu in sorted(gpus, key=lambda gpu: len(held[gpu])):
        if len(held[gpu]) >= min([runs, *held[gpu]]):
            continue
        for slot in range(runs):
            # Each user has files of their own: those of others are only looked at. A forked child
            # of the run, such as a loader's worker, does not keep the lock: filelock closes it.
            path = folder / f"{_file_name(gpu)}.{runs}.{slot}.{os.getuid()}.lock"
            lock = FileLock(path, mode=_READABLE)
            with suppress(Timeout), _no_umask():
                lock.acquire(timeout=0)
                _renew(path, lock)
                return gpu, lock
    return None


def _renew(path: Path, lock: FileLock) -> None:
    """Let a lock's file be as if it were made now, since it may be an old one.

    What cleans ``/tmp`` goes by its age, and other users look at it.
    """
    try:
        os.utime(path)
        path.chmod(_READABLE)
    except OSError:
        lock.release()
        raise


def _file_name(gpu: Gpu) -> str:
    return re.sub("[^A-Za-z0-9-]", "_", gpu.uuid)


def _limits_of_runs(folder: Path, gpu: Gpu) -> list[int]:
    """Of each run that is on a GPU, how many it allows there."""
    form = re.compile(re.escape(_file_name(gpu)) + r"\.([0-9]+)\.[0-9]+\.[0-9]+\.lock")
    slots = [(slot, form.fullmatch(slot.name)) for slot in folder.iterdir()]
    return [int(found[1]) for slot, found in slots if found and _is_held(slot)]


def _is_held(slot: Path) -> bool:
    try:
        handle = os.open(slot, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:  # removed since the folder was listed
        return False
    except PermissionError:  # of another user; it may well be held
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
