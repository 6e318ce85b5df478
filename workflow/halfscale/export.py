"""``recommendation.json``: the verdict for programs."""

from __future__ import annotations

import hashlib
import math
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import pandas as pd

from halfscale import __version__
from halfscale.plan import Plan, is_found
from halfscale.verdict import RULE, Interval, Verdict

SCHEMA = 1


def build_recommendation(plan: Plan, runs: pd.DataFrame, verdict: Verdict) -> dict[str, Any]:
    """The content of ``recommendation.json``.

    Args:
        plan: What was to be run.
        runs: The table of runs the verdict was taken from.
        verdict: The verdict.

    Returns:
        Plain data without NaN or Infinity; an unbounded interval end is None. The evidence digest
        depends on what was trained and how the losses went, not on times.
    """
    name = verdict.recommended
    choice = plan.configurations[name] if name else None
    return {
        "schema_version": SCHEMA,
        "kind": verdict.kind,
        "sentence": verdict.sentence,
        "recommended": name,
        "policy": choice.policy if choice else None,
        "parameters": choice.parameters if choice else None,
        "constructor": choice.constructor(plan.device) if choice else None,
        "deciding_step": verdict.deciding_step,
        "winning_set": verdict.winning_set,
        "rejected": verdict.rejected,
        "identical": [
            {"configurations": group, "inert_knobs": _inert_in_all(runs, group)}
            for group in verdict.identical
        ],
        "found_by_search": [key for key in sorted(plan.configurations) if is_found(key)],
        "policies": {key: choice.policy for key, choice in sorted(plan.configurations.items())},
        "scores": {
            key: {
                **asdict(score),
                "ratio": _limits(score.ratio),
                "against_best": _limits(score.against_best),
            }
            for key, score in verdict.scores.items()
        },
        "rule": list(RULE),
        "evidence": {
            "digest": _evidence_digest(runs),
            "runs": len(runs),
            "workloads": {key: block.steps for key, block in sorted(plan.workloads.items())},
            "seeds": list(plan.seeds),
            "device": plan.device,
            "arithmetic": sorted(set(runs["arithmetic"])),
        },
        "versions": {
            "halfscale": __version__,
            "torch": version("torch"),
            "python": platform.python_version(),
        },
    }


def _limits(interval: Interval) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in asdict(interval).items()}


def _inert_in_all(runs: pd.DataFrame, group: list[str]) -> list[str]:
    """The parameters that never acted in any run of any of the configurations."""
    texts = runs[runs["configuration"].isin(group)]["inert_knobs"].fillna("")
    sets = [set(filter(None, text.split(", "))) for text in texts]
    return sorted(set.intersection(*sets)) if sets else []


def _evidence_digest(runs: pd.DataFrame) -> str:
    lines = sorted(runs["digest"] + " " + runs["outcome"] + " " + runs["curve"])
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
