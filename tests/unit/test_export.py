"""recommendation.json: strict, complete, and the same for the same evidence."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from halfscale.export import build_recommendation
from halfscale.plan import PolicyChoice
from halfscale.verdict import RULE, Verdict, decide

from .crafted import Made, runs_table

KEYS = {
    *("schema_version", "kind", "sentence", "recommended", "policy", "parameters"),
    *("constructor", "policies", "found_by_search"),
    *("deciding_step", "winning_set", "rejected", "identical", "scores", "rule", "evidence"),
    "versions",
}


def digest(made: Made, runs: pd.DataFrame) -> str:
    content = build_recommendation(made.plan, runs, made.verdict)
    return str(content["evidence"]["digest"])


@pytest.mark.parametrize("name", ["contested", "tied", "hopeless"])
def test_it_is_strict_json_that_survives_itself(name: str, request: pytest.FixtureRequest) -> None:
    content = request.getfixturevalue(name).recommendation
    assert set(content) == KEYS
    assert json.loads(json.dumps(content, allow_nan=False)) == content


def test_a_winner_comes_with_its_parameters_and_the_line_to_paste(contested: Made) -> None:
    content = contested.recommendation
    name = content["recommended"]
    assert content["kind"] == "winner"
    assert name in content["winning_set"]
    assert (
        PolicyChoice.of(content["policy"], **content["parameters"])
        == contested.plan.configurations[name]
    )
    assert content["constructor"] == contested.plan.configurations[name].constructor("cpu")
    assert content["schema_version"] == 1
    assert content["rule"] == list(RULE)
    assert content["versions"].keys() == {"halfscale", "torch", "python"}


def test_everything_behind_the_answer_is_there(contested: Made) -> None:
    content = contested.recommendation
    assert list(content["rejected"]) == ["broken"]
    assert set(content["scores"]) == set(contested.plan.configurations) - {"broken"}
    for score in content["scores"].values():
        assert score.keys() == {"ratio", "against_best", "reached", "runs", "skipped_steps"}
        assert score["ratio"].keys() == {"estimate", "low", "high"}
    evidence = content["evidence"]
    assert evidence["runs"] == len(list(contested.plan.runs())) == 80
    assert evidence["workloads"] == {"binary": 100, "digits": 150}
    assert evidence["seeds"] == [0, 1, 2, 3, 4]
    assert evidence["device"] == "cpu"


def test_identical_runs_come_with_the_knobs_that_explain_them(contested: Made) -> None:
    (group,) = contested.recommendation["identical"]
    assert group["configurations"] == ["fast", "twin"]
    # fast grew, twin did not, neither overflowed.
    assert group["inert_knobs"] == ["backoff_factor"]


def test_no_winner_has_no_parameters(hopeless: Made) -> None:
    content = hopeless.recommendation
    assert content["kind"] == "no winner"
    assert content["recommended"] is content["parameters"] is content["constructor"] is None
    assert set(content["rejected"]) == {"broken", "slow"}
    assert content["scores"] == {}


def test_unbounded_intervals_are_null(contested: Made) -> None:
    one_seed = runs_table({name: {"w": [40]} for name in ("fp32", *contested.plan.configurations)})
    decided = decide(one_seed, contested.plan.configurations)
    assert math.isinf(decided.scores["default"].ratio.high)
    content = build_recommendation(contested.plan, contested.runs, decided)
    assert content["scores"]["default"]["ratio"]["high"] is None
    json.dumps(content, allow_nan=False)


def test_the_evidence_digest_does_not_depend_on_times_or_the_order_of_rows(
    contested: Made,
) -> None:
    runs = contested.runs
    first = digest(contested, runs)
    assert len(first) == 64
    shuffled = runs.sample(frac=1, random_state=1)
    assert digest(contested, shuffled) == first
    later = runs.assign(seconds_per_step=runs["seconds_per_step"] * 3)
    assert digest(contested, later) == first


@pytest.mark.parametrize(
    ("column", "value"), [("digest", "0" * 16), ("outcome", "stuck"), ("curve", "f" * 16)]
)
def test_the_evidence_digest_depends_on_what_was_trained_and_how_it_went(
    contested: Made, column: str, value: str
) -> None:
    changed = contested.runs.copy()
    changed.loc[7, column] = value
    assert digest(contested, changed) != digest(contested, contested.runs)


def test_it_is_the_same_from_the_table_on_the_disk(contested: Made, tmp_path: Any) -> None:
    contested.runs.to_csv(tmp_path / "runs.csv", index=False)
    runs = pd.read_csv(tmp_path / "runs.csv")
    decided = decide(runs, contested.plan.configurations)
    assert isinstance(decided, Verdict)
    assert build_recommendation(contested.plan, runs, decided) == contested.recommendation


def test_numbers_are_plain_python(contested: Made) -> None:
    def walk(value: object) -> None:
        assert not isinstance(value, np.generic)
        for item in value.values() if isinstance(value, dict) else ():
            walk(item)
        for item in value if isinstance(value, list) else ():
            walk(item)

    walk(contested.recommendation)
