"""Each job has a GPU of its own: real processes on pretended GPUs."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfscale import gpus as locks
from halfscale.devices import Gpu, GpuError
from halfscale.gpus import hold_gpu
from halfscale.sources import PACKAGE
from pretended import boards, pretend_gpus, uuid

PATIENCE = 60.0
HOLD = """
import os, sys
from halfscale.gpus import hold_gpu

with hold_gpu(say=lambda line: print(line, flush=True)):
    print("mask", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    sys.stdin.read()
print("left", flush=True)
"""
FORK = HOLD.replace(
    '    print("mask"',
    """
    import time

    if child := os.fork():
        print("child", child)
    else:
        time.sleep(600)
    print("mask\"""",
)
NOBODY = 65534


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.02)


@dataclass
class Holder:
    """A process that holds a GPU until it is told to leave."""

    process: subprocess.Popen[bytes]
    output: Path

    def says(self, word: str) -> list[str]:
        """The lines that begin with a word, without it."""
        lines = self.output.read_text(encoding="utf-8").splitlines()
        return [line.removeprefix(word).strip() for line in lines if line.startswith(word)]

    @property
    def mask(self) -> str:
        until(lambda: self.says("mask") or self.process.poll() is not None, "it gets a GPU")
        assert self.says("mask"), self.output.read_text(encoding="utf-8")
        return self.says("mask")[0]

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0
        assert self.says("left") == [""]


@dataclass
class Machine:
    """A machine with pretended GPUs, and the processes that were started on it."""

    folder: Path
    environment: dict[str, str]
    holders: list[Holder] = field(default_factory=list)

    def start(self, runs: int = 1, program: str = HOLD, **environment: str) -> Holder:
        number = len(self.holders)
        output = self.folder / f"output{number}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "HALFSCALE_"))}
        path = os.pathsep.join([str(PACKAGE.parent), self.environment["PYTHONPATH"]])
        settings = {"PYTHONPATH": path, "HALFSCALE_RUNS_PER_GPU": str(runs)}
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                env=clean | self.environment | settings | environment,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self.holders.append(Holder(process, output))
        return self.holders[-1]

    def waits(self, holder: Holder) -> None:
        """It says once that it waits, and still has no GPU two looks later."""
        until(lambda: holder.says("waiting"), "it waits")
        time.sleep(2 * locks._SECONDS_BETWEEN_LOOKS)
        assert len(holder.says("waiting")) == 1
        assert not holder.says("mask")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    with ExitStack() as stack:

        def make(gpus: list[dict[str, Any]]) -> Machine:
            made = Machine(tmp_path, pretend_gpus(tmp_path / "gpus", gpus))
            stack.callback(end_all, made.holders)
            return made

        yield make


def end_all(holders: list[Holder]) -> None:
    for holder in holders:
        holder.process.kill()
        holder.process.wait()


Make = Callable[[list[dict[str, Any]]], Machine]


def test_four_jobs_at_once_see_four_gpus_and_a_fifth_waits(machine: Make) -> None:
    four = machine(boards(4))
    holders = [four.start() for _ in range(4)]
    assert sorted(holder.mask for holder in holders) == [uuid(n) for n in range(4)]
    fifth = four.start()
    four.waits(fifth)
    holders[2].leave()
    assert fifth.mask == holders[2].mask


