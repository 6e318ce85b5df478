"""The benchmarks that use more of the package than a user does stay in step with it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from halfscale.planner import build_plan
from halfscale.precision import arithmetic
from halfscale.records import TRACE_SCHEMA, read_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_import_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_synthetic_runs_are_runs_that_the_readers_accept(tmp_path: Path) -> None:
    pipeline = runpy.run_path(str(BENCHMARKS / "pipeline.py"))
    plan = pipeline["synthetic_plan"](16)
    assert pipeline["write_synthetic"](plan, tmp_path) == len(list(plan.runs())) == 16
    for spec in plan.runs():
        read_run(tmp_path, spec)


def test_the_readers_read_what_the_pipeline_benchmark_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = runpy.run_path(str(BENCHMARKS / "pipeline.py"))
    pipeline["time_readers"](16, tmp_path, everything=True)
    printed = capsys.readouterr().out
    for word in ("predictions of 16 runs: ", "page of 16 runs: ", "16 runs: tables ", ", report "):
        assert word in printed


def test_the_replay_benchmark_times_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = runpy.run_path(str(BENCHMARKS / "replay.py"))
    sizes = ["--configurations", "450", "--steps", "30", "--seeds", "2", "--sample", "2"]
    benchmark["main"]([*sizes, "--repeats", "1"])
    printed = capsys.readouterr().out
    assert "450 torch configurations x 30 steps x 2 seeds" in printed
    assert "times faster" in printed


@pytest.mark.usefixtures("torch_settings")
def test_the_calibration_benchmark_trains_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = runpy.run_path(str(BENCHMARKS / "calibration.py"))
    benchmark["main"](["--seeds", "1", "--workloads", "binary"])
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1].startswith("| all | 5 | 5 (100.0%)")
    case = benchmark["Case"]
    cases = [case("w", "a", 0, 3, 3), case("w", "b", 1, 3, 2), case("w", "c", 2, 0, 4)]
    assert benchmark["line"]("w", cases) == (
        "| w | 3 | 2 (66.7%) | 1 | c, seed 2: predicted 0, had 4 |"
    )


@pytest.mark.parametrize("name", ["MLP 16-64-2 (binary)", "transformer (text)"])
def test_the_recording_step_and_the_plain_one_train_alike(name: str) -> None:
    telemetry = runpy.run_path(str(BENCHMARKS / "telemetry.py"))
    build, _ = telemetry["MODELS"][name]
    weights = {}
    for arm, make in telemetry["ARMS"].items():
        workload = build()
        with arithmetic("fp16", "cpu", native=False) as used:
            step = make(workload, used)
            results = [step() for _ in range(3)]
        weights[arm] = torch.cat([p.detach().flatten() for p in workload.model.parameters()])
    assert torch.equal(weights["plain"], weights["recording"])
    assert set(results[-1]) == {*TRACE_SCHEMA.names, "largest_gradient"}
    assert results[-1]["applied"]


def test_the_gpu_benchmark_ends_with_one_line_where_there_is_no_gpu() -> None:
    benchmark = runpy.run_path(str(BENCHMARKS / "gpu.py"))
    with pytest.raises(SystemExit, match=r"^no GPU that this torch can use; --device cpu tries"):
        benchmark["main"]([])


@pytest.mark.usefixtures("torch_settings")
def test_the_gpu_benchmark_checks_and_times_on_the_cpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    benchmark = runpy.run_path(str(BENCHMARKS / "gpu.py"))
    settings = {"configurations": {"default": {}}, "device": "cpu", "seeds": [0]}
    plan = build_plan({**settings, "workloads": {"binary": {"steps": 3}}})
    checks = benchmark["Checks"]()
    benchmark["check_default"](checks, plan)
    benchmark["check_repeats"](checks, plan)
    benchmark["check_settings"](checks, "cpu")
    benchmark["check_scaler"](checks, "cpu")
    benchmark["time_all"](plan, "cpu", 2)
    printed = capsys.readouterr().out.splitlines()
    assert checks.failed == 0
    assert [line[:4] for line in printed] == ["pass"] * 11 + ["time"] * 3

    unstable = {"steps": 30, "samples": 32, "learning_rate": 1e9}
    benchmark["check_default"](checks, build_plan({**settings, "workloads": {"binary": unstable}}))
    assert checks.failed >= 1, "a control that diverges is a check that failed"
    torch.use_deterministic_algorithms(False)
    before = checks.failed
    benchmark["check_settings"](checks, "cpu")
    assert checks.failed == before + 1


def test_the_benchmark_of_short_runs_trains_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    benchmark = runpy.run_path(str(BENCHMARKS / "short_runs.py"))
    benchmark["main"](["--runs", "5", "--workload", "binary", "--repeats", "1"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "binary, 30 steps, 2 cores"
    assert re.match(r"5 runs: loop [\d.]+ s \(1\.00 ×\), workflow .*, changed .* ×\)$", second)
    with pytest.raises(SystemExit):
        benchmark["main"](["--runs", "4"])
    assert "must be a multiple of 5" in capsys.readouterr().err
