"""What the search found: a file that is read only as long as it belongs to the plan.

Configurations found by the search are trained and judged like those that a user listed, so the plan
that everything after the search works with is the user's and these.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from halfscale.plan import Plan, PolicyChoice, canonical_json

PROPOSALS = Path("search", "proposals.json")
"""Where the proposals are, relative to the results folder."""


class ProposalError(RuntimeError):
    """The proposals are missing, damaged or belong to another plan; the message names the file."""


class Proposal(BaseModel):
    """A configuration that the search found.

    Attributes:
        choice: The policy and its parameters.
        cost: Its predicted cost as a share of the steps, mean over workloads and seeds.
        alike: How many configurations of the grid behave alike on every probe, itself included.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    choice: PolicyChoice
    cost: float
    alike: int


class Proposals(BaseModel):
    """The content of ``proposals.json``, beside its own checksum.

    Attributes:
        digest: The digest of the search's specification.
        tried: How many configurations were replayed.
        objective: What was minimised, in words.
        proposals: What to train, best first.
        listed: The predicted cost of each configuration that the user listed, likewise.
        unused: The probes that did not end ok and were not looked at, in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    tried: int
    objective: str
    proposals: list[Proposal]
    listed: dict[str, float]
    unused: list[str]


def extend_plan(plan: Plan, results: Path) -> Plan:
    """The plan with the configurations that its search found; the plan itself without a search.

    Raises:
        ProposalError: If they are missing, damaged or belong to another plan.
    """
    proposals = read_proposals(plan, results)
    if proposals is None:
        return plan
    return plan.with_found([proposal.choice for proposal in proposals.proposals])


def read_proposals(plan: Plan, results: Path) -> Proposals | None:
    """What the search of a plan found; None if the plan has no search.

    Raises:
        ProposalError: If the file is missing, damaged or belongs to another plan.
    """
    spec = plan.search_spec
    if spec is None:
        return None
    path = results / PROPOSALS
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("checksum")
        proposals = Proposals.model_validate(content)
        sealed = seal(proposals)
    except FileNotFoundError:
        _refuse(path, "is missing")
    except (ValueError, KeyError, AttributeError, TypeError, ValidationError):
        _refuse(path, "is truncated or no file of proposals")
    if sealed["checksum"] != checksum:
        _refuse(path, "was edited after it was written")
    if proposals.digest != spec.digest:
        _refuse(path, f"belongs to another search ({proposals.digest}, not {spec.digest})")
    return proposals


def seal(proposals: Proposals) -> dict[str, Any]:
    """The content of the file: plain data with a checksum of its own.

    Raises:
        ValueError: If a number is NaN or infinite.
    """
    content = proposals.model_dump()
    checksum = hashlib.sha256(canonical_json(content).encode()).hexdigest()
    return {**content, "checksum": checksum}


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ProposalError(
        f"{path} {reason}. Mend it: remove the folder and run the same command again: "
        f"rm -r {shlex.quote(str(path.parent))}"
    ) from None
