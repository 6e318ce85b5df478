"""Replay configurations over probes: what each would have skipped, lost and done to the scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfscale.magnitudes import TOLERABLE_LOSS
from halfscale.plan import PolicyChoice
from halfscale.policies import FloorReached
from halfscale.replay.probe import Probe, check_epsilon, overflows
from halfscale.replay.rules import Lanes, make_lanes
from halfscale.replay.tally import Tally

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Replay:
    """What every configuration did over every probe. Arrays have shape (configurations, probes).

    Attributes:
        choices: The configurations, in the order of the rows.
        probes: The probes, in the order of the columns.
        epsilon: The lost share above which a scale is below its usable window.
        steps_run: Steps until the end or the abort, the aborting step included. int64.
        skipped: Skipped steps. int64.
        longest_streak: The most steps skipped in a row. int64.
        calibration: Steps skipped before the first applied one; all that ran if none was. int64.
        growths: Steps after which the scale was higher than before. int64.
        backoffs: Steps after which it was lower. int64.
        below_window: Applied steps that lost more than a share epsilon. int64.
        final_scale: The scale the policy leaves behind. float64.
        lost_steps: The sum of the lost shares of the applied steps. float64, in steps.
        mean_lost: Their mean, 0 where no step was applied. float64.
        regret: The mean of |log2(scale / oracle)| in bits, the oracle being the largest safe power
            of two of the step. Steps without one (no gradient, or none that any scale saves) are
            left out, 0 if that leaves none. A scale of 0 counts as 2^-1075 and infinity as 2^1024,
            the powers just beyond what a float64 holds. float64.
        aborted: Whether the policy gave up training at its floor. bool.
        stuck: Whether the last half or more of the steps was skipped, without an abort. bool.
        fingerprint: Equal where the traces are: the same scale at each step, hence the same
            overflows, up to the end or the same abort. uint64.
    """

    choices: tuple[PolicyChoice, ...]
    probes: tuple[Probe, ...]
    epsilon: float
    steps_run: Counts
    skipped: Counts
    longest_streak: Counts
    calibration: Counts
    growths: Counts
    backoffs: Counts
    below_window: Counts
    final_scale: Reals
    lost_steps: Reals
    mean_lost: Reals
    regret: Reals
    aborted: Flags
    stuck: Flags
    fingerprint: NDArray[np.uint64]

    @classmethod
    def measures(cls) -> list[str]:
        """The names of the arrays."""
        return [field.name for field in fields(cls)][3:]

    def columns(self) -> dict[str, NDArray[Any]]:
        """A long table, a row a configuration and probe: both indices, then every measure."""
        rows, columns = np.indices(self.skipped.shape).reshape(2, -1)
        indices = {"configuration": rows, "probe": columns}
        return indices | {name: getattr(self, name).ravel() for name in self.measures()}


@dataclass(frozen=True, eq=False)
class Traces:
    """One configuration over one probe, step by step, up to the end or the abort.

    Attributes:
        scale: The scale in use at each step, shape (steps run,), float64.
        overflow: Whether the step overflowed and was skipped, shape (steps run,).
        final_scale: The scale the policy leaves behind.
        ended: Why the policy gave up, or None.
    """

    scale: Reals
    overflow: Flags
    final_scale: float
    ended: str | None


def replay(
    choices: Sequence[PolicyChoice], probes: Sequence[Probe], epsilon: float = TOLERABLE_LOSS
) -> Replay:
    """Drive every configuration over every probe.

    The policies move as their state machines do, bit for bit; those of one kind move together.

    Args:
        choices: The configurations, of any policies.
        probes: One probe a seed, all with the same number of steps.
        epsilon: The lost share above which a scale is below its usable window, from 0 to below 1.

    Returns:
        The measures of every configuration on every probe.

    Raises:
        ValueError: If there is no probe, their lengths differ, or epsilon is no such share.
    """
    check_epsilon(epsilon)
    if len(lengths := {probe.steps for probe in probes}) != 1:
        raise ValueError(f"probes must be of one length, got {sorted(lengths) or 'none'}")
    kinds: dict[str, list[int]] = {}
    for index, choice in enumerate(choices):
        kinds.setdefault(choice.policy, []).append(index)
    table: dict[str, NDArray[Any]] = {
        name: np.zeros((len(choices), len(probes)), dtype=dtype)
        for name, dtype in Tally.DTYPES.items()
    }
    for rows in kinds.values():
        machines = [choices[row].make() for row in rows]
        for column, probe in enumerate(probes):
            measures = _drive(make_lanes(machines), probe, epsilon)
            for name, values in measures.items():
                table[name][rows, column] = values
    return Replay(tuple(choices), tuple(probes), epsilon, **table)


def _drive(lanes: Lanes, probe: Probe, epsilon: float) -> dict[str, NDArray[Any]]:
    """Drive lanes over one probe and measure what they do."""
    tally = Tally(len(lanes.scale), epsilon)
    with np.errstate(all="ignore"):  # scales reach 0 and infinity, and that is a result
        log2_oracle = np.log2(probe.largest_safe_scale())
        for step in range(probe.steps):
            row = probe.row(step, tally.skipped)  # one for all lanes, or one a lane
            overflow = overflows(lanes.scale, probe.largest[row])
            skipped, applied = lanes.running & overflow, lanes.running & ~overflow
            before = lanes.scale.copy()
            tally.note_skips(skipped, applied)
            tally.note_losses(before, applied, probe.lost_table, row)
            tally.note_scale(before, skipped | applied, log2_oracle[row])
            lanes.update(step, skipped, applied, probe.largest_gradient[row])
            tally.note_move(before, lanes.scale)
        return tally.measures(probe.steps, lanes.scale, lanes.running)


def replay_traces(choice: PolicyChoice, probe: Probe) -> Traces:
    """Drive one configuration over one probe and keep every step, for a figure.

    Args:
        choice: The configuration.
        probe: The probe.

    Returns:
        Scale and overflow at each step.
    """
    policy, ended = choice.make(), None
    scales: list[float] = []
    skips: list[bool] = []
    skipped = 0
    for step in range(probe.steps):
        row = probe.row(step, skipped)
        scales.append(policy.scale)
        skips.append(bool(overflows(policy.scale, float(probe.largest[row]))))
        skipped += skips[-1]
        try:
            largest_gradient = float(probe.largest_gradient[row])
            policy.update(skips[-1], largest_gradient=largest_gradient)
        except FloorReached as floor:
            ended = f"step {step}: {floor}"
            break
    return Traces(
        np.array(scales, dtype=np.float64), np.array(skips, dtype=np.bool_), policy.scale, ended
    )
