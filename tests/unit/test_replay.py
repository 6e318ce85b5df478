"""The replay against the plain state machines, element by element, and by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.plan import PolicyChoice
from halfscale.policies import POLICIES, FloorReached, make_policy
from halfscale.replay import Probe, grid, overflows, replay, replay_traces
from halfscale.replay.rules import make_lanes

from .test_policies import settings_of
from .test_replay_probe import counts_at

law = settings(deadline=None, max_examples=40)
each_policy = pytest.mark.parametrize("name", POLICIES)
EPSILON = 0.0123  # no share of so few elements equals it


def probe_from(
    largest: list[float], counts: list[list[int]] | None = None, same_batch: bool = False
) -> Probe:
    """A probe with these largest magnitudes; the parameters' gradients are half as large."""
    magnitudes = np.array(largest, dtype=np.float64)
    rows = np.array(counts) if counts else np.zeros((len(largest), BINS))
    return Probe(magnitudes, magnitudes / 2, rows, same_batch)


# --- strategies -----------------------------------------------------------------------------

magnitudes = (
    st.sampled_from([0.0, math.inf, 5e-324, 1e-300, 1e300, 65520.0])
    | st.integers(-40, 40).map(lambda power: 2.0**power)
    | st.floats(2.0**-16, 2.0**16)
)
runs = st.tuples(magnitudes, st.integers(1, 30))
stretches = st.lists(runs, max_size=10).map(lambda parts: [m for m, n in parts for _ in range(n)])
# Overflows whatever the scale, close enough together for every kind of hysteresis to matter.
flickers = st.lists(st.sampled_from([0.0, 0.0, math.inf]), max_size=60)
sequences = stretches | flickers
histograms = st.lists(st.tuples(st.integers(-50, 20), st.integers(1, 9)), max_size=4)


@st.composite
def probes(draw: st.DrawFn) -> Probe:
    largest = draw(sequences)
    rows = [counts_at(*pairs) for pairs in draw(st.lists(histograms, min_size=1, max_size=3))]
    counts = [rows[step % len(rows)] for step in range(len(largest))]
    return probe_from(largest, counts, draw(st.booleans()))


# --- the reference: plain Python, one configuration, one step after the other -------------------


def lost_exactly(scale: float, counts: list[int]) -> Fraction:
    lost = Fraction(0)
    for index, count in enumerate(counts):
        lowest = Fraction(2) ** (LOWEST_EXPONENT + index)
        if count and scale < math.inf:
            below = Fraction(1, 2**25) / Fraction(scale) if scale else 2 * lowest
            lost += count * min(max(below / lowest - 1, Fraction(0)), Fraction(1))
    return lost / max(sum(counts), 1)


def bits(scale: float) -> float:
    return {0.0: -1075.0, math.inf: 1024.0}.get(scale) or (math.log2(scale) if scale != 1 else 0.0)


def reference(choice: PolicyChoice, probe: Probe) -> dict[str, Any]:
    policy = choice.make()
    scales: list[float] = []
    skips: list[bool] = []
    met: list[int] = []
    aborted = False
    while len(met) < probe.steps:
        met.append(skips.count(False) if probe.same_batch else len(met))
        scales.append(policy.scale)
        product = float(scales[-1]) * float(probe.largest[met[-1]])
        skips.append(not product < 65520)
        try:
            gradient = float(probe.largest_gradient[met[-1]])
            policy.update(skips[-1], largest_gradient=gradient)
        except FloorReached:
            aborted = True
            break
    rows = zip(scales, skips, probe.counts[met].tolist(), strict=True)
    lost = [lost_exactly(scale, row) for scale, skip, row in rows if not skip]
    safe = probe.largest_safe_scale()[met].tolist()
    apart = [abs(bits(a) - bits(b)) for a, b in zip(scales, safe, strict=False) if 0 < b < math.inf]
    after = [*scales, policy.scale][1:]
    text = "".join("X" if skip else "F" for skip in skips)
    trailing = len(text) - len(text.rstrip("X"))
    return {
        "steps_run": len(scales),
        "skipped": sum(skips),
        "longest_streak": max(map(len, text.split("F"))),
        "calibration": len(text) - len(text.lstrip("X")),
        "growths": sum(b > a for a, b in zip(scales, after, strict=True)),
        "backoffs": sum(b < a for a, b in zip(scales, after, strict=True)),
        "below_window": sum(share > EPSILON for share in lost),
        "final_scale": policy.scale,
        "lost_steps": pytest.approx(float(sum(lost)), rel=1e-9),
        "mean_lost": pytest.approx(float(sum(lost)) / max(len(lost), 1), rel=1e-9),
        "regret": pytest.approx(sum(apart) / max(len(apart), 1), rel=1e-9, abs=1e-12),
        "aborted": aborted,
        "stuck": not aborted and trailing > 0 and 2 * trailing >= len(probe.largest),
    }


