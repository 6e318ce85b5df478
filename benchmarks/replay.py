"""Time the replay of many torch configurations against their plain state machines, in one run.

    python benchmarks/replay.py [--configurations 10000 --steps 1000 --seeds 5 --sample 20]

Prints the seconds of the whole replay (best of --repeats), the process's peak memory, and how many
times faster a configuration is than by `replay_traces`, which drives the state machine step by
step and measures nothing. The probes are synthetic: the largest gradient wanders over some powers
of two, so that configurations overflow, grow and back off many times. On one core, if the
environment says so before numpy loads; this script says so itself.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import time

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402

from halfscale.magnitudes import BINS, LOWEST_EXPONENT  # noqa: E402
from halfscale.plan import PolicyChoice  # noqa: E402
from halfscale.replay import Probe, grid, replay, replay_traces  # noqa: E402


def synthetic_probe(steps: int, seed: int) -> Probe:
    """A run whose gradients wander: a normal histogram of exponents, 12 bits below the largest."""
    random = np.random.default_rng(seed)
    exponent = np.cumsum(random.normal(0, 0.4, steps)) % 12 - 6
    exponents = np.arange(LOWEST_EXPONENT, LOWEST_EXPONENT + BINS)
    centre = exponent[:, None] - 12
    counts = np.rint(1e6 * np.exp(-((exponents - centre) ** 2) / 40))
    counts[exponents > exponent[:, None]] = 0
    largest = 2.0**exponent
    return Probe(largest, largest / 2, counts)


def torch_choices(count: int) -> list[PolicyChoice]:
    """That many torch configurations, no two the same."""
    axes = {
        "init_scale": [2.0**power for power in range(25)],
        "growth_factor": [1.5, 2.0, 4.0, 8.0],
        "backoff_factor": [0.125, 0.25, 0.5, 0.75],
    }
    intervals = -(-count // 400)
    choices = grid("torch", {**axes, "growth_interval": range(5, 5 + intervals)})
    return list(itertools.islice(choices, count))


def seconds_of_plain(choices: list[PolicyChoice], probes: list[Probe]) -> float:
    """The seconds a configuration takes by its state machine over all probes."""
    started = time.perf_counter()
    for choice in choices:
        for probe in probes:
            replay_traces(choice, probe)
    return (time.perf_counter() - started) / len(choices)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configurations", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sample", type=int, default=20, help="configurations driven plainly")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    probes = [synthetic_probe(given.steps, seed) for seed in range(given.seeds)]
    choices = torch_choices(given.configurations)
    taken = []
    for _ in range(given.repeats):
        started = time.perf_counter()
        result = replay(choices, probes)
        taken.append(time.perf_counter() - started)
    seconds = min(taken)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sample = choices[:: max(1, len(choices) // given.sample)][: given.sample]
    plain = seconds_of_plain(sample, probes)
    print(
        f"{len(choices):,} torch configurations x {given.steps:,} steps x {given.seeds} seeds, "
        f"one core: {seconds:.2f} s (of {given.repeats}), peak memory {peak:.2f} GiB\n"
        f"{result.skipped.sum():,} skipped, {result.growths.sum():,} growths, "
        f"{len(np.unique(result.fingerprint, axis=0)):,} different behaviours\n"
        f"a configuration: {seconds / len(choices) * 1e3:.3f} ms, by its state machine "
        f"{plain * 1e3:.3f} ms, {plain * len(choices) / seconds:.0f} times faster"
    )


if __name__ == "__main__":
    main()
