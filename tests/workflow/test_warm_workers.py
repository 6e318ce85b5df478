"""Warm workers under the real Snakemake: used where they help, gone with the workflow."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from .driver import (
    ARMS,
    NOTHING,
    Bench,
    all_gone,
    children,
    finish,
    slow_training,
    trace_columns,
    trainings,
    wait_until,
)

TABLE = "results/tables/runs.csv"


def parents(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The warm parents that a Snakemake has."""
    found = []
    for child in children(process):
        try:
            if "halfscale.warm.parent" in child.cmdline() and child.ppid() == process.pid:
                found.append(child)
        except psutil.Error:
            continue
    return found


def logs(bench: Bench) -> str:
    return "".join(log.read_text() for log in bench.path.glob("results/logs/train/*/*/*.log"))


@pytest.fixture
def slow(bench: Bench, tmp_path: Path) -> None:
    """Two runs are missing and take their time."""
    bench.forget_runs("first", "second")
    for folder in ("logs", "tables"):
        shutil.rmtree(bench.path / "results" / folder)
    bench.environment = slow_training(tmp_path / "slow", 0.3)


def start_and_meet(bench: Bench) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A workflow that trains two runs, and the parent and children that do it."""
    process = bench.start(TABLE)
    wait_until(lambda: logs(bench).count("step 1/5") == 2, 120, "both runs take a step")
    (parent,) = parents(process)
    jobs = parent.children()
    assert len(jobs) == 2
    return process, [parent, *jobs]


@pytest.mark.usefixtures("slow")
def test_runs_are_forked_from_one_parent_that_ends_with_the_workflow(bench: Bench) -> None:
    process, workers = start_and_meet(bench)
    assert len(trainings(process)) == 2
    finished = finish(process)
    assert finished.code == 0, finished.text
    wait_until(lambda: all_gone(workers), 10, "parent and children end")
    assert "no warm worker" not in logs(bench)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_a_workflow_that_is_ended(bench: Bench, how: signal.Signals) -> None:
    process, workers = start_and_meet(bench)
    clients = trainings(process)
    process.send_signal(how)
    if how == signal.SIGTERM:  # Snakemake lets running jobs finish
        finish(process)
    wait_until(lambda: all_gone([*workers, *clients]), 20, "every process ends")
    finish(process)
    bench.environment = {}
    bench.make(TABLE)
    assert bench.plan(TABLE) == NOTHING


@pytest.mark.usefixtures("slow")
def test_with_the_setting_off_each_run_is_a_process_of_its_own(bench: Bench) -> None:
    bench.edit("search: off", "search: off\nwarm_workers: off")
    process = bench.start(TABLE)
    wait_until(lambda: logs(bench).count("step 1/5") == 2, 120, "both runs take a step")
    assert parents(process) == []
    assert finish(process).code == 0
    bench.edit("warm_workers: off", "warm_workers: on")
    assert bench.plan(TABLE) == NOTHING


def test_warm_and_cold_runs_leave_the_same_traces(bench: Bench) -> None:
    warm = {arm: trace_columns(bench.run_folder(arm)) for arm in ARMS}
    bench.edit("search: off", "search: off\nwarm_workers: off")
    bench.forget_runs(*ARMS)
    shutil.rmtree(bench.path / "results" / "tables")
    bench.make(TABLE)
    assert {arm: trace_columns(bench.run_folder(arm)) for arm in ARMS} == warm


@pytest.mark.usefixtures("slow")
def test_a_killed_parent_costs_nothing_but_time(bench: Bench) -> None:
    process, workers = start_and_meet(bench)
    workers[0].kill()
    finished = finish(process)
    assert finished.code == 0, finished.text
    assert bench.plan(TABLE) == NOTHING
    wait_until(lambda: all_gone(workers), 10, "the children end")


def test_a_dry_run_starts_no_parent_and_leaves_no_socket(bench: Bench, tmp_path: Path) -> None:
    bench.edit("65536", "32768")
    temporary = tmp_path / "t"
    temporary.mkdir()
    bench.environment = {"TMPDIR": str(temporary)}
    assert bench.plan(TABLE) != NOTHING
    assert not list(temporary.glob("halfscale-warm-*"))