def measured(choices: list[PolicyChoice], probe: Probe) -> list[dict[str, Any]]:
    result = replay(choices, [probe], EPSILON)
    names = [name for name in result.measures() if name != "fingerprint"]
    return [
        {name: getattr(result, name)[row, 0].item() for name in names}
        for row in range(len(choices))
    ]


# --- the same as the state machines -------------------------------------------------------------


@each_policy
@law
@given(data=st.data(), largest=sequences)
def test_lanes_move_as_their_state_machines_do(
    name: str, data: st.DataObject, largest: list[float]
) -> None:
    parameters = data.draw(st.lists(settings_of(name), min_size=1, max_size=4))
    machines = [make_policy(name, **chosen) for chosen in parameters]
    lanes = make_lanes([make_policy(name, **chosen) for chosen in parameters])
    running = [True] * len(machines)
    with np.errstate(all="ignore"):
        for step, magnitude in enumerate(largest):
            overflow = overflows(lanes.scale, magnitude)
            skipped, applied = lanes.running & overflow, lanes.running & ~overflow
            lanes.update(step, skipped, applied, magnitude)
            for lane, machine in enumerate(machines):
                if running[lane]:
                    try:
                        machine.update(bool(overflow[lane]), largest_gradient=magnitude)
                    except FloorReached:
                        running[lane] = False
            assert lanes.scale.tolist() == [machine.scale for machine in machines]
            assert lanes.running.tolist() == running


@each_policy
@settings(law, max_examples=20)
@given(data=st.data(), probe=probes())
def test_every_measure_is_that_of_the_state_machine(
    name: str, data: st.DataObject, probe: Probe
) -> None:
    parameters = data.draw(st.lists(settings_of(name), min_size=1, max_size=3))
    choices = [PolicyChoice.of(name, **chosen) for chosen in parameters]
    assert measured(choices, probe) == [reference(choice, probe) for choice in choices]


EXTREMES = {
    "all steps overflow until the scale is 0": [math.inf] * 200,
    "overflows, then a long calm": [2.0**30] * 60 + [2.0**-10] * 140,
    "nothing ever overflows": [0.0] * 200,
    "tiny gradients let the scale grow out of range": [5e-324] * 200,
    "alternating": [1e300, 0.0] * 100,
    "one step": [1.0],
    "no step": [],
}


@each_policy
@pytest.mark.parametrize("largest", EXTREMES.values(), ids=EXTREMES)
def test_every_measure_is_that_of_the_state_machine_at_the_extremes(
    name: str, largest: list[float]
) -> None:
    counts = [counts_at((-30, 3), (0, 1))] * len(largest)
    has = POLICIES[name].parameters()
    quick = {
        "growth_interval": 1,
        "hysteresis": 1,
        "raise_at_floor": True,
        "init_scale": 16.0,
        "growth_factor": 3.0,
    }
    choices = [
        PolicyChoice.of(name, **{key: quick[key] for key in keys if key in has})
        for keys in ([], [*quick], ["growth_interval"], ["growth_interval", "growth_factor"])
    ]
    for same_batch in (False, True):
        probe = probe_from(largest, counts, same_batch)
        assert measured(choices, probe) == [reference(choice, probe) for choice in choices]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("fairseq", {"tolerance": share}) for share in (1 / 3, 0.5, 1.0)),
        *(("metaseq", {"tolerance": share}) for share in (1 / 3, 0.5, 1.0)),
        *(
            ("deepspeed", {"hysteresis": 3, "consecutive_hysteresis": flag})
            for flag in (False, True)
        ),
        ("apex-hysteresis", {"hysteresis": 2}),
        ("megatron", {"hysteresis": 2}),
    ],
)
def test_overflows_are_forgiven_as_often_as_by_the_state_machine(
    name: str, parameters: dict[str, Any]
) -> None:
    for pattern in ("FFXFXXFFFX", "XFXFXFXFXF", "FXXXFXXFXFFFFXFX", "FFXFFX"):
        probe = probe_from([math.inf if letter == "X" else 0.0 for letter in pattern * 3])
        choice = PolicyChoice.of(name, growth_interval=3, **parameters)
        assert measured([choice], probe) == [reference(choice, probe)]


