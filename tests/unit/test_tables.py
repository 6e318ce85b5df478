"""Tables, worked out by hand from small traces, and built from the plan's runs alone."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfscale.plan import Plan, RunSpec
from halfscale.records import TRACE_SCHEMA, RecordError, write_run
from halfscale.tables import (
    CONFIGURATION_COLUMNS,
    RUN_COLUMNS,
    collect_runs,
    find_orphans,
    find_targets,
    smooth,
    summarise,
)

from .crafted import ENVIRONMENT, Fate, make_plan, write_all, write_crafted

HALVING = [2.0**-step for step in range(20)]


def put(
    results: Path,
    spec: RunSpec,
    loss: Sequence[float],
    applied: Sequence[bool] | None = None,
    scale: Sequence[float] | None = None,
    **record: Any,
) -> None:
    """Write a run with the given columns, the rest made up."""
    steps = len(loss)
    applied = [True] * steps if applied is None else list(applied)
    *before, final = [1.0] * (steps + 1) if scale is None else scale
    trace = {
        "step": list(range(steps)),
        "loss": list(loss),
        "scale": before,
        "overflow": [not taken for taken in applied],
        "applied": applied,
        "grad_norm": [1.0] * steps,
        "headroom": [3.0 if taken else -math.inf for taken in applied],
        "seconds": [0.25 + step for step in range(steps)],
    }
    defaults = {"outcome": "ok", "error": None, "final_scale": final if spec.policy else None}
    write_run(results / spec.folder, trace, spec=spec, environment=ENVIRONMENT, **defaults | record)


def plan_of(steps: int, seeds: Sequence[int] = (0,), *names: str) -> Plan:
    return make_plan(
        {name: {} for name in names or ("default",)}, seeds, {"binary": {"steps": steps}}
    )


def put_all(results: Path, plan: Plan, losses: Mapping[str, Sequence[float]]) -> None:
    """The given losses by arm, fp32's for the other controls."""
    for spec in plan.runs():
        put(results, spec, losses.get(spec.arm, losses["fp32"]))


def row(runs: pd.DataFrame, arm: str, seed: int = 0) -> dict[str, Any]:
    (found,) = runs[(runs["configuration"] == arm) & (runs["seed"] == seed)].to_dict("records")
    return {str(key): value for key, value in found.items()}


def test_steps_to_target_are_counted_from_one(tmp_path: Path) -> None:
    # fp32 falls from 1 to 2^-19: the target is 0.05 of the way up, and 2^-5 = 0.031 is below it.
    slower = [1.0] * 4 + HALVING[:16]
    plan = plan_of(20)
    put_all(tmp_path, plan, {"fp32": HALVING, "default": slower})
    runs, _ = collect_runs(plan, tmp_path)
    assert find_targets(runs)["binary"] == pytest.approx(0.05, abs=1e-5)
    assert row(runs, "fp32")["steps_to_target"] == 6
    assert row(runs, "default")["steps_to_target"] == 10


def test_a_target_never_reached_is_infinite_and_a_first_loss_may_reach_it(tmp_path: Path) -> None:
    plan = plan_of(20, (0,), "default", "lucky")
    put_all(tmp_path, plan, {"fp32": HALVING, "default": [0.5] * 20, "lucky": [0.01] + [1.0] * 19})
    runs, _ = collect_runs(plan, tmp_path)
    assert row(runs, "default")["steps_to_target"] == math.inf
    assert row(runs, "lucky")["steps_to_target"] == 1


def test_skipped_steps_count_as_steps(tmp_path: Path) -> None:
    plan = plan_of(20)
    put_all(tmp_path, plan, {"fp32": HALVING})
    put(
        tmp_path,
        plan.run("binary", "default", 0),
        [1.0] * 3 + HALVING[:17],
        applied=[False] * 3 + [True] * 17,
    )
    runs, _ = collect_runs(plan, tmp_path)
    assert row(runs, "default")["steps_to_target"] == 9
    assert row(runs, "default")["skipped_steps"] == 3


