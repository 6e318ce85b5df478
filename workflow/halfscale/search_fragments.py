"""The piece of the page on what the search found: predicted first, then trained like the others."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from halfscale.html import table
from halfscale.plan import Plan, is_found
from halfscale.proposals import read_proposals


def describe_search(results: Path, verdict: Mapping[str, Any]) -> str:
    """What was tried, what was proposed, what it was predicted to lose and how its training went.

    Args:
        results: The results folder, with the plan beside the tables.
        verdict: The content of ``recommendation.json``.

    Returns:
        HTML, everything in it escaped.

    Raises:
        ProposalError: If the proposals belong to another plan.
    """
    plan = Plan.model_validate_json((results / "tables" / "plan.json").read_text(encoding="utf-8"))
    found = read_proposals(plan, results)
    if found is None:
        return "<p>There was no search (<code>search: off</code>).</p>"
    costs = {**found.listed}
    for number, proposal in enumerate(found.proposals, start=1):
        costs[f"found-{number}"] = proposal.cost
    rows = [
        {
            "configuration": name,
            "from": "the search" if is_found(name) else "config.yaml",
            "parameters": _parameters(plan.configurations[name].parameters),
            "predicted loss of steps": f"{cost:.2%}",
            "verdict": _standing(name, verdict),
        }
        for name, cost in sorted(costs.items(), key=lambda item: (item[1], item[0]))
    ]
    unused = (
        f"<p>Reference runs that did not end ok, and so were not looked at: "
        f"{escape('; '.join(found.unused))}.</p>"
        if found.unused
        else ""
    )
    return (
        f"<p>{found.tried} configurations were replayed over the probes; the best "
        f"{len(found.proposals)} that behave like none of config.yaml were then trained on every "
        "workload and seed, and judged like the others.</p>"
        f"{table(pd.DataFrame(rows)).data}{unused}"
        f"<details><summary>What the search looks for</summary><p>{escape(found.objective)}</p>"
        "</details>"
    )


def _parameters(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_short(value)}" for key, value in parameters.items())


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _standing(name: str, verdict: Mapping[str, Any]) -> str:
    if name == verdict["recommended"]:
        return "recommended"
    if name in verdict["rejected"]:
        return "rejected"
    return "in the winning set" if name in verdict["winning_set"] else "told apart from the best"
