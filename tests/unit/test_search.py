"""The search: what may be asked for, what it proposes, and a file that belongs to one plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from halfscale.config import ConfigError
from halfscale.grid import grid
from halfscale.jobs import Jobs
from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.naming import find_fault, suggest_name
from halfscale.plan import Plan, ProbeSpec, is_found
from halfscale.planner import build_plan
from halfscale.proposals import (
    PROPOSALS,
    ProposalError,
    Proposals,
    extend_plan,
    read_proposals,
    seal,
)
from halfscale.records import Outcome, write_json, write_probe
from halfscale.search import search
from halfscale.search_fragments import describe_search

from .crafted import ENVIRONMENT, HOSTILE, make_plan, write_crafted_probe

LISTED = {"a": {"init_scale": 2.0**16, "growth_interval": 20}}


def plan_of(search: object = True, **changed: object) -> Plan:
    return build_plan(
        {"configurations": LISTED, "seeds": [0, 1], "device": "cpu", "search": search, **changed}
    )


def write_probes(results: Path, plan: Plan, largest: float = 0.25) -> None:
    """Probes whose steps overflow above 2^15 / largest, and lose something below 2^0."""
    for spec in plan.probes():
        write_one(results, spec, [largest] * spec.steps)


def write_one(
    results: Path, spec: ProbeSpec, largest: list[float], outcome: Outcome = "ok"
) -> None:
    counts = np.zeros(BINS, int)
    counts[[-25 - LOWEST_EXPONENT, -3 - LOWEST_EXPONENT]] = 1
    steps = len(largest)
    write_probe(
        results / spec.folder,
        {
            "step": list(range(steps)),
            "loss": [1.0] * steps,
            "largest": largest,
            "largest_gradient": largest,
            "activation_counts": [counts.tolist()] * steps,
            "weight_counts": [[0] * BINS] * steps,
            "activation_zeros": [0] * steps,
            "weight_zeros": [0] * steps,
            "batch_repeats": [False] * steps,
        },
        spec=spec,
        outcome=outcome,
        error=None if outcome == "ok" else "it did not end",
        environment=ENVIRONMENT,
    )


# What may be asked for.


def test_it_is_on_unless_it_is_switched_off() -> None:
    config = {"configurations": LISTED, "device": "cpu"}
    assert build_plan(config).search == plan_of(True).search == plan_of(None).search
    assert build_plan({**config, "search": {}}).search == build_plan(config).search
    assert plan_of("on") == plan_of(True)
    assert plan_of(False).search is None
    assert plan_of("off").search is None  # as --config search=off gives it
    assert plan_of(False).search_spec is None


def test_ranges_mean_the_same_in_every_spelling_and_order() -> None:
    written = {"growth_interval": [20, 5], "init_scale": ["2**8", 65536]}
    again = {"init_scale": {"from": 256, "to": "2**16", "times": 256}, "growth_interval": [5, 20.0]}
    assert plan_of(written).canonical_json() == plan_of(again).canonical_json()


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("yes", "search: 'yes': must be on, off or a block of ranges; write: search: {proposals"),
        ([1], "search: [1]: must be on, off or a block of ranges"),
        ({"proposals": 0}, "search.proposals: 0: must be at least 1 and at most 20; write: search"),
        ({"proposals": "few"}, "search.proposals: 'few': is not a number; write: "),
        ({"policy": "troch"}, "unknown policy; known: torch"),
        ({"init_scal": [1]}, "write: search: {init_scale: [65536.0]}"),
        ({"proposal": 3}, "write: search: {proposals: 2}"),
        ({"init_scale": 4}, "search.init_scale: 4: must be a list or a range"),
        ({"init_scale": []}, "search.init_scale: []: has no values; write: search: {init_scale"),
        ({"init_scale": ["x"]}, "'x' is not a number"),
        ({"growth_factor": [0.5]}, "search.growth_factor: [0.5]: "),
        ({"growth_interval": {"from": 1, "to": 9}}, "must have the keys from, to and either"),
        (
            {
                "init_scale": {"from": 1, "to": 1000, "plus": 1},
                "growth_interval": {"from": 1, "to": 201, "plus": 1},
            },
            "201000 combinations, more than 200000; write: search: {init_scale: [65536.0]",
        ),
        ({"init_scale": {"from": 1, "to": 1001, "plus": 1}}, "has 1001 values, more than 1000"),
        ({"policy": "apex", "init_scale": [1, 2**20], "max_scale": [4]}, "search: {"),
        ({"policy": "megatron", "hysteresi": [2]}, "policy: megatron, hysteresis: [2]"),
    ],
)
def test_what_cannot_be_searched_is_refused_with_what_to_write(block: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(block)
    message = str(caught.value)
    assert said in message
    assert message.startswith("config.yaml: search")
    assert len(message.splitlines()) == 1


def test_the_names_of_what_is_found_are_kept() -> None:
    with pytest.raises(ConfigError, match="kept for configurations that the search finds"):
        build_plan({"configurations": {"found-3": {}}})
    assert find_fault("Found-1", ()) is not None
    assert not is_found(suggest_name("found-1", ()))


# What it proposes.


def test_it_proposes_the_best_of_the_grid_that_are_not_listed(tmp_path: Path) -> None:
    plan = plan_of({"init_scale": [2**20, 2**16, 2**8], "growth_interval": [1000], "proposals": 2})
    write_probes(tmp_path, plan)
    found = search(plan, tmp_path)
    assert found.tried == 3
    # 2^17 is the largest safe scale: 2^20 skips three steps, 2^8 and 2^16 none and lose nothing.
    # 2^16 is listed, with another interval that does act.
    scales = [proposal.choice.parameters["init_scale"] for proposal in found.proposals]
    assert scales == [2.0**16, 2.0**8]
    assert [proposal.cost for proposal in found.proposals] == [0.0, 0.0]
    assert set(found.listed) == {"a"}
    assert found.unused == []


def test_what_behaves_like_a_listed_one_is_not_proposed(tmp_path: Path) -> None:
    plan = plan_of(
        {"init_scale": [2**16], "growth_interval": [20], "backoff_factor": [0.5, 0.25]},
        workloads={"binary": {"steps": 15}},
    )
    write_probes(tmp_path, plan)
    assert search(plan, tmp_path).proposals == []  # no overflow within 15 steps: one behaviour


def test_every_workload_counts_alike_however_long_it_is(tmp_path: Path) -> None:
    plan = plan_of(
        {"init_scale": [2**18, 2**4], "growth_interval": [10**6], "proposals": 1},
        workloads={"binary": {"steps": 10}, "digits": {"steps": 1000}},
    )
    for spec in plan.probes():
        # The long one wants a small scale, the short one a large one, by one step each.
        largest = [2.0**-2] * 10 if spec.workload == "binary" else [2.0**-5] * 1000
        write_one(tmp_path, spec, largest)
    (best,) = search(plan, tmp_path).proposals
    # 2^18 skips a tenth of the short one; 2^4 skips nothing and loses nothing.
    assert best.choice.parameters["init_scale"] == 2.0**4


def test_probes_that_did_not_end_ok_are_left_out_and_named(tmp_path: Path) -> None:
    plan = plan_of(workloads={"binary": {"steps": 30}, "digits": {"steps": 30}})
    for spec in plan.probes():
        if spec.workload == "digits":
            write_crafted_probe(tmp_path, spec, done=0)
        elif spec.seed:
            # Diverged in its second step: at no scale would that one have been finite.
            write_one(tmp_path, spec, [0.25, math.inf], outcome="diverged")
        else:
            write_one(tmp_path, spec, [0.25] * 30)
    found = search(plan, tmp_path)
    assert found.unused == [
        "binary, seed 1 (diverged)",
        "digits, seed 0 (failed)",
        "digits, seed 1 (failed)",
    ]
    assert len(found.proposals) == 2


def test_without_any_recorded_step_nothing_is_proposed(tmp_path: Path) -> None:
    plan = plan_of()
    for spec in plan.probes():
        write_crafted_probe(tmp_path, spec, done=0)
    found = search(plan, tmp_path)
    assert (found.proposals, found.listed, len(found.unused)) == ([], {}, 4)
    assert extend_plan(plan, tmp_path) == plan


def test_a_plan_without_a_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no search"):
        search(plan_of(False), tmp_path)


# A file that belongs to one plan.


@pytest.fixture
def searched(tmp_path: Path) -> tuple[Plan, Path]:
    plan = plan_of({"proposals": 2})
    write_probes(tmp_path, plan)
    search(plan, tmp_path)
    return plan, tmp_path


def test_the_plan_is_extended_by_what_was_found(searched: tuple[Plan, Path]) -> None:
    plan, results = searched
    whole = extend_plan(plan, results)
    assert sorted(whole.configurations) == ["a", "found-1", "found-2"]
    assert whole.search_spec == plan.search_spec
    assert extend_plan(whole, results) == whole
    assert whole.run("binary", "found-1", 0).policy == whole.configurations["found-1"]
    assert Plan.model_validate_json(whole.canonical_json()) == whole


def test_a_plan_without_a_search_is_not_extended(searched: tuple[Plan, Path]) -> None:
    assert extend_plan(make_plan(), searched[1]) == make_plan()


@pytest.mark.parametrize(
    "other",
    [
        plan_of({"proposals": 3}),
        plan_of({"init_scale": [4]}),
        plan_of({"policy": "apex"}),
        plan_of({"proposals": 2}, seeds=[0]),
        plan_of({"proposals": 2}, configurations={"a": {}}),
    ],
    ids=["number", "ranges", "policy", "seeds", "configurations"],
)
def test_the_proposals_of_another_plan_are_refused(
    searched: tuple[Plan, Path], other: Plan
) -> None:
    results = searched[1]
    with pytest.raises(ProposalError) as caught:
        read_proposals(other, results)
    assert str(results / PROPOSALS) in str(caught.value)
    assert f"rm -r {results / PROPOSALS.parent}" in str(caught.value)
    assert Jobs(other, results).whole() == other


def edit_cost(path: Path) -> None:
    path.write_text(path.read_text().replace('"cost": 0.0', '"cost": 0.5', 1))


def edit_scale(path: Path) -> None:
    content = json.loads(path.read_text())
    content["proposals"][0]["choice"]["parameters"]["init_scale"] *= 2
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:90]), "is truncated"),
        (lambda path: path.write_text("[]"), "is truncated or no file of proposals"),
        (lambda path: path.write_text("{}"), "is truncated or no file of proposals"),
        (edit_cost, "was edited after it was written"),
        (edit_scale, "was edited after it was written"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    searched: tuple[Plan, Path], damage: object, said: str
) -> None:
    plan, results = searched
    damage(results / PROPOSALS)  # type: ignore[operator]
    with pytest.raises(ProposalError, match=said) as caught:
        extend_plan(plan, results)
    assert str(results / PROPOSALS) in str(caught.value)


# On the page.


def verdict(recommended: str | None) -> dict[str, object]:
    return {"recommended": recommended, "rejected": {"a": "stuck"}, "winning_set": ["found-1"]}


def test_the_page_says_what_was_found_and_how_it_did(searched: tuple[Plan, Path]) -> None:
    plan, results = searched
    whole = extend_plan(plan, results)
    write_json(results / "tables" / "plan.json", json.loads(whole.canonical_json()))
    html = describe_search(results, verdict("found-2"))
    for text in ("found-1", "found-2", "the search", "config.yaml", "init_scale=", "recommended"):
        assert text in html
    assert "in the winning set" in html
    assert "rejected" in html
    assert "configurations were replayed over the probes" in html


def test_the_page_says_that_there_was_no_search(tmp_path: Path) -> None:
    write_json(tmp_path / "tables" / "plan.json", json.loads(make_plan().canonical_json()))
    assert "search: off" in describe_search(tmp_path, verdict(None))


def test_no_name_becomes_markup(tmp_path: Path) -> None:
    plan = plan_of()
    spec = plan.search_spec
    assert spec is not None
    proposals = Proposals(
        digest=spec.digest, tried=1, objective=HOSTILE, proposals=[], listed={}, unused=[HOSTILE]
    )
    write_json(tmp_path / PROPOSALS, seal(proposals))
    write_json(tmp_path / "tables" / "plan.json", json.loads(plan.canonical_json()))
    assert "<script" not in describe_search(tmp_path, verdict(None))


def test_the_default_grid_leaves_out_what_cannot_act() -> None:
    intervals = {choice.parameters["growth_interval"] for choice in grid(steps=150)}
    assert intervals == {5, 10, 20, 50, 100, 2000}
