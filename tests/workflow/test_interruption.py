"""Killed and doubled workflows: nothing goes on unseen, nothing is lost, the next start works."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import psutil

from .driver import (
    NOTHING,
    Bench,
    all_gone,
    children,
    finish,
    slow_training,
    snapshot,
    trainings,
    wait_until,
)

TABLE = "results/tables/runs.csv"


def log_of(bench: Bench, arm: str) -> str:
    path = bench.path / "results" / "logs" / "train" / "binary" / arm / "seed0.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_after_sigkill_no_training_stays_and_the_same_command_finishes(
    bench: Bench, tmp_path: Path
) -> None:
    before = bench.table().drop(columns="seconds_per_step")
    bench.forget_runs("first", "second")
    shutil.rmtree(bench.path / "results" / "tables")
    shutil.rmtree(bench.path / "results" / "logs")
    bench.environment = slow_training(tmp_path / "slow", 1.5)
    killed = bench.start(TABLE)
    # Both train side by side: the profile's one GPU is no limit for runs on the CPU.
    wait_until(
        lambda: all("step 1/5" in log_of(bench, arm) for arm in ("first", "second")),
        120,
        "both runs take a step",
    )
    assert len(trainings(killed)) == 2
    descendants = children(killed)
    killed.kill()
    wait_until(lambda: all_gone(descendants), 8, "the jobs of the killed workflow end")
    finish(killed)
    assert not any((bench.run_folder(arm) / "run.json").exists() for arm in ("first", "second"))

    bench.environment = {}
    bench.make(TABLE)
    pd.testing.assert_frame_equal(bench.table().drop(columns="seconds_per_step"), before)
    assert bench.plan(TABLE) == NOTHING
    assert not list(bench.run_folder("first").glob(".*"))


def test_after_sigkill_the_old_result_stays_whole(bench: Bench, tmp_path: Path) -> None:
    before = snapshot(bench.run_folder("first"))
    bench.edit("65536", "32768")
    (bench.path / "results/logs/train/binary/first/seed0.log").unlink()
    bench.environment = slow_training(tmp_path / "slow", 1.5)
    run = "results/runs/binary/first/seed0/run.json"
    killed = bench.start(run)
    wait_until(lambda: "step 1/5" in log_of(bench, "first"), 120, "the run takes a step")
    descendants = children(killed)
    killed.kill()
    finish(killed)
    wait_until(lambda: all_gone(descendants), 8, "the jobs of the killed workflow end")
    after = snapshot(bench.run_folder("first"))
    assert {name: content for name, (content, _) in after.items()} == {
        name: content for name, (content, _) in before.items()
    }
    assert bench.plan(run).trains == {"binary/first/seed0"}


def test_after_sigkill_during_the_report_no_kernel_stays(bench: Bench) -> None:
    (bench.path / "reports" / "summary.html").unlink()
    killed = bench.start()

    def kernel_runs() -> bool:
        try:
            return any("ipykernel_launcher" in p.cmdline() for p in children(killed))
        except psutil.Error:
            return False

    wait_until(kernel_runs, 120, "the notebook's kernel starts")
    descendants = children(killed)
    killed.kill()
    finish(killed)
    wait_until(lambda: all_gone(descendants), 10, "the report's processes end")
    assert not (bench.path / "reports" / "summary.html").exists()
    assert bench.plan().rules == {"summary", "all"}


def test_of_two_started_at_once_one_finishes_and_the_tables_are_whole(bench: Bench) -> None:
    bench.edit("65536", "32768")
    both = [bench.start(TABLE), bench.start(TABLE)]
    ended = [finish(process) for process in both]
    assert 0 in [one.code for one in ended], "\n".join(one.text for one in ended)
    for one in ended:
        assert one.code == 0 or "cannot be locked" in one.text, one.text
    assert bench.plan(TABLE) == NOTHING
    table = bench.table().set_index("configuration")
    assert len(table) == 5
    assert set(table["outcome"]) == {"ok"}


def test_a_second_one_is_refused_while_the_first_trains(bench: Bench, tmp_path: Path) -> None:
    bench.edit("65536", "32768")
    (bench.path / "results/logs/train/binary/first/seed0.log").unlink()
    bench.environment = slow_training(tmp_path / "slow", 1.5)
    first = bench.start(TABLE)
    wait_until(lambda: "step 1/5" in log_of(bench, "first"), 120, "the run takes a step")
    assert bench.plan(TABLE).trains == {"binary/first/seed0"}
    second = bench.snakemake(TABLE)
    assert second.code != 0
    assert "cannot be locked" in second.text
    assert len(trainings(first)) == 1
    finished = finish(first)
    assert finished.code == 0, finished.text
    assert bench.plan(TABLE) == NOTHING
