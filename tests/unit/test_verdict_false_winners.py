"""How often the rule names a winner where there is none, measured by simulation.

One population under k names: in at most 5 % of the trials may the rule call one of them better. The
rule is written here a second time, for thousands of trials at once, and compared with `decide` on
some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from halfscale import verdict
from halfscale.plan import PolicyChoice
from halfscale.verdict import (
    FAMILY_ERROR,
    LARGEST_CHANCE,
    LARGEST_CHANCE_UNREACHED,
    MINIMUM_SEEDS,
    Interval,
    decide,
)

from .crafted import runs_table

TRIALS = 10_000
LIMIT = 200
LARGEST_SHARE = 0.05

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Trials:
    """Many comparisons at once.

    Attributes:
        steps: Steps to the target, inf if not reached; shape (trials, names, workloads, seeds).
        fp32: The same of the control; shape (trials, workloads, seeds).
    """

    steps: np.ndarray
    fp32: np.ndarray

    def told_apart(self) -> np.ndarray:
        """Which names the rule tells apart from the best; shape (trials, names)."""
        _, names, workloads, seeds = self.steps.shape
        pairs = names * (names - 1) // 2
        chance = 2 * pairs * 4.0**-seeds  # of all good luck here and none there
        if seeds < MINIMUM_SEEDS or chance > LARGEST_CHANCE:
            return np.zeros(self.steps.shape[:2], bool)
        least = np.minimum(self.steps, LIMIT + 1) / np.minimum(self.fp32, LIMIT + 1)[:, None]
        logs = np.log(least).mean(axis=2)
        best = logs.mean(axis=2).argmin(axis=1)[:, None, None]
        difference = logs - np.take_along_axis(logs, best, axis=1)
        error = difference.std(axis=2, ddof=1) / math.sqrt(seeds)
        half = stats.t.ppf(1 - FAMILY_ERROR / pairs / 2, seeds - 1) * error
        slower = difference.mean(axis=2) - half > 1e-12
        reached = np.isfinite(self.steps).sum(axis=3)
        best_reached = np.take_along_axis(reached, best, axis=1)
        nowhere = ((best_reached == seeds) & (reached == 0)).any(axis=2)
        if chance * workloads > LARGEST_CHANCE_UNREACHED:
            return slower
        return slower | nowhere

    def decide(self, trial: int) -> set[str]:
        """The names that `decide` tells apart in one trial."""
        names = [f"c{number}" for number in range(self.steps.shape[1])]
        table = {
            name: {f"w{number}": values for number, values in enumerate(workloads)}
            for name, workloads in zip(
                [*names, "fp32"], [*self.steps[trial], self.fp32[trial]], strict=True
            )
        }
        found = decide(runs_table(table, LIMIT), dict.fromkeys(names, PolicyChoice.of()))
        assert (found.kind == "winner") == (len(found.winning_set) < len(names))
        return set(names) - set(found.winning_set)


def unreached(share: float) -> Draw:
    """Runs of which a share never reaches the target."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.where(rng.random(shape) < share, np.inf, rng.normal(100, 10, shape).round())

    return draw


POPULATIONS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(100, 10, shape).clip(1).round(),
    "skewed": lambda rng, shape: rng.lognormal(4, 0.6, shape).clip(1, LIMIT),
    "heavy tails": lambda rng, shape: (100 + 5 * rng.standard_t(2, shape)).clip(1, LIMIT).round(),
    "two values": lambda rng, shape: rng.choice([90.0, 100.0], shape),
    "three values": lambda rng, shape: rng.integers(95, 98, shape).astype(float),
    "mostly equal": lambda rng, shape: rng.choice([90.0, 100.0], shape, p=[0.1, 0.9]),
    "a third unreached": unreached(1 / 3),
    "half unreached": unreached(1 / 2),
}


def simulate(population: str, names: int, workloads: int, seeds: int) -> Trials:
    """Trials of one population under several names; the same for the same arguments."""
    rng = np.random.default_rng([len(population), names, workloads, seeds])
    draw = POPULATIONS[population]
    fp32 = draw(rng, (TRIALS, workloads, seeds))
    return Trials(
        steps=draw(rng, (TRIALS, names, workloads, seeds)),
        fp32=np.where(np.isfinite(fp32), fp32, 100.0),
    )


@pytest.mark.parametrize("seeds", [5, 8])
@pytest.mark.parametrize("workloads", [1, 2])
@pytest.mark.parametrize("names", [2, 5, 10])
@pytest.mark.parametrize("population", POPULATIONS)
def test_one_population_under_several_names_has_a_winner_in_at_most_5_percent_of_trials(
    population: str, names: int, workloads: int, seeds: int
) -> None:
    trials = simulate(population, names, workloads, seeds)
    share = trials.told_apart().any(axis=1).mean()
    error = math.sqrt(share * (1 - share) / TRIALS)  # at 5 %: 0.2 %
    assert share <= LARGEST_SHARE, f"{share:.2%} ± {error:.2%} of {TRIALS} trials"


def closed_form(differences: np.ndarray, error: float = 0.05) -> Interval:
    """`paired_interval` with the bootstrap's standard error in closed form; see its own test."""
    estimate, seeds = float(differences.mean()), len(differences)
    standard_error = differences.std(ddof=1) / math.sqrt(seeds)
    half = float(stats.t.ppf(1 - error / 2, seeds - 1) * standard_error)
    return Interval(estimate, estimate - half, estimate + half)


@pytest.mark.parametrize("names", [2, 5])
@pytest.mark.parametrize("population", POPULATIONS)
def test_the_rule_written_twice_is_one_rule(
    monkeypatch: pytest.MonkeyPatch, population: str, names: int
) -> None:
    monkeypatch.setattr(verdict, "paired_interval", closed_form)
    trials = simulate(population, names, 2, 5)
    told_apart = trials.told_apart()
    winner = told_apart.any(axis=1)
    some = [*np.flatnonzero(winner)[:4], *np.flatnonzero(~winner)[:3]]
    for trial in some:
        expected = {f"c{number}" for number in np.flatnonzero(told_apart[trial])}
        assert trials.decide(trial) == expected


@pytest.mark.parametrize("names", [2, 5])
def test_a_real_difference_of_ten_percent_is_found(names: int) -> None:
    rng = np.random.default_rng(names)
    found = 0
    for _ in range(20):
        steps = rng.normal(100, 1, (1, names, 2, 5)).round()
        steps[:, 1:] *= 1.1
        trials = Trials(steps.round(), rng.normal(100, 1, (1, 2, 5)).round())
        found += trials.decide(0) == {f"c{number}" for number in range(1, names)}
    assert found == 20


@pytest.mark.parametrize("names", [2, 5])
def test_more_seeds_find_smaller_differences(names: int) -> None:
    def power(seeds: int) -> float:
        rng = np.random.default_rng(seeds)
        steps = rng.normal(100, 3, (2000, names, 2, seeds))
        steps[:, 1:] *= 1.06
        told = Trials(steps, rng.normal(100, 3, (2000, 2, seeds))).told_apart()
        return float(told[:, 1:].all(axis=1).mean())

    assert power(5) < power(8) < power(16)
    assert power(16) > 0.9
