"""One Slurm and one local run for all tests; a run with faults goes on beside the other tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from workflow.driver import CONFIG, REPOSITORY, SNAKEMAKE, Bench, wait_until

from .daemons import Slurm, missing, running_slurm


@dataclass
class ClusterBench(Bench):
    """A working folder in which Snakemake runs with the profile for Slurm."""

    def command(self, *arguments: str, cores: int = 2) -> list[str]:
        """The runs of the tests take seconds, not minutes: only the first question comes sooner."""
        profile = ("--workflow-profile", str(self.source / "profiles" / "slurm"))
        sooner = ("--slurm-init-seconds-before-status-checks", "6")
        snakefile = ("-s", str(self.source / "Snakefile"))
        return [str(SNAKEMAKE), *snakefile, *profile, *sooner, *arguments]


MakeBench = Callable[[str], ClusterBench]


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    reason = missing()
    if reason:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    # munged runs as another user, whom pytest's own folders keep out.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        Path(folder).chmod(0o755)
        with running_slurm(Path(folder)) as started:
            yield started


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the workflow, which every job reads: an edit must not disturb the session."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("Snakefile", "config.yaml"):
        shutil.copy2(REPOSITORY / name, copy / name)
    for name in ("workflow", "profiles", "envs"):
        shutil.copytree(
            REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    return copy


@pytest.fixture(scope="session")
def make_bench(slurm: Slurm, source: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeBench:
    """Make a folder with nothing but ``config.yaml``."""

    def make(name: str) -> ClusterBench:
        path = tmp_path_factory.mktemp(name)
        (path / "config.yaml").write_text(CONFIG, encoding="utf-8")
        return ClusterBench(path, source, dict(slurm.environment))

    return make


@pytest.fixture(scope="session")
def local(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The tables of the same configuration, made on this machine alone."""
    path = tmp_path_factory.mktemp("local")
    (path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    bench = Bench(path, source)
    bench.make("results/tables/runs.csv")
    return bench


def edit_both(bench: Bench) -> None:
    """Another initial scale for both configurations."""
    bench.edit("65536", "32768")
    bench.edit("init_scale: 256", "init_scale: 512")


def misbehave(folder: Path, *, slow: tuple[str, ...] = (), broken: tuple[str, ...] = ()) -> str:
    """Let the training of some arms wait for minutes in its first step, or raise there.

    Returns:
        What to set PYTHONPATH to: a folder with a ``sitecustomize`` module.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys, time\n\n"
        "quick = time.perf_counter\n\n"
        "def behave():\n"
        "    caller = sys._getframe(1)\n"
        "    if caller.f_globals.get('__name__') == 'halfscale.steps':\n"
        "        arm = getattr(caller.f_locals['training'].spec, 'arm', None)\n"
        f"        if arm in {broken!r}:\n"
        "            raise TypeError('a bug')\n"
        f"        if arm in {slow!r}:\n"
        "            time.sleep(300)\n"
        "    return quick()\n\n"
        "if {'train', 'halfscale.warm.parent'} & set(sys.orig_argv):\n"
        "    time.perf_counter = behave\n",
        encoding="utf-8",
    )
    return str(folder)


def log_of(bench: Bench, arm: str) -> str:
    path = bench.path / "results" / "logs" / "train" / "binary" / arm / "seed0.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def wait_for_training(bench: Bench, arm: str) -> None:
    """Wait until a job that misbehaves has begun to train, or to wait for ever."""
    wait_until(lambda: "train workload=" in log_of(bench, arm), 180, f"{arm} trains")


@dataclass
class Started:
    """A workflow that goes on beside the tests."""

    bench: Bench
    process: subprocess.Popen[str]


@contextmanager
def started(bench: Bench, *arguments: str) -> Iterator[Started]:
    process = bench.start(*arguments)
    try:
        yield Started(bench, process)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def faulty(slurm: Slurm, make_bench: MakeBench, local: Bench) -> Iterator[Started]:
    """One run fails, one is too slow for its time limit, one is cancelled from outside.

    The first two have an older result, the third and one that does not misbehave have none.
    """
    bench = make_bench("faulty")
    shutil.copytree(local.path, bench.path, dirs_exist_ok=True)
    bench.forget_runs("fp32", "bf16")
    shutil.rmtree(bench.path / "results" / "logs")
    edit_both(bench)
    modules = misbehave(bench.path / "faults", slow=("second", "fp32"), broken=("first",))
    bench.environment["PYTHONPATH"] = modules
    # A minute is the shortest limit that Slurm knows.
    limit = ("--set-resources", "train:runtime=1")
    with started(bench, "results/tables/runs.csv", *limit) as running:
        wait_for_training(bench, "fp32")
        (job,) = (job for job in slurm.jobs(bench.path) if "fp32" in job.comment)
        slurm.call("scancel", job.number)
        yield running


@pytest.fixture(scope="session")
def expected(local: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """What `faulty` comes to in the end, made on this machine alone."""
    path = tmp_path_factory.mktemp("expected") / "work"
    shutil.copytree(local.path, path)
    bench = Bench(path, local.source)
    edit_both(bench)
    with started(bench, "results/tables/runs.csv") as running:
        yield running


@pytest.fixture(scope="session")
def without_gpu(make_bench: MakeBench) -> Iterator[Started]:
    """A job on the node that pretends to have a GPU."""
    bench = make_bench("cuda")
    bench.edit("device: cpu", "device: cuda")
    with started(bench, "results/probes/binary/seed0/probe.json") as running:
        yield running
