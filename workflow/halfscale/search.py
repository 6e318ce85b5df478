"""The search: replay a grid of configurations over all probes and propose the best for training.

What it proposes was only predicted. It is trained on every workload and seed like any other
configuration, and the verdict decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halfscale.grid import grid
from halfscale.plan import Plan, PolicyChoice
from halfscale.proposals import PROPOSALS, Proposal, Proposals, seal
from halfscale.records import read_probe, write_json
from halfscale.replay import OBJECTIVE, Probe, Replay, mean_cost, propose, replay


def search(plan: Plan, results: Path) -> Proposals:
    """Search as the plan says and write ``proposals.json``.

    Raises:
        ValueError: If the plan has no search.
        RecordError: If a probe's file is missing, damaged or belongs to another specification.
        OSError: If the file cannot be written.
    """
    spec = plan.search_spec
    if spec is None:
        raise ValueError("the plan has no search")
    used, unused = read_probes(plan, results)
    longest = max((block.steps for block in plan.workloads.values()), default=1)
    choices = grid(spec.search.policy, spec.search.ranges, steps=longest)
    listed = spec.configurations
    by_user, found = list(listed.values()), list(filter(None, used.values()))
    content = Proposals(
        digest=spec.digest,
        tried=len(choices),
        objective=OBJECTIVE,
        proposals=_choose(choices, found, spec.search.proposals, by_user),
        listed=dict(zip(listed, _costs(by_user, found), strict=True)) if found else {},
        unused=unused,
    )
    write_json(results / PROPOSALS, seal(content))
    return content


def read_probes(plan: Plan, results: Path) -> tuple[dict[str, list[Probe]], list[str]]:
    """The probes that ended ok by workload, a seed each, and in words which others there are.

    Raises:
        RecordError: If a probe's file is missing, damaged or belongs to another specification.
    """
    used: dict[str, list[Probe]] = {workload: [] for workload in sorted(plan.workloads)}
    unused = []
    for spec in plan.probes():
        record, table = read_probe(results, spec)
        if record.outcome == "ok":
            used[spec.workload].append(Probe.of(table))
        else:
            unused.append(f"{spec.workload}, seed {spec.seed} ({record.outcome})")
    return used, unused


def _replays(choices: Sequence[PolicyChoice], probes: Sequence[Sequence[Probe]]) -> list[Replay]:
    return [replay(choices, of_workload) for of_workload in probes]


def _costs(choices: Sequence[PolicyChoice], probes: Sequence[Sequence[Probe]]) -> list[float]:
    costs: list[float] = mean_cost(_replays(choices, probes)).tolist()
    return costs


def _choose(
    choices: Sequence[PolicyChoice],
    probes: Sequence[Sequence[Probe]],
    number: int,
    listed: Sequence[PolicyChoice],
) -> list[Proposal]:
    if not probes:
        return []
    found = propose(_replays(choices, probes), number, list(listed))
    return [Proposal(choice=one.choice, cost=one.cost, alike=len(one.alike)) for one in found]
