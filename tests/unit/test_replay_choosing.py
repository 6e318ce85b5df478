"""Which configurations are proposed, and the grids they come from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfscale.plan import PolicyChoice
from halfscale.policies import POLICIES
from halfscale.replay import (
    DEFAULT_RANGES,
    OBJECTIVE,
    Probe,
    cost,
    grid,
    propose,
    rank,
    replay,
    replay_traces,
)

from .test_replay import probe_from, wandering_probe
from .test_replay_probe import counts_at


def static(power: int) -> PolicyChoice:
    return PolicyChoice.of("static", init_scale=2.0**power)


def torch(**parameters: Any) -> PolicyChoice:
    return PolicyChoice.of("torch", **parameters)


# A largest magnitude of 1 is safe up to 2^15; a quarter of the elements needs 2^15, another 2^12.
TWO_TAILS = [counts_at((-40, 1), (-37, 1), (0, 2))] * 8
CALM = probe_from([1.0] * 8, TWO_TAILS)


def test_a_skipped_step_costs_one_and_a_lost_share_its_part_of_a_step() -> None:
    choices = [static(15), static(14), static(11), static(16), torch(init_scale=2**17)]
    assert cost(replay(choices, [CALM]))[:, 0].tolist() == [0, 2, 4, 8, 2]


def test_steps_not_taken_after_an_abort_cost_one_each() -> None:
    probe = probe_from([math.inf] + [1.0] * 9)
    assert cost(replay([PolicyChoice.of("fairseq", init_scale=2e-4)], [probe]))[0, 0] == 10


def test_the_ranking_goes_by_the_mean_cost_over_the_seeds() -> None:
    harder = probe_from([2.0] * 8, TWO_TAILS)  # safe up to 2^14
    result = replay([static(15), static(14), static(11)], [CALM, harder])
    assert cost(result).tolist() == [[0, 8], [2, 2], [4, 4]]
    assert rank([result]) == [1, 2]  # 2^15 is stuck on one of the seeds


def test_ties_go_to_the_least_regret_then_to_the_nearest_to_the_defaults() -> None:
    calm = probe_from([1.0] * 8)  # nothing to lose
    far, near = torch(init_scale=2**10), torch(init_scale=2**14)
    slow, slower = torch(init_scale=2**15, growth_interval=100), torch(init_scale=2**15)
    result = replay([far, near, slow, slower], [calm])
    assert cost(result)[:, 0].tolist() == [0, 0, 0, 0]
    assert rank([result]) == [3, 2, 1, 0]


def test_a_configuration_that_aborts_or_gets_stuck_is_never_proposed() -> None:
    probe = probe_from([1.0] * 4 + [math.inf] * 4)
    choices = [static(10), PolicyChoice.of("fairseq", init_scale=2e-4)]
    assert propose([replay(choices, [probe])], 5) == []


def test_of_those_that_behave_alike_the_nearest_to_the_defaults_is_proposed() -> None:
    # No interval but the first acts within 8 steps, so the growth factor of the others is inert.
    ranges = {"init_scale": [2**14], "growth_factor": [4, 2], "growth_interval": [3, 500, 1000]}
    choices = [*grid("torch", ranges), PolicyChoice.of("apex", init_scale=2**14)]
    proposals = propose([replay(choices, [CALM])], 10)
    behaviours = [proposal.alike for proposal in proposals]
    assert sorted(behaviours) == [(0,), (1, 2, 4, 5, 6), (3,)]
    [inert] = [proposal for proposal in proposals if len(proposal.alike) == 5]
    assert inert.choice == choices[inert.index] == torch(init_scale=2**14, growth_interval=1000)
    assert (inert.cost, inert.regret) == (2 / 8, 1)


def test_no_more_than_k_are_proposed_and_they_are_the_best() -> None:
    result = replay([static(power) for power in (8, 11, 14, 15)], [CALM])
    assert [proposal.index for proposal in propose([result], 2)] == [3, 2]


@pytest.mark.parametrize(
    "known",
    [static(15), torch(init_scale=2**15), torch(init_scale=2**15, growth_interval=700)],
    ids=["the same", "another policy that behaves alike", "not in the replay at all"],
)
def test_what_is_listed_already_is_not_proposed_under_any_name(known: PolicyChoice) -> None:
    result = replay([static(15), static(14), torch(init_scale=2**15)], [CALM])
    assert [proposal.index for proposal in propose([result], 5, exclude=[known])] == [1]


@given(st.permutations(range(12)), st.integers(0, 50))
def test_the_order_of_the_choices_does_not_matter(order: list[int], seed: int) -> None:
    ranges = {"init_scale": [1, 2**8, 2**16], "growth_interval": [2, 5], "growth_factor": [2, 4]}
    choices = grid("torch", ranges)
    probe = wandering_probe(40, seed)
    best = propose([replay(choices, [probe])], 4)
    shuffled = propose([replay([choices[i] for i in order], [probe])], 4)
    assert [proposal.choice for proposal in best] == [proposal.choice for proposal in shuffled]
    traces = {replay_traces(proposal.choice, probe).scale.tobytes() for proposal in best}
    assert len(traces) == len(best)


def test_a_request_for_no_proposal_is_refused() -> None:
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        propose([replay([static(1)], [CALM])], 0)


def test_runs_without_steps_have_one_behaviour() -> None:
    empty = Probe(np.zeros(0), np.zeros(0), np.zeros((0, 268)))
    result = replay([torch(init_scale=1), torch()], [empty])
    assert cost(result).tolist() == [[0], [0]]
    assert [proposal.choice for proposal in propose([result], 3)] == [torch()]


def test_the_objective_is_said_in_words() -> None:
    for word in ("lost whole", "lost by x", "regret", "PyTorch's defaults", "stuck", "alike"):
        assert word in OBJECTIVE


# --- grids --------------------------------------------------------------------------------------


def test_the_default_grid_has_every_combination_once() -> None:
    choices = grid()
    assert len(choices) == 13 * 3 * 3 * 9
    assert len({str(choice.parameters) for choice in choices}) == len(choices)
    assert torch() in choices


def test_of_the_intervals_that_cannot_act_the_nearest_to_the_default_is_kept() -> None:
    def kept(
        policy: str, steps: int, intervals: tuple[int, ...] = (10, 100, 1500, 9000)
    ) -> list[int]:
        choices = grid(policy, {"growth_interval": intervals}, steps=steps)
        return [choice.parameters["growth_interval"] for choice in choices]

    assert kept("torch", 100) == [10, 1500]
    assert kept("torch", 100, (10, 100)) == [10, 100]
    assert kept("torch", 101) == [10, 100, 1500]
    assert kept("torch", 10_000) == [10, 100, 1500, 9000]
    assert kept("metaseq", 50) == [10, 100, 1500, 9000]  # its window shrinks


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"metaseq"}))
def test_intervals_no_shorter_than_the_run_never_act(name: str) -> None:
    if "growth_interval" not in POLICIES[name].parameters():
        return
    probe = probe_from(([0.0] * 7 + [math.inf]) * 3)
    traces = {
        replay_traces(PolicyChoice.of(name, growth_interval=interval), probe).scale.tobytes()
        for interval in (24, 25, 1000)
    }
    assert len(traces) == 1


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_a_default_grid_of_what_it_takes(name: str) -> None:
    choices = grid(name)
    assert choices
    varied = set(DEFAULT_RANGES) & set(POLICIES[name].parameters())
    assert {key for choice in choices for key in choice.parameters} >= varied


def test_numbers_and_ranges_are_read_as_people_write_them() -> None:
    ranges = {
        "init_scale": {"from": 1, "to": "2**24", "times": 16},
        "growth_interval": {"from": 5, "to": 12, "plus": 5},
        "growth_factor": ["2", 2.0, 2],
    }
    choices = grid("torch", ranges)
    scales = sorted({choice.parameters["init_scale"] for choice in choices})
    assert scales == [2.0**power for power in range(0, 25, 4)]
    assert sorted({choice.parameters["growth_interval"] for choice in choices}) == [5, 10]
    assert {choice.parameters["growth_factor"] for choice in choices} == {2.0}
    assert {choice.parameters["backoff_factor"] for choice in choices} == {0.5}


def test_values_that_are_no_numbers_pass_to_the_policy() -> None:
    choices = grid("apex", {"min_scale": [None, 1], "init_scale": [4]})
    assert [choice.parameters["min_scale"] for choice in choices] == [None, 1.0]
    floors = grid("rising-floor", {"floors": [[[0, 8]], []]})
    assert [choice.parameters["floors"] for choice in floors] == [[[0, 8.0]], []]


@pytest.mark.parametrize(
    ("policy", "ranges", "message"),
    [
        ("tensorflow", {}, "unknown policy 'tensorflow'; known are torch"),
        ("keras", {"hysteresis": [1]}, "grid of keras: policy keras has no parameter hysteresis"),
        ("torch", {"growth_factor": [2, 0.5]}, "growth_factor must be greater than 1, got 0.5"),
        ("torch", {"growth_interval": [0]}, "growth_interval must be at least 1, got 0"),
        ("torch", {"growth_interval": [None]}, "growth_interval must be a number, got None"),
        ("torch", {"init_scale": []}, "grid of torch: init_scale has no values"),
        ("torch", {"init_scale": ["big"]}, "init_scale: 'big' is not a number"),
        ("torch", {"init_scale": 8}, "init_scale must be a list or a range, got 8"),
        ("torch", {"init_scale": {"from": 1, "to": 2}}, "keys from, to and either times or plus"),
        ("torch", {"init_scale": {"from": 4, "to": 2, "times": 2}}, "must rise from 4 to 2"),
        ("torch", {"init_scale": {"from": 1, "to": 2, "times": 1}}, "which times 1 does not"),
        ("torch", {"init_scale": {"from": 0, "to": 2, "times": 2}}, "must rise from 0 to 2"),
        ("torch", {"init_scale": {"from": 0, "to": 2, "plus": 0}}, "which plus 0 does not"),
        ("torch", {"init_scale": {"from": 0, "to": 9, "plus": 1e-9}}, "more than 200000 values"),
        (
            "megatron",
            {"init_scale": [1, 8], "min_scale": [2]},
            "grid of megatron: min_scale must not exceed init_scale, which is 1.0, got 2",
        ),
        (
            "torch",
            {"init_scale": range(1, 1001), "growth_factor": range(2, 1002)},
            "grid of torch: 1000000 combinations, more than 200000",
        ),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_in_one_line(
    policy: str, ranges: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        grid(policy, ranges, steps=100)
    assert "\n" not in str(refusal.value)
