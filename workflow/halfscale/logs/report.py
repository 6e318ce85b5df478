"""What a log says of other settings, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfscale.candidates import make_grid, parse_choice
from halfscale.logs.bounds import Bounds, bound_skips
from halfscale.logs.drive import Driven, drive
from halfscale.logs.estimate import Estimate, count_excess, estimate
from halfscale.logs.infer import Inferred, drop_doubtful
from halfscale.logs.log import ScalingLog, scales_of_steps
from halfscale.logs.reading import read_log
from halfscale.plan import PolicyChoice
from halfscale.wording import describe, fill, show_number, spread, tabulate

BOUNDS = (
    "Skipped, from at least to at most: what holds for all gradients that agree with the log. An "
    "overflow at a scale says that every larger scale overflows in that step, none that every "
    "smaller one is safe; between, both are followed. Gradients are taken not to depend on which "
    "steps were skipped."
)
"""What the bounds mean, in words."""

LIMITS = (
    "A log tells what overflows, not what a low scale rounds to zero: of settings that skip alike, "
    "the one nearest below the largest safe scale stands first. halfscale probe measures both."
)
"""What a log cannot tell, in words."""


LONG = 5000
"""Steps beyond which only the configurations that are named are bounded."""


@dataclass(frozen=True)
class Row:
    """One configuration: what is certain, and its row among those that were estimated.

    Of a long log only what is named is bounded, since that takes a minute each.
    """

    name: str
    choice: PolicyChoice
    bounds: Bounds | None
    estimated: int


@dataclass(frozen=True)
class LogReport:
    """Everything a log has to say.

    Attributes:
        log: The log, mended as its notes say.
        inferred: The scaler that wrote it.
        estimate: The probable magnitudes.
        driven: What all configurations probably did.
        best: The best of the grid, each of its own behaviour.
        named: The log's own configuration, PyTorch's defaults, and what is to be compared.
        asked: How many configurations the grid holds.
    """

    log: ScalingLog
    inferred: Inferred
    estimate: Estimate
    driven: Driven
    best: list[Row]
    named: list[Row]
    asked: int


def examine(
    path: Path, ranges: Sequence[str] = (), compared: Sequence[str] = (), top: int = 10
) -> LogReport:
    """Read a log and replay PyTorch's rule over it.

    Args:
        path: The log.
        ranges: What `halfscale.candidates.make_grid` takes.
        compared: What `halfscale.candidates.parse_choice` takes.
        top: How many of the grid to bound.

    Raises:
        ValueError: If the log or a configuration cannot be used, in one line.
    """
    wanted = _parse_all(compared)
    log, inferred = drop_doubtful(scales_of_steps(read_log(path)))
    if not log.known.any():
        raise ValueError(
            f"{path}: no row has both a scale and an overflow; write both at each step"
        )
    choices = make_grid((), ranges, log.steps)
    own = inferred.choice()
    named = {"this log's own": own} if own else {}
    named |= {"PyTorch's defaults": PolicyChoice.of("torch"), **wanted}
    rows = choices + [choice for choice in named.values() if choice not in choices]
    guess = estimate(log)
    driven = drive(rows, guess)
    best = [group[0] for group in driven.ranked() if group[0] < len(choices)][:top]

    def row(name: str, index: int, bounded: bool = True) -> Row:
        return Row(name, rows[index], bound_skips(rows[index], log) if bounded else None, index)

    return LogReport(
        log=_note_excess(log),
        inferred=inferred,
        estimate=guess,
        driven=driven,
        best=[row(describe(rows[index]), index, log.steps <= LONG) for index in best],
        named=[row(name, rows.index(choice)) for name, choice in named.items()],
        asked=len(choices),
    )


def _parse_all(compared: Sequence[str]) -> dict[str, PolicyChoice]:
    wanted = {f"--compare {text}": parse_choice(text) for text in compared}
    for name, choice in wanted.items():
        if choice.policy != "torch":
            raise ValueError(f"{name}: a log is replayed with policy torch alone; leave out policy")
    return wanted


def _note_excess(log: ScalingLog) -> ScalingLog:
    count, clean = count_excess(log), int(log.clean.sum())
    if not count:
        return log
    text = f"the largest gradient times the scale is beyond fp16's range in {count} clean steps"
    if 2 * count > clean:
        text += ": was it logged before it was unscaled? log it divided by the scale"
    else:
        text += " (fp32 layers or accumulated gradients can do that)"
    return log.noted(text)


def describe_log(report: LogReport) -> str:
    """The whole report as text."""
    log = report.log
    lines = [_describe_content(log), *(fill(f"- {note}") for note in log.notes)]
    lines += [fill(f"- {text}") for text in conclusions(report)]
    lines += ["", *map(fill, (BOUNDS, f"Estimate: {report.estimate.how}.", LIMITS)), ""]
    head = ["rank", "skipped", "estimate", "streak", "final scale", "configuration"]
    rows = [head, *(_cells(str(i), row, report) for i, row in enumerate(report.best, 1))]
    rows += [_cells("", row, report) for row in report.named]
    lines.append(f"{report.asked} configurations; by the estimate the best:")
    lines.append(tabulate(rows))
    bounds = [row.bounds for row in [*report.best, *report.named]]
    if None in bounds:
        lines.append(f"(-: of more than {LONG} steps bounds are computed for --compare alone)")
    if not all(item.exact for item in bounds if item):
        lines.append("(~: scales were taken together; the range may be wider than need be)")
    if report.best and not report.estimate.certain_only:
        lines += ["", report.best[0].choice.constructor("cuda")]
    return "\n".join(lines)


def _describe_content(log: ScalingLog) -> str:
    scale = log.scale[~np.isnan(log.scale)]
    low, high = show_number(float(scale.min())), show_number(float(scale.max()))
    moved = "the scale " + (f"from {low} to {high}" if low != high else f"always {low}")
    count = int(log.overflowed.sum())
    return (
        f"{log.path}: steps {log.first} to {log.first + log.steps - 1}, {log.rows} rows, "
        f"{count} overflow{'s' * (count != 1)}, {moved}"
    )


def conclusions(report: LogReport) -> list[str]:
    """What the log alone says, in sentences."""
    log, inferred = report.log, report.inferred
    scale = log.scale[~np.isnan(log.scale)]
    said = []
    if scale.min() == scale.max():
        said.append(
            f"the scale is {show_number(float(scale[0]))} throughout: growth and backoff never "
            "acted, and every step tells of this one scale alone"
        )
    elif inferred.fault:
        said.append(
            f"no torch.amp.GradScaler moves a scale so: {inferred.fault}; the ranges below hold "
            "all the same, they rest on scale and overflow of each step alone"
        )
    else:
        said.append(f"the scale moved as torch.amp.GradScaler moves it: {_parameters(inferred)}")
    if not log.overflowed.any():
        said.append(
            "there is no overflow: only a lower bound of the largest safe scale is known, "
            f"{show_number(float(np.max(log.safe_up_to)))} at best; a configuration that stays at "
            "or below the logged scale would have skipped nothing, of a higher one nothing is known"
        )
    if log.first:
        said.append(
            f"the log begins at step {log.first}: every configuration is started there anew, with "
            "its own init_scale"
        )
    return said


def _parameters(inferred: Inferred) -> str:
    unknown = {
        "growth_factor": "unknown, it never grew",
        "backoff_factor": "unknown, it never fell",
        "growth_interval": f"more than {inferred.longest_clean}",
    }
    values = {
        "init_scale": inferred.init_scale,
        "growth_factor": inferred.growth_factor,
        "backoff_factor": inferred.backoff_factor,
        "growth_interval": inferred.growth_interval,
    }
    return ", ".join(
        f"{key}={show_number(value)}" if value is not None else f"{key} {unknown.get(key)}"
        for key, value in values.items()
    )


def _cells(rank: str, row: Row, report: LogReport) -> list[str]:
    bounds, driven = row.bounds, report.driven
    sure = "-"
    if bounds:
        sure = spread([bounds.least, bounds.most], 9) + "~" * (not bounds.exact)
    guesses = [
        str(driven.skipped[row.estimated]),
        str(driven.longest_streak[row.estimated]),
        show_number(float(driven.final_scale[row.estimated])),
    ]
    return [rank, sure, *(["-"] * 3 if report.estimate.certain_only else guesses), row.name]


def log_as_json(report: LogReport) -> dict[str, Any]:
    """The whole report for programs."""
    log, certain = report.log, report.estimate.certain_only

    def entry(row: Row) -> dict[str, Any]:
        skipped, streak = (
            None if certain else int(array[row.estimated])
            for array in (report.driven.skipped, report.driven.longest_streak)
        )
        return {
            "name": row.name,
            **row.choice.model_dump(),
            "bounds": row.bounds and asdict(row.bounds),
            "estimated_skipped": skipped,
            "estimated_streak": streak,
        }

    return {
        "log": str(log.path),
        "first_step": log.first,
        "steps": log.steps,
        "rows": log.rows,
        "overflows": int(log.overflowed.sum()),
        "notes": [*log.notes, *conclusions(report)],
        "inferred": asdict(report.inferred),
        "estimate": report.estimate.how,
        "configurations": report.asked,
        "ranked": [entry(row) for row in report.best],
        "compared": [entry(row) for row in report.named],
    }
