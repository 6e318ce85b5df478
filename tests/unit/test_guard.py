"""What the Snakefile needs around the plan: overlays, locks of the dead, outdated results."""

from __future__ import annotations

import base64
import os
import re
import shlex
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
from halfscale.plan import Plan
from halfscale.planner import build_plan
from halfscale.predict import write_predictions

from .crafted import make_plan, write_all

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


def mark_recorded(path: str) -> None:
    """Leave the metadata that Snakemake keeps of a file it made."""
    folder = Path(".snakemake", "metadata")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / base64.urlsafe_b64encode(path.encode()).decode()).write_text("{}")


@pytest.fixture
def written(folder: Path) -> Plan:
    plan = make_plan({"a": {}, "b": {}}, seeds=[0])
    write_all(Path("results"), plan)
    return plan


EDITED = make_plan({"a": {}, "b": {"init_scale": 2}}, seeds=[0])


def test_results_of_this_plan_are_not_outdated(written: Plan) -> None:
    guard.stop_if_outdated(written, Path("results"))


def test_results_that_are_missing_or_unreadable_are_left_to_snakemake(written: Plan) -> None:
    guard.stop_if_outdated(make_plan({"c": {}}), Path("results"))
    (Path("results") / written.run("binary", "a", 0).folder / "run.json").write_text("{")
    guard.stop_if_outdated(written, Path("results"))
    guard.stop_if_outdated(EDITED, Path("nowhere"))


def test_outdated_results_without_snakemakes_records_stop_with_the_command_that_mends_it(
    written: Plan,
) -> None:
    with pytest.raises(SystemExit) as caught:
        guard.stop_if_outdated(EDITED, Path("results"))
    message = str(caught.value.code)
    assert len(message.splitlines()) == 1
    assert "1 results" in message
    assert shlex.split(message.rpartition(": ")[2]) == ["rm", "-r", "results/runs/binary/b"]
    subprocess.run(message.rpartition(": ")[2], shell=True, check=True)
    guard.stop_if_outdated(EDITED, Path("results"))


def test_outdated_results_that_snakemake_knows_are_left_to_it(written: Plan) -> None:
    mark_recorded(f"results/{written.run('binary', 'b', 0).folder}/run.json")
    guard.stop_if_outdated(EDITED, Path("results"))


def test_tables_of_another_plan_without_records_stop_with_the_command_that_mends_it(
    written: Plan,
) -> None:
    tables = Path("results", "tables")
    tables.mkdir()
    (tables / "plan.json").write_text(EDITED.canonical_json() + "\n")
    with pytest.raises(SystemExit, match=r"rm -r results/tables$"):
        guard.stop_if_outdated(written, Path("results"))
    mark_recorded("results/tables/plan.json")
    guard.stop_if_outdated(written, Path("results"))


def test_tables_of_this_plan_are_not_outdated(written: Plan) -> None:
    tables = Path("results", "tables")
    tables.mkdir()
    (tables / "plan.json").write_text(written.canonical_json() + "\n")
    guard.stop_if_outdated(written, Path("results"))


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


def test_predictions_of_another_plan_are_made_again_where_no_records_are_kept(folder: Path) -> None:
    plan = make_plan({"a": {}}, seeds=[0])
    results = Path("results")
    guard.reopen_predictions(plan, results)
    write_all(results, plan)
    write_predictions(plan, results)
    path = results / "replay" / "predictions.csv"
    mark = folder / ".snakemake" / "incomplete" / guard._record_name(path)
    guard.reopen_predictions(plan, results)
    assert not mark.exists()
    edited = make_plan({"a": {"init_scale": 8}}, seeds=[0])
    record = folder / ".snakemake" / "metadata" / mark.name
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    guard.reopen_predictions(edited, results)
    assert not mark.exists()  # Snakemake knows by itself
    record.unlink()
    guard.reopen_predictions(edited, results)
    assert mark.exists()


def test_predictions_that_cannot_be_read_are_left_to_their_readers(folder: Path) -> None:
    for content in (b"", b"x,y\n1,2\n", b"\xff\xfe"):
        path = folder / "results" / "replay" / "predictions.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        guard.reopen_predictions(make_plan(), Path("results"))


def test_the_figures_that_are_asked_for_are_those_that_are_drawn() -> None:
    from halfscale.plots import FIGURES

    assert set(guard.FIGURES) == set(FIGURES)


def test_every_file_of_every_run_is_a_target() -> None:
    plan = make_plan({"a": {}}, seeds=[0, 1])
    targets = guard.list_targets(plan)
    assert len(targets) == len(set(targets))
    for run in plan.runs():
        assert f"results/{run.folder}/run.json" in targets
        assert f"results/{run.folder}/trace.parquet" in targets
    for seed in (0, 1):
        assert f"results/probes/binary/seed{seed}/probe.json" in targets
        assert f"results/probes/binary/seed{seed}/probe.parquet" in targets
    assert "reports/summary.html" in targets
    assert {f"results/replay/{file}" for file in guard.REPLAY} <= set(targets)


def test_a_run_that_is_not_in_the_plan_ends_with_one_line() -> None:
    plan = make_plan({"a": {}}, seeds=[0])
    assert guard.find_run(plan, Path("nowhere"), "binary", "a", 0) == plan.run("binary", "a", 0)
    for workload, arm in (("binary", "b"), ("digits", "a")):
        with pytest.raises(SystemExit, match=f"no workload {workload} or no configuration {arm}$"):
            guard.find_run(plan, Path("nowhere"), workload, arm, 0)
    with pytest.raises(SystemExit, match="can be asked for once it has run"):
        guard.find_run(plan, Path("nowhere"), "binary", "found-1", 0)


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
