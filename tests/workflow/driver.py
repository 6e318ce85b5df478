"""Run the real Snakemake in a folder and say what it did, or would do."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import psutil
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).parents[2]
SNAKEMAKE = Path(sys.executable).with_name("snakemake")
TIME_LIMIT = 600.0

CONFIG = """\
# Two configurations, one seed, five steps.
configurations:
  first: {init_scale: 65536, growth_factor: 2, backoff_factor: 0.5, growth_interval: 3}
  second: {init_scale: 256, growth_factor: 2, backoff_factor: 0.25, growth_interval: 1}
seeds: [0]
workloads:
  binary: {steps: 5}
device: cpu
search: off
"""
CONTROLS = ("fp32", "bf16", "fp16-unscaled")
ARMS = ("first", "second", *CONTROLS)
READERS = frozenset({"tables", "verdict", "plots", "summary", "all"})
PREDICTORS = READERS | {"predict"}
TARGETS = ("reports/summary.html", "reports/recommendation.json")

PROBE = "probe"
"""In `Planned.trains` the arm of a probe."""

_TRAIN = re.compile(r"(?:train|probe) workload=(\S+)(?: configuration=(\S+))? seed=(\d+)")


@dataclass(frozen=True)
class Finished:
    """How a Snakemake process ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return f"{self.out}\n{self.err}"

    @property
    def complaints(self) -> list[str]:
        """The lines on the terminal that are halfscale's own."""
        return [line for line in self.err.splitlines() if line.startswith("halfscale")]


@dataclass(frozen=True)
class Planned:
    """What Snakemake would do: the runs and probes to train, and every rule that would run."""

    trains: frozenset[str]
    rules: frozenset[str]

    @property
    def readers(self) -> frozenset[str]:
        return self.rules - {"train", "probe"}


NOTHING = Planned(frozenset(), frozenset())


def trains(*arms: str, workload: str = "binary", seed: int = 0) -> frozenset[str]:
    """The runs of the named arms, or a probe, as `Planned.trains` has them."""
    return frozenset(f"{workload}/{arm}/seed{seed}" for arm in arms)


@dataclass
class Bench:
    """A working folder and the halfscale that runs in it.

    Attributes:
        path: The working folder, with its ``config.yaml``.
        source: The folder of halfscale's Snakefile.
        environment: What differs from the environment of the tests.
    """

    path: Path
    source: Path
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *arguments: str, cores: int = 2) -> list[str]:
        snakefile = () if "-s" in arguments else ("-s", str(self.source / "Snakefile"))
        return [str(SNAKEMAKE), *snakefile, "--cores", str(cores), *arguments]

    def start(
        self, *arguments: str, cores: int = 2, cwd: Path | None = None, merged: bool = False
    ) -> subprocess.Popen[str]:
        """Start Snakemake; ``merged`` sends both outputs to one stream, as on a terminal."""
        return subprocess.Popen(
            self.command(*arguments, cores=cores),
            cwd=cwd or self.path,
            env=clean_environment() | self.environment,
            text=True,
            encoding="utf-8",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        )

    def snakemake(self, *arguments: str, cores: int = 2, cwd: Path | None = None) -> Finished:
        """Run Snakemake to its end."""
        return finish(self.start(*arguments, cores=cores, cwd=cwd))

    def make(self, *arguments: str, cores: int = 2) -> Finished:
        """Run Snakemake and expect it to succeed."""
        finished = self.snakemake(*arguments, cores=cores)
        assert finished.code == 0, finished.text
        return finished

    def plan(self, *arguments: str, cwd: Path | None = None) -> Planned:
        """What Snakemake would do now."""
        finished = self.snakemake("-n", *arguments, cwd=cwd)
        assert finished.code == 0, finished.text
        return read_plan(finished.text)

    def take_source(self, name: str = "halfscale-source") -> Path:
        """Give this folder a halfscale of its own, so that its files can be edited."""
        copy = self.path.parent / name
        shutil.copytree(self.source, copy)
        self.source = copy
        return copy

    def edit(self, old: str, new: str, file: str = "config.yaml") -> None:
        replace_once(self.path / file, old, new)

    def run_folder(self, arm: str, workload: str = "binary", seed: int = 0) -> Path:
        return self.path / "results" / "runs" / workload / arm / f"seed{seed}"

    def forget_runs(self, *arms: str) -> None:
        """Remove the runs of some arms."""
        for arm in arms:
            shutil.rmtree(self.run_folder(arm))

    def table(self, name: str = "runs") -> pd.DataFrame:
        return pd.read_csv(self.path / "results" / "tables" / f"{name}.csv")


