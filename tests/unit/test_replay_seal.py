"""The seal of the predictions: what was edited, swapped or cut is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfscale.calibration import read_replay
from halfscale.plan import Plan
from halfscale.predict import write_predictions
from halfscale.records import RecordError
from halfscale.replay_seal import check_replay

from .crafted import make_plan, write_crafted_probe

FILES = ("predictions.csv", "traces.parquet", "landscape.csv")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan({"a": {}}, seeds=[0])


@pytest.fixture
def results(plan: Plan, tmp_path: Path) -> Path:
    for probe in plan.probes():
        write_crafted_probe(tmp_path, probe)
    write_predictions(plan, tmp_path)
    return tmp_path


def refusal(plan: Plan, results: Path) -> str:
    with pytest.raises(RecordError) as caught:
        check_replay(plan, results, *FILES)
    said = str(caught.value)
    assert said.endswith(f"rm -r {results / 'replay'}")
    assert "\n" not in said
    return said


def test_what_was_written_is_read(plan: Plan, results: Path) -> None:
    assert check_replay(plan, results, *FILES) == [results / "replay" / name for name in FILES]
    predictions, traces = read_replay(plan, results)
    assert len(predictions) == 1
    assert len(traces) == predictions["steps"].item()


@pytest.mark.parametrize("name", FILES)
def test_an_edited_or_missing_file_is_refused(plan: Plan, results: Path, name: str) -> None:
    path = results / "replay" / name
    content = path.read_bytes()
    for edited in (content[:-1], content + b"\n", content.replace(content[8:9], b"~", 1)):
        path.write_bytes(edited)
        said = refusal(plan, results)
        assert said.startswith(f"{path} is not the one that seal.json was written with")
    path.unlink()
    assert refusal(plan, results).startswith(f"{path} is missing")


def test_an_edited_predicted_step_does_not_reach_the_tables(plan: Plan, results: Path) -> None:
    path = results / "replay" / "traces.parquet"
    _, traces = read_replay(plan, results)
    traces.assign(overflow=~traces["overflow"]).to_parquet(path)
    with pytest.raises(RecordError, match=r"traces\.parquet is not the one"):
        read_replay(plan, results)


def test_the_seal_itself_is_checked(plan: Plan, results: Path) -> None:
    path = results / "replay" / "seal.json"
    whole = path.read_text()
    content = json.loads(whole)
    content["files"]["landscape.csv"] = "0" * 64
    path.write_text(json.dumps(content))
    assert refusal(plan, results).startswith(f"{path} was edited after it was written")
    for damaged in (whole[:50], "[]", "{}", json.dumps({**json.loads(whole), "more": 1})):
        path.write_text(damaged)
        assert refusal(plan, results).startswith(f"{path} is truncated or no seal")
    path.unlink()
    assert refusal(plan, results).startswith(f"{path} is missing")


def test_the_predictions_of_other_probes_are_refused(plan: Plan, results: Path) -> None:
    for other in (make_plan({"a": {}}, seeds=[1]), make_plan({"a": {}}, seeds=[0, 1])):
        assert "belongs to the predictions of other probes" in refusal(other, results)
    check_replay(make_plan({"b": {}}, seeds=[0]), results, *FILES)
