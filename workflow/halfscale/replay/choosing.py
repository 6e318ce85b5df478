"""Which configurations are worth a real training, by what a replay predicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfscale.plan import PolicyChoice, canonical_json
from halfscale.replay.engine import Replay, replay

OBJECTIVE = (
    "The predicted cost of a configuration is counted in steps: a skipped step, or one not taken "
    "after an abort, costs 1, and an applied step that lost a share x of its non-zero gradient "
    "elements costs x. The least mean cost over the seeds is best. Ties go to the least regret "
    "(the mean distance of the scale from the largest safe power of two, in bits), then to the "
    "set nearest to PyTorch's defaults. Configurations that abort or get stuck on any seed are "
    "left out, and of those that behave alike on every seed only one is named, the nearest to the "
    "defaults."
)
"""What `rank` and `propose` do, in words for a page."""

# Sums of shares differ in their last bits by the order of adding; that must not break a tie.
_DIGITS = 9


@dataclass(frozen=True)
class Proposal:
    """A configuration worth a real training.

    Attributes:
        choice: The configuration.
        index: Its row in the replay.
        cost: Its predicted cost in steps, the mean over the probes.
        regret: Its distance from the oracle in bits, the mean over the probes.
        alike: The rows of the replay whose traces are the same on every probe, itself included.
    """

    choice: PolicyChoice
    index: int
    cost: float
    regret: float
    alike: tuple[int, ...]


def cost(result: Replay) -> NDArray[np.float64]:
    """The predicted cost in steps, as `OBJECTIVE` says.

    Returns:
        The cost of every configuration on every probe, shape (configurations, probes), float64.
    """
    not_taken = result.probes[0].steps - result.steps_run
    return result.skipped + result.lost_steps + not_taken


def rank(result: Replay) -> list[int]:
    """The rows of a replay from best to worst, those that abort or get stuck left out."""
    usable = np.flatnonzero(~(result.aborted | result.stuck).any(axis=1))
    costs = cost(result).mean(axis=1).round(_DIGITS)
    regrets = result.regret.mean(axis=1).round(_DIGITS)

    def key(row: int) -> tuple[object, ...]:
        choice = result.choices[row]
        # The text decides last, so that the order of the choices never does.
        return costs[row], regrets[row], choice.distance, canonical_json(choice)

    return sorted(usable.tolist(), key=key)


def propose(result: Replay, k: int, exclude: Iterable[PolicyChoice] = ()) -> list[Proposal]:
    """The best configurations, each of its own behaviour.

    Args:
        result: The replay to choose from.
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
    alike: dict[bytes, list[int]] = {}
    for row, behaviour in enumerate(_behaviours(result)):
        alike.setdefault(behaviour, []).append(row)
    known = set(_behaviours_of(result, list(exclude)))
    proposals: list[Proposal] = []
    costs, regrets = cost(result).mean(axis=1), result.regret.mean(axis=1)
    for row in rank(result):
        behaviour = result.fingerprint[row].tobytes()
        if behaviour in known:
            continue
        # Those alike have equal cost and regret, so the first is the nearest to the defaults.
        known.add(behaviour)
        figures = float(costs[row]), float(regrets[row])
        proposals.append(Proposal(result.choices[row], row, *figures, tuple(alike[behaviour])))
        if len(proposals) == k:
            break
    return proposals


def _behaviours(result: Replay) -> list[bytes]:
    return [row.tobytes() for row in result.fingerprint]


def _behaviours_of(result: Replay, choices: Sequence[PolicyChoice]) -> list[bytes]:
    """How configurations behave that need not be among those replayed."""
    return _behaviours(replay(choices, result.probes, result.epsilon)) if choices else []