def test_the_target_is_taken_from_medians_over_seeds(tmp_path: Path) -> None:
    # Initial losses 1, 2, 9: median 2. Final losses 0, 0.5, 1: median 0.5. 0.5 + 5 % of 1.5.
    plan = plan_of(20, (0, 1, 2))
    ends = {0: (9.0, 0.5), 1: (1.0, 0.0), 2: (2.0, 1.0)}
    for spec in plan.runs():
        first, last = ends[spec.seed]
        put(tmp_path, spec, [first] + [last] * 19)
    runs, _ = collect_runs(plan, tmp_path)
    assert find_targets(runs) == {"binary": pytest.approx(0.575)}


def test_losses_are_smoothed_over_five_percent_of_the_steps(tmp_path: Path) -> None:
    # 40 steps: a window of 2. One low loss between high ones does not reach the target.
    plan = plan_of(40)
    jumpy = [1.0, 0.0, 1.0, 1.0, *([0.06, 0.02] * 18)]
    put_all(tmp_path, plan, {"fp32": [1.0] + [0.0] * 39, "default": jumpy})
    runs, _ = collect_runs(plan, tmp_path)
    found = row(runs, "default")
    assert found["steps_to_target"] == 6  # mean of 0.06 and 0.02, where the target is 0.05
    assert found["final_loss"] == pytest.approx(0.04)
    assert found["initial_loss"] == 1.0
    assert row(runs, "fp32")["steps_to_target"] == 3


@given(
    loss=st.lists(st.floats(-100, 100), min_size=1, max_size=60).map(np.array),
    steps=st.integers(2, 100),
)
def test_smoothing_is_the_mean_of_the_last_losses(loss: np.ndarray, steps: int) -> None:
    window = max(1, steps // 20)
    expected = [loss[max(0, end - window) : end].mean() for end in range(1, len(loss) + 1)]
    assert smooth(loss, steps) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("pattern", "skipped", "longest"),
    [
        ("++++", 0, 0),
        ("----", 4, 4),
        ("--+---+-", 6, 3),
        ("-+-+-+", 3, 1),
        ("+++---", 3, 3),
        ("---+++", 3, 3),
    ],
)
def test_skipped_steps_and_their_longest_streak(
    tmp_path: Path, pattern: str, skipped: int, longest: int
) -> None:
    plan = plan_of(len(pattern))
    put_all(tmp_path, plan, {"fp32": [1.0] * len(pattern)})
    put(
        tmp_path,
        plan.run("binary", "default", 0),
        [1.0] * len(pattern),
        applied=[sign == "+" for sign in pattern],
    )
    found = row(collect_runs(plan, tmp_path)[0], "default")
    assert (found["skipped_steps"], found["longest_skip_streak"]) == (skipped, longest)
    assert found["smallest_headroom"] == (-math.inf if skipped else 3.0)


@pytest.mark.parametrize(
    ("scale", "growths", "backoffs", "inert"),
    [
        ([4, 4, 4, 4], 0, 0, {"growth_factor", "growth_interval", "backoff_factor"}),
        ([4, 8, 8, 16], 2, 0, {"backoff_factor"}),
        ([4, 2, 1, 1], 0, 2, {"growth_factor", "growth_interval"}),
        ([4, 8, 4, 4], 1, 1, set()),
        ([4, 4, 4, 2], 0, 1, {"growth_factor", "growth_interval"}),  # after the last step
    ],
)
def test_growths_backoffs_and_the_knobs_that_never_acted(
    tmp_path: Path, scale: list[float], growths: int, backoffs: int, inert: set[str]
) -> None:
    plan = plan_of(3)
    put_all(tmp_path, plan, {"fp32": [1.0, 0.5, 0.2]})
    put(tmp_path, plan.run("binary", "default", 0), [1.0, 0.5, 0.2], scale=scale)
    runs, _ = collect_runs(plan, tmp_path)
    found = row(runs, "default")
    assert (found["growths"], found["backoffs"]) == (growths, backoffs)
    assert set(filter(None, found["inert_knobs"].split(", "))) == inert
    assert found["final_scale"] == scale[-1]
    control = row(runs, "fp16-unscaled")
    assert (control["growths"], control["backoffs"], control["inert_knobs"]) == (0, 0, "")
    assert math.isnan(control["final_scale"])


