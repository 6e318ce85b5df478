"""What the Snakefile needs around the plan: overlays, locks of the dead, outdated results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from filelock import FileLock

from halfscale import guard
from halfscale.plan import PolicyChoice
from halfscale.planner import build_plan

from .crafted import make_plan

SHIPPED = {
    "configurations": {"default": {"init_scale": 4}},
    "workloads": {"binary": {"steps": 10, "hidden": 5}, "digits": {"steps": 20}},
    "seeds": [0, 1],
    "device": "cpu",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, empty."""
    path = tmp_path / "work"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    """The workflow's folder, with the configuration that ships."""
    path = tmp_path / "workflow"
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump(SHIPPED))
    return path


def ends_with(*arguments: Any, **keywords: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        guard.load_plan(*arguments, **keywords)
    message = str(caught.value.code)
    assert message.startswith("halfscale: ")
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.usefixtures("folder")
def test_without_a_configuration_the_one_that_ships_is_used(workflow: Path) -> None:
    assert guard.load_plan({}, workflow) == build_plan(SHIPPED)


def test_a_configuration_in_the_working_directory_goes_first(workflow: Path, folder: Path) -> None:
    (folder / "config.yaml").write_text("configurations: {mine: {}}\ndevice: cpu\n")
    assert list(guard.load_plan({}, workflow).configurations) == ["mine"]


@pytest.mark.usefixtures("folder")
def test_values_from_the_command_line_are_laid_over_block_by_block(workflow: Path) -> None:
    plan = guard.load_plan({"seeds": [7], "workloads": {"binary": {"steps": 30}}}, workflow)
    assert plan.seeds == (7,)
    assert plan.workloads["binary"].steps == 30
    assert plan.workloads["binary"].parameters["hidden"] == 5
    assert plan.workloads["digits"].steps == 20
    assert plan.configurations["default"].parameters["init_scale"] == 4


@pytest.mark.usefixtures("folder")
def test_configurations_that_are_given_stand_alone(workflow: Path) -> None:
    given = {"configurations": {"mine": {}}, "device": "cpu"}
    assert guard.load_plan(given, workflow) == build_plan(given)


@pytest.mark.usefixtures("folder")
def test_bad_input_ends_the_process_with_one_line(workflow: Path) -> None:
    message = ends_with({"seeds": [-1]}, workflow)
    assert str(workflow / "config.yaml") in message
    assert "seeds" in message
    given = workflow / "given.yaml"
    given.write_text("configurations: {a: {}}\nseeds: [0]\nseeds: [1]\n")
    message = ends_with(yaml.safe_load(given.read_text()), workflow, given_files=[given])
    assert str(given) in message
    assert "line 2" in message
    assert "line 3" in message
    given.write_text("configurations: {a: {init_scal: 1}}\n")
    message = ends_with(yaml.safe_load(given.read_text()), workflow, given_files=[str(given)])
    assert str(given) in message
    assert "init_scal" in message


def test_no_configuration_anywhere_is_said(folder: Path, tmp_path: Path) -> None:
    assert "config.yaml" in ends_with({}, tmp_path / "nowhere")


@pytest.fixture
def unlocked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with no lock held by this process."""
    held: list[FileLock] = []
    monkeypatch.setattr(guard, "_held", held)
    yield folder
    for lock in held:
        lock.release()


def put_lock(folder: Path, number: int, *outputs: str) -> list[Path]:
    """Locks as Snakemake leaves them: a list of outputs and one of inputs."""
    locks = folder / ".snakemake" / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    names = [f"{number}.output.lock", f"{number}.input.lock"]
    for name in names:
        (locks / name).write_text("".join(f"{output}\n" for output in outputs))
    return [locks / name for name in names]


OURS = [
    "results/runs/binary/default/seed0/run.json",
    "results/tables/runs.csv",
    "reports/summary.html",
    "reports/recommendation.json",
    "results/verification/checks.csv",
    "results/plots/loss.svg",
    "results/probes/binary/seed3/probe.json",
    "results/search/proposals.json",
    "results/replay/predictions.csv",
    "prefix/results/runs/binary/default/seed0/run.json",
]


@pytest.mark.parametrize("output", OURS)
def test_the_lock_of_a_killed_workflow_is_removed_and_only_that_one(
    unlocked: Path, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = put_lock(unlocked, 0, output, "elsewhere.txt")
    theirs = put_lock(unlocked, 1, "their/output.csv", "reports/other.html")
    guard.clear_stale_locks()
    assert not any(lock.exists() for lock in ours)
    assert all(lock.exists() for lock in theirs)
    assert "lock" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["analysis/run.json", "my/run.json", "run.json.bak"])
def test_the_lock_of_another_workflow_with_a_similar_file_stays(
    unlocked: Path, output: str
) -> None:
    theirs = put_lock(unlocked, 0, output)
    guard.clear_stale_locks()
    assert all(lock.exists() for lock in theirs)


def test_the_lock_of_a_live_workflow_stays(unlocked: Path) -> None:
    locks = put_lock(unlocked, 0, OURS[0])
    program = (
        "import sys\nfrom filelock import FileLock\n"
        "lock = FileLock('.snakemake/halfscale.lock')\nlock.acquire()\n"
        "print('held', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout and other.stdout.readline() == "held\n"
        guard.clear_stale_locks()
        assert all(lock.exists() for lock in locks)
        other.kill()
    guard.clear_stale_locks()
    assert not any(lock.exists() for lock in locks), "the lock ends with its process"


def test_nothing_is_done_where_there_is_nothing(
    unlocked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard.clear_stale_locks()
    guard.hold_lock()
    guard.clear_stale_locks()
    assert capsys.readouterr().err == ""
    assert [path.name for path in unlocked.iterdir()] == [".snakemake"]


def test_failures_are_told_by_the_last_line_of_the_logs_of_this_time(folder: Path) -> None:
    started = time.time() - 5
    for name, text, age in (
        ("train/a", "step 1\nhalfscale train failed: workload=w configuration=a seed=0: why\n", 0),
        ("train/b", "outcome: ok\n", 0),
        ("train/c", "halfscale train failed: old\n", 100),
        ("d", "", 0),
    ):
        log = folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
        os.utime(log, (time.time() - age,) * 2)
    lines = guard.describe_failures(Path("logs"), started)
    assert lines == [
        "halfscale train failed: workload=w configuration=a seed=0: why (log: logs/train/a.log)"
    ]
    assert guard.describe_failures(Path("nowhere"), started) == []


def test_jobs_find_this_interpreter_and_this_package_and_know_their_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv(guard.OWNER, "")
    guard.prepare_jobs()
    guard.prepare_jobs()
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert os.environ["PYTHONPATH"] == str(Path(guard.__file__).parents[1])
    assert re.fullmatch(r"\d+", os.environ[guard.OWNER])
    assert int(os.environ[guard.OWNER]) == os.getpid()


def test_the_figures_that_are_asked_for_are_those_that_are_drawn() -> None:
    from halfscale.plots import FIGURES

    assert set(guard.FIGURES) == set(FIGURES)


def test_every_file_of_every_run_is_a_target_once() -> None:
    plan = make_plan({"a": {}}, seeds=[0, 1])
    targets = [*guard.list_first_targets(plan), *guard.list_late_targets(plan)]
    assert len(targets) == len(set(targets))
    for job in plan.jobs():
        assert f"results/{job.folder}/{job.record_name}" in targets
        assert f"results/{job.folder}/{job.table_name}" in targets
    assert "reports/summary.html" in targets
    assert {f"results/replay/{file}" for file in guard.REPLAY} <= set(targets)


def test_only_what_the_search_found_waits_for_it() -> None:
    plan = make_plan({"a": {}}, seeds=[0])
    found = plan.with_found([PolicyChoice.of(init_scale=8)])
    first, late = guard.list_first_targets(plan), guard.list_late_targets(found)
    waits = [target for target in late if "/runs/" in target]
    assert waits == [
        f"results/runs/binary/found-1/seed0/{file}" for file in ("run.json", "trace.parquet")
    ]
    assert set(guard.list_run_files(found)) - set(first) == set(waits)


def test_jobs_find_the_runs_per_gpu_in_their_environment(
    folder: Path, workflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFSCALE_RUNS_PER_GPU", "7")
    plan = guard.load_plan({}, workflow)
    assert os.environ["HALFSCALE_RUNS_PER_GPU"] == "1"
    shared = guard.load_plan({"runs_per_gpu": "2**1"}, workflow)
    assert os.environ["HALFSCALE_RUNS_PER_GPU"] == "2"
    assert shared.execution.runs_per_gpu == 2
    assert shared.canonical_json() == plan.canonical_json()
    assert [job.digest for job in shared.jobs()] == [job.digest for job in plan.jobs()]


class PretendedWorkflow:
    """As much of Snakemake's workflow as the limit of jobs a second needs."""

    def __init__(self, limit: str | None, local: bool = True) -> None:
        from snakemake.scheduling.job_scheduler import JobRateLimiter
        from snakemake.settings.types import MaxJobsPerTimespan

        parsed = limit and JobRateLimiter(MaxJobsPerTimespan.parse_choice(limit))
        self.scheduler = SimpleNamespace(job_rate_limiter=parsed)
        self.local_exec = local


@pytest.mark.parametrize(
    ("limit", "local", "kept"),
    [
        ("100/1s", True, False),
        ("100/1s", False, True),
        ("5/1s", True, True),
        ("100/1m", True, True),
        (None, True, False),
    ],
    ids=["the default", "a cluster", "a user's number", "a user's time", "none"],
)
def test_only_the_default_limit_of_jobs_a_second_is_dropped_and_only_here(
    limit: str | None, local: bool, kept: bool
) -> None:
    workflow = PretendedWorkflow(limit, local)
    guard.drop_rate_limit(workflow)
    assert (workflow.scheduler.job_rate_limiter is not None) == kept


def test_snakemakes_own_default_is_the_one_that_is_dropped() -> None:
    from snakemake.cli import get_argument_parser

    assert get_argument_parser().get_default("max_jobs_per_timespan") == "100/1s"
