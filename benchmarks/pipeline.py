"""Time the workflow around the training: parsing, nothing to do, tables, plots and report.

    python benchmarks/pipeline.py [--runs 200] [--many 2000]

Run files are synthetic (written by the package's own writer), so that no training is timed. Times
of Snakemake are given beside those of a trivial one-rule workflow taken in turn in the same run.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from synthetic import (
    HALFSCALE,
    REPOSITORY,
    SNAKEMAKE,
    synthetic_plan,
    timed,
    write_synthetic,
    write_synthetic_probes,
)

TRIVIAL = 'rule all:\n    output: "done"\n    shell: "touch {output}"\n'


def compare(name: str, ours: list[str], folder: Path, trivial: Path, pairs: int = 5) -> None:
    """Print the median of ``ours`` over a trivial workflow's dry run, in turn."""
    floor_command = [*SNAKEMAKE, "--cores", "1", "-n"]
    measured = [(timed(ours, folder), timed(floor_command, trivial)) for _ in range(pairs)]
    over = statistics.median(a - b for a, b in measured)
    mine, floor = (statistics.median(column) for column in zip(*measured, strict=True))
    print(f"{name}: {mine:.2f} s, trivial workflow {floor:.2f} s, over it {over:.2f} s")


def time_readers(runs: int, folder: Path, everything: bool) -> None:
    """Time the readers over synthetic run files."""
    plan = synthetic_plan(runs)
    results = folder / f"results-{runs}"
    count = write_synthetic(plan, results)
    write_synthetic_probes(plan, results)
    recommendation = folder / "recommendation.json"
    read = ["--plan", plan.canonical_json(), "--results", str(results)]
    print(f"predictions of {count} runs: {timed([*HALFSCALE, 'predict', *read], folder):.1f} s")
    timings = {"tables": timed([*HALFSCALE, "tables", *read], folder)}
    if everything:
        verify = [*HALFSCALE, "verify", "--folder", str(results / "verification")]
        timed(verify, folder)
        tables = results / "tables"
        chosen = ["--plan", str(tables / "plan.json"), "--runs", str(tables / "runs.csv")]
        common = ["--results", str(results), "--recommendation", str(recommendation)]
        places = ["--executed", "s.ipynb", "--page", "s.html", "--attempt", "a.ipynb"]
        timings["verdict"] = timed(
            [
                *HALFSCALE,
                "verdict",
                *chosen,
                "--output",
                str(recommendation),
                "--settings",
                "settings",
            ],
            folder,
        )
        timings["plots"] = timed([*HALFSCALE, "plots", *common], folder)
        timings["report"] = timed([*HALFSCALE, "report", *common, *places], folder)
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
