"""The benchmarks that make data of their own stay in step with the package."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from halfscale.records import read_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_synthetic_runs_are_runs_that_the_readers_accept(tmp_path: Path) -> None:
    pipeline = runpy.run_path(str(BENCHMARKS / "pipeline.py"))
    plan = pipeline["synthetic_plan"](16)
    assert pipeline["write_synthetic"](plan, tmp_path) == len(list(plan.runs())) == 16
    for spec in plan.runs():
        read_run(tmp_path, spec)


def test_the_replay_benchmark_times_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = runpy.run_path(str(BENCHMARKS / "replay.py"))
    sizes = ["--configurations", "450", "--steps", "30", "--seeds", "2", "--sample", "2"]
    benchmark["main"]([*sizes, "--repeats", "1"])
    printed = capsys.readouterr().out
    assert "450 torch configurations x 30 steps x 2 seeds" in printed
    assert "times faster" in printed
