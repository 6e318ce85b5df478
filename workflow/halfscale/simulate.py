"""Drive policies by hand: what would DeepSpeed have done here?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfscale.config import parse_number
from halfscale.plan import LARGEST_FP16
from halfscale.policies import POLICIES, FloorReached, Policy, make_policy


@dataclass(frozen=True)
class Step:
    """One step as a policy sees it; ``largest_gradient`` is the largest unscaled magnitude."""

    overflow: bool
    largest_gradient: float | None = None


@dataclass
class Simulation:
    """What a policy did over a pattern.

    Attributes:
        name: The policy.
        scales: The scale after each step; shorter than the pattern if the policy gave up.
        states: The whole state after each step.
        ended: Why it gave up, or None.
    """

    name: str
    scales: list[float] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None


def parse_pattern(text: str, largest_gradient: float | None = None) -> list[Step]:
    """Read a pattern such as ``FFX``: F a finite step, X one with an overflow; spaces are ignored.

    Raises:
        ValueError: If the pattern is empty or holds another letter.
    """
    letters = "".join(text.split()).upper()
    if wrong := sorted(set(letters) - set("FX")):
        raise ValueError(
            f"the pattern holds {wrong[0]!r}; write F for a finite step, X for an "
            "overflow, such as FFXFF"
        )
    if not letters:
        raise ValueError("the pattern is empty; write F and X, such as FFXFF")
    return [Step(letter == "X", largest_gradient) for letter in letters]


def read_trace(path: Path) -> list[Step]:
    """Read the overflows of a recorded run: a run's folder or its ``trace.parquet``.

    The pattern is taken as it was recorded: it holds for other policies only as long as their
    scales would have overflowed on the same steps.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    import pyarrow.parquet as pq

    file = path / "trace.parquet" if path.is_dir() else path
    columns = pq.read_table(file, columns=["overflow", "headroom", "scale"]).to_pydict()
    rows = zip(columns["overflow"], columns["headroom"], columns["scale"], strict=True)
    return [
        Step(overflow, None if overflow else LARGEST_FP16 / 2.0**headroom / scale)
        for overflow, headroom, scale in rows
    ]


def parse_settings(names: Sequence[str], settings: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read ``key=value`` (for every policy) and ``policy.key=value`` (for one).

    Returns:
        The parameters by policy.

    Raises:
        ValueError: If a setting has another form, or names a policy that is not asked for.
    """
    parameters: dict[str, dict[str, Any]] = {name: {} for name in names}
    for setting in settings:
        target, equals, text = setting.partition("=")
        if not equals or not target.strip():
            raise ValueError(f"{setting!r} is not of the form key=value, such as init_scale=2**16")
        policy, dot, key = target.strip().rpartition(".")
        if dot and policy not in parameters:
            raise ValueError(f"{setting!r} names {policy!r}, which no --policy asks for")
        for name in [policy] if dot else names:
            parameters[name][key] = _parse_value(text.strip())
    return parameters


def _parse_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    return words[text.lower()] if text.lower() in words else parse_number(text)


def simulate(policy: Policy, steps: Iterable[Step]) -> Simulation:
    """Drive a policy over steps, until they end or it gives up."""
    done = Simulation(policy.name)
    for step in steps:
        try:
            policy.update(step.overflow, largest_gradient=step.largest_gradient)
        except FloorReached as floor:
            done.ended = f"step {len(done.scales)}: {floor}"
            break
        done.scales.append(policy.scale)
        done.states.append(policy.state_dict())
    return done


def simulate_all(
    names: Sequence[str], settings: Iterable[str], steps: Sequence[Step]
) -> list[Simulation]:
    """Drive each named policy over the same steps.

    Raises:
        ValueError: If a policy is unknown or refuses a parameter.
    """
    if unknown := [name for name in names if name not in POLICIES]:
        raise ValueError(f"unknown policy {unknown[0]!r}; known are {', '.join(POLICIES)}")
    parameters = parse_settings(names, settings)
    return [simulate(make_policy(name, **parameters[name]), steps) for name in names]


def short(scale: float) -> str:
    """A scale as text: whole numbers without a point, others in the fewest exact digits."""
    return str(int(scale)) if scale == int(scale) and abs(scale) < 1e16 else repr(scale)


def side_by_side(simulations: Sequence[Simulation], steps: Sequence[Step]) -> str:
    """A table, a row a step, a column a policy; ``-`` where a policy had given up."""
    head = ["step", "", *(simulation.name for simulation in simulations)]
    rows = [
        [
            str(index),
            "X" if step.overflow else "F",
            *(
                short(simulation.scales[index]) if index < len(simulation.scales) else "-"
                for simulation in simulations
            ),
        ]
        for index, step in enumerate(steps)
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [head, *rows]
    )
