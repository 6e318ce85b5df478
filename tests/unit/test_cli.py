"""The commands that the rules run: what they write, and the one line that says why they failed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from typer.testing import CliRunner

from halfscale import __version__, cli, plots, sources
from halfscale.cli import app
from halfscale.guard import OWNER
from halfscale.predict import write_predictions
from halfscale.records import read_run
from halfscale.scaling import ManualGradScaler

from .crafted import Made, make, make_plan, sweep_table, tiny_spec, write_all, write_crafted_probe

pytestmark = pytest.mark.usefixtures("torch_settings")


@pytest.fixture(autouse=True)
def _no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OWNER, raising=False)


def succeed(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: object) -> str:
    """Run a command that fails; its one line on the terminal, which is also the log's last."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    if arguments[0] != "check":
        assert line.startswith(f"halfscale {arguments[0]} failed: ")
        assert result.stdout.splitlines()[-1] == line
    return line


def test_the_version() -> None:
    assert succeed("--version").strip() == __version__


def test_check_says_what_would_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "configurations: {a: {}, b: {}}\nseeds: [0, 2]\ndevice: cpu\nworkloads: {binary: {}}\n"
    )
    output = succeed("check", tmp_path / "config.yaml")
    assert "10 runs on cpu" in output
    assert "a, b, fp32, bf16, fp16-unscaled" in output
    assert "0, 2" in output
    assert "beside them 2 probes, and up to 4 runs of what the search finds" in output


def test_check_refuses_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("configurations: {a: {init_scal: 1}}\n")
    line = fail("check", tmp_path / "config.yaml")
    assert str(tmp_path / "config.yaml") in line
    assert "init_scale" in line


def test_train_writes_a_run_and_counts_its_steps(tmp_path: Path) -> None:
    spec = tiny_spec(steps=10)
    output = succeed("train", "--spec", spec.canonical_json(), "--folder", tmp_path / spec.folder)
    assert "workload=binary configuration=default seed=0" in output
    assert "step 10/10" in output
    assert "outcome: ok" in output
    assert read_run(tmp_path, spec)[0].steps_done == 10


def test_training_that_diverges_is_a_result_not_a_failure(tmp_path: Path) -> None:
    plan = make_plan(workloads={"binary": {"steps": 50, "samples": 32, "learning_rate": 1e9}})
    spec = plan.run("binary", "fp32", 0)
    output = succeed("train", "--spec", spec.canonical_json(), "--folder", tmp_path / spec.folder)
    assert "outcome: diverged" in output


def test_a_job_that_fails_names_workload_configuration_and_seed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = tiny_spec(seed=7)
    line = fail("train", "--spec", spec.canonical_json(), "--folder", tmp_path / "file" / "run")
    assert "workload=binary configuration=default seed=7: " in line
    assert "file" in line


@pytest.mark.parametrize("text", ["{", "{}", '{"workload": "binary"}'])
def test_a_specification_that_is_none_fails_with_one_line(tmp_path: Path, text: str) -> None:
    fail("train", "--spec", text, "--folder", tmp_path)


def test_verify_writes_its_tables(tmp_path: Path) -> None:
    output = succeed("verify", "--folder", tmp_path)
    checks = pd.read_csv(tmp_path / "checks.csv")
    assert list(checks.columns) == ["name", "measured", "expected", "passed"]
    assert checks["passed"].all()
    assert output.count("pass ") == len(checks) == 8
    assert list(pd.read_csv(tmp_path / "sweep.csv").columns) == list(sweep_table().columns)


def test_a_check_that_fails_fails_the_job_and_leaves_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always_step(self: ManualGradScaler, optimizer: object) -> bool:
        self._non_finite = None
        optimizer.step()  # type: ignore[attr-defined]
        return True

    monkeypatch.setattr(ManualGradScaler, "step", always_step)
    line = fail("verify", "--folder", tmp_path)
    assert "'overflow in fp16'" in line
    assert "measured" in line
    assert "expected" in line
    assert not (tmp_path / "checks.csv").exists()


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    """Tables and recommendation, made by the commands, of runs with an orphan among them."""
    results = tmp_path_factory.mktemp("results")
    write_all(results, make_plan({"gone": {}}, seeds=[0]))
    made = make(results, make_plan({"a": {}, "b": {"init_scale": 4}}))
    output = succeed("tables", "--plan", made.plan.canonical_json(), "--results", results)
    assert "orphan" in output
    assert "gone" in output
    return made, results


