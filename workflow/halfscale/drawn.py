"""Which configurations the figures draw where there are too many to tell apart in one picture.

Nothing is left out of the tables and of the figures' texts; the page says what was not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from halfscale.plan import CONTROLS

# As many as there are colours that can be told apart.
MOST_DRAWN = 10
MOST_RANKED = 30
LEAST_REJECTED = 2
# More lines of single runs, or points of curves, make the file large and the picture no clearer.
MOST_RUN_LINES = 300
MOST_SEED_LINES = 120
MOST_CURVE_POINTS = 20_000

_BY_CONFIGURATION = ("loss", "scale", "skipped")


def rank(verdict: Mapping[str, Any]) -> list[str]:
    """The configurations that were not rejected, best first.

    Args:
        verdict: The content of ``recommendation.json``, here and below.
    """
    scores = verdict["scores"]
    return sorted(scores, key=lambda name: (scores[name]["ratio"]["estimate"], name))


def choose_drawn(verdict: Mapping[str, Any], most: int = MOST_DRAWN) -> list[str]:
    """The configurations to draw, by name: all, or the recommended, the best and some rejected.

    Two of those rejected are among them, if there are, and more where there is room.
    """
    rejected = sorted(verdict["rejected"])
    kept = sorted(rank(verdict), key=lambda name: name != verdict["recommended"])
    if len(verdict["policies"]) <= most:
        return sorted(verdict["policies"])
    few = rejected[: max(LEAST_REJECTED, most - len(kept))]
    return sorted([*kept[: most - len(few)], *few])


def choose_ranked(verdict: Mapping[str, Any]) -> list[str]:
    """The configurations of the ranking, best first; the recommended one is always among them."""
    ranked = rank(verdict)
    kept = ranked[:MOST_RANKED]
    if verdict["recommended"] in ranked[MOST_RANKED:]:
        kept[-1] = verdict["recommended"]
    return kept


def draws_one_seed(verdict: Mapping[str, Any]) -> bool:
    """Whether the scale is drawn of one seed alone, since there are too many runs for all."""
    evidence = verdict["evidence"]
    lines = len(choose_drawn(verdict)) * len(evidence["workloads"]) * len(evidence["seeds"])
    return lines > MOST_RUN_LINES


def draws_seed_lines(verdict: Mapping[str, Any]) -> bool:
    """Whether the loss of each run is drawn as a thin line, since there are few."""
    evidence = verdict["evidence"]
    arms = len(verdict["policies"]) + len(CONTROLS)
    return arms * len(evidence["workloads"]) * len(evidence["seeds"]) <= MOST_SEED_LINES


def steps_a_point(verdict: Mapping[str, Any]) -> int:
    """How many steps one point of a loss curve stands for; 1 unless there are very many points."""
    evidence = verdict["evidence"]
    steps: Mapping[str, int] = evidence["workloads"]
    lines = 1 + (len(evidence["seeds"]) if draws_seed_lines(verdict) else 0)
    arms = len(choose_drawn(verdict)) + len(CONTROLS)
    return math.ceil(arms * lines * sum(steps.values()) / MOST_CURVE_POINTS)


def describe_drawn(verdict: Mapping[str, Any], figure: str) -> str:
    """What a figure leaves out, in words; empty if that is nothing.

    Args:
        verdict: The content of ``recommendation.json``.
        figure: The figure's name.
    """
    words = ""
    ranked, shown = rank(verdict), choose_ranked(verdict)
    if figure == "ranking" and len(shown) < len(ranked):
        words = (
            f"Drawn are {len(shown)} of {len(ranked)} configurations, the best and the recommended "
            "one; the numbers of all are in the text below."
        )
    total, drawn = len(verdict["policies"]), choose_drawn(verdict)
    if figure in _BY_CONFIGURATION and len(drawn) < total:
        words = (
            f"Drawn are {len(drawn)} of {total} configurations: {_describe_choice(verdict)}; the "
            "numbers of all are in the text below."
        )
    if figure == "landscape" and len(drawn) < total:
        words = (
            f"Of {total} configurations {len(drawn)} are looked for there: "
            f"{_describe_choice(verdict)}; the text below has the costs of all that lie in it."
        )
    if figure == "scale" and draws_one_seed(verdict):
        words += f" Of each, seed {verdict['evidence']['seeds'][0]} is drawn."
    if figure == "loss" and (width := steps_a_point(verdict)) > 1:
        thin = ", on a thin line of one" if draws_seed_lines(verdict) else ""
        words += f" Each point stands for {width} steps of all seeds{thin}."
    return words.strip()


def _describe_choice(verdict: Mapping[str, Any]) -> str:
    """Which ones `choose_drawn` chose."""
    drawn = choose_drawn(verdict)
    rejected = sum(name in verdict["rejected"] for name in drawn)
    best = "the recommended one, then the best" if verdict["recommended"] in drawn else "the best"
    kinds = [best] if rejected < len(drawn) else []
    return ", and ".join([*kinds, *([f"{rejected} of those rejected"] if rejected else [])])
