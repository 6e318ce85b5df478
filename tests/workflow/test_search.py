"""The search in the workflow: what it finds is trained like what was listed, and never stale."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from halfscale.proposals import Proposals, seal

from .driver import CONFIG, NOTHING, Bench, mend_command, trains
from .test_elsewhere import MODULE, only_runs

# 2^40 overflows at once, so the other one is found; no interval acts within five steps.
SEARCH = "search: {proposals: 1, init_scale: [2**14, 2**40], growth_interval: [9]}"
ON = CONFIG.replace("search: off", SEARCH)
FOUND = "results/runs/binary/found-1/seed0/run.json"


def scale_of(bench: Bench, run: str = FOUND) -> float:
    spec = json.loads((bench.path / run).read_text(encoding="utf-8"))["spec"]
    return float(spec["policy"]["parameters"]["init_scale"])


@pytest.fixture
def searched(bench: Bench) -> Bench:
    """A finished workflow with a search."""
    bench.edit("search: off", SEARCH)
    bench.make()
    return bench


def test_what_is_found_is_trained_and_judged_like_what_was_listed(bench: Bench) -> None:
    bench.edit("search: off", SEARCH)
    planned = bench.plan()
    assert planned.trains == frozenset()
    assert "search" in planned.rules
    finished = bench.make()
    assert "train workload=binary configuration=found-1 seed=0" in finished.text
    assert "configuration=first" not in finished.text
    assert scale_of(bench) == 2**14
    assert "found-1" in set(bench.table()["configuration"])
    verdict = json.loads((bench.path / "reports/recommendation.json").read_text(encoding="utf-8"))
    assert "found-1" in verdict["scores"]
    assert verdict["found_by_search"] == ["found-1"]
    page = (bench.path / "reports/summary.html").read_text(encoding="utf-8")
    assert "2 configurations were replayed over the probes" in page
    assert bench.plan() == NOTHING


def test_an_edited_configuration_leaves_what_was_found_alone(searched: Bench) -> None:
    before = (searched.path / FOUND).stat().st_mtime_ns
    searched.edit("256", "512")
    planned = searched.plan()
    assert planned.trains == trains("second")
    assert "search" in planned.rules
    searched.make()
    assert (searched.path / FOUND).stat().st_mtime_ns == before
    assert searched.plan() == NOTHING


def test_other_ranges_train_what_they_find_instead(searched: Bench) -> None:
    searched.edit("2**14, 2**40", "2**12, 2**40")
    finished = searched.make()
    assert "configuration=found-1" in finished.text
    assert "configuration=first" not in finished.text
    assert scale_of(searched) == 2**12
    assert searched.plan() == NOTHING


def test_a_search_that_is_switched_off_leaves_orphans(searched: Bench) -> None:
    searched.edit(SEARCH, "search: off")
    searched.make()
    assert "found-1" not in set(searched.table()["configuration"])
    orphans = json.loads((searched.path / "results/tables/orphans.json").read_text("utf-8"))
    assert orphans == ["runs/binary/found-1/seed0"]
    assert searched.plan() == NOTHING


def test_what_was_found_and_deleted_is_made_again(searched: Bench) -> None:
    (searched.path / FOUND).unlink()
    assert "configuration=found-1" in searched.make().text
    assert searched.plan() == NOTHING


def test_proposals_edited_by_hand_never_reach_a_figure(searched: Bench) -> None:
    path = searched.path / "results/search/proposals.json"
    path.write_text(path.read_text(encoding="utf-8").replace("16384.0", "8192.0"), encoding="utf-8")
    (searched.path / "results/tables/runs.csv").unlink()
    failed = searched.snakemake()
    assert failed.code != 0
    complaint = next(line for line in failed.complaints if "was edited" in line)
    subprocess.run(mend_command(complaint), cwd=searched.path, check=True)
    searched.make()
    assert scale_of(searched) == 2**14
    assert searched.plan() == NOTHING


def test_without_records_an_edited_search_stops_and_the_mend_command_helps(
    searched: Bench,
) -> None:
    shutil.rmtree(searched.path / ".snakemake")
    searched.edit("2**14, 2**40", "2**12, 2**40")
    stopped = searched.snakemake()
    assert stopped.code != 0
    (complaint,) = stopped.complaints
    folders = ["results/runs/binary/found-1", "results/search"]
    assert mend_command(complaint) == ["rm", "-r", *folders]
    subprocess.run(mend_command(complaint), cwd=searched.path, check=True)
    searched.make()
    assert scale_of(searched) == 2**12


def test_a_search_within_a_module(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "outer"
    path.mkdir()
    snakefile = str(bench.source / "Snakefile")
    (path / "Snakefile").write_text(MODULE.format(snakefile=snakefile), encoding="utf-8")
    block = "".join(f"  {line}\n" for line in ON.splitlines())
    (path / "outer.yaml").write_text(f"halfscale:\n{block}", encoding="utf-8")
    only_runs(bench, path / "scaling")
    outer = Bench(path, path)
    outer.make()
    assert scale_of(outer, f"scaling/{FOUND}") == 2**14
    assert outer.plan() == NOTHING


def test_the_file_of_proposals_says_what_was_minimised(searched: Bench) -> None:
    content = json.loads((searched.path / "results/search/proposals.json").read_text("utf-8"))
    checksum = content.pop("checksum")
    proposals = Proposals.model_validate(content)
    assert seal(proposals)["checksum"] == checksum
    assert "share of the steps" in proposals.objective
    assert set(proposals.listed) == {"first", "second"}