def test_tables_hold_what_was_measured(tables: tuple[Made, Path]) -> None:
    made, results = tables
    folder = results / "tables"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("calibration.csv", "configurations.csv", "exponents.csv", "orphans.json", "plan.json"),
        *("probes.csv", "runs.csv", "steps.parquet", "windows.parquet"),
    ]
    pd.testing.assert_frame_equal(
        pd.read_csv(folder / "runs.csv")
        .fillna({"inert_knobs": "", "policy": ""})
        .drop(columns="error"),
        made.runs.drop(columns="error"),
        check_dtype=False,
    )
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "steps.parquet"), made.steps)
    pd.testing.assert_frame_equal(
        pd.read_csv(folder / "exponents.csv"), made.exponents, check_dtype=False
    )
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "windows.parquet"), made.windows)
    assert json.loads((folder / "orphans.json").read_text()) == ["runs/binary/gone/seed0"]
    pd.testing.assert_frame_equal(
        pd.read_csv(folder / "calibration.csv", dtype={"note": str}).fillna({"note": ""}),
        made.calibration,
        check_dtype=False,
    )
    assert (folder / "plan.json").read_text().strip() == made.plan.canonical_json()


def test_the_verdict_is_taken_from_the_tables_on_the_disk(
    tables: tuple[Made, Path], tmp_path: Path
) -> None:
    made, results = tables
    folder = results / "tables"
    output = succeed(
        *("verdict", "--plan", folder / "plan.json", "--runs", folder / "runs.csv"),
        *("--output", tmp_path / "recommendation.json", "--settings", tmp_path / "settings"),
    )
    written = json.loads((tmp_path / "recommendation.json").read_text())
    assert written == made.recommendation
    assert output.strip() == made.verdict.sentence
    assert "settings.md" in {path.name for path in (tmp_path / "settings").iterdir()}


def test_a_verdict_whose_settings_cannot_be_written_leaves_no_recommendation(
    tables: tuple[Made, Path], tmp_path: Path
) -> None:
    folder = tables[1] / "tables"
    (tmp_path / "settings").write_text("a file where the folder should be")
    line = fail(
        *("verdict", "--plan", folder / "plan.json", "--runs", folder / "runs.csv"),
        *("--output", tmp_path / "recommendation.json", "--settings", tmp_path / "settings"),
    )
    assert str(tmp_path / "settings") in line
    assert not (tmp_path / "recommendation.json").exists()