def test_a_knob_is_inert_in_a_configuration_only_if_it_never_acted_in_any_run(
    tmp_path: Path,
) -> None:
    plan = plan_of(3, (0, 1))
    put_all(tmp_path, plan, {"fp32": [1.0, 0.5, 0.2]})
    put(tmp_path, plan.run("binary", "default", 1), [1.0, 0.5, 0.2], scale=[4, 8, 8, 8])
    runs, _ = collect_runs(plan, tmp_path)
    table = summarise(runs).set_index("configuration")
    assert table.loc["default", "inert_knobs"] == "backoff_factor"


@pytest.mark.parametrize(
    ("loss", "skipped", "outcome"),
    [
        ([1.0] * 20, 0, "stalled"),
        ([1.0] + [1.5] * 19, 0, "stalled"),
        ([1.0] + [0.96] * 19, 0, "stalled"),  # 4 % of fp32's drop
        ([1.0] + [0.94] * 19, 0, "ok"),
        ([1.0] * 20, 9, "stalled"),
        ([1.0] * 20, 10, "ok"),  # half of the steps skipped: the scale is to blame
    ],
)
def test_a_run_whose_loss_does_not_move_is_stalled(
    tmp_path: Path, loss: list[float], skipped: int, outcome: str
) -> None:
    plan = plan_of(20)
    put_all(tmp_path, plan, {"fp32": [1.0] + [0.0] * 19})
    applied = [False] * skipped + [True] * (20 - skipped)
    put(tmp_path, plan.run("binary", "default", 0), loss, applied=applied)
    assert row(collect_runs(plan, tmp_path)[0], "default")["outcome"] == outcome


def test_nothing_is_stalled_where_the_control_does_not_move_either(tmp_path: Path) -> None:
    plan = plan_of(20)
    put_all(tmp_path, plan, {"fp32": [1.0] * 20})
    runs, _ = collect_runs(plan, tmp_path)
    assert set(runs["outcome"]) == {"ok"}


def test_differences_are_taken_to_the_control_of_the_same_seed(tmp_path: Path) -> None:
    plan = plan_of(20, (0, 1))
    for spec in plan.runs():
        last = {"fp32": 0.25, "default": 0.5}.get(spec.arm, 0.0) + spec.seed
        put(tmp_path, spec, [4.0] + [last] * 19)
    runs, _ = collect_runs(plan, tmp_path)
    assert [row(runs, "default", seed)["final_loss_difference"] for seed in (0, 1)] == [0.25, 0.25]
    assert row(runs, "fp32", 1)["final_loss_difference"] == 0.0


def test_ratios_are_geometric_means_of_pairs(tmp_path: Path) -> None:
    # Steps to target: fp32 6 and 6; default 3 (twice as fast) and 12 (half as fast).
    plan = plan_of(20, (0, 1))
    put_all(tmp_path, plan, {"fp32": HALVING})
    put(tmp_path, plan.run("binary", "default", 0), [1.0, 0.5, *([0.0] * 18)])
    put(tmp_path, plan.run("binary", "default", 1), [1.0] * 11 + [0.0] * 9)
    table = summarise(collect_runs(plan, tmp_path)[0]).set_index("configuration")
    found = table.loc["default"]
    assert found["ratio_to_fp32"] == pytest.approx(1.0)
    assert found["ratio_low"] < 1 < found["ratio_high"]
    assert (found["reached"], found["runs"], found["ok"]) == (2, 2, 2)
    assert found["steps_to_target"] == 7.5
    assert tuple(table.loc["fp32"][["ratio_to_fp32", "ratio_low", "ratio_high"]]) == (1, 1, 1)


