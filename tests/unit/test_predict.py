"""Predictions of a plan: those of the replay, for every run, of whatever the probes recorded."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.plan import Plan, PolicyChoice, ProbeSpec
from halfscale.predict import (
    LANDSCAPE_COLUMNS,
    PREDICTION_COLUMNS,
    TRACE_COLUMNS,
    landscape_planes,
    predict,
    write_predictions,
)
from halfscale.records import RecordError, read_probe, write_probe
from halfscale.replay import Probe, cost, replay, replay_traces

from .crafted import ENVIRONMENT, make_plan, write_crafted_probe

CONFIGURATIONS = {
    "low": {"init_scale": 4, "growth_interval": 2},
    "high": {"init_scale": 2**17, "growth_interval": 2},
    "other": {"policy": "megatron", "init_scale": 2**18, "growth_interval": 3},
}


def write_largest(
    results: Path, spec: ProbeSpec, largest: list[float], same_batch: bool = False
) -> None:
    """A probe with these largest magnitudes and a quarter of its elements from 2^-40 up."""
    counts = np.zeros(BINS, int)
    counts[-40 - LOWEST_EXPONENT], counts[-LOWEST_EXPONENT] = 1, 3
    steps = len(largest)
    columns = {
        "step": list(range(steps)),
        "loss": [1.0] * steps,
        "largest": largest,
        "largest_gradient": largest,
        "batch_repeats": [same_batch] * steps,
        "activation_counts": [counts.tolist()] * steps,
        "weight_counts": [[0] * BINS] * steps,
        "activation_zeros": [0] * steps,
        "weight_zeros": [0] * steps,
    }
    outcome = "ok" if steps == spec.steps else "diverged"
    record = {"spec": spec, "outcome": outcome, "error": None, "environment": ENVIRONMENT}
    write_probe(results / spec.folder, columns, **record)


def plan_of(seeds: tuple[int, ...] = (0,), steps: int = 7) -> Plan:
    return make_plan(CONFIGURATIONS, seeds, {"binary": {"steps": steps}})


def test_a_prediction_worked_by_hand(tmp_path: Path) -> None:
    # As in test_replay: from 2^17 with an interval of 2 over largest magnitudes of 1 and one of 4,
    #   scale    2^17  2^16  2^15  2^15  2^16  2^15  2^14
    #   overflow  X     X     F     F     X     X     F       then 2^14, where a quarter is lost.
    plan = plan_of()
    write_largest(tmp_path, plan.probe("binary", 0), [1, 1, 1, 1, 1, 4, 1])
    tables = predict(plan, tmp_path)
    predictions = tables["predictions"].set_index("configuration")
    expected = {
        "workload": "binary",
        "seed": 0,
        "digest": plan.run("binary", "high", 0).digest,
        "steps": 7,
        "skipped_steps": 4,
        "longest_skip_streak": 2,
        "calibration": 2,
        "growths": 1,
        "backoffs": 4,
        "final_scale": 2.0**14,
        "lost_steps": 0.25,
        "below_window": 1,
        "regret": 1.0,
        "aborted": False,
        "stuck": False,
    }
    assert predictions.loc["high"].to_dict() == expected
    trace = tables["traces"][tables["traces"]["configuration"] == "high"]
    assert np.log2(trace["scale"]).tolist() == [17, 16, 15, 15, 16, 15, 14]
    assert trace.loc[trace["overflow"], "step"].tolist() == [0, 1, 4, 5]


def test_with_the_same_batch_a_skipped_step_is_met_again(tmp_path: Path) -> None:
    plan = plan_of()
    write_largest(tmp_path, plan.probe("binary", 0), [1, 4, 2, 1, 1, 1, 1], same_batch=True)
    predictions = predict(plan, tmp_path)["predictions"].set_index("configuration")
    assert predictions.loc["high", ["skipped_steps", "final_scale"]].tolist() == [4, 2.0**14]


def test_every_run_of_the_plan_is_predicted_as_the_replay_does(tmp_path: Path) -> None:
    plan = make_plan(CONFIGURATIONS, (0, 3), {"binary": {"steps": 9}, "digits": {"steps": 12}})
    random = np.random.default_rng(0)
    for spec in plan.probes():
        write_largest(tmp_path, spec, (2.0 ** random.normal(0, 2, spec.steps)).tolist())
    tables = predict(plan, tmp_path)
    assert list(tables["predictions"].columns) == list(PREDICTION_COLUMNS)
    assert list(tables["traces"].columns) == list(TRACE_COLUMNS)
    rows = tables["predictions"].set_index(["workload", "configuration", "seed"])
    runs = [run for run in plan.runs() if not run.is_control]
    assert set(rows.index) == {(run.workload, run.arm, run.seed) for run in runs}
    steps = dict(iter(tables["traces"].groupby(["workload", "configuration", "seed"])))
    for run in runs:
        key = run.workload, run.arm, run.seed
        probe = Probe.of(read_probe(tmp_path, plan.probe(run.workload, run.seed))[1])
        choice = plan.configurations[run.arm]
        trace = replay_traces(choice, probe)
        assert rows.loc[key, "digest"] == run.digest
        assert (
            rows.loc[key, "skipped_steps"] == trace.overflow.sum() == steps[key]["overflow"].sum()
        )
        assert rows.loc[key, "final_scale"] == trace.final_scale
        assert steps[key]["scale"].tolist() == trace.scale.tolist()
        assert rows.loc[key, "lost_steps"] == replay([choice], [probe]).lost_steps[0, 0]


def test_a_probe_that_ended_early_predicts_what_there_is(tmp_path: Path) -> None:
    plan = plan_of(seeds=(0, 1, 2))
    write_largest(tmp_path, plan.probe("binary", 0), [1.0] * 7)
    write_largest(tmp_path, plan.probe("binary", 1), [1.0, 1.0, math.inf])
    write_crafted_probe(tmp_path, plan.probe("binary", 2), done=0)
    tables = predict(plan, tmp_path)
    rows = tables["predictions"].set_index(["configuration", "seed"])
    assert rows["steps"].to_dict() == {
        (name, seed): steps for name in CONFIGURATIONS for seed, steps in ((0, 7), (1, 3), (2, 0))
    }
    assert rows.loc[("low", 1), "skipped_steps"] == 1
    assert rows.loc[("low", 2)].drop(["workload", "digest", "steps"]).isna().all()
    assert set(tables["traces"]["seed"]) == {0, 1}
    # A mean over seeds of different lengths would compare nothing.
    assert set(tables["landscape"]["steps"]) == {7}
    assert set(tables["landscape"]["seeds"]) == {1}


def test_probes_that_recorded_nothing_leave_empty_tables_with_their_columns(tmp_path: Path) -> None:
    plan = plan_of()
    write_crafted_probe(tmp_path, plan.probe("binary", 0), done=0)
    tables = write_predictions(plan, tmp_path)
    assert tables["predictions"]["skipped_steps"].isna().all()
    assert list(pd.read_csv(tmp_path / "replay" / "landscape.csv").columns) == list(
        LANDSCAPE_COLUMNS
    )
    traces = pd.read_parquet(tmp_path / "replay" / "traces.parquet")
    assert (len(traces), list(traces.columns)) == (0, list(TRACE_COLUMNS))


def test_a_missing_probe_stops_by_name(tmp_path: Path) -> None:
    plan = plan_of()
    with pytest.raises(RecordError, match=r"probes/binary/seed0/probe\.json is missing"):
        predict(plan, tmp_path)


def test_the_landscape_is_the_mean_cost_over_the_seeds(tmp_path: Path) -> None:
    plan = plan_of(seeds=(0, 1))
    for seed, largest in ((0, 1.0), (1, 2.0**-8)):
        write_largest(tmp_path, plan.probe("binary", seed), [largest] * 7)
    landscape = predict(plan, tmp_path)["landscape"]
    assert list(landscape.columns) == list(LANDSCAPE_COLUMNS)
    probes = [Probe.of(read_probe(tmp_path, plan.probe("binary", seed))[1]) for seed in (0, 1)]
    names = ["init_scale", "growth_factor", "backoff_factor", "growth_interval"]
    rows = landscape.to_dict("records")
    choices = [PolicyChoice.of("torch", **{name: row[name] for name in names}) for row in rows]
    expected = cost(replay(choices, probes)).mean(axis=1)
    assert landscape["cost"].tolist() == pytest.approx(expected.tolist())
    scale = landscape[landscape["plane"] == "scale"]
    assert set(scale["growth_factor"]) == {2.0} and set(scale["backoff_factor"]) == {0.5}
    # At 2^16 the first seed skips one step, then neither loses anything.
    at = scale[(scale["init_scale"] == 2**16) & (scale["growth_interval"] == 2000)]
    assert at["cost"].tolist() == [0.5]


def test_the_factors_are_varied_where_most_configurations_are() -> None:
    def place(configurations: dict[str, dict[str, object]]) -> tuple[float, int]:
        plane = landscape_planes(make_plan(configurations))["factors"]
        return plane["init_scale"][0], plane["growth_interval"][0]

    common = {"init_scale": 2**10, "growth_interval": 20}
    several = {"a": {}, "b": common, "c": {**common, "growth_factor": 4}}
    assert place(several) == (2**10, 20)
    assert place({"a": {"init_scale": 2**8}, "b": {"init_scale": 2**15}}) == (2**15, 2000)
    assert place({"a": {"policy": "keras", "init_scale": 4}}) == (2**16, 2000)


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    plan = plan_of()
    write_largest(tmp_path, plan.probe("binary", 0), [1.0] * 7)
    tables = write_predictions(plan, tmp_path)
    folder = tmp_path / "replay"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("landscape.csv", "predictions.csv", "seal.json", "traces.parquet"),
    ]
    for name in ("landscape", "predictions"):
        again = io.StringIO((folder / f"{name}.csv").read_text())
        pd.testing.assert_frame_equal(pd.read_csv(again), tables[name], check_dtype=False)
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "traces.parquet"), tables["traces"])