def test_scales_reach_zero_and_infinity_in_a_replay() -> None:
    calm, storm = probe_from([5e-324] * 300), probe_from([math.inf] * 300)
    assert replay([PolicyChoice.of("torch")], [storm]).final_scale[0, 0] == 0
    eager = PolicyChoice.of("keras", growth_interval=1)
    assert replay([eager], [calm]).final_scale[0, 0] == math.inf
    assert replay([eager], [calm]).stuck[0, 0]


def wandering_probe(steps: int, seed: int, same_batch: bool = False) -> Probe:
    random = np.random.default_rng(seed)
    exponents = np.cumsum(random.normal(0, 0.7, steps)) % 14 - 7
    rows = [counts_at((int(e) - 14, 40), (int(e) - 12, 90), (int(e), 3)) for e in exponents]
    return probe_from((2.0**exponents).tolist(), rows, same_batch)


@pytest.mark.parametrize("same_batch", [False, True])
def test_the_whole_default_grid_equals_the_state_machines(same_batch: bool) -> None:
    probe = wandering_probe(120, 0, same_batch)
    choices = grid(steps=120)
    assert len(choices) == 13 * 3 * 3 * 6
    sample = choices[::29]
    assert measured(sample, probe) == [reference(choice, probe) for choice in sample]
    result = replay(choices, [probe])
    traces = [replay_traces(choice, probe) for choice in choices]
    assert result.skipped[:, 0].tolist() == [trace.overflow.sum() for trace in traces]
    assert result.final_scale[:, 0].tolist() == [trace.final_scale for trace in traces]


def test_fingerprints_are_equal_exactly_where_traces_are() -> None:
    probe = wandering_probe(60, 1)
    choices = [*grid(steps=60), *grid("apex"), *grid("deepspeed"), *grid("fairseq", {})]
    fingerprints = replay(choices, [probe]).fingerprint[:, 0].tolist()
    traces = [replay_traces(choice, probe).scale.tobytes() for choice in choices]
    together = set(zip(fingerprints, traces, strict=True))
    assert len(together) == len(set(fingerprints)) == len(set(traces)) < len(choices)


def test_an_abort_at_the_last_step_is_another_behaviour() -> None:
    probe = probe_from([1.0, math.inf])
    floor = {"init_scale": 1.0, "min_scale": 1.0, "hysteresis": 1}
    choices = [PolicyChoice.of("deepspeed", raise_at_floor=flag, **floor) for flag in (False, True)]
    result = replay(choices, [probe])
    assert result.aborted[:, 0].tolist() == [False, True]
    assert result.steps_run[:, 0].tolist() == [2, 2]
    assert result.fingerprint[0, 0] != result.fingerprint[1, 0]


# --- by hand ------------------------------------------------------------------------------------


def test_every_measure_on_a_run_worked_by_hand() -> None:
    # The oracle is 2^15 at a largest magnitude of 1 and 2^13 at 4. From 2^17 with an interval of 2:
    #   step      0     1     2     3     4     5     6
    #   largest   1     1     1     1     1     4     1
    #   scale    2^17  2^16  2^15  2^15  2^16  2^15  2^14
    #   overflow  X     X     F     F     X     X     F       then 2^14
    # Elements from 2^-40 up to 2^-39: lost at 2^14, kept at 2^15. They are a quarter.
    quarter = [counts_at((-40, 1), (0, 3))] * 7
    probe = probe_from([1, 1, 1, 1, 1, 4, 1], quarter)
    choice = PolicyChoice.of("torch", init_scale=2**17, growth_interval=2)
    result = replay([choice], [probe])
    expected = {
        "steps_run": 7,
        "skipped": 4,
        "longest_streak": 2,
        "calibration": 2,
        "growths": 1,
        "backoffs": 4,
        "below_window": 1,
        "final_scale": 2.0**14,
        "lost_steps": 0.25,
        "mean_lost": 0.25 / 3,
        "regret": (2 + 1 + 0 + 0 + 1 + 2 + 1) / 7,
        "aborted": False,
        "stuck": False,
    }
    for name, value in expected.items():
        assert getattr(result, name)[0, 0] == value, name
    traces = replay_traces(choice, probe)
    assert np.log2(traces.scale).tolist() == [17, 16, 15, 15, 16, 15, 14]
    assert traces.overflow.tolist() == [True, True, False, False, True, True, False]
    assert (traces.final_scale, traces.ended) == (2.0**14, None)


