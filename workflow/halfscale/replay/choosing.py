"""Which configurations are worth a real training, by what a replay predicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfscale.plan import PolicyChoice, canonical_json
from halfscale.replay.engine import Replay, replay

OBJECTIVE = (
    "The predicted cost of a configuration is the share of the steps that it loses: a skipped "
    "step, or one not taken after an abort, is lost whole, and an applied step that lost a share x "
    "of its non-zero gradient elements is lost by x. The least mean cost over workloads and seeds "
    "is best. Ties go to the least regret (the mean distance of the scale from the largest safe "
    "power of two, in bits), then to the set nearest to PyTorch's defaults. Configurations that "
    "abort or get stuck anywhere are left out, and of those that behave alike everywhere only one "
    "is named, the nearest to the defaults."
)
"""What `rank` and `propose` do, in words for a page."""

# Sums of shares differ in their last bits by the order of adding; that must not break a tie.
_DIGITS = 9


@dataclass(frozen=True)
class Proposal:
    """A configuration worth a real training.

    Attributes:
        choice: The configuration.
        index: Its row in the replays.
        cost: Its predicted cost as a share of the steps, mean over workloads and seeds.
        regret: Its distance from the oracle in bits, mean over workloads and seeds.
        alike: The rows whose traces are the same on every probe, itself included.
    """

    choice: PolicyChoice
    index: int
    cost: float
    regret: float
    alike: tuple[int, ...]


def cost(result: Replay) -> NDArray[np.float64]:
    """The predicted cost in steps, see `OBJECTIVE`.

    Returns:
        The cost of every configuration on every probe, shape (configurations, probes), float64.
    """
    not_taken = result.probes[0].steps - result.steps_run
    return result.skipped + result.lost_steps + not_taken


def mean_cost(results: Sequence[Replay]) -> NDArray[np.float64]:
    """The predicted cost as a share of the steps, mean over workloads and seeds.

    Args:
        results: The replays of the same configurations over the probes of each workload.

    Returns:
        Shape (configurations,), float64.
    """
    shares = [cost(result).mean(axis=1) / max(result.probes[0].steps, 1) for result in results]
    mean: NDArray[np.float64] = np.mean(shares, axis=0)
    return mean


def _mean_regret(results: Sequence[Replay]) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.mean([one.regret.mean(axis=1) for one in results], axis=0)
    return mean


def rank(results: Sequence[Replay]) -> list[int]:
    """The rows of replays from best to worst, those that abort or get stuck anywhere left out.

    Args:
        results: The replays of the same configurations over the probes of each workload.
    """
    choices = results[0].choices
    fails = [(result.aborted | result.stuck).any(axis=1) for result in results]
    usable = np.flatnonzero(~np.any(fails, axis=0))
    costs, regrets = mean_cost(results).round(_DIGITS), _mean_regret(results).round(_DIGITS)

    def key(row: int) -> tuple[object, ...]:
        choice = choices[row]
        # The text decides last, so that the order of the choices never does.
        return costs[row], regrets[row], choice.distance, canonical_json(choice)

    return sorted(usable.tolist(), key=key)


def propose(
    results: Sequence[Replay], k: int, exclude: Iterable[PolicyChoice] = ()
) -> list[Proposal]:
    """The best configurations, each of its own behaviour.

    Args:
        results: The replays of the same configurations over the probes of each workload.
        k: How many to propose at most.
        exclude: Configurations that need no proposal, such as those a user has listed already.
            Whatever behaves like one of them is not proposed either.

    Returns:
        Up to `k` proposals, best first; fewer if no more behave differently.

    Raises:
        ValueError: If `k` is below 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    behaviours, alike = _behaviours(results), dict[bytes, list[int]]()
    for row, behaviour in enumerate(behaviours):
        alike.setdefault(behaviour, []).append(row)
    known = set(_behaviours_of(list(exclude), results))
    proposals: list[Proposal] = []
    costs, regrets = mean_cost(results), _mean_regret(results)
    for row in rank(results):
        if len(proposals) == k:
            break
        behaviour = behaviours[row]
        if behaviour not in known:
            # Those alike have equal cost and regret, so the first is the nearest to the defaults.
            known.add(behaviour)
            figures = float(costs[row]), float(regrets[row])
            rows = tuple(alike[behaviour])
            proposals.append(Proposal(results[0].choices[row], row, *figures, rows))
    return proposals


def _behaviours(results: Sequence[Replay]) -> list[bytes]:
    """For each configuration a text that is equal where the traces on every probe are."""
    fingerprints = np.concatenate([result.fingerprint for result in results], axis=1)
    return [row.tobytes() for row in fingerprints]


def _behaviours_of(choices: Sequence[PolicyChoice], results: Sequence[Replay]) -> list[bytes]:
    """How configurations behave that need not be among those replayed."""
    if not choices:
        return []
    return _behaviours([replay(choices, result.probes, result.epsilon) for result in results])