def test_plots_are_drawn_from_the_tables_on_the_disk(
    tables: tuple[Made, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, results = tables
    (results / "verification").mkdir(exist_ok=True)
    sweep_table().to_csv(results / "verification" / "sweep.csv", index=False)
    (tmp_path / "recommendation.json").write_text(json.dumps(made.recommendation))
    some = {name: plots.FIGURES[name] for name in ("ranking", "sweep")}
    monkeypatch.setattr(plots, "FIGURES", some)
    recommendation = tmp_path / "recommendation.json"
    succeed("plots", "--results", results, "--recommendation", recommendation)
    drawn = sorted(path.name for path in (results / "plots").iterdir())
    assert drawn == ["ranking.svg", "ranking.txt", "sweep.svg", "sweep.txt"]


def test_predict_writes_what_the_replay_says(tables: tuple[Made, Path], tmp_path: Path) -> None:
    made, results = tables
    for probe in made.plan.probes():
        write_crafted_probe(tmp_path, probe)
    output = succeed("predict", "--plan", made.plan.canonical_json(), "--results", tmp_path)
    assert "predictions: 10 rows" in output
    for name in ("predictions.csv", "landscape.csv", "traces.parquet", "seal.json"):
        written = tmp_path / "replay" / name
        assert written.read_bytes() == (results / "replay" / name).read_bytes(), name


def test_a_missing_probe_stops_the_prediction_by_name(tmp_path: Path) -> None:
    plan = make_plan(seeds=[0])
    line = fail("predict", "--plan", plan.canonical_json(), "--results", tmp_path)
    assert str(tmp_path / "probes/binary/seed0") in line
    assert not (tmp_path / "replay").exists()


def test_predictions_of_another_plan_stop_the_tables(tmp_path: Path) -> None:
    made = make(tmp_path, make_plan({"a": {}}, seeds=[0]))
    edited = make_plan({"a": {"init_scale": 8}}, seeds=[0])
    write_all(tmp_path, edited)
    line = fail("tables", "--plan", edited.canonical_json(), "--results", tmp_path)
    assert "the predictions have none of this run: workload=binary configuration=a seed=0" in line
    assert not (tmp_path / "tables").exists()
    write_predictions(edited, tmp_path)
    succeed("tables", "--plan", edited.canonical_json(), "--results", tmp_path)
    calibration = pd.read_csv(tmp_path / "tables" / "calibration.csv")
    assert len(calibration) == len(made.calibration) == 1


@pytest.mark.parametrize("name", ["predictions.csv", "traces.parquet", "landscape.csv"])
def test_an_edited_file_of_predictions_stops_its_reader_by_name(
    tables: tuple[Made, Path], tmp_path: Path, name: str
) -> None:
    made, whole = tables
    results = tmp_path / "results"
    shutil.copytree(whole, results)
    path = results / "replay" / name
    path.write_bytes(path.read_bytes() + b"\n")
    job = ["tables", "--plan", made.plan.canonical_json()]
    if name == "landscape.csv":
        job = ["plots", "--recommendation", str(tmp_path / "recommendation.json")]
        (tmp_path / "recommendation.json").write_text("{}")
    line = fail(*job, "--results", results)
    assert str(path) in line
    assert f"rm -r {path.parent}" in line


def test_a_damaged_run_stops_the_tables_by_name(tmp_path: Path) -> None:
    plan = make_plan(seeds=[0])
    write_all(tmp_path, plan)
    path = tmp_path / plan.run("binary", "bf16", 0).folder / "run.json"
    path.write_bytes(path.read_bytes()[:100])
    line = fail("tables", "--plan", plan.canonical_json(), "--results", tmp_path)
    assert str(path) in line
    assert "rm -r" in line
    assert not (tmp_path / "tables").exists()


def test_a_report_that_fails_leaves_no_stale_page_and_keeps_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = new_code_cell("results = recommendation = ''", metadata={"tags": ["parameters"]})
    cells = [parameters, new_code_cell("raise ValueError('line 1\\nline 2')")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "in.ipynb")
    monkeypatch.setattr(sources, "NOTEBOOK", tmp_path / "in.ipynb")
    page, executed = tmp_path / "summary.html", tmp_path / "summary.ipynb"
    attempt = tmp_path / "logs" / "summary.ipynb"
    for stale in (page, executed):
        stale.write_text("stale")
    line = fail(
        *("report", "--results", tmp_path, "--recommendation", tmp_path / "r.json"),
        *("--executed", executed, "--page", page, "--attempt", attempt),
    )
    assert "line 1" in line
    assert "line 2" not in line
    assert not page.exists()
    assert not executed.exists()
    assert attempt.exists()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes with which a job ended itself; no watch outlives the test."""
    codes: list[int] = []
    monkeypatch.setattr(cli.os, "_exit", codes.append)
    yield codes
    for thread in watches():
        thread.join()


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "owner-watch"]


def test_a_job_ends_with_the_workflow_that_started_it(
    monkeypatch: pytest.MonkeyPatch, ends: list[int]
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        monkeypatch.setenv(OWNER, str(owner.pid))
        cli._end_with_owner()
        (watch,) = watches()
        watch.join(0.2)
        assert ends == []
        owner.kill()
        owner.wait()
        watch.join(10)
        assert ends == [75]


@pytest.mark.parametrize("owner", ["", "x", "-1"])
def test_a_job_started_by_hand_has_no_owner(
    monkeypatch: pytest.MonkeyPatch, ends: list[int], owner: str
) -> None:
    monkeypatch.setenv(OWNER, owner)
    cli._end_with_owner()
    assert watches() == ends == []


def test_the_module_runs_as_a_program(importable: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "halfscale", "--version"],
        env=importable,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == __version__