def test_a_folder_that_is_removed_while_a_job_waits_is_made_again(machine: Make) -> None:
    one = machine(boards(1))
    folder = Path(one.environment["HALFSCALE_GPU_LOCKS"])
    first = one.start()
    assert first.mask == uuid(0)
    second = one.start()
    one.waits(second)
    shutil.rmtree(folder)
    # Its lock went with the folder.
    assert second.mask == uuid(0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777


def test_a_killed_job_frees_its_gpu(machine: Make) -> None:
    one = machine(boards(1))
    first = one.start()
    assert first.mask == uuid(0)
    second = one.start()
    one.waits(second)
    first.process.send_signal(signal.SIGKILL)
    assert second.mask == uuid(0)
    assert not first.says("left")


def test_a_job_killed_while_a_child_of_it_lives_frees_its_gpu(machine: Make) -> None:
    one = machine(boards(1))
    first = one.start(program=FORK)
    try:
        assert first.mask == uuid(0)
        first.process.kill()
        first.process.wait()
        os.kill(int(first.says("child")[0]), 0)  # it lives
        assert one.start().mask == uuid(0)
    finally:
        for child in first.says("child"):
            os.kill(int(child), signal.SIGKILL)


def test_eight_runs_two_a_gpu(machine: Make) -> None:
    four = machine(boards(4))
    holders = [four.start(runs=2) for _ in range(8)]
    assert Counter(holder.mask for holder in holders) == {uuid(n): 2 for n in range(4)}
    ninth = four.start(runs=2)
    four.waits(ninth)
    holders[5].leave()
    assert ninth.mask == holders[5].mask


def test_runs_are_spread_before_gpus_are_shared(machine: Make) -> None:
    four = machine(boards(4))
    # One after the other, so that an order would show.
    masks = [four.start(runs=3).mask for _ in range(8)]
    assert sorted(masks[:4]) == sorted(masks[4:]) == [uuid(n) for n in range(4)]


def test_who_chooses_chooses_alone(machine: Make) -> None:
    one = machine(boards(1))
    folder = Path(one.environment["HALFSCALE_GPU_LOCKS"])
    locks._make(folder)
    with locks._locked(folder):
        holder = one.start()
        one.waits(holder)
        assert holder.says("waiting") == [
            f": a process keeps {folder} locked; fuser {folder} names it"
        ]
        assert not list(folder.iterdir())
    assert holder.mask == uuid(0)


def test_a_run_that_allows_no_other_shares_with_none(machine: Make) -> None:
    one = machine(boards(1))
    alone = one.start(runs=1)
    assert alone.mask == uuid(0)
    sociable = one.start(runs=2)
    one.waits(sociable)
    alone.leave()
    assert sociable.mask == uuid(0)
    another = one.start(runs=1)
    one.waits(another)
    assert one.start(runs=2).mask == uuid(0)


@pytest.mark.parametrize(
    ("names", "environment"),
    [
        (("2", uuid(2)), {}),
        ((uuid(2), "GPU-2"), {}),
        (("GPU-2", "2"), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (("2,1", "GPU-20,GPU-7"), {}),
    ],
)
def test_one_gpu_under_two_names_is_not_taken_twice(
    machine: Make, names: tuple[str, str], environment: dict[str, str]
) -> None:
    four = machine(boards(4))
    first = four.start(CUDA_VISIBLE_DEVICES=names[0], **environment)
    assert first.mask == uuid(2)
    second = four.start(CUDA_VISIBLE_DEVICES=names[1])
    four.waits(second)
    first.leave()
    assert second.mask == uuid(2)


def test_one_instance_under_two_names_is_not_taken_twice(machine: Make) -> None:
    instances = [{"uuid": uuid(n, "MIG"), "gi": n + 7, "ci": 0} for n in range(2)]
    divided = machine([{"uuid": uuid(9), "instances": instances}])
    first = divided.start(CUDA_VISIBLE_DEVICES=f"MIG-{uuid(9)}/8/0")
    assert first.mask == uuid(1, "MIG")
    second = divided.start(CUDA_VISIBLE_DEVICES=uuid(1, "MIG"))
    divided.waits(second)
    assert divided.start().mask == uuid(0, "MIG")


def test_a_preset_mask_is_kept_to(machine: Make) -> None:
    four = machine(boards(4))
    holders = [four.start(CUDA_VISIBLE_DEVICES="3,1") for _ in range(2)]
    assert sorted(holder.mask for holder in holders) == [uuid(1), uuid(3)]
    third = four.start(CUDA_VISIBLE_DEVICES="3,1")
    four.waits(third)


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "and CUDA_VISIBLE_DEVICES= allows; let the job"),
        (
            {"CUDA_VISIBLE_DEVICES": "-1"},
            "torch can use and CUDA_VISIBLE_DEVICES=-1 allows",
        ),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, f"twice; write CUDA_VISIBLE_DEVICES={uuid(1)}"),
        ({"HALFSCALE_RUNS_PER_GPU": "0"}, "write HALFSCALE_RUNS_PER_GPU=1"),
        ({"HALFSCALE_RUNS_PER_GPU": "two"}, "write HALFSCALE_RUNS_PER_GPU=1"),
        (
            {"HALFSCALE_GPU_LOCKS": "/proc/locks-of-gpus"},
            "/proc/locks-of-gpus: No such file or directory; set HALFSCALE_GPU_LOCKS to a folder",
        ),
    ],
)
def test_what_cannot_be_held_is_said_in_one_line(
    machine: Make, environment: dict[str, str], line: str
) -> None:
    holder = machine(boards(2)).start(**environment)
    assert holder.process.wait(PATIENCE) == 1
    assert line in holder.output.read_text(encoding="utf-8").splitlines()[-1]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In this process: one GPU, and a folder for the locks that is not there yet."""
    monkeypatch.setattr(locks, "visible_gpus", lambda: [Gpu("MIG-GPU-0/1/0", "Pretended")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("HALFSCALE_GPU_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


def test_the_mask_is_put_back(one_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_gpu(say=lambda line: None):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-GPU-0/1/0"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(KeyError), hold_gpu(say=lambda line: None):
        raise KeyError
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_after_cuda_is_initialised_it_is_too_late(
    one_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with pytest.raises(RuntimeError, match="before a GPU was chosen"), hold_gpu():
        pass


def test_the_folder_has_the_rights_of_tmp_whatever_the_umask(one_gpu: Path) -> None:
    before = os.umask(0o077)
    try:
        with hold_gpu(say=lambda line: None):
            (slot,) = one_gpu.iterdir()
            assert stat.S_IMODE(slot.stat().st_mode) == 0o644
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert stat.S_IMODE(one_gpu.stat().st_mode) == 0o1777


@pytest.mark.parametrize("kind", ["link", "file", "not sticky"])
def test_a_folder_in_which_others_could_interfere_is_refused(one_gpu: Path, kind: str) -> None:
    other = one_gpu.with_name("other")
    other.mkdir()
    if kind == "link":
        one_gpu.symlink_to(other)
    elif kind == "file":
        one_gpu.write_text("")
    else:
        one_gpu.mkdir()
        one_gpu.chmod(0o777)
    with pytest.raises(GpuError, match=f"chmod 1777 {one_gpu}"), hold_gpu():
        pass
    assert not list(other.iterdir())


def test_a_link_in_place_of_a_lock_is_not_followed(one_gpu: Path) -> None:
    precious = one_gpu.with_name("precious")
    precious.write_text("kept")
    with hold_gpu(say=lambda line: None):
        (slot,) = one_gpu.iterdir()
    slot.unlink()
    slot.symlink_to(precious)
    with pytest.raises(GpuError, match=f"{slot.name}: .*; remove it"), hold_gpu():
        pass
    assert precious.read_text() == "kept"


def test_an_old_lock_is_as_a_new_one_once_it_is_held(one_gpu: Path) -> None:
    with hold_gpu(say=lambda line: None):
        (slot,) = one_gpu.iterdir()
    # Killed before it got its rights, twelve days ago.
    slot.chmod(0o600)
    before = time.time()
    os.utime(slot, (before - 12 * 86400,) * 2)
    with hold_gpu(say=lambda line: None):
        found = slot.stat()
        # File systems round.
        assert min(found.st_mtime, found.st_atime) > before - 10
        assert stat.S_IMODE(found.st_mode) == 0o644


def test_a_lock_that_vanishes_before_it_is_looked_at_is_nobody_s(
    one_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_gpu(say=lambda line: None):
        (slot,) = one_gpu.iterdir()
    listed = list(one_gpu.iterdir())
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(listed))
    slot.unlink()
    taken = locks._take_slot(one_gpu, locks.visible_gpus(), runs=1)
    assert taken is not None
    taken[1].release()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_a_lock_that_cannot_be_read_costs_its_own_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as shared:
        Path(shared).chmod(0o1777)
        folder = Path(shared, "locks")
        locks._make(folder)
        closed = folder / "GPU-0.1.0.0.lock"
        closed.touch(0o600)
        gpus = [Gpu("GPU-0"), Gpu("GPU-1")]
        monkeypatch.setattr(locks, "visible_gpus", lambda: gpus)
        assert take_as(False, folder) == "taken"
        assert [slot.name for slot in folder.iterdir() if slot != closed] == [
            f"GPU-1.1.0.{NOBODY}.lock"
        ]
        del gpus[1]
        assert take_as(False, folder) == "waits"
        line = tell_as(False, lambda: locks._describe_wait(folder, gpus, 1))
        assert line == (
            "waiting: all GPUs this job may use (1) are taken by halfscale runs; runs_per_gpu: 1; "
            f"counted as runs, since they cannot be read: {closed}"
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
@pytest.mark.parametrize("first_is_root", [True, False])
def test_users_wait_for_each_other(
    one_gpu: Path, monkeypatch: pytest.MonkeyPatch, first_is_root: bool
) -> None:
    # pytest's own folders are closed to other users.
    with tempfile.TemporaryDirectory() as shared:
        Path(shared).chmod(0o1777)
        folder = Path(shared, "locks")
        monkeypatch.setenv("HALFSCALE_GPU_LOCKS", str(folder))
        # Whoever comes first makes the folder; both have held a slot before.
        for as_root in (first_is_root, not first_is_root):
            assert take_as(as_root, folder) == "taken"
        assert folder.stat().st_uid == (0 if first_is_root else NOBODY)
        with hold_gpu(say=lambda line: None):
            assert take_as(False, folder) == "waits"
        assert take_as(False, folder) == "taken"


def test_a_job_forked_from_a_process_with_torch_holds_a_gpu_until_it_is_killed(
    one_gpu: Path,
) -> None:
    import torch

    assert sys.modules["torch"] is torch
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with hold_gpu(say=lambda line: None):
                os.write(writing, os.environ["CUDA_VISIBLE_DEVICES"].encode())
                time.sleep(600)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as stream:
        assert stream.read(100) == b"MIG-GPU-0/1/0"
    assert take_as(True, one_gpu) == "waits"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert take_as(True, one_gpu) == "taken"


def take_as(root: bool, folder: Path) -> str:
    """Try once, in another process, to get a slot of the GPU."""

    def take() -> str:
        locks._make(folder)
        with locks._locked(folder):
            return "taken" if locks._take_slot(folder, locks.visible_gpus(), 1) else "waits"

    return tell_as(root, take)


def tell_as(root: bool, act: Callable[[], str]) -> str:
    """What a function returns in another process, as root or as a user without rights.

    Forked, since the other user may not be allowed to read the interpreter's own folder.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if not root:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.write(writing, act().encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as stream:
        return stream.read().decode()