def replace_once(file: Path, old: str, new: str) -> None:
    """Replace a text that stands exactly once in a file."""
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
    file.write_text(text.replace(old, new), encoding="utf-8")


def finish(process: subprocess.Popen[str]) -> Finished:
    """Wait for a process; one that takes too long is killed and the test fails."""
    try:
        out, err = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"Snakemake took over {TIME_LIMIT:g} s:\n{out}\n{err}") from None
    return Finished(process.returncode, out, err or "")


def clean_environment() -> dict[str, str]:
    """The environment of the tests, less what would tell halfscale or Snakemake something."""
    dropped = ("HALFSCALE_", "SNAKEMAKE_", "PYTEST_", "JUPYTER", "PYTHONPATH", "PYTHONSAFEPATH")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    # Also on a machine with a GPU these tests are about the CPU.
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def read_plan(text: str) -> Planned:
    """Read a dry run: every job announces its rule, or its run for a training."""
    runs = frozenset(f"{w}/{arm or PROBE}/seed{seed}" for w, arm, seed in _TRAIN.findall(text))
    table = re.search(r"^job +count\n[- ]+\n((?:\S+ +\d+\n)+)", text, re.MULTILINE)
    if table is None:
        assert "Nothing to be done" in text, text
        assert not runs
        return NOTHING
    counts = {name: int(count) for name, count in re.findall(r"(\S+) +(\d+)\n", table[1])}
    counts.pop("total")
    assert counts.get("train", 0) + counts.get("probe", 0) == len(runs), text
    return Planned(runs, frozenset(counts))


def mend_command(complaint: str) -> list[str]:
    """The command that an error message tells to mend it with."""
    found = re.search(r"rm -r .+$", complaint.rstrip())
    assert found is not None, complaint
    return shlex.split(found[0])


def trace_columns(folder: Path) -> dict[str, list[object]]:
    """The columns of a run's trace that must not depend on anything but its specification."""
    table = pq.read_table(folder / "trace.parquet").drop_columns(["seconds"])
    return {name: [repr(v) for v in values] for name, values in table.to_pydict().items()}


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, with its content and its time."""
    return {
        str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a condition; the test fails if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All living descendants of a process."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended; a zombie has, though its parent has not asked for it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_gone(processes: list[psutil.Process]) -> bool:
    return all(map(is_gone, processes))


def trainings(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The training jobs that a Snakemake is running."""
    found = []
    for child in children(process):
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if words and "python" in Path(words[0]).name and "train" in words:
            found.append(child)
    return found


def slow_training(folder: Path, seconds: float) -> dict[str, str]:
    """Make training wait whenever it looks at the clock, twice a step.

    Returns:
        The environment variables that do it, through a ``sitecustomize`` module.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys, time\n\n"
        "quick = time.perf_counter\n\n"
        "def slow():\n"
        "    if sys._getframe(1).f_globals.get('__name__') == 'halfscale.steps':\n"
        f"        time.sleep({seconds})\n"
        "    return quick()\n\n"
        "if {'train', 'halfscale.warm.parent'} & set(sys.orig_argv):\n"
        "    time.perf_counter = slow\n",
        encoding="utf-8",
    )
    return {"PYTHONPATH": str(folder)}


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a small file system over a folder, its content kept.

    Where that is not allowed the test is skipped, but in CI it fails.
    """
    import pytest

    content = folder.with_name(f"{folder.name}-kept")
    shutil.copytree(folder, content)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "halfscale-test", str(folder)]
    tool = shutil.which("mount")
    if tool is None or subprocess.run(command, capture_output=True).returncode:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up("mounting a small file system needs root on Linux")
    try:
        shutil.copytree(content, folder, dirs_exist_ok=True)
        shutil.rmtree(content)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
