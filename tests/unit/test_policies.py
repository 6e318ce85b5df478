"""Every policy against its own project's sequences, against PyTorch itself, and its laws."""

import json
import math
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from halfscale.policies import POLICIES, FloorReached, Policy, Torch, make_policy
from halfscale.policies.fp32 import FP32_MAX, FP32_SMALLEST_NORMAL, to_fp32

VECTORS = json.loads((Path(__file__).parent / "conformance" / "vectors.json").read_text())
ABORT = "abort"
law = settings(deadline=None, max_examples=50)  # a busy machine is no failure
each_policy = pytest.mark.parametrize("name", POLICIES)

# How a scale may leave the positive finite numbers, as the policies' docstrings say: by
# vanishing, by growing out of its float type, or not at all but by an abort instead.
WAYS_OUT: dict[str, set[str]] = {
    "torch": {"zero"},
    "static": set(),
    "apex": {"zero"},
    "apex-hysteresis": {"zero"},
    "deepspeed": {"infinity", ABORT},
    "megatron": {"infinity"},
    "fairseq": {"infinity", ABORT},
    "keras": {"zero", "infinity"},
    "jmp": set(),
    "flax": {"zero"},
    "openseq2seq-logmax": set(),
    "continuous": {"zero"},
    "metaseq": {"infinity"},
    "rising-floor": {"zero"},
}


def gradient_at(step: int) -> float:
    """A largest gradient that wanders over twenty powers of two, and is zero now and then."""
    return 0.0 if step % 41 == 40 else 2.0 ** (-(step * 7 % 20)) * (1 + step % 3 / 5)


def advance(policy: Policy, pattern: str, *, start: int = 0) -> list[float | str]:
    """The scale after each step of a pattern of F and X, or a mark where the policy aborts."""
    trace: list[float | str] = []
    for step, letter in enumerate(pattern, start):
        try:
            trace.append(policy.update(letter == "X", largest_gradient=gradient_at(step)))
        except FloorReached:
            trace.append(ABORT)
    return trace


def scales(name: str, pattern: str, **parameters: Any) -> list[float | str]:
    return advance(make_policy(name, **parameters), pattern)


# --- strategies -----------------------------------------------------------------------------

runs = st.tuples(st.sampled_from("FX"), st.integers(1, 40))
patterns = st.lists(runs, max_size=12).map(lambda parts: "".join(c * n for c, n in parts))
powers_of_two = st.integers(-20, 30).map(lambda power: 2.0**power)
odd_scales = st.floats(2.0**-20, 2.0**30)
init_scales = powers_of_two | odd_scales | st.sampled_from([2.0**-140, 2.0**120, 1e38])
intervals = st.integers(1, 12)
hystereses = st.integers(1, 4)
growths = st.sampled_from([2.0, 1.001, 1.5]) | st.floats(1.01, 16)
backoffs = st.sampled_from([0.5, 0.25]) | st.floats(0.01, 0.99)
below = st.integers(0, 12).map(lambda power: 2.0**-power)  # of the initial scale
above = st.integers(0, 12).map(lambda power: 2.0**power)


