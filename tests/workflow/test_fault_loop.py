"""Faults at random moments: after one more call of the same command nothing tells of them.

The loop runs for a fixed time, ``HALFSCALE_FAULT_SECONDS`` (60 unless set), from a seed that is
printed with the number of faults tried; ``HALFSCALE_FAULT_SEED`` repeats one.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import pytest

from .driver import ARMS, NOTHING, Bench, children, finish, mend_command, small_disk, wait_until

SECONDS = float(os.environ.get("HALFSCALE_FAULT_SECONDS", "60"))
SEED = int(os.environ.get("HALFSCALE_FAULT_SEED", time.time_ns() % 10**6))
TABLE = "results/tables/runs.csv"
MARK = "FAULT_LOOP_MARK"


@dataclass
class Round:
    """One call of the command that is disturbed.

    Attributes:
        bench: The folder.
        process: The Snakemake that is disturbed.
        random: Where chances come from.
        others: Other workflows that were started in the same folder.
    """

    bench: Bench
    process: subprocess.Popen[str]
    random: random.Random
    others: list[subprocess.Popen[str]]

    def find(self, word: str, parent: bool = False) -> list[psutil.Process]:
        """Processes below Snakemake with a word in their command; or those right below them."""
        found = []
        for child in children(self.process):
            with suppress(psutil.Error):
                if word in child.cmdline():
                    found += child.children() if parent else [child]
        return found

    def kill(self, candidates: list[psutil.Process]) -> bool:
        if not candidates:
            return False
        with suppress(psutil.NoSuchProcess):
            self.random.choice(candidates).kill()
        return True


def kill_snakemake(disturbed: Round) -> bool:
    disturbed.process.kill()
    return True


def kill_parent(disturbed: Round) -> bool:
    return disturbed.kill(
        [
            process
            for process in disturbed.find("halfscale.warm.parent")
            if process.ppid() == disturbed.process.pid
        ]
    )


def kill_child(disturbed: Round) -> bool:
    (parent,) = disturbed.find("halfscale.warm.parent")[:1] or (None,)
    return parent is not None and disturbed.kill(parent.children())


def kill_client(disturbed: Round) -> bool:
    return disturbed.kill(disturbed.find("train"))


def kill_reader(disturbed: Round) -> bool:
    return disturbed.kill(disturbed.find("predict") + disturbed.find("tables"))


def remove_socket(disturbed: Round) -> bool:
    found = list(Path(disturbed.bench.environment["TMPDIR"]).glob("halfscale-warm-*"))
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(found)


def truncate_a_file(disturbed: Round) -> bool:
    results = disturbed.bench.path / "results" / "runs"
    files = [*results.rglob("run.json"), *results.rglob("trace.parquet")]
    if not files:
        return False
    with suppress(FileNotFoundError):
        file = disturbed.random.choice(sorted(files))
        os.truncate(file, file.stat().st_size // 2)
    return True


def start_a_second_workflow(disturbed: Round) -> bool:
    disturbed.others.append(disturbed.bench.start(TABLE))
    return True


def fill_the_disk(disturbed: Round) -> bool:
    filler = disturbed.bench.path / "results" / "runs" / "filler"
    with suppress(OSError), filler.open("wb", 0) as file:
        while True:
            file.write(b"x" * 256)
    return True


FAULTS: tuple[Callable[[Round], bool], ...] = (
    *(kill_snakemake, kill_parent, kill_child, kill_client, kill_reader),
    *(remove_socket, truncate_a_file, start_a_second_workflow, fill_the_disk),
)


def marked(mark: str) -> list[psutil.Process]:
    """The processes that were started for a folder, by a variable in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def call_again(bench: Bench) -> None:
    """The same command once more; if it refuses a file, what it says is done first."""
    finished = bench.snakemake(TABLE)
    mends = {tuple(mend_command(line)) for line in finished.complaints if "rm -r" in line}
    if mends:
        for command in mends:
            subprocess.run(command, cwd=bench.path, check=True)
        finished = bench.snakemake(TABLE)
    assert finished.code == 0, finished.text


@pytest.fixture
def disk(bench: Bench) -> Iterator[None]:
    """A disk of their own for the runs, that can be filled."""
    with small_disk(bench.path / "results" / "runs", "256k"):
        yield


@pytest.mark.usefixtures("disk")
def test_faults_at_random_moments_leave_no_trace(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = bench.table().drop(columns="seconds_per_step")
    temporary = tmp_path / "t"
    temporary.mkdir()
    bench.environment = {"TMPDIR": str(temporary), MARK: str(tmp_path)}
    chance = random.Random(SEED)
    tried: Counter[str] = Counter()
    waiting: list[Callable[[Round], bool]] = []
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        waiting = waiting or chance.sample(FAULTS, len(FAULTS))
        fault = waiting.pop()
        print(f"seed {SEED}: {fault.__name__}")
        bench.forget_runs(*[arm for arm in ARMS if bench.run_folder(arm).exists()])
        shutil.rmtree(bench.path / "results" / "tables", ignore_errors=True)
        disturbed = Round(bench, bench.start(TABLE), chance, [])
        moment = time.monotonic() + chance.uniform(0.5, 6.0)
        # A fault that needs a process or a file waits until there is one.
        while disturbed.process.poll() is None:
            if time.monotonic() >= moment and fault(disturbed):
                tried[fault.__name__] += 1
                break
            time.sleep(0.01)
        for process in (disturbed.process, *disturbed.others):
            finish(process)
        (bench.path / "results" / "runs" / "filler").unlink(missing_ok=True)
        wait_until(lambda: not marked(str(tmp_path)), 20, f"no process is left ({fault.__name__})")
        call_again(bench)
        table = bench.table().drop(columns="seconds_per_step")
        pd.testing.assert_frame_equal(table, expected, obj=f"{fault.__name__}, seed {SEED}")
        assert bench.plan(TABLE) == NOTHING
        assert not marked(str(tmp_path))
    with capsys.disabled():
        shown = ", ".join(f"{name} {count}" for name, count in sorted(tried.items()))
        print(f"\n{tried.total()} faults tried from seed {SEED}: {shown}")
    assert tried
