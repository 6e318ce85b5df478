"""Predictions against runs: what is compared, over which steps, and where they part."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from halfscale.calibration import (
    CALIBRATION_COLUMNS,
    calibrate,
    describe_worst,
    summarise_calibration,
    within_tolerance,
)
from halfscale.records import RecordError
from halfscale.tables import longest_streak

KEY = {"workload": "binary", "configuration": "a", "seed": 0}


def scales(pattern: str, start: float = 64.0) -> list[float]:
    """The scale of each step of a pattern: halved after an overflow (X), never grown."""
    found = [start]
    for letter in pattern:
        found.append(found[-1] / 2 if letter == "X" else found[-1])
    return found


def steps_of(pattern: str, loss: list[float] | None = None, **key: Any) -> pd.DataFrame:
    applied = [letter == "F" for letter in pattern]
    return pd.DataFrame(
        {
            **KEY,
            **key,
            "step": range(len(pattern)),
            "loss": loss or [1.0] * len(pattern),
            "scale": scales(pattern)[:-1],
            "applied": applied,
        }
    )


def traces_of(pattern: str, **key: Any) -> pd.DataFrame:
    overflow = [letter == "X" for letter in pattern]
    columns = {"step": range(len(pattern)), "scale": scales(pattern)[:-1], "overflow": overflow}
    return pd.DataFrame({**KEY, **key, **columns})


def run_of(pattern: str, outcome: str = "ok", planned: int | None = None, **key: Any) -> Any:
    return {
        **KEY,
        **key,
        "control": False,
        "outcome": outcome,
        "steps": planned or len(pattern),
        "final_scale": scales(pattern)[-1],
        "digest": "12e3",
    }


def prediction_of(pattern: str, steps: int | None = None, **key: Any) -> dict[str, Any]:
    length = len(pattern) if steps is None else steps
    final = scales(pattern)[-1] if length else math.nan
    return {**KEY, **key, "digest": "12e3", "steps": length, "final_scale": final}


def compare(
    predicted: str,
    had: str,
    *,
    loss: list[float] | None = None,
    reference: list[float] | None = None,
    probe_steps: int | None = None,
    **run: Any,
) -> Any:
    """The row of one run that had one pattern where another was predicted."""
    steps = [steps_of(had, loss)]
    if reference is not None:
        steps.append(steps_of("F" * len(reference), reference, configuration="bf16"))
    table = calibrate(
        pd.DataFrame([run_of(had, **run)]),
        pd.concat(steps),
        pd.DataFrame([prediction_of(predicted, probe_steps)]),
        traces_of(predicted),
    )
    assert list(table.columns) == list(CALIBRATION_COLUMNS)
    (row,) = table.to_dict("records")
    return row


def test_a_prediction_that_came_true() -> None:
    row = compare("XXFFXF", "XXFFXF")
    assert row == {
        **KEY,
        "outcome": "ok",
        "compared_steps": 6,
        "predicted_skipped_steps": 3,
        "skipped_steps": 3,
        "difference": 0,
        "predicted_longest_skip_streak": 2,
        "longest_skip_streak": 2,
        "predicted_final_scale": 8.0,
        "final_scale": 8.0,
        "first_difference": None,
        "note": "",
    }


def test_a_prediction_that_did_not() -> None:
    row = compare("XFFFFF", "XFXXXF")
    assert (row["predicted_skipped_steps"], row["skipped_steps"], row["difference"]) == (1, 4, -3)
    assert (row["predicted_longest_skip_streak"], row["longest_skip_streak"]) == (1, 3)
    assert (row["predicted_final_scale"], row["final_scale"]) == (32.0, 4.0)
    assert row["first_difference"] == 2
    assert row["note"] == "they part at step 2"


def test_where_a_run_left_the_course_of_the_reference_is_said_with_both_losses() -> None:
    # Up to step 3 two steps were taken, so the reference's third loss is the one to hold it to.
    reference = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]
    strayed = [9.0, 9.0, 8.0, 7.7, 7.7, 7.7]
    row = compare("XFFFFF", "XFFXXX", loss=strayed, reference=reference)
    assert row["note"] == (
        "they part at step 3, where the loss is 7.7 and the reference's after as many steps taken "
        "7: the run had left the reference's course"
    )
    close = [9.0, 9.0, 8.0, 7.01, 7.0, 7.0]
    row = compare("XFFFFF", "XFFXXX", loss=close, reference=reference)
    same = "they part at step 3, where the loss is still the reference's: a gradient close to "
    assert row["note"] == f"{same}the limit"


@pytest.mark.parametrize("reference", [None, [], [9.0], [9.0, 8.0, math.nan]])
def test_without_a_reference_the_step_alone_is_named(reference: list[float] | None) -> None:
    assert compare("FFFFF", "FFXXX", reference=reference)["note"] == "they part at step 2"


def test_a_run_that_diverged_is_compared_up_to_there() -> None:
    # The loss became NaN in the fourth step, which is skipped for that and no overflow.
    loss = [3.0, 2.0, 9.0, math.nan]
    row = compare("XFFFFFXX", "XFFX", loss=loss, outcome="diverged", planned=8)
    assert (row["compared_steps"], row["predicted_skipped_steps"], row["skipped_steps"]) == (
        3,
        1,
        1,
    )
    assert (row["predicted_final_scale"], row["final_scale"]) == (32.0, 32.0)
    assert row["note"] == "compared over 3 of 8 steps, then the run, diverged, ended"


def test_a_run_that_diverged_in_its_last_step_lacks_that_one() -> None:
    row = compare("FFF", "FFX", loss=[1.0, 1.0, math.inf], outcome="diverged")
    assert (row["compared_steps"], row["difference"]) == (2, 0)


def test_a_run_that_failed_is_compared_over_what_it_did() -> None:
    row = compare("XXFFFF", "XX", outcome="failed", planned=6)
    assert (row["compared_steps"], row["difference"]) == (2, 0)
    assert row["final_scale"] == 16.0


def test_a_run_that_failed_before_its_first_step_is_not_compared() -> None:
    row = compare("XXF", "", outcome="failed", planned=3)
    assert row["compared_steps"] == 0
    assert row["note"] == "not compared: the run ended before its first step"
    assert row["difference"] is None


def test_a_probe_that_ended_early_is_compared_up_to_there() -> None:
    row = compare("XF", "XFXX", probe_steps=2)
    assert (row["compared_steps"], row["skipped_steps"], row["difference"]) == (2, 1, 0)
    assert row["final_scale"] == 32.0
    assert row["note"] == "compared over 2 of 4 steps, then the probe ended"


def test_a_probe_that_recorded_nothing_predicts_nothing() -> None:
    row = compare("", "XFXX", probe_steps=0)
    assert row["note"] == "not compared: the probe recorded no step"


def test_a_run_that_was_stuck_is_compared_in_full() -> None:
    row = compare("FXXXX", "FXXXX", outcome="stuck")
    assert (row["compared_steps"], row["difference"], row["longest_skip_streak"]) == (5, 0, 4)


def test_a_policy_that_gives_up_earlier_than_predicted_or_later() -> None:
    # Predicted to end after two steps, the run went on; and the other way round.
    row = compare("XX", "XXXFF", probe_steps=5, planned=5)
    assert (row["compared_steps"], row["difference"]) == (5, -1)
    assert (row["predicted_final_scale"], row["final_scale"]) == (16.0, 8.0)
    row = compare("XXXFF", "XX", outcome="stuck", planned=5)
    assert (row["compared_steps"], row["difference"]) == (2, 0)
    assert row["note"] == "compared over 2 of 5 steps, then the run, stuck, ended"


def many(*pairs: tuple[str, str, str]) -> pd.DataFrame:
    """A calibration of workloads with predicted and actual patterns, a seed a pair."""
    keys = [{"workload": workload, "seed": seed} for seed, (workload, _, _) in enumerate(pairs)]
    together = list(zip(keys, pairs, strict=True))
    return calibrate(
        pd.DataFrame([run_of(had, planned=4, **key) for key, (_, _, had) in together]),
        pd.concat([steps_of(had, **key) for key, (_, _, had) in together]),
        pd.DataFrame([prediction_of(predicted, **key) for key, (_, predicted, _) in together]),
        pd.concat([traces_of(predicted, **key) for key, (_, predicted, _) in together]),
    )


def test_the_summary_counts_by_workload_and_altogether() -> None:
    table = many(
        ("binary", "XFFF", "XFFF"),
        ("binary", "XFFF", "FFFF"),
        ("digits", "FFFF", "FXXX"),
        ("digits", "FFFF", "FXXF"),
        ("digits", "FXFF", ""),
    )
    assert within_tolerance(table).tolist() == [True, True, False, False, False]
    summary = summarise_calibration(table).set_index("workload")
    assert summary.loc["binary"].to_dict() == {
        "runs": 2,
        "compared": 2,
        "within": 2,
        "share": 1.0,
        "exact": 1,
        "same scale": 1,
        "worst": "binary, a, seed 1: predicted 1, had 0",
    }
    assert summary.loc["digits", ["runs", "compared", "within", "share"]].tolist() == [3, 2, 0, 0]
    assert summary.loc["all", ["runs", "compared", "within", "share"]].tolist() == [5, 4, 2, 0.5]
    assert summary.loc["all", "worst"] == "digits, a, seed 2: predicted 0, had 3"


def test_a_summary_of_nothing_that_could_be_compared() -> None:
    table = many(("binary", "F", ""))
    last = summarise_calibration(table).iloc[-1]
    assert (last["runs"], last["compared"], last["worst"]) == (1, 0, "")
    assert math.isnan(last["share"])


def test_of_right_predictions_none_is_the_worst() -> None:
    assert describe_worst(many(("binary", "XF", "XF"))) == ""


def test_counts_that_were_read_back_as_floats_are_written_as_counts(tmp_path: Path) -> None:
    table = many(("binary", "XXXF", "FFFF"), ("binary", "F", ""))
    table.to_csv(tmp_path / "calibration.csv", index=False)
    again = pd.read_csv(tmp_path / "calibration.csv")
    assert pd.api.types.is_float_dtype(again["skipped_steps"])
    assert describe_worst(again) == "binary, a, seed 0: predicted 3, had 0"


def test_controls_are_not_predicted() -> None:
    runs = pd.DataFrame([run_of("XF"), run_of("FF", configuration="fp32") | {"control": True}])
    table = calibrate(runs, steps_of("XF"), pd.DataFrame([prediction_of("XF")]), traces_of("XF"))
    assert table["configuration"].tolist() == ["a"]


@pytest.mark.parametrize("change", [{"digest": "ffff"}, {"seed": 1}])
def test_a_prediction_of_another_run_is_refused_by_name(change: dict[str, Any]) -> None:
    predictions = pd.DataFrame([prediction_of("XF") | change])
    with pytest.raises(RecordError, match="workload=binary configuration=a seed=0") as refusal:
        calibrate(pd.DataFrame([run_of("XF")]), steps_of("XF"), predictions, traces_of("XF"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("pattern", "longest"), [("", 0), ("F", 0), ("XXFX", 2), ("FXXX", 3), ("XFXF", 1)]
)
def test_the_longest_streak(pattern: str, longest: int) -> None:
    assert longest_streak([letter == "X" for letter in pattern]) == longest