@st.composite
def settings_of(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Parameters a policy accepts, over the whole range of each."""
    init = draw(init_scales)
    choices: dict[str, Any] = {
        "init_scale": st.just(init),
        "growth_interval": intervals,
        "growth_factor": growths,
        "backoff_factor": backoffs,
        "factor": growths,
        "hysteresis": hystereses,
        "consecutive_hysteresis": st.booleans(),
        "raise_at_floor": st.booleans(),
        "tolerance": st.floats(0, 1),
        "threshold": st.none() | below.map(lambda share: init * share),
        "min_scale": below.map(lambda share: init * share),
        "max_scale": above.map(lambda ratio: init * ratio),
        "beta1": st.floats(0.5, 0.999),
        "beta2": st.floats(0.5, 0.9999),
        "overflow_std_dev": st.floats(0, 5),
        "overflow_log2": st.sampled_from([16.0, 10.0, 65536.0]),
        "floors": st.lists(st.tuples(st.integers(0, 60), odd_scales), max_size=4).map(rising),
    }
    if name in ("apex", "flax"):
        choices["min_scale"] = st.none() | choices["min_scale"]
    if name == "megatron":
        choices["max_scale"] = st.none() | choices["max_scale"]
    parameters = {key: draw(choices[key]) for key in POLICIES[name].parameters()}
    assume(parameters.get("min_scale") is None or to_fp32(parameters["min_scale"]) > 0)
    assume(to_fp32(parameters.get("max_scale") or 1.0) < math.inf)
    return parameters


def rising(pairs: list[tuple[int, float]]) -> list[tuple[int, float]]:
    steps = sorted({step for step, _ in pairs})
    return list(zip(steps, sorted(floor for _, floor in pairs), strict=False))


# --- each project's own sequences -----------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["source"])
def test_policy_gives_the_scales_its_project_asserts(vector: dict[str, Any]) -> None:
    policy = make_policy(vector["policy"], **vector["params"])
    trackers = []
    trace = []
    for letter in vector["pattern"]:
        trace.append(policy.update(letter == "X"))
        trackers.append(policy.state_dict().get("tracker"))
    assert trace == vector["scales"]
    if "tracker" in vector:
        assert trackers == vector["tracker"]


def test_the_vectors_cover_every_step_of_their_patterns() -> None:
    assert len(VECTORS["vectors"]) == 19
    for vector in VECTORS["vectors"]:
        assert len(vector["scales"]) == len(vector["pattern"])


DEFAULTS: dict[str, dict[str, Any]] = {
    "torch": {
        "init_scale": 65536,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
    },
    "static": {"init_scale": 65536},
    "apex": {
        "init_scale": 65536,
        "growth_interval": 2000,
        "min_scale": None,
        "max_scale": 2**24,
    },
    "apex-hysteresis": {
        "init_scale": 65536,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "hysteresis": 2,
    },
    "deepspeed": {
        "init_scale": 65536,
        "growth_interval": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_scale": 1,
        "raise_at_floor": False,
    },
    "megatron": {
        "init_scale": 2**32,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
        "min_scale": 1,
        "max_scale": None,
    },
    "fairseq": {
        "init_scale": 2**15,
        "growth_interval": 2000,
        "tolerance": 0,
        "threshold": None,
        "min_scale": 1e-4,
    },
    "keras": {"init_scale": 2**15, "growth_interval": 2000},
    "jmp": {"init_scale": 2**15, "growth_interval": 2000, "factor": 2, "min_scale": 1},
    "flax": {
        "init_scale": 65536,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "min_scale": 2.0**-126,
    },
    "openseq2seq-logmax": {
        "init_scale": 1,
        "min_scale": 1,
        "max_scale": 2**14,
        "beta1": 0.99,
        "beta2": 0.999,
        "overflow_std_dev": 3.09,
        "overflow_log2": 16,
    },
    "continuous": {"init_scale": 1, "growth_factor": 1.001, "backoff_factor": 0.5},
    "metaseq": {
        "init_scale": 4,
        "growth_interval": 256,
        "tolerance": 0,
        "threshold": None,
        "min_scale": 2.0**-5,
    },
    "rising-floor": {
        "init_scale": 65536,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "floors": ((40_000, 8192), (150_000, 32768)),
    },
}


def test_every_policy_starts_from_its_projects_defaults() -> None:
    assert {name: policy.parameters() for name, policy in POLICIES.items()} == DEFAULTS
    for name in POLICIES:
        assert make_policy(name).scale == DEFAULTS[name]["init_scale"]


# --- PyTorch itself -------------------------------------------------------------------------


class RealScaler:
    """torch.amp.GradScaler on a one-parameter optimizer whose gradient is set by hand."""

    def __init__(self, **parameters: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", **parameters)
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.scaler.scale(torch.ones(()))  # the scale tensor is made on first use

    def step(self, gradient: float) -> tuple[float, int]:
        self.parameter.grad = torch.tensor([gradient])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        state = self.scaler.state_dict()
        return state["scale"], state["_growth_tracker"]


def random_pattern(seed: int, steps: int) -> str:
    """Long calm stretches and bursts of overflows, so that both rules act many times."""
    rng = random.Random(seed)
    pattern = ""
    while len(pattern) < steps:
        share = rng.choice([0.0, 0.02, 0.3, 1.0])
        length = rng.randint(1, 120)
        pattern += "".join("X" if rng.random() < share else "F" for _ in range(length))
    return pattern[:steps]


@pytest.mark.parametrize(
    ("seed", "parameters"),
    [
        (0, {"init_scale": 65536.0, "growth_interval": 7}),
        (1, {"init_scale": 3.0e38, "growth_factor": 1.3, "growth_interval": 1}),
        (2, {"init_scale": 0.1, "growth_factor": 1.7, "backoff_factor": 0.3}),
        (3, {"init_scale": 1e-40, "growth_factor": 1.001, "backoff_factor": 0.999}),
        (4, {"init_scale": 1e30, "growth_factor": 9.9, "backoff_factor": 0.01}),
    ],
)
def test_torch_equals_the_real_grad_scaler_over_long_patterns(
    seed: int, parameters: dict[str, Any]
) -> None:
    parameters = {"growth_interval": 5, **parameters}
    policy = Torch(**parameters)
    real = RealScaler(**parameters)
    for letter in random_pattern(seed, 3000):
        policy.update(letter == "X")
        assert (policy.scale, policy.tracker) == real.step(math.inf if letter == "X" else 1.0)


@law
@given(
    init=init_scales | st.floats(1e-45, FP32_MAX),
    growth=st.floats(1, 1e30, exclude_min=True),
    backoff=st.floats(0, 1, exclude_min=True, exclude_max=True),
    interval=intervals,
    pattern=patterns,
)
def test_torch_rounds_each_product_as_the_real_kernel_does(
    init: float, growth: float, backoff: float, interval: int, pattern: str
) -> None:
    policy = Torch(init, growth, backoff, interval)
    scale, tracker = torch.tensor(init), torch.tensor(0, dtype=torch.int32)
    for letter in pattern:
        policy.update(letter == "X")
        found_inf = torch.tensor(float(letter == "X"))
        torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)
        assert (policy.scale, policy.tracker) == (scale.item(), tracker.item())


@law
@given(init=odd_scales, growth=growths, backoff=backoffs)
@example(init=33.1, growth=1.3, backoff=0.3)  # rounding the factors or not tells here
def test_projects_with_fp32_factors_multiply_as_fp32_tensors_do(
    init: float, growth: float, backoff: float
) -> None:
    start, up, down = torch.tensor(init), torch.tensor(growth), torch.tensor(backoff)
    common = {"init_scale": init, "growth_interval": 1, "min_scale": 1e-30}
    factors = {"growth_factor": growth, "backoff_factor": backoff}
    grown, lowered = (start * up).item(), (start * down).item()
    assert scales("megatron", "F", **common, **factors) == [grown]
    assert scales("megatron", "X", hysteresis=1, **common, **factors) == [lowered]
    assert scales("flax", "FF", **common, **factors) == [start.item(), grown]
    assert scales("flax", "X", **common, **factors) == [lowered]
    assert scales("jmp", "F", factor=growth, **common) == [grown]
    assert scales("jmp", "X", factor=growth, **common) == [(start / up).item()]


@law
@given(st.floats(allow_nan=False))
def test_rounding_to_fp32_is_that_of_a_tensor(value: float) -> None:
    assert to_fp32(value) == torch.tensor(value, dtype=torch.float64).float().item()


def test_torch_has_no_floor_and_reaches_zero_after_166_overflows() -> None:
    policy, real = make_policy("torch"), RealScaler()
    for _ in range(165):
        assert policy.update(True) == real.step(math.inf)[0] > 0
    assert policy.update(True) == real.step(math.inf)[0] == 0
    assert set(advance(policy, "F" * 4001)) == {0}


def test_inverse_of_torchs_scale_is_infinite_after_144_overflows() -> None:
    policy = make_policy("torch")
    advance(policy, "X" * 143)
    assert math.isfinite(to_fp32(1 / policy.scale))
    policy.update(True)
    assert to_fp32(1 / policy.scale) == math.inf


def test_lowering_the_interval_below_the_tracker_stops_growth_until_an_overflow() -> None:
    policy, real = Torch(8.0, growth_interval=10), RealScaler(init_scale=8.0, growth_interval=10)
    trace = []
    for step in range(300):
        if step == 6:
            policy.growth_interval = 4
            real.scaler.set_growth_interval(4)
        overflow = step == 200
        trace.append(policy.update(overflow))
        assert (policy.scale, policy.tracker) == real.step(math.inf if overflow else 1.0)
    assert trace[:200] == [8.0] * 200
    assert trace[200:205] == [4.0, 4.0, 4.0, 4.0, 8.0]


def test_a_step_whose_unscaled_gradient_is_infinite_counts_as_finite() -> None:
    # At 2^-100 a finite gradient unscales to infinity; the check came first, so the step is taken.
    policy, real = (
        Torch(2.0**-100, growth_interval=2),
        RealScaler(init_scale=2.0**-100, growth_interval=2),
    )
    for expected in (2.0**-100, 2.0**-99):
        assert policy.update(False) == real.step(1e30)[0] == expected
    assert torch.isinf(real.parameter).all()


def test_torch_growth_stops_short_of_infinity() -> None:
    policy = Torch(2.0**127, growth_interval=1)
    assert policy.update(False) == 2.0**127
    assert policy.tracker == 0


# --- laws that hold for all -----------------------------------------------------------------


@each_policy
@law
@given(st.data(), patterns)
def test_scale_stays_finite_and_positive_or_leaves_as_documented(
    name: str, data: st.DataObject, pattern: str
) -> None:
    parameters = data.draw(settings_of(name))
    for value in scales(name, pattern, **parameters):
        if value == ABORT:
            assert ABORT in WAYS_OUT[name]
        elif value == 0:
            assert "zero" in WAYS_OUT[name]
        elif value == math.inf:
            assert "infinity" in WAYS_OUT[name]
        else:
            assert isinstance(value, float)
            assert 0 < value < math.inf


@pytest.mark.parametrize(
    ("name", "parameters", "pattern", "last"),
    [
        ("torch", {}, "X" * 166, 0),
        ("apex-hysteresis", {}, "X" * 167, 0),
        ("continuous", {}, "X" * 150, 0),
        ("rising-floor", {}, "X" * 166, 0),
        ("keras", {}, "X" * 165, 0),
        ("flax", {"min_scale": None}, "X" * 166, 0),
        ("apex", {}, "X" * 1091, 0),
        ("keras", {"init_scale": 2.0**127, "growth_interval": 1}, "FX", math.inf),
        ("megatron", {"init_scale": 2.0**127, "growth_interval": 1}, "FXXX", math.inf),
        ("deepspeed", {"init_scale": 2.0**1023, "growth_interval": 1}, "FFX", math.inf),
        ("fairseq", {"init_scale": 2.0**1023, "growth_interval": 1}, "FX", math.inf),
        ("metaseq", {"init_scale": 2.0**1023, "growth_interval": 1}, "FX", math.inf),
        ("deepspeed", {"raise_at_floor": True}, "X" * 18, ABORT),
        ("fairseq", {}, "X" * 29, ABORT),
    ],
)
def test_each_documented_way_out_is_real(
    name: str, parameters: dict[str, Any], pattern: str, last: float | str
) -> None:
    *before, end = scales(name, pattern, **parameters)
    assert end == last
    assert 0 not in before
    assert ABORT not in before


@each_policy
@law
@given(st.data(), patterns)
def test_saving_and_restoring_at_any_step_changes_nothing(
    name: str, data: st.DataObject, pattern: str
) -> None:
    parameters = data.draw(settings_of(name))
    cut = data.draw(st.integers(0, len(pattern)))
    whole, first, second = (make_policy(name, **parameters) for _ in range(3))
    expected = advance(whole, pattern)
    head = advance(first, pattern[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second == first
    assert head + advance(second, pattern[cut:], start=cut) == expected
    assert second == whole


@each_policy
@law
@given(st.data(), patterns)
def test_an_overflow_never_raises_the_scale(name: str, data: st.DataObject, pattern: str) -> None:
    policy = make_policy(name, **data.draw(settings_of(name)))
    for step, letter in enumerate(pattern):
        before = policy.scale
        advance(policy, letter, start=step)
        if letter == "X":
            assert policy.scale <= before


@each_policy
def test_the_returned_scale_is_the_current_one(name: str) -> None:
    policy = make_policy(name)
    for step, letter in enumerate(random_pattern(7, 500)):
        (value,) = advance(policy, letter, start=step)
        assert value in (policy.scale, ABORT)


# --- where the rules coincide ---------------------------------------------------------------

coinciding = st.integers(0, 10).map(lambda power: 2.0**power)


def torch_scales(pattern: str, init: float, interval: int) -> list[float | str]:
    return scales("torch", pattern, init_scale=init, growth_interval=interval)


@law
@given(coinciding, intervals, patterns)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("apex", {"max_scale": 2.0**1000}),
        ("apex-hysteresis", {"hysteresis": 1}),
        ("fairseq", {"tolerance": 0, "min_scale": 1e-300}),
        ("jmp", {"factor": 2, "min_scale": 2.0**-148}),
        ("keras", {}),
        ("megatron", {"hysteresis": 1, "min_scale": 2.0**-148}),
        ("rising-floor", {"floors": []}),
    ],
)
def test_rule_coincides_with_torchs_within_all_bounds(
    name: str, parameters: dict[str, Any], init: float, interval: int, pattern: str
) -> None:
    expected = torch_scales(pattern, init, interval)
    assume(all(2.0**-147 <= float(scale) < 2.0**127 for scale in expected))
    common = {"init_scale": init, "growth_interval": interval}
    assert scales(name, pattern, **common, **parameters) == expected


@law
@given(odd_scales, growths, backoffs, intervals, patterns)
def test_hysteresis_of_one_is_torchs_rule_for_any_factors(
    init: float, growth: float, backoff: float, interval: int, pattern: str
) -> None:
    parameters = {
        "init_scale": init,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
    }
    with_hysteresis = scales("apex-hysteresis", pattern, hysteresis=1, **parameters)
    assert with_hysteresis == scales("torch", pattern, **parameters)


@law
@given(coinciding, intervals, patterns)
def test_flax_is_torch_with_an_interval_longer_by_one(
    init: float, interval: int, pattern: str
) -> None:
    expected = torch_scales(pattern, init, interval + 1)
    assume(all(2.0**-126 <= float(scale) < 2.0**127 for scale in expected))
    assert scales("flax", pattern, init_scale=init, growth_interval=interval) == expected


@law
@given(coinciding, intervals, patterns)
def test_deepspeed_is_torch_that_overlooks_the_first_finite_step_of_each_stretch(
    init: float, interval: int, pattern: str
) -> None:
    reference = Torch(init, growth_interval=interval)
    expected = []
    for step, letter in enumerate(pattern):
        first_of_stretch = letter == "F" and (step == 0 or pattern[step - 1] == "X")
        expected.append(reference.scale if first_of_stretch else reference.update(letter == "X"))
    assume(all(2.0**-147 <= scale < 2.0**127 for scale in expected))
    parameters = {"growth_interval": interval, "hysteresis": 1, "min_scale": 2.0**-148}
    assert scales("deepspeed", pattern, init_scale=init, **parameters) == expected


# --- where the rules part -------------------------------------------------------------------


def test_flax_and_deepspeed_first_grow_one_step_later_than_torch() -> None:
    common = {"init_scale": 8, "growth_interval": 3}
    assert scales("torch", "FFFFFFFF", **common) == [8, 8, 16, 16, 16, 32, 32, 32]
    assert scales("flax", "FFFFFFFF", **common) == [8, 8, 8, 16, 16, 16, 16, 32]
    assert scales("deepspeed", "FFFFFFFF", **common) == [8, 8, 8, 16, 16, 16, 32, 32]


def test_deepspeed_and_flax_count_afresh_after_an_overflow() -> None:
    common = {"init_scale": 8, "growth_interval": 2}
    assert scales("torch", "FXFFF", **common) == [8, 4, 4, 8, 8]
    assert scales("flax", "FXFFF", **common) == [8, 4, 4, 4, 8]
    assert scales("deepspeed", "FXFFF", hysteresis=1, **common) == [8, 4, 4, 4, 8]


def test_megatron_counts_overflows_cumulatively_and_apex_only_consecutive_ones() -> None:
    common = {"init_scale": 64, "growth_interval": 100, "hysteresis": 2}
    assert scales("megatron", "XFXFXX", **common) == [64, 64, 32, 32, 16, 8]
    assert scales("apex-hysteresis", "XFXFXX", **common) == [64, 64, 64, 64, 64, 32]
    assert scales("apex-hysteresis", "XXXFXX", **common) == [64, 32, 16, 16, 16, 8]


def test_a_forgiven_overflow_still_starts_the_count_of_finite_steps_afresh() -> None:
    common = {"init_scale": 64, "growth_interval": 3, "hysteresis": 2}
    for name in ("apex-hysteresis", "megatron"):
        assert scales(name, "FFXFFF", **common) == [64, 64, 64, 64, 64, 128]
    assert scales("deepspeed", "FFXFFFF", **common) == [64, 64, 64, 64, 64, 64, 128]


def test_megatron_restores_its_hysteresis_only_with_a_growth() -> None:
    common = {"init_scale": 64, "growth_interval": 3, "hysteresis": 2}
    assert scales("megatron", "FFXFFXFFX", **common) == [64, 64, 64, 64, 64, 32, 32, 32, 16]
    assert scales("megatron", "XFFFXX", **common) == [64, 64, 64, 128, 128, 64]


def test_megatron_grows_without_bound_unless_a_ceiling_is_set() -> None:
    common = {"init_scale": 2.0**31, "growth_interval": 1}
    assert scales("megatron", "FFF", **common) == [2.0**32, 2.0**33, 2.0**34]
    assert scales("megatron", "FFF", max_scale=2.0**32, **common) == [2.0**32] * 3


def test_deepspeed_restores_its_hysteresis_with_a_growth_or_each_finite_step() -> None:
    common = {"init_scale": 64, "growth_interval": 2, "hysteresis": 2}
    assert scales("deepspeed", "XFXFX", **common) == [64, 64, 32, 32, 16]
    assert scales("deepspeed", "XFFFXX", **common) == [64, 64, 64, 128, 128, 64]
    assert scales("deepspeed", "XFXFXX", consecutive_hysteresis=True, **common) == [
        64, 64, 64, 64, 64, 32,
    ]  # fmt: skip


def test_deepspeed_at_its_floor_stays_or_aborts_with_its_state_unmoved() -> None:
    common = {"init_scale": 2, "hysteresis": 1}
    assert scales("deepspeed", "XXX", **common) == [1, 1, 1]
    policy = make_policy("deepspeed", raise_at_floor=True, **common)
    assert policy.update(True) == 1
    before = policy.state_dict()
    with pytest.raises(FloorReached) as stop:
        policy.update(True)
    assert (stop.value.policy, stop.value.floor, stop.value.scale) == ("deepspeed", 1, 1)
    assert policy.state_dict() == before


def test_deepspeed_with_hysteresis_left_does_not_abort_at_its_floor() -> None:
    parameters = {"init_scale": 1, "hysteresis": 2, "raise_at_floor": True}
    assert scales("deepspeed", "XX", **parameters) == [1, ABORT]


def test_fairseq_halves_only_when_overflows_reach_the_tolerated_share() -> None:
    # Step 4: 1 overflow in 5 steps is under a quarter; step 5: 2 in 6 is not. Then the count
    # starts again: 1 in 5 at step 10, 2 in 8 at step 13.
    parameters = {"init_scale": 64, "tolerance": 0.25}
    assert scales("fairseq", "FFFFXXFFFFXFFX", **parameters) == [64] * 5 + [32] * 8 + [16]
    assert scales("fairseq", "FFFFXX", init_scale=64) == [64, 64, 64, 64, 32, 16]


def test_fairseq_takes_the_first_step_as_one_since_the_last_rescale() -> None:
    common = {"init_scale": 8, "tolerance": 0.5}
    assert scales("fairseq", "FX", **common) == [8, 4]  # 1 in 2
    assert scales("fairseq", "FFX", **common) == [8, 8, 8]  # 1 in 3


def test_fairseq_counts_the_rate_from_its_last_growth_too() -> None:
    # The growth at step 3 is a rescale: at step 5 it is 1 in 2, at step 4 it would be 1 in 1.
    parameters = {"init_scale": 8, "growth_interval": 4, "tolerance": 0.6}
    assert scales("fairseq", "FFFFFX", **parameters) == [8, 8, 8, 16, 16, 16]
    assert scales("fairseq", "FFFFX", **parameters) == [8, 8, 8, 16, 8]


def test_fairseq_never_goes_below_its_threshold() -> None:
    assert scales("fairseq", "XXXX", init_scale=8, threshold=3) == [4, 3, 3, 3]


def test_fairseq_aborts_at_its_floor_and_gives_the_scale_back() -> None:
    policy = make_policy("fairseq", init_scale=4, min_scale=1)
    assert policy.update(True) == 2
    with pytest.raises(FloorReached, match=r"fairseq.*floor 1") as stop:
        policy.update(True)
    assert (stop.value.policy, stop.value.floor, stop.value.scale) == ("fairseq", 1, 2)
    assert policy.state_dict() == {
        "scale": 2, "iteration": 1, "last_overflow": 1, "last_rescale": 1, "overflows": 0,
    }  # fmt: skip


def test_fairseq_can_be_driven_on_after_an_abort() -> None:
    # No step lies between the rescale and the next overflow; fairseq then divides by 1000.
    common = {"init_scale": 4, "min_scale": 2}
    assert scales("fairseq", "XX", tolerance=0.001, **common) == [ABORT, ABORT]
    assert scales("fairseq", "XX", tolerance=0.00101, **common) == [ABORT, 4]


def test_metaseq_doubles_and_halves_its_window_with_its_scale() -> None:
    policy = make_policy("metaseq", growth_interval=4)
    trace = []
    for letter in "FFFF" + "FFFF" + "FFFFFFFF" + "XXX" + "FFFFF":
        policy.update(letter == "X")
        trace.append((policy.scale, policy.state_dict()["window"]))
    assert trace[:16] == [(4, 4)] * 3 + [(8, 8)] * 4 + [(16, 16)] * 8 + [(32, 32)]
    assert trace[16:19] == [(16, 16), (8, 8), (4, 4)]
    assert trace[19:] == [(4, 4)] * 3 + [(8, 8)] * 2


def test_metaseq_at_its_floor_keeps_the_scale_halves_the_window_and_goes_on() -> None:
    policy = make_policy("metaseq", init_scale=3, growth_interval=5, min_scale=1)
    trace = []
    for letter in "XXXXFF":
        policy.update(letter == "X")
        trace.append((policy.scale, policy.state_dict()["window"]))
    assert trace == [(1.5, 2), (1.5, 1), (1.5, 1), (1.5, 1), (3, 2), (6, 4)]


def test_metaseq_may_reach_its_floor_exactly() -> None:
    assert scales("metaseq", "XXX", init_scale=4, min_scale=1) == [2, 1, 1]


def test_rising_floor_holds_from_its_step_on_and_skipped_steps_count() -> None:
    assert scales("rising-floor", "XXXX", init_scale=32, floors=[[3, 8]]) == [16, 8, 4, 4]
    parameters = {"init_scale": 16, "growth_interval": 100, "floors": [[2, 4], [5, 8]]}
    assert scales("rising-floor", "XXXXXX", **parameters) == [8, 4, 4, 4, 4, 4]
    assert scales("rising-floor", "FFXXFXX", **parameters) == [16, 16, 8, 4, 4, 4, 4]
    assert scales("rising-floor", "FFFFFXX", **parameters) == [16, 16, 16, 16, 16, 8, 8]


def test_rising_floor_grows_as_torch_does_from_below_its_floor() -> None:
    parameters = {"init_scale": 2, "growth_interval": 1, "floors": [[0, 8]]}
    assert scales("rising-floor", "FXFXFX", **parameters) == [4, 4, 8, 8, 16, 8]


def test_apex_stops_at_its_ceiling_and_at_a_floor_where_one_is_set() -> None:
    assert scales("apex", "FFF", init_scale=2.0**23, growth_interval=1) == [2.0**24] * 3
    assert scales("apex", "XXX", init_scale=4, min_scale=1.5) == [2, 1.5, 1.5]


def test_jmp_keeps_its_scale_where_growth_would_be_infinite_and_keras_does_not() -> None:
    common = {"init_scale": 2.0**127, "growth_interval": 1}
    assert scales("jmp", "FX", **common) == [2.0**127, 2.0**126]
    assert scales("keras", "FX", **common) == [math.inf, math.inf]


def test_flax_stops_at_the_largest_fp32_and_at_the_smallest_normal_one() -> None:
    assert scales("flax", "FFF", init_scale=2.0**127, growth_interval=1)[1:] == [FP32_MAX] * 2
    assert scales("flax", "XX", init_scale=2.0**-125) == [FP32_SMALLEST_NORMAL] * 2


def test_continuous_grows_a_little_each_finite_step_in_fp32() -> None:
    grown = (torch.tensor(1.0).double() * 1.001).float()
    twice = (grown.double() * 1.001).float()
    assert scales("continuous", "FFX", init_scale=1) == [
        grown.item(), twice.item(), twice.item() / 2,
    ]  # fmt: skip


def test_static_scale_never_moves() -> None:
    assert scales("static", "FXXF", init_scale=1000) == [1000] * 4


# --- the policy that looks at gradients -----------------------------------------------------


def test_logmax_leaves_room_for_a_steady_gradient_exactly() -> None:
    policy = make_policy("openseq2seq-logmax")
    for _ in range(50):
        assert policy.update(False, largest_gradient=2.0**6) == pytest.approx(2.0**10, rel=1e-4)


def test_logmax_follows_the_mean_and_deviation_of_its_averages() -> None:
    policy = make_policy("openseq2seq-logmax", beta1=0.5, beta2=0.75)
    policy.update(False, largest_gradient=2.0**2)
    # By hand, weights 1/3 and 2/3 for the fast average, 3/7 and 4/7 for the slow ones:
    mean = (2 * 1 + 4 * 2) / 3
    slow_mean = (2 * 3 + 4 * 4) / 7
    deviation = math.sqrt((4 * 3 + 16 * 4) / 7 - slow_mean**2)
    expected = 2 ** (16 - mean - 3.09 * deviation)
    assert policy.update(False, largest_gradient=2.0**4) == pytest.approx(expected, rel=1e-12)


def test_logmax_counts_an_overflow_as_a_gradient_at_the_end_of_fp16() -> None:
    seen, overflowed = (
        make_policy("openseq2seq-logmax", max_scale=2.0**40, overflow_std_dev=0) for _ in range(2)
    )
    for policy in (seen, overflowed):
        policy.update(False, largest_gradient=2.0**-4)
    assert overflowed.update(True) == seen.update(False, largest_gradient=2.0**16) < 2.0**20
    assert overflowed == seen


def test_logmax_as_released_is_pinned_to_its_floor_by_one_overflow() -> None:
    released = make_policy("openseq2seq-logmax", overflow_log2=65536)
    corrected = make_policy("openseq2seq-logmax")
    for policy in (released, corrected):
        policy.update(False, largest_gradient=2.0**4)
        policy.update(True)
        for _ in range(5000):
            policy.update(False, largest_gradient=2.0**4)
    assert released.scale == 1
    assert corrected.scale > 1000


def test_logmax_stays_within_its_bounds() -> None:
    policy = make_policy("openseq2seq-logmax")
    assert policy.update(False, largest_gradient=5e-324) == 2.0**14
    assert policy.update(False, largest_gradient=1e300) == 1


def test_logmax_needs_the_largest_gradient_of_a_finite_step_only() -> None:
    policy = make_policy("openseq2seq-logmax")
    policy.update(True)
    before = policy.state_dict()
    with pytest.raises(ValueError, match="openseq2seq-logmax needs largest_gradient"):
        policy.update(False)
    for useless in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="largest_gradient"):
            policy.update(False, largest_gradient=useless)
    assert policy.state_dict() == before


def test_logmax_passes_over_a_step_whose_gradients_are_all_zero() -> None:
    policy = make_policy("openseq2seq-logmax")
    policy.update(False, largest_gradient=2.0**10)
    before = policy.state_dict()
    assert policy.update(False, largest_gradient=0.0) == before["scale"]
    assert policy.state_dict() == before


def test_only_logmax_asks_for_the_largest_gradient() -> None:
    asking = [name for name, policy in POLICIES.items() if policy.uses_largest_gradient]
    assert asking == ["openseq2seq-logmax"]


# --- building, saving, and what is refused --------------------------------------------------


def test_the_registry_holds_each_policy_under_its_own_name() -> None:
    assert set(POLICIES) == set(WAYS_OUT) == set(DEFAULTS)
    for name, policy in POLICIES.items():
        assert policy.name == name
        assert isinstance(make_policy(name), policy)
        assert policy.__doc__ is not None
        assert "Source:" in policy.__doc__


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'tensorflow'.*torch, static, apex"):
        make_policy("tensorflow")


def test_a_parameter_a_policy_lacks_is_refused_with_those_it_has() -> None:
    expected = "keras has no parameter hysteresis, min_scale; it has init_scale, growth_interval"
    with pytest.raises(ValueError, match=expected):
        make_policy("keras", hysteresis=2, min_scale=1)


@pytest.mark.parametrize("name", ["scale", "tracker", "name", "uses_largest_gradient"])
def test_state_and_class_facts_are_not_parameters(name: str) -> None:
    assert name not in POLICIES["torch"].parameters()
    with pytest.raises(ValueError, match=f"no parameter {name}"):
        make_policy("torch", **{name: 1})


@pytest.mark.parametrize(
    ("policy", "parameter", "value", "message"),
    [
        ("torch", "growth_factor", 0.5, "growth_factor must be greater than 1, got 0.5"),
        ("torch", "growth_factor", 1, "growth_factor must be greater than 1, got 1"),
        ("torch", "growth_factor", math.inf, "growth_factor must be greater than 1, got inf"),
        ("torch", "backoff_factor", 1, "backoff_factor must lie between 0 and 1, got 1"),
        ("torch", "backoff_factor", 0, "backoff_factor must lie between 0 and 1, got 0"),
        ("torch", "init_scale", 0, "init_scale must be positive and finite, got 0"),
        ("torch", "init_scale", -8, "init_scale must be positive and finite, got -8"),
        ("torch", "init_scale", math.nan, "init_scale must be a number, got nan"),
        ("torch", "init_scale", "2**16", r"init_scale must be a number, got '2\*\*16'"),
        ("torch", "init_scale", True, "init_scale must be a number, got True"),
        ("torch", "init_scale", 1e39, "init_scale must be within the range of fp32"),
        ("torch", "init_scale", 1e-46, "init_scale must be within the range of fp32"),
        ("apex", "init_scale", math.inf, "init_scale must be positive and finite, got inf"),
        ("apex", "init_scale", 10**400, "init_scale is too large for a float"),
        ("torch", "growth_interval", 0, "growth_interval must be at least 1, got 0"),
        ("torch", "growth_interval", 2.5, "growth_interval must be a whole number, got 2.5"),
        ("torch", "growth_interval", None, "growth_interval must be a number, got None"),
        ("megatron", "hysteresis", 0, "hysteresis must be at least 1, got 0"),
        ("megatron", "min_scale", 2.0**33, "min_scale must not exceed init_scale"),
        ("megatron", "max_scale", 4, "max_scale must not be below init_scale"),
        ("fairseq", "threshold", 2.0**16, "threshold must not exceed init_scale"),
        ("fairseq", "tolerance", 1.5, "tolerance must be a share from 0 to 1, got 1.5"),
        ("deepspeed", "raise_at_floor", 1, "raise_at_floor must be true or false, got 1"),
        ("jmp", "factor", 1, "factor must be greater than 1, got 1"),
        ("openseq2seq-logmax", "overflow_std_dev", -1, "overflow_std_dev must be finite and not"),
        ("rising-floor", "floors", 8, r"floors must be a list of \[step, floor\] pairs, got 8"),
        ("rising-floor", "floors", [[1, 2, 3]], r"floors must be a list of \[step, floor\]"),
        ("rising-floor", "floors", [[5, 2], [1, 4]], r"floors must have steps that increase"),
        ("rising-floor", "floors", [[-1, 2], [3, 4]], r"floors must have steps that increase"),
        ("rising-floor", "floors", [[1, 4], [5, 2]], r"floors must not fall, got \[4.0, 2.0\]"),
        ("rising-floor", "floors", [[1, 0]], "floors: the floor from step 1 must be positive"),
    ],
)
def test_a_senseless_parameter_is_refused_by_name(
    policy: str, parameter: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(policy, **{parameter: value})


def test_numbers_may_be_written_either_way() -> None:
    written = make_policy("torch", init_scale=2**16, growth_interval=2000.0, growth_factor=2)
    assert written == make_policy("torch")
    assert isinstance(written.scale, float)
    assert repr(written) == repr(make_policy("torch"))


@pytest.mark.parametrize("name", POLICIES)
def test_a_state_with_a_field_missing_or_unknown_is_refused(name: str) -> None:
    policy = make_policy(name)
    state = policy.state_dict()
    assert "scale" in state
    for field in state:
        with pytest.raises(ValueError, match=f"policy {name}: missing {field}, unknown nothing"):
            policy.load_state_dict({key: state[key] for key in state if key != field})
    with pytest.raises(ValueError, match=f"policy {name}: missing nothing, unknown momentum"):
        policy.load_state_dict({**state, "momentum": 0})


def test_a_state_refused_for_one_field_changes_none() -> None:
    policy = make_policy("megatron")
    for wrong in (None, "3", 1.5, math.nan):
        with pytest.raises(ValueError, match="megatron: hysteresis_left"):
            policy.load_state_dict({"scale": 1.0, "tracker": 1, "hysteresis_left": wrong})
    assert policy == make_policy("megatron")


def test_a_state_holds_every_field_that_moves() -> None:
    for name in POLICIES:
        policy, fresh = make_policy(name, init_scale=1024), make_policy(name, init_scale=1024)
        advance(policy, "FXFXX")
        moved = {key for key, value in vars(policy).items() if value != getattr(fresh, key)}
        assert moved <= set(policy.state_dict())


def test_an_abort_survives_pickling_and_names_what_stopped_it() -> None:
    stop = pickle.loads(pickle.dumps(FloorReached("fairseq", 1e-4, 1.5e-4)))
    assert (stop.policy, stop.floor, stop.scale) == ("fairseq", 1e-4, 1.5e-4)
    assert str(stop) == "policy fairseq reached its floor 0.0001 (scale 0.00015)"


def test_policies_need_the_standard_library_alone() -> None:
    code = (
        "import sys, halfscale.policies\n"
        "roots = {name.partition('.')[0] for name in sys.modules} - {'halfscale'}\n"
        "print(*sorted({'torch', 'numpy', 'pydantic'} & roots))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == ""