def test_with_the_same_batch_a_skipped_step_is_met_again() -> None:
    # From 2^17 with an interval of 2; the oracle is 2^15 at 1 and 2^13 at 4.
    #   step      0     1     2     3     4     5     6
    #   row       0     0     0     1     1     1     2
    #   largest   1     1     1     4     4     4     2
    #   scale    2^17  2^16  2^15  2^15  2^14  2^13  2^13
    #   overflow  X     X     F     X     X     F     F       then 2^14
    largest = [1.0, 4, 2, 1, 1, 1, 1]
    choice = PolicyChoice.of("torch", init_scale=2**17, growth_interval=2)
    probe = probe_from(largest, same_batch=True)
    traces = replay_traces(choice, probe)
    assert np.log2(traces.scale).tolist() == [17, 16, 15, 15, 14, 13, 13]
    assert np.flatnonzero(traces.overflow).tolist() == [0, 1, 3, 4]
    assert traces.final_scale == 2.0**14
    result = replay([choice], [probe])
    assert result.regret[0, 0] == (2 + 1 + 0 + 2 + 1 + 0 + 1) / 7
    # With other batches the largest magnitude of 4 is that of step 1, whatever was skipped.
    assert np.flatnonzero(replay_traces(choice, probe_from(largest)).overflow).tolist() == [0, 1, 2]


def test_an_abort_ends_the_counting() -> None:
    # fairseq halves 2^-13 to 2^-14 < 1e-4 on the second step, gives it back and aborts.
    choice = PolicyChoice.of("fairseq", init_scale=2.0**-13)
    probe = probe_from([1.0, math.inf, 1.0, math.inf])
    result = replay([choice], [probe])
    assert (result.steps_run[0, 0], result.skipped[0, 0], result.final_scale[0, 0]) == (
        2,
        1,
        2**-13,
    )
    assert result.aborted[0, 0]
    assert not result.stuck[0, 0]
    traces = replay_traces(choice, probe)
    assert traces.overflow.tolist() == [False, True]
    assert traces.ended == "step 1: policy fairseq reached its floor 0.0001 (scale 0.00012207)"


@pytest.mark.parametrize(
    ("pattern", "stuck"),
    [("FFXX", True), ("FFFX", False), ("XXXF", False), ("X", True), ("F", False), ("", False)],
)
def test_a_run_is_stuck_if_its_last_half_or_more_was_skipped(pattern: str, stuck: bool) -> None:
    probe = probe_from([math.inf if letter == "X" else 0.0 for letter in pattern])
    assert replay([PolicyChoice.of("static")], [probe]).stuck[0, 0] == stuck


def test_steps_without_an_oracle_do_not_count_for_the_regret() -> None:
    choice = PolicyChoice.of("static", init_scale=2**14)
    probe = probe_from([0.0, 1.0, math.inf])
    assert replay([choice], [probe]).regret[0, 0] == 1
    assert replay([choice], [probe_from([0.0, math.inf])]).regret[0, 0] == 0


def test_a_scale_of_zero_is_as_far_from_the_oracle_as_the_power_below_every_float() -> None:
    tiny = PolicyChoice.of("torch", init_scale=2.0**-149)
    result = replay([tiny], [probe_from([math.inf, 1.0])])
    assert (result.final_scale[0, 0], result.regret[0, 0]) == (0, 1075 + 15)


def test_a_histogram_without_elements_loses_nothing() -> None:
    result = replay([PolicyChoice.of("static", init_scale=2.0**-100)], [probe_from([1.0] * 3)])
    assert (result.lost_steps[0, 0], result.below_window[0, 0]) == (0, 0)


def test_seeds_are_columns_and_configurations_rows_of_any_policy() -> None:
    choices = [PolicyChoice.of(name) for name in POLICIES]
    columns = [wandering_probe(50, seed) for seed in (0, 1)]
    result = replay(choices, columns)
    table = result.columns()
    assert result.skipped.shape == (14, 2)
    assert len(table["skipped"]) == 28
    for row, choice in enumerate(choices):
        for column, probe in enumerate(columns):
            skips = replay_traces(choice, probe).overflow.sum()
            assert result.skipped[row, column] == skips
            at = (table["configuration"] == row) & (table["probe"] == column)
            assert table["skipped"][at].tolist() == [skips]


def test_no_configuration_gives_no_rows() -> None:
    assert replay([], [probe_from([1.0])]).skipped.shape == (0, 1)


def test_probes_of_different_lengths_are_refused() -> None:
    choices = [PolicyChoice.of("torch")]
    with pytest.raises(ValueError, match=r"probes must be of one length, got \[1, 2\]"):
        replay(choices, [probe_from([1.0]), probe_from([1.0, 1.0])])
    with pytest.raises(ValueError, match="probes must be of one length, got none"):
        replay(choices, [])
    with pytest.raises(ValueError, match="epsilon must be a share"):
        replay(choices, [probe_from([1.0])], epsilon=1.5)
