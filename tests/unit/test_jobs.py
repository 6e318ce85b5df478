"""The jobs of a plan while the workflow is parsed: made once, and anew when the search has run."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from halfscale import outdated
from halfscale.jobs import Jobs
from halfscale.packing import LONGEST_PLAIN, pack, unpack
from halfscale.plan import Plan, PolicyChoice, RunSpec
from halfscale.proposals import PROPOSALS, Proposal, Proposals, seal
from halfscale.records import write_json

from .crafted import make_plan, write_all

RESULTS = Path("results")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def propose(plan: Plan, *scales: float) -> None:
    """Write what a search would have found."""
    assert plan.search_spec is not None
    proposals = [
        Proposal(choice=PolicyChoice.of(init_scale=scale), cost=0.0, alike=1) for scale in scales
    ]
    found = Proposals(
        digest=plan.search_spec.digest,
        tried=1,
        objective="none",
        proposals=proposals,
        listed={},
        unused=[],
    )
    write_json(RESULTS / PROPOSALS, seal(found))


def test_a_job_is_what_the_plan_says_of_it() -> None:
    plan = make_plan({"a": {}}, seeds=[0, 1])
    jobs = Jobs(plan, RESULTS)
    assert [job.spec for job in jobs.listed()] == list(plan.jobs())
    for job in jobs.listed():
        assert job.text == job.spec.canonical_json()
        assert job.digest == job.spec.digest
        assert Path(job.record) == job.spec.folder / job.spec.record_name


def test_a_run_that_is_not_in_the_plan_ends_with_one_line() -> None:
    jobs = Jobs(make_plan({"a": {}}, seeds=[0]), RESULTS)
    for workload, arm in (("binary", "b"), ("digits", "a")):
        with pytest.raises(SystemExit, match=f"no workload {workload} or no configuration {arm}$"):
            jobs.run(workload, arm, 0)
    with pytest.raises(SystemExit, match="can be asked for once it has run"):
        jobs.run("binary", "found-1", 0)


def test_what_the_search_finds_is_part_of_the_plan_once_it_has_run() -> None:
    plan = make_plan({"a": {}}, seeds=[0], search={"proposals": 2})
    jobs = Jobs(plan, RESULTS)
    assert jobs.whole() == plan
    propose(plan, 8.0)
    assert "found-1" in jobs.whole().arms
    assert jobs.count_runs() == len(jobs.runs()) == 5
    first = jobs.run("binary", "found-1", 0)
    assert [job.spec for job in jobs.runs()] == list(jobs.whole().runs())
    propose(plan, 16.0, 32.0)
    again = jobs.run("binary", "found-1", 0)
    assert first.digest != again.digest
    assert {"found-1", "found-2"} <= set(jobs.whole().arms)
    (RESULTS / PROPOSALS).unlink()
    assert jobs.whole() == plan


def test_proposals_that_cannot_be_used_leave_the_plan_alone() -> None:
    plan = make_plan({"a": {}}, seeds=[0], search={"proposals": 2})
    propose(make_plan({"b": {}}, seeds=[0], search={"proposals": 2}), 8.0)
    assert Jobs(plan, RESULTS).whole() == plan


def test_each_specification_is_made_once_and_each_record_opened_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan({"a": {}, "b": {}}, seeds=[0, 1], search={"proposals": 1})
    propose(plan, 8.0)
    write_all(RESULTS, plan)
    made, opened = Counter[str](), Counter[str]()
    make, read = Plan.run, Path.read_bytes

    def counting_run(self: Plan, workload: str, arm: str, seed: int) -> RunSpec:
        made[f"{workload}/{arm}/{seed}"] += 1
        return make(self, workload, arm, seed)

    def counting_read(self: Path) -> bytes:
        opened[os.fspath(self)] += 1
        return read(self)

    monkeypatch.setattr(Plan, "run", counting_run)
    monkeypatch.setattr(Path, "read_bytes", counting_read)
    jobs = Jobs(plan, RESULTS)
    outdated.reopen_failed(jobs)
    outdated.reopen_predictions(jobs)
    outdated.stop_if_outdated(jobs)
    for _ in range(3):
        keys = list(jobs.whole().run_keys())
        assert len(keys) == 2 * len(jobs.whole().arms) == 12
        assert all(jobs.run(*key).text for key in keys)
    assert set(made.values()) == {1}
    assert len(made) == 12
    records = {str(RESULTS / job.record) for job in jobs.listed()}
    assert {name: opened[name] for name in records} == dict.fromkeys(records, 1)


def test_a_short_plan_is_an_argument_as_it_is_and_a_long_one_fits_too() -> None:
    short = make_plan({"a": {}})
    assert Jobs(short, RESULTS).plan_text == short.canonical_json()
    names = {
        f"c{n}": {"init_scale": 2.0 ** (n % 20), "growth_interval": n + 1} for n in range(3000)
    }
    long = make_plan(names, seeds=[0])
    assert len(long.canonical_json()) > 2 * 2**17, "Linux would refuse it"
    text = Jobs(long, RESULTS).plan_text
    assert len(text) < LONGEST_PLAIN
    assert Plan.model_validate_json(unpack(text)) == long


def test_what_was_packed_is_refused_if_it_is_not_whole() -> None:
    packed = pack("x" * (LONGEST_PLAIN + 1))
    assert unpack(packed) == "x" * (LONGEST_PLAIN + 1)
    with pytest.raises(ValueError, match="not whole"):
        unpack(packed[:-8])
