"""The benchmarks that make run files of their own stay in step with the package."""

from __future__ import annotations

import runpy
from pathlib import Path

from halfscale.records import read_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_synthetic_runs_are_runs_that_the_readers_accept(tmp_path: Path) -> None:
    pipeline = runpy.run_path(str(BENCHMARKS / "pipeline.py"))
    plan = pipeline["synthetic_plan"](16)
    assert pipeline["write_synthetic"](plan, tmp_path) == len(list(plan.runs())) == 16
    for spec in plan.runs():
        read_run(tmp_path, spec)