def test_a_run_that_did_not_reach_enters_with_one_step_more_than_it_had(tmp_path: Path) -> None:
    plan = plan_of(20, (0, 1))
    put_all(tmp_path, plan, {"fp32": HALVING, "default": [0.5] * 20})
    found = summarise(collect_runs(plan, tmp_path)[0]).set_index("configuration").loc["default"]
    assert found["ratio_to_fp32"] == pytest.approx(21 / 6)
    assert found["reached"] == 0
    assert math.isinf(found["steps_to_target"])


def test_outcomes_are_counted(tmp_path: Path) -> None:
    plan = make_plan(seeds=[0, 1, 2, 3], workloads={"binary": {"steps": 20}})
    outcomes = ["ok", "diverged", "failed", "out-of-memory"]
    for spec in plan.runs():
        outcome = outcomes[spec.seed] if spec.arm == "default" else "ok"
        put(tmp_path, spec, HALVING, outcome=outcome, error=None if outcome == "ok" else "why")
    table = summarise(collect_runs(plan, tmp_path)[0]).set_index("configuration")
    counted = ["ok", "diverged", "stuck", "stalled", "out-of-memory", "failed"]
    assert list(table.loc["default", counted]) == [1, 1, 0, 0, 1, 1]
    assert list(table.loc["fp32", counted]) == [4, 0, 0, 0, 0, 0]


def test_runs_that_ended_at_once_do_not_cost_the_others_their_tables(tmp_path: Path) -> None:
    plan = plan_of(20, (0, 1), "default", "other")
    put_all(tmp_path, plan, {"fp32": HALVING})
    for seed in (0, 1):
        spec = plan.run("binary", "other", seed)
        put(tmp_path, spec, [], scale=[65536.0], outcome="failed", error="ValueError: x")
    runs, steps = collect_runs(plan, tmp_path)
    found = row(runs, "other")
    assert (found["outcome"], found["steps_done"], found["skipped_steps"]) == ("failed", 0, 0)
    assert math.isnan(found["final_loss"])
    assert math.isinf(found["steps_to_target"])
    assert "other" not in set(steps["configuration"])
    table = summarise(runs).set_index("configuration")
    assert table.loc["default", "reached"] == 2


def test_a_control_that_ended_at_once_does_not_cost_the_others_their_tables(
    tmp_path: Path,
) -> None:
    plan = plan_of(20)
    put_all(tmp_path, plan, {"fp32": HALVING})
    put(tmp_path, plan.run("binary", "fp32", 0), [], scale=[1.0], outcome="failed", error="x")
    runs, _ = collect_runs(plan, tmp_path)
    assert len(summarise(runs)) == len(plan.arms)
    assert math.isnan(row(runs, "default")["final_loss_difference"])


@pytest.mark.parametrize("last", [math.nan, math.inf])
def test_a_diverged_run_shows_no_finite_final_loss(tmp_path: Path, last: float) -> None:
    plan = plan_of(60)
    put_all(tmp_path, plan, {"fp32": [1.0] + [0.0] * 59})
    spec = plan.run("binary", "default", 0)
    put(tmp_path, spec, [0.5, 0.1, 0.1, last], outcome="diverged", error="the loss became nan")
    assert not math.isfinite(row(collect_runs(plan, tmp_path)[0], "default")["final_loss"])


def test_equal_curves_have_equal_digests_whatever_the_times(tmp_path: Path) -> None:
    plan = plan_of(20, (0,), "a", "b", "c", "d")
    put_all(tmp_path, plan, {"fp32": HALVING, "c": [*HALVING[:-1], 1.0]})
    applied = [True] * 19 + [False]
    put(tmp_path, plan.run("binary", "d", 0), HALVING, applied=applied)
    runs, _ = collect_runs(plan, tmp_path)
    curves = {name: row(runs, name)["curve"] for name in "abcd"}
    assert curves["a"] == curves["b"]
    assert len(set(curves.values())) == 3


