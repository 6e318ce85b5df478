"""Results that no longer fit the plan: stopped or made again where Snakemake cannot know it."""

from __future__ import annotations

import base64
import shlex
import subprocess
from pathlib import Path

import pytest

from halfscale import outdated
from halfscale.jobs import Jobs
from halfscale.plan import Plan
from halfscale.predict import write_predictions

from .crafted import make_plan, write_all


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    outdated.stop_if_outdated(Jobs(written, Path("results")))


def test_results_that_are_missing_or_unreadable_are_left_to_snakemake(written: Plan) -> None:
    outdated.stop_if_outdated(Jobs(make_plan({"c": {}}), Path("results")))
    (Path("results") / written.run("binary", "a", 0).folder / "run.json").write_text("{")
    outdated.stop_if_outdated(Jobs(written, Path("results")))
    outdated.stop_if_outdated(Jobs(EDITED, Path("nowhere")))


def test_outdated_results_without_snakemakes_records_stop_with_the_command_that_mends_it(
    written: Plan,
) -> None:
    with pytest.raises(SystemExit) as caught:
        outdated.stop_if_outdated(Jobs(EDITED, Path("results")))
    message = str(caught.value.code)
    assert len(message.splitlines()) == 1
    assert "1 results" in message
    assert shlex.split(message.rpartition(": ")[2]) == ["rm", "-r", "results/runs/binary/b"]
    subprocess.run(message.rpartition(": ")[2], shell=True, check=True)
    outdated.stop_if_outdated(Jobs(EDITED, Path("results")))


def test_outdated_results_that_snakemake_knows_are_left_to_it(written: Plan) -> None:
    mark_recorded(f"results/{written.run('binary', 'b', 0).folder}/run.json")
    outdated.stop_if_outdated(Jobs(EDITED, Path("results")))


def test_tables_of_another_plan_without_records_stop_with_the_command_that_mends_it(
    written: Plan,
) -> None:
    tables = Path("results", "tables")
    tables.mkdir()
    (tables / "plan.json").write_text(EDITED.canonical_json() + "\n")
    with pytest.raises(SystemExit, match=r"rm -r results/tables$"):
        outdated.stop_if_outdated(Jobs(written, Path("results")))
    mark_recorded("results/tables/plan.json")
    outdated.stop_if_outdated(Jobs(written, Path("results")))


def test_tables_of_this_plan_are_not_outdated(written: Plan) -> None:
    tables = Path("results", "tables")
    tables.mkdir()
    (tables / "plan.json").write_text(written.canonical_json() + "\n")
    outdated.stop_if_outdated(Jobs(written, Path("results")))


def test_predictions_of_another_plan_are_made_again_where_no_records_are_kept(folder: Path) -> None:
    plan = make_plan({"a": {}}, seeds=[0])
    results = Path("results")
    outdated.reopen_predictions(Jobs(plan, results))
    write_all(results, plan)
    write_predictions(plan, results)
    path = results / "replay" / "predictions.csv"
    mark = folder / ".snakemake" / "incomplete" / outdated._record_name(path)
    outdated.reopen_predictions(Jobs(plan, results))
    assert not mark.exists()
    edited = make_plan({"a": {"init_scale": 8}}, seeds=[0])
    record = folder / ".snakemake" / "metadata" / mark.name
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    outdated.reopen_predictions(Jobs(edited, results))
    assert not mark.exists()  # Snakemake knows by itself
    record.unlink()
    outdated.reopen_predictions(Jobs(edited, results))
    assert mark.exists()


def test_predictions_that_cannot_be_read_are_left_to_their_readers(folder: Path) -> None:
    for content in (b"", b"x,y\n1,2\n", b"\xff\xfe"):
        path = folder / "results" / "replay" / "predictions.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        outdated.reopen_predictions(Jobs(make_plan(), Path("results")))
