"""Every branch of the rule, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from halfscale.plan import PolicyChoice
from halfscale.verdict import RULE, Verdict, decide, paired_interval

from .crafted import runs_table

# Five seeds of a workload on which fp32 needs 40 to 44 steps.
FP32 = [40, 41, 42, 43, 44]
SLOWER = [60, 61, 63, 64, 66]  # half as long again, on every seed
JITTER = [42, 40, 44, 41, 43]  # fp32's steps in another order

DEFAULT = PolicyChoice.of(growth_interval=20)
LOW = PolicyChoice.of(init_scale=2.0**8, growth_interval=20)
HIGH = PolicyChoice.of(init_scale=2.0**22, growth_interval=20)
PARAMETERS = {"default": DEFAULT, "low": LOW, "high": HIGH}


def verdict_on(
    steps: Mapping[str, Sequence[float]],
    skipped: Mapping[str, float] | None = None,
    parameters: Mapping[str, PolicyChoice] = PARAMETERS,
    **outcomes: str,
) -> Verdict:
    """Decide on one workload; an outcome given for a name ends its first seed."""
    runs = runs_table(
        {"fp32": {"w": FP32}, **{k: {"w": v} for k, v in steps.items()}}, 100, skipped
    )
    for name, outcome in outcomes.items():
        first = (runs["configuration"] == name) & (runs["seed"] == 0)
        runs.loc[first, "outcome"] = outcome
        runs.loc[first, "error"] = "ValueError: why" if outcome == "failed" else None
    return decide(runs, {name: parameters[name] for name in steps})


def test_a_configuration_that_is_faster_on_every_seed_wins() -> None:
    verdict = verdict_on({"default": FP32, "low": SLOWER, "high": SLOWER})
    assert verdict.kind == "winner"
    assert verdict.recommended == "default"
    assert verdict.winning_set == ["default"]
    assert verdict.deciding_step == "steps to the target"
    assert "default" in verdict.sentence
    assert verdict.scores["default"].ratio.estimate == pytest.approx(1.0)
    expected = np.exp(np.log(np.array(SLOWER) / FP32).mean())
    assert verdict.scores["low"].ratio.estimate == pytest.approx(expected)
    assert verdict.scores["low"].against_best.low > 1
    assert verdict.scores["low"].reached == verdict.scores["low"].runs == 5


def test_no_difference_keeps_the_default() -> None:
    verdict = verdict_on({"low": FP32, "default": JITTER, "high": FP32[::-1]})
    assert verdict.kind == "no measurable difference"
    assert verdict.recommended == "default"
    assert set(verdict.winning_set) == {"low", "default", "high"}
    assert "No measurable difference" in verdict.sentence


def test_no_difference_recommends_the_nearest_to_the_defaults() -> None:
    parameters = {
        "far": PolicyChoice.of(init_scale=2.0**20),
        "near": PolicyChoice.of(init_scale=2.0**17),
        "nearer": PolicyChoice.of(growth_factor=3.0),  # log2(1.5) = 0.58
    }
    verdict = verdict_on({name: FP32 for name in parameters}, parameters=parameters)
    assert verdict.recommended == "nearer"
    without = {name: parameters[name] for name in ("far", "near")}
    assert verdict_on({name: FP32 for name in without}, None, without).recommended == "near"


def test_inside_the_winning_set_the_fewest_skipped_steps_decide() -> None:
    steps = {"default": FP32, "low": JITTER, "high": SLOWER}
    verdict = verdict_on(steps, skipped={"default": 3, "low": 1, "high": 0})
    assert verdict.kind == "winner"
    assert set(verdict.winning_set) == {"default", "low"}
    assert verdict.recommended == "low"
    assert verdict.deciding_step == "fewest skipped steps"
    assert verdict.scores["default"].skipped_steps == 3


def test_with_equal_skipped_steps_the_nearest_to_the_defaults_decides() -> None:
    steps = {"default": FP32, "low": JITTER, "high": SLOWER}
    verdict = verdict_on(steps, skipped={"default": 2, "low": 2, "high": 0})
    assert verdict.recommended == "default"
    assert "nearest" in verdict.deciding_step
    assert "2 of 3" in verdict.sentence


def test_equal_distances_are_decided_by_name() -> None:
    parameters = {
        "b": PolicyChoice.of(init_scale=2.0**18),
        "a": PolicyChoice.of(init_scale=2.0**14),
        "c": HIGH,
    }
    verdict = verdict_on({"b": FP32, "a": JITTER, "c": SLOWER}, None, parameters)
    assert verdict.recommended == "a"


@pytest.mark.parametrize("outcome", ["diverged", "stuck", "stalled", "out-of-memory", "failed"])
def test_any_outcome_but_ok_on_any_seed_is_a_rejection(outcome: str) -> None:
    verdict = verdict_on({"default": SLOWER, "low": FP32}, low=outcome)
    assert verdict.recommended == "default"
    assert list(verdict.rejected) == ["low"]
    assert outcome in verdict.rejected["low"]
    assert "seed 0" in verdict.rejected["low"]
    assert "1 of 5" in verdict.rejected["low"]
    assert ("ValueError: why" in verdict.rejected["low"]) == (outcome == "failed")
    assert "low" not in verdict.scores
    assert (verdict.kind, verdict.deciding_step) == ("winner", "rejection of all others")


def test_a_rejection_on_one_of_several_workloads_is_one() -> None:
    runs = runs_table({name: {"v": FP32, "w": FP32} for name in ("fp32", "default", "low")})
    bad = (runs["configuration"] == "low") & (runs["workload"] == "w") & (runs["seed"] == 3)
    runs.loc[bad, "outcome"] = "diverged"
    verdict = decide(runs, {"default": DEFAULT, "low": LOW})
    assert list(verdict.rejected) == ["low"]
    assert "w, seed 3" in verdict.rejected["low"]
    assert "1 of 10" in verdict.rejected["low"]


def test_all_rejected_is_no_winner() -> None:
    verdict = verdict_on({"default": FP32, "low": FP32}, default="diverged", low="stuck")
    assert verdict.kind == "no winner"
    assert verdict.recommended is None
    assert verdict.winning_set == []
    assert set(verdict.rejected) == {"default", "low"}
    assert "all 2 configurations were rejected" in verdict.sentence


@pytest.mark.parametrize("outcome", ["diverged", "failed"])
def test_a_control_that_fails_leaves_nothing_to_compare_with(outcome: str) -> None:
    verdict = verdict_on({"default": FP32, "low": SLOWER}, fp32=outcome)
    assert verdict.kind == "no winner"
    assert verdict.recommended is None
    assert "fp32" in verdict.sentence
    assert outcome in verdict.sentence


def test_one_configuration_is_not_compared() -> None:
    verdict = verdict_on({"default": SLOWER})
    assert (verdict.kind, verdict.recommended) == ("single", "default")
    assert verdict.winning_set == ["default"]
    assert verdict_on({"default": FP32}, default="stuck").kind == "no winner"


@pytest.mark.parametrize("seeds", [1, 2, 3, 4])
def test_fewer_than_five_seeds_tell_nothing_apart(seeds: int) -> None:
    runs = runs_table(
        {
            "fp32": {"w": FP32[:seeds]},
            "default": {"w": [90 + seed / 8 for seed in range(seeds)]},
            "low": {"w": FP32[:seeds]},
            "high": {"w": [math.inf] * seeds},
        }
    )
    verdict = decide(runs, PARAMETERS)
    assert verdict.kind == "no measurable difference"
    assert verdict.recommended == "default"


def test_five_seeds_tell_a_clear_difference_apart() -> None:
    assert verdict_on({"default": SLOWER, "low": FP32}).recommended == "low"


def test_a_difference_smaller_than_its_noise_is_none() -> None:
    noisy = [30, 75, 38, 60, 47]
    verdict = verdict_on({"default": noisy, "low": FP32})
    assert np.mean(np.log(noisy)) > np.mean(np.log(FP32))
    assert verdict.kind == "no measurable difference"


def test_a_difference_is_taken_seed_by_seed() -> None:
    # Seeds differ by a factor of two, configurations by 10 % on every one of them.
    base = np.array([40, 80, 50, 70, 60])
    runs = runs_table(
        {
            "fp32": {"w": list(base)},
            "default": {"w": list(np.add(base, [4, 8, 6, 7, 5]))},
            "low": {"w": list(base)},
        }
    )
    assert decide(runs, {"default": DEFAULT, "low": LOW}).recommended == "low"


def test_one_that_reached_nowhere_where_the_best_always_did_is_told_apart() -> None:
    verdict = verdict_on({"default": [math.inf] * 5, "low": FP32})
    assert verdict.recommended == "low"
    assert verdict.winning_set == ["low"]
    score = verdict.scores["default"]
    assert (score.reached, score.runs) == (0, 5)
    expected = np.exp(np.log(101 / np.array(FP32)).mean())
    assert score.ratio.estimate == pytest.approx(expected)


def test_workloads_are_combined_by_geometric_mean() -> None:
    # Twice as slow on one workload, twice as fast on the other: no difference in the mean.
    fast, slow = [20, 21, 22, 23, 24], [80, 82, 84, 86, 88]
    base = {"v": FP32, "w": FP32}
    runs = runs_table(
        {"fp32": base, "default": base, "low": {"v": [20, 20.5, 21, 21.5, 22], "w": slow}}
    )
    verdict = decide(runs, {"default": DEFAULT, "low": LOW})
    assert verdict.scores["low"].ratio.estimate == pytest.approx(1.0)
    assert verdict.kind == "no measurable difference"
    runs = runs_table({"fp32": base, "default": base, "low": {"v": fast, "w": FP32}})
    scores = decide(runs, {"default": DEFAULT, "low": LOW}).scores
    expected = np.exp(np.log(np.array(fast) / FP32).mean() / 2)
    assert scores["low"].ratio.estimate == pytest.approx(expected)


def test_identical_runs_are_named() -> None:
    runs = runs_table({name: {"w": FP32} for name in ("fp32", "default", "low", "high", "odd")})
    alike = runs["configuration"].isin(["default", "low"])
    runs.loc[alike, "curve"] = "same-" + runs.loc[alike, "seed"].astype(str)
    first = (runs["configuration"] == "odd") & (runs["seed"] == 0)
    runs.loc[first, "curve"] = "same-0"
    verdict = decide(runs, {**PARAMETERS, "odd": LOW})
    assert verdict.identical == [["default", "low"]]


def test_identical_runs_with_two_names_are_never_told_apart() -> None:
    verdict = verdict_on({"default": SLOWER, "low": SLOWER, "high": FP32})
    assert verdict.winning_set == ["high"]
    verdict = verdict_on({"default": FP32, "low": FP32, "high": SLOWER})
    assert set(verdict.winning_set) == {"default", "low"}


def test_runs_that_failed_before_their_first_step_are_not_called_identical_training() -> None:
    runs = runs_table({name: {"w": FP32} for name in ("fp32", "default", "low", "high")})
    failed = runs["configuration"].isin(["low", "high"])
    runs.loc[failed, ["outcome", "error", "curve"]] = ["failed", "ValueError: x", "e3b0c44298fc"]
    assert decide(runs, PARAMETERS).identical == []


def test_the_rule_is_printed_in_words() -> None:
    assert len(RULE) == 6
    assert all(text.endswith(".") for text in RULE)


step_counts = st.lists(st.integers(10, 110), min_size=5, max_size=5)


@st.composite
def tables(draw: Any) -> pd.DataFrame:
    names = ["fp32", "default", "low", "high"]
    workloads = draw(st.sampled_from([["v"], ["v", "w"]]))
    steps = {name: {workload: draw(step_counts) for workload in workloads} for name in names}
    skipped = {name: draw(st.integers(0, 3)) for name in names}
    runs = runs_table(steps, 100, skipped)
    runs.loc[runs["steps_to_target"] > 100, "steps_to_target"] = math.inf
    if draw(st.booleans()):
        runs.loc[draw(st.integers(0, len(runs) - 1)), "outcome"] = "diverged"
    return runs


@settings(max_examples=25)
@given(runs=tables(), data=st.data())
def test_the_order_of_rows_and_configurations_does_not_matter(
    runs: pd.DataFrame, data: Any
) -> None:
    order = data.draw(st.permutations(range(len(runs))))
    shuffled = runs.iloc[list(order)].reset_index(drop=True)
    names = data.draw(st.permutations(list(PARAMETERS)))
    one, other = (
        decide(runs, PARAMETERS),
        decide(shuffled, {name: PARAMETERS[name] for name in names}),
    )
    assert (one.kind, one.recommended, one.sentence) == (
        other.kind,
        other.recommended,
        other.sentence,
    )
    assert (one.winning_set, one.identical) == (other.winning_set, other.identical)
    assert set(one.rejected) == set(other.rejected)
    assert set(one.scores) == set(other.scores)


@settings(max_examples=25)
@given(runs=tables(), names=st.permutations(["x", "y", "z"]))
def test_other_names_give_the_same_answer_under_the_other_names(
    runs: pd.DataFrame, names: list[str]
) -> None:
    renamed = dict(zip(PARAMETERS, names, strict=True))
    other_runs = runs.assign(configuration=runs["configuration"].replace(renamed))
    one = decide(runs, PARAMETERS)
    other = decide(other_runs, {renamed[name]: block for name, block in PARAMETERS.items()})
    assert one.kind == other.kind
    assert (renamed[one.recommended] if one.recommended else None) == other.recommended
    assert {renamed[name] for name in one.winning_set} == set(other.winning_set)
    assert {renamed[name] for name in one.rejected} == set(other.rejected)


@settings(max_examples=25)
@given(runs=tables())
def test_every_answer_is_consistent(runs: pd.DataFrame) -> None:
    verdict = decide(runs, PARAMETERS)
    assert (verdict.recommended is None) == (verdict.kind == "no winner")
    assert set(verdict.rejected).isdisjoint(verdict.winning_set)
    if verdict.recommended:
        assert verdict.recommended in verdict.winning_set
        assert verdict.recommended in verdict.sentence
    if verdict.kind == "no measurable difference":
        assert set(verdict.winning_set) == set(PARAMETERS)
    for score in verdict.scores.values():
        assert score.ratio.low <= score.ratio.estimate <= score.ratio.high


def test_ties_are_listed_by_name_not_in_the_order_of_a_set() -> None:
    names = [f"c{number}" for number in range(8)]
    verdict = verdict_on({n: FP32 for n in names}, None, dict.fromkeys(names, DEFAULT))
    assert verdict.winning_set == names


@pytest.mark.parametrize("error", [0.05, 0.04, 0.004])
@pytest.mark.parametrize("seeds", [2, 5, 8, 30])
def test_an_interval_is_students_with_the_bootstraps_standard_error(
    seeds: int, error: float
) -> None:
    for number in range(4):
        values = np.random.default_rng(number).lognormal(size=seeds)
        interval = paired_interval(values, error)
        assert interval.estimate == pytest.approx(values.mean())
        # The bootstrap's standard error of a mean, in closed form, corrected for its use of 1/n.
        half = stats.t.ppf(1 - error / 2, seeds - 1) * values.std(ddof=1) / math.sqrt(seeds)
        assert interval.high - interval.estimate == pytest.approx(half, rel=0.03)
        assert interval.estimate - interval.low == pytest.approx(half, rel=0.03)


def test_an_interval_agrees_with_scipys_bootstrap() -> None:
    values = np.random.default_rng(3).normal(1, 2, 12)
    rng = np.random.default_rng(11)
    reference = stats.bootstrap((values,), np.mean, n_resamples=20000, rng=rng, method="percentile")
    half = stats.t.ppf(0.975, 11) * reference.standard_error * math.sqrt(12 / 11)
    interval = paired_interval(values)
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.03)


def test_an_interval_of_one_seed_is_unbounded_and_of_equal_seeds_empty() -> None:
    one = paired_interval(np.array([0.3]))
    assert (one.low, one.estimate, one.high) == (-math.inf, 0.3, math.inf)
    equal = paired_interval(np.full(5, 0.25))
    assert (equal.low, equal.estimate, equal.high) == (0.25, 0.25, 0.25)
    assert equal.exp().low == pytest.approx(math.exp(0.25))
    assert one.exp().low == 0
    assert one.exp().high == math.inf


@given(
    values=st.lists(st.floats(-3, 3), min_size=2, max_size=8).map(np.array),
    factor=st.floats(0.1, 10),
)
@settings(max_examples=25)
def test_an_interval_scales_and_mirrors_with_its_values(values: np.ndarray, factor: float) -> None:
    one, scaled, mirrored = map(paired_interval, (values, values * factor, -values))
    assert scaled.high == pytest.approx(one.high * factor, abs=1e-6)
    assert mirrored.low == pytest.approx(-one.high, abs=0.05 * (one.high - one.low) + 1e-9)