def test_every_column_is_documented_and_in_the_csv(tmp_path: Path) -> None:
    plan = make_plan(seeds=[0, 1])
    write_all(tmp_path, plan)
    runs, steps = collect_runs(plan, tmp_path)
    table = summarise(runs)
    for frame, columns in ((runs, RUN_COLUMNS), (table, CONFIGURATION_COLUMNS)):
        assert list(frame.columns) == list(columns)
        assert all(columns.values())
        again = pd.read_csv(io.StringIO(frame.to_csv(index=False)))
        assert list(again.columns) == list(columns)
    assert len(runs) == len(list(plan.runs()))
    assert len(table) == len(plan.arms)
    assert list(steps.columns) == ["workload", "configuration", "seed", *TRACE_SCHEMA.names]
    assert len(steps) == runs["steps_done"].sum()


def test_seconds_a_step_are_a_median(tmp_path: Path) -> None:
    plan = plan_of(3)
    put_all(tmp_path, plan, {"fp32": [1.0, 0.5, 0.2]})
    assert row(collect_runs(plan, tmp_path)[0], "default")["seconds_per_step"] == 1.25


def test_tables_are_built_from_the_plan_never_from_what_lies_around(tmp_path: Path) -> None:
    plan = make_plan({"a": {}, "b": {}}, seeds=[0, 1])
    write_all(tmp_path, plan)
    smaller = make_plan({"a": {}}, seeds=[1])
    runs, steps = collect_runs(smaller, tmp_path)
    assert set(runs["configuration"]) == set(smaller.arms)
    assert set(runs["seed"]) == set(steps["seed"]) == {1}
    write_crafted(tmp_path, make_plan({"z": {}}).run("binary", "z", 0))
    assert len(collect_runs(smaller, tmp_path)[0]) == len(runs)


def test_orphans_are_listed(tmp_path: Path) -> None:
    plan = make_plan({"a": {}, "b": {}}, seeds=[0, 1])
    write_all(tmp_path, plan)
    assert find_orphans(plan, tmp_path) == []
    smaller = make_plan({"a": {}}, seeds=[1])
    orphans = find_orphans(smaller, tmp_path)
    assert orphans == sorted(orphans)
    assert "runs/binary/b/seed0" in orphans
    assert "runs/binary/a/seed0" in orphans
    assert "runs/binary/a/seed1" not in orphans
    assert "probes/binary/seed0" in orphans
    assert len(orphans) == 10 - 4 + 1
    assert find_orphans(plan, tmp_path / "nowhere") == []


@pytest.fixture
def written(tmp_path: Path) -> tuple[Plan, Path]:
    plan = make_plan({"a": {"init_scale": 4}, "b": {"init_scale": 2}}, seeds=[0])
    write_all(tmp_path, plan)
    return plan, tmp_path


def folder_of(written: tuple[Plan, Path], name: str) -> Path:
    plan, results = written
    return results / plan.run("binary", name, 0).folder


def assert_refused(written: tuple[Plan, Path], name: str) -> None:
    with pytest.raises(RecordError) as caught:
        collect_runs(*written)
    assert str(folder_of(written, name)) in str(caught.value)


def test_a_missing_run_stops_the_tables(written: tuple[Plan, Path]) -> None:
    shutil.rmtree(folder_of(written, "b"))
    assert_refused(written, "b")


def test_runs_that_changed_places_stop_the_tables(written: tuple[Plan, Path]) -> None:
    one, other = folder_of(written, "a"), folder_of(written, "b")
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)
    assert_refused(written, "a")


def test_traces_that_changed_places_stop_the_tables(written: tuple[Plan, Path]) -> None:
    plan, results = written
    write_crafted(results, plan.run("binary", "b", 0), Fate(pace=4))
    one, other = (folder_of(written, name) / "trace.parquet" for name in "ab")
    bytes_of_one = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(bytes_of_one)
    assert_refused(written, "a")


def test_runs_of_another_configuration_stop_the_tables(written: tuple[Plan, Path]) -> None:
    edited = make_plan({"a": {"init_scale": 4}, "b": {"init_scale": 8}}, seeds=[0])
    assert_refused((edited, written[1]), "b")
