"""Time the workflow around the training: parsing, nothing to do, tables, plots and report.

    python benchmarks/pipeline.py [--runs 200] [--many 2000]

Run files are synthetic (written by the package's own writer), so that no training is timed. Times
of Snakemake are given beside those of a trivial one-rule workflow taken in turn in the same run.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from halfscale.config import read_config
from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.plan import Plan
from halfscale.planner import build_plan
from halfscale.records import write_probe, write_run

REPOSITORY = Path(__file__).parents[1]
SNAKEMAKE = [str(Path(sys.executable).parent / "snakemake")]
TRIVIAL = 'rule all:\n    output: "done"\n    shell: "touch {output}"\n'
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "workflow")}


def timed(command: list[str], folder: Path) -> float:
    """Wall seconds of a command that must succeed."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=ENVIRONMENT)
    return time.perf_counter() - started


def compare(name: str, ours: list[str], folder: Path, trivial: Path, pairs: int = 5) -> None:
    """Print the median of ``ours`` over a trivial workflow's dry run, in turn."""
    floor_command = [*SNAKEMAKE, "--cores", "1", "-n"]
    measured = [(timed(ours, folder), timed(floor_command, trivial)) for _ in range(pairs)]
    over = statistics.median(a - b for a, b in measured)
    mine, floor = (statistics.median(column) for column in zip(*measured, strict=True))
    print(f"{name}: {mine:.2f} s, trivial workflow {floor:.2f} s, over it {over:.2f} s")


def synthetic_plan(runs: int) -> Plan:
    """A plan of about so many runs: two workloads, eight arms, as many seeds as it takes."""
    config = read_config(REPOSITORY / "config.yaml")
    seeds = list(range(max(1, round(runs / 16))))
    return build_plan({**config, "seeds": seeds, "device": "cpu", "search": False})


def write_synthetic(plan: Plan, results: Path) -> int:
    """Write the files of every run of the plan; the losses fall and scaled runs skip steps."""
    count = 0
    for count, spec in enumerate(plan.runs(), start=1):  # noqa: B007 - the count is returned
        random = np.random.default_rng(abs(hash((spec.arm, spec.seed))) % 2**32)
        steps = np.arange(spec.steps)
        skipped = (random.random(spec.steps) < 0.02) & (spec.policy is not None)
        loss = 2.0 * np.exp(-steps / 40.0) + 0.1 + 0.01 * random.random(spec.steps)
        trace = {
            "step": steps.tolist(),
            "loss": loss.tolist(),
            "scale": [65536.0] * spec.steps,
            "overflow": skipped.tolist(),
            "applied": (~skipped).tolist(),
            "grad_norm": loss.tolist(),
            "headroom": [3.0] * spec.steps,
            "seconds": [0.001] * spec.steps,
        }
        write_run(
            results / spec.folder,
            trace,
            spec=spec,
            outcome="ok",
            error=None,
            final_scale=65536.0 if spec.policy else None,
            environment={"arithmetic": "synthetic"},
        )
    return count


def write_synthetic_probes(plan: Plan, results: Path) -> None:
    """Write the files of every probe of the plan; a scale of 2^16 overflows in some steps."""
    counts = np.zeros(BINS, dtype=np.int64)
    counts[-30 - LOWEST_EXPONENT : -LOWEST_EXPONENT] = 16
    for spec in plan.probes():
        random = np.random.default_rng(spec.seed)
        largest = np.exp2(random.uniform(-4.0, 0.2, spec.steps))
        probe = {
            "step": list(range(spec.steps)),
            "loss": [0.5] * spec.steps,
            "largest": largest.tolist(),
            "largest_gradient": (largest / 2).tolist(),
            "batch_repeats": [False] * spec.steps,
            "activation_counts": [counts.tolist()] * spec.steps,
            "weight_counts": [counts.tolist()] * spec.steps,
            "activation_zeros": [0] * spec.steps,
            "weight_zeros": [0] * spec.steps,
        }
        write_probe(
            results / spec.folder,
            probe,
            spec=spec,
            outcome="ok",
            error=None,
            environment={"arithmetic": "synthetic"},
        )


def time_readers(runs: int, folder: Path, everything: bool) -> None:
    """Time the readers over synthetic run files."""
    plan = synthetic_plan(runs)
    results = folder / f"results-{runs}"
    count = write_synthetic(plan, results)
    write_synthetic_probes(plan, results)
    halfscale = [sys.executable, "-m", "halfscale"]
    recommendation = folder / "recommendation.json"
    read = ["--plan", plan.canonical_json(), "--results", str(results)]
    print(f"predictions of {count} runs: {timed([*halfscale, 'predict', *read], folder):.1f} s")
    timings = {"tables": timed([*halfscale, "tables", *read], folder)}
    if everything:
        verify = [*halfscale, "verify", "--folder", str(results / "verification")]
        timed(verify, folder)
        tables = results / "tables"
        chosen = ["--plan", str(tables / "plan.json"), "--runs", str(tables / "runs.csv")]
        common = ["--results", str(results), "--recommendation", str(recommendation)]
        places = ["--executed", "s.ipynb", "--page", "s.html", "--attempt", "a.ipynb"]
        timings["verdict"] = timed(
            [
                *halfscale,
                "verdict",
                *chosen,
                "--output",
                str(recommendation),
                "--settings",
                "settings",
            ],
            folder,
        )
        timings["plots"] = timed([*halfscale, "plots", *common], folder)
        timings["report"] = timed([*halfscale, "report", *common, *places], folder)
        size = (folder / "s.html").stat().st_size / 1e6
        print(f"page of {count} runs: {size:.2f} MB")
    shown = ", ".join(f"{name} {value:.1f} s" for name, value in timings.items())
    print(f"{count} runs: {shown}, in all {sum(timings.values()):.1f} s")


def time_snakemake(folder: Path) -> None:
    """Time a dry run on a fresh copy, then a call with nothing to do."""
    trivial = folder / "trivial"
    trivial.mkdir()
    (trivial / "Snakefile").write_text(TRIVIAL)
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(clone)], check=True)
    compare("dry run, fresh clone", [*SNAKEMAKE, "--cores", "1", "-n"], clone, trivial)
    small = [*SNAKEMAKE, "--cores", "2", "--configfile", "examples/small.yaml"]
    timed(small, clone)
    compare("nothing to do, 10 runs", small, clone, trivial)


def peak_memory() -> None:
    """Print the largest memory any child used so far, which includes the training jobs."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"peak memory of any process: {peak:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--many", type=int, default=2000)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="halfscale-benchmark-"))
    try:
        time_snakemake(folder)
        time_readers(arguments.runs, folder, everything=True)
        time_readers(arguments.many, folder, everything=False)
        peak_memory()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
