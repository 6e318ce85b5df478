"""Replay configurations over probes that lie in files, and say what that predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfscale.candidates import make_grid, parse_choice
from halfscale.config import flow
from halfscale.plan import PolicyChoice
from halfscale.probe_files import ProbeFile, read_probe_file
from halfscale.replay import OBJECTIVE, Probe, Replay, cost, rank, replay
from halfscale.wording import describe, fill, show_number, spread, tabulate

DEFAULT = PolicyChoice.of("torch")
_CAVEAT = (
    "A prediction from gradients recorded in bf16, without a skipped step; the proof is a training "
    "of each: write into config.yaml"
)


@dataclass(frozen=True)
class Standing:
    """Where one configuration stands.

    Attributes:
        choice: The configuration.
        row: Its row in the replay.
        place: Its rank among the grid's different behaviours, from 1; None if it is none of
            them, or aborts or gets stuck.
        ahead: How many of the grid's behaviours are better; None if it aborts or gets stuck.
        alike: How many configurations of the grid behave like it, and itself.
    """

    choice: PolicyChoice
    row: int
    place: int | None
    ahead: int | None
    alike: int


@dataclass(frozen=True)
class Comparison:
    """Everything a replay over probes has to say.

    Attributes:
        files: The probes.
        result: The replay of the grid, PyTorch's defaults and what is to be compared.
        asked: How many configurations the grid holds.
        standings: The best of each behaviour in the grid, best first; all of them.
        compared: PyTorch's defaults, then what is to be compared, by the names to show.
    """

    files: tuple[ProbeFile, ...]
    result: Replay
    asked: int
    standings: list[Standing]
    compared: dict[str, Standing]


def compare(
    paths: Sequence[Path],
    policies: Sequence[str] = (),
    ranges: Sequence[str] = (),
    compared: Sequence[str] = (),
) -> Comparison:
    """Replay a grid over probes.

    Args:
        paths: The probes, several seeds of one workload.
        policies: Names of policies; PyTorch's if there is none.
        ranges: What `halfscale.candidates.make_grid` takes.
        compared: What `halfscale.candidates.parse_choice` takes.

    Raises:
        ValueError: If a probe or a range cannot be used, in one line that says what to do.
    """
    wanted = {f"--compare {text}": parse_choice(text) for text in compared}
    files = _read_all(paths)
    probes = [Probe.of(file.table) for file in files]
    choices = make_grid(policies, ranges, probes[0].steps)
    named = {"PyTorch's defaults": DEFAULT, **wanted}
    rows = choices + [choice for choice in named.values() if choice not in choices]
    result = replay(rows, probes)
    standings, by_row = rank_behaviours(result, len(choices))
    places = {name: by_row[rows.index(choice)] for name, choice in named.items()}
    return Comparison(files, result, len(choices), standings, places)


def _read_all(paths: Sequence[Path]) -> tuple[ProbeFile, ...]:
    files = tuple(read_probe_file(path) for path in paths)
    names = [file.path.resolve() for file in files]
    if twice := [path for path in names if names.count(path) > 1]:
        raise ValueError(f"{twice[0]} is given twice; give the probe of each seed once")
    if len({len(file.table) for file in files}) > 1:
        lengths = ", ".join(f"{file.path} has {len(file.table)} steps" for file in files)
        raise ValueError(
            f"the probes differ in length: {lengths}; record all of them with the same --steps, "
            "or replay each alone"
        )
    specs = [file.about.spec for file in files if file.about]
    kinds = {(spec.workload, spec.source, str(sorted(spec.parameters.items()))) for spec in specs}
    if len(kinds) > 1:
        names_of = ", ".join(dict.fromkeys(spec.workload for spec in specs))
        raise ValueError(
            f"the probes are not seeds of one training, but of {len(kinds)} ({names_of}, or other "
            "settings or code); replay each alone"
        )
    return files


def rank_behaviours(result: Replay, asked: int) -> tuple[list[Standing], list[Standing]]:
    """The configurations by what they do: those whose scales are the same at every step are one.

    Args:
        result: The replay of a grid and, after it, of others, which are placed but not ranked.
        asked: How many configurations the grid holds.

    Returns:
        The first of each behaviour in the grid, best first; and the standing of every row.
    """
    marks = [row.tobytes() for row in result.fingerprint]
    groups: dict[bytes, list[int]] = {}
    ahead: dict[int, int] = {}
    for row in rank([result]):
        ahead[row] = len(groups)
        if row < asked:
            groups.setdefault(marks[row], []).append(row)
    places = {mark: place for place, mark in enumerate(groups, 1)}

    def standing(row: int) -> Standing:
        place = places.get(marks[row])
        before = ahead.get(row) if place is None else place - 1
        alike = len(groups.get(marks[row], [])) + (place is None or row >= asked)
        return Standing(result.choices[row], row, place, before, alike)

    by_row = [standing(row) for row in range(len(marks))]
    return [by_row[rows[0]] for rows in groups.values()], by_row


def measures(result: Replay, row: int) -> dict[str, Any]:
    """The figures of one configuration, a list where each probe has its own."""
    return {
        "cost": float(cost(result)[row].mean()),
        "skipped": result.skipped[row].tolist(),
        "longest_streak": result.longest_streak[row].tolist(),
        "below_window": result.below_window[row].tolist(),
        "final_scale": [s if math.isfinite(s) else None for s in result.final_scale[row].tolist()],
        "regret": float(result.regret[row].mean()),
        "aborted": bool(result.aborted[row].any()),
        "stuck": bool(result.stuck[row].any()),
    }


_NOTE = (
    "cost in steps; streak: most skipped in a row; below: applied steps below the usable window; "
    "regret in bits; a range is over the probes"
)
_OUTSIDE = "; a rank <1, 1–2 or >9: not in the grid, where it would stand"
HEAD = ["rank", "cost", "skipped", "streak", "below", "final scale", "regret", "configuration"]


def describe_comparison(comparison: Comparison, top: int) -> str:
    """The objective, the ranked table, where the compared ones stand, and the line to paste."""
    standings = comparison.standings
    lines = [_describe_probe(file) for file in comparison.files]
    lines += ["", fill(OBJECTIVE), ""]
    lines.append(
        f"{comparison.asked} configurations, {len(standings)} different behaviours; the best:"
    )
    outside = _OUTSIDE if _has_outside(comparison) else ""
    rows = [HEAD, *(_row(comparison, s, describe(s.choice)) for s in standings[:top])]
    rows += [_row(comparison, s, name) for name, s in comparison.compared.items()]
    lines += [tabulate(rows), fill(f"({_NOTE}{outside})")]
    if not standings:
        lines += ["", "every configuration aborts or gets stuck; try a lower init_scale"]
        return "\n".join(lines)
    lines += ["", standings[0].choice.constructor(_device(comparison)), "", fill(_CAVEAT)]
    lines.append(_block(standings[0].choice))
    return "\n".join(lines)


def _describe_probe(file: ProbeFile) -> str:
    if file.about is None:
        return f"{file.path}: {len(file.table)} steps"
    spec, outcome = file.about.spec, file.about.outcome
    ended = "" if outcome == "ok" else f", which {outcome} after {len(file.table)}"
    return f"{file.path}: {spec.workload}, seed {spec.seed}, {spec.steps} steps{ended}"


def _has_outside(comparison: Comparison) -> bool:
    standings = comparison.compared.values()
    return any(s.place is None and s.ahead is not None for s in standings)


def _rank(standing: Standing, behaviours: int) -> str | None:
    """Its place, or between which it would have one; None if it aborts or gets stuck."""
    if standing.ahead is None:
        return None
    if standing.place is not None:
        return str(standing.place)
    if not standing.ahead:
        return "<1"
    within = standing.ahead < behaviours
    return f"{standing.ahead}–{standing.ahead + 1}" if within else f">{behaviours}"


def _row(comparison: Comparison, standing: Standing, name: str) -> list[str]:
    result = comparison.result
    figures = measures(result, standing.row)
    left_out = "aborts" if figures["aborted"] else "stuck"
    alike = f" (and {standing.alike - 1} alike)" if standing.alike > 1 else ""
    finals = sorted({show_number(value) for value in result.final_scale[standing.row].tolist()})
    return [
        _rank(standing, len(comparison.standings)) or left_out,
        f"{figures['cost']:.4g}",
        spread(figures["skipped"], 9),
        spread(figures["longest_streak"], 9),
        spread(figures["below_window"], 9),
        "–".join(finals[:: max(1, len(finals) - 1)]),
        f"{figures['regret']:.2f}",
        name + alike,
    ]


def _device(comparison: Comparison) -> str:
    about = comparison.files[0].about
    return about.spec.device if about else "cuda"


def _block(best: PolicyChoice) -> str:
    policy = {} if best.policy == "torch" else {"policy": best.policy}
    parameters = {key: value for key, value in best.parameters.items() if value is not None}
    return flow({"configurations": {"best": {**policy, **parameters}, "default": {}}})


def comparison_as_json(comparison: Comparison, top: int) -> dict[str, Any]:
    """The same for programs."""
    result, best = comparison.result, comparison.standings[:1]

    def entry(standing: Standing) -> dict[str, Any]:
        return {
            "rank": standing.place,
            "ahead": standing.ahead,
            **standing.choice.model_dump(),
            **measures(result, standing.row),
            "alike": standing.alike,
        }

    return {
        "probes": [str(file.path) for file in comparison.files],
        "steps": result.probes[0].steps,
        "objective": OBJECTIVE,
        "configurations": comparison.asked,
        "behaviours": len(comparison.standings),
        "ranked": [entry(standing) for standing in comparison.standings[:top]],
        "compared": {name: entry(standing) for name, standing in comparison.compared.items()},
        "constructor": best[0].choice.constructor(_device(comparison)) if best else None,
    }
