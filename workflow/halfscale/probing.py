"""Record one probe by hand, into one file, and say what it shows."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halfscale.config import parse_whole
from halfscale.magnitudes import (
    LOWEST_EXPONENT,
    TOLERABLE_LOSS,
    largest_safe_exponent,
    smallest_useful_exponent,
)
from halfscale.plan import ProbeSpec
from halfscale.planner import LARGEST_SEED
from halfscale.policies.checks import LARGEST_COUNT
from halfscale.probe import record_probe
from halfscale.probe_files import ProbeFile, read_probe_file, write_probe_file
from halfscale.records import tenths
from halfscale.replay import Probe
from halfscale.single import name_workload, plan_single, read_settings
from halfscale.wording import name_window, power


class ProbeFailed(ValueError):
    """The workload cannot be probed; the message is one line that says what to change."""


def plan_probe(
    workload: str, settings: Sequence[str], *, steps: str, seed: str, device: str, threads: str
) -> ProbeSpec:
    """What a command line asks to be probed.

    Args:
        workload: ``path/to/file.py:build``, ``package.module:build`` or a built-in name.
        settings: ``key=value`` each, for ``build``'s parameters.
        steps: The number of steps; numbers as people write them.
        seed: The seed.
        device: auto, cpu or cuda.
        threads: CPU threads.

    Raises:
        ValueError: If one of them cannot be used, in one line.
    """
    count = read_whole("--steps", steps, 2, LARGEST_COUNT, "500")
    chosen = read_whole("--seed", seed, 0, LARGEST_SEED, "0")
    cores = read_whole("--threads", threads, 1, 1024, "1")
    built_in = workload.isidentifier()
    name = workload if built_in else name_workload(workload)
    block = {} if built_in else {"entry": workload}
    block |= read_settings(settings) | {"steps": count}
    return plan_single(name, block, device, seed=chosen, threads=cores).probe(name, chosen)


def read_whole(option: str, text: str, low: int, high: int, example: str) -> int:
    """A whole number of the command line.

    Raises:
        ValueError: If it is none or beyond the limits, in one line.
    """
    try:
        return parse_whole(text, low, high)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}; write {option} {example}") from None


def probe_by_hand(spec: ProbeSpec, output: Path, progress: Callable[[str], None]) -> ProbeFile:
    """Train the reference run of a specification and write its probe into one file.

    A training that diverges leaves the steps up to there.

    Args:
        spec: What to run.
        output: The file.
        progress: Is given one line at about every tenth of the steps.

    Raises:
        ProbeFailed: If the workload's own code fails.
        OSError: If the file cannot be written.
        ValueError: If the file's name cannot be used.
    """
    _check_output(output)
    columns, ended = record_probe(spec, progress)
    if ended.outcome not in ("ok", "diverged"):
        text = " ".join(str(ended.error).split())
        raise ProbeFailed(f"{spec.entry or spec.workload}: {ended.outcome}: {text}")
    write_probe_file(
        output,
        columns,
        spec=spec,
        outcome=ended.outcome,
        error=ended.error,
        environment=ended.environment,
    )
    return read_probe_file(output)


def _check_output(output: Path) -> None:
    """Find out before the training whether its result can be kept."""
    if output.is_dir():
        raise ValueError(f"-o {output} is a folder; write -o {output / 'probe.parquet'}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ValueError(f"-o {output} {reason}; write -o probe.parquet") from None


def summarise_probe(file: ProbeFile) -> str:
    """What a probe shows: its length, its magnitudes, the usable scales, and what to do next."""
    probe, about = Probe.of(file.table), file.about
    lines = []
    if about:
        spec, done = about.spec, f"{probe.steps} of {about.spec.steps} steps"
        lines.append(f"{file.path}: {spec.workload}, {done}, seed {spec.seed}, {about.arithmetic}")
        if about.error:
            lines.append(f"the training {about.outcome} even in bf16: {about.error}")
    (filled,) = np.nonzero(probe.counts.sum(axis=0))
    if len(filled):
        low, high = filled[0] + LOWEST_EXPONENT, filled[-1] + LOWEST_EXPONENT + 1
        lines.append(f"gradient magnitudes from {power(low)} to {power(high)}")
    else:
        lines.append("all gradients are zero: does the loss come from what the optimizer moves?")
    lines.append(
        f"usable scales (no overflow, at most {TOLERABLE_LOSS:.0%} of the non-zero elements lost):"
    )
    parts = tenths(probe.steps)
    tenth = parts["start"].stop
    safe = largest_safe_exponent(probe.largest)
    useful = smallest_useful_exponent(probe.counts, TOLERABLE_LOSS)
    for title, part in (
        (f"the first {tenth} steps", parts["start"]),
        (f"the last {tenth} steps", parts["end"]),
        ("throughout", parts["all"]),
    ):
        lines.append(f"  {title:<20} {_describe_window(useful[part], safe[part])}")
    lines.append(f"next: halfscale replay {shlex.quote(str(file.path))}")
    return "\n".join(lines)


def _describe_window(useful: NDArray[np.float64], safe: NDArray[np.float64]) -> str:
    low, high = float(useful.max()), float(safe.min())
    named = name_window(low, high)
    if high == -np.inf:
        return f"{named}: a gradient is infinite without any scale"
    if low > high:
        return f"{named}: some step needs {power(low)}, some overflows above {power(high)}"
    return named
