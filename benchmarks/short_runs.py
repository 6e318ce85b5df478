"""Time many short runs: the workflow with warm workers against a plain Python loop.

    python benchmarks/short_runs.py [--runs 25 100 200] [--workload deep_tanh] [--repeats 3]

The loop is one process that imports torch once and trains the same specifications one after the
other. ``changed`` edits one of the five configurations of a finished workflow and runs it again.
``--cold`` times the workflow without warm workers as well, ``--benchopt PYTHON`` the same runs as
a benchopt benchmark, in an environment that has benchopt 1.10 beside halfscale. All are taken in
turn; medians are printed, with the ratios to the loop's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from halfscale.config import flow
from halfscale.plan import Plan
from halfscale.planner import build_plan

REPOSITORY = Path(__file__).parents[1]
SNAKEMAKE = str(Path(sys.executable).parent / "snakemake")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "workflow"), "OMP_NUM_THREADS": "1"}
STEPS = 30
CONFIGURATIONS = 5

LOOP = """
import sys
from pathlib import Path
from halfscale.plan import RunSpec
from halfscale.train import train
file = Path(sys.argv[1])
for line in file.read_text(encoding="utf-8").splitlines():
    spec = RunSpec.model_validate_json(line)
    train(spec, file.parent / spec.folder, lambda line: None)
"""


def configure(workload: str, runs: int, warm: bool) -> dict[str, object]:
    """A configuration of five arms and as many seeds as it takes."""
    return {
        "configurations": {
            f"scale-{exponent}": {"init_scale": 2.0**exponent, "growth_interval": 10}
            for exponent in range(8, 8 + CONFIGURATIONS)
        },
        "workloads": {workload: {"steps": STEPS}},
        "seeds": list(range(runs // CONFIGURATIONS)),
        "device": "cpu",
        "search": False,
        "warm_workers": warm,
    }


def timed(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> float:
    """Wall seconds of a command that must succeed."""
    started = time.perf_counter()
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, env=environment or ENVIRONMENT
    )
    return time.perf_counter() - started


def run_loop(folder: Path, specifications: list[str]) -> float:
    file = folder / "specifications"
    file.write_text("\n".join(specifications), encoding="utf-8")
    return timed([sys.executable, "-c", LOOP, str(file)], folder)


def run_benchopt(folder: Path, specifications: list[str], python: Path, jobs: int) -> float:
    file = folder / "specifications"
    file.write_text("\n".join(specifications), encoding="utf-8")
    peer = folder / "peer"
    shutil.copytree(REPOSITORY / "benchmarks" / "benchopt_peer", peer)
    more = {"HALFSCALE_SPECIFICATIONS": str(file), "HALFSCALE_RUNS": str(len(specifications))}
    command = [str(python.with_name("benchopt")), "run", ".", "-n", "1", "--no-plot", "--no-html"]
    return timed([*command, "-j", str(jobs)], peer, ENVIRONMENT | more)


def run_workflow(folder: Path, plan: Plan, cores: int) -> float:
    targets = [f"results/{run.folder}/{run.record_name}" for run in listed(plan)]
    command = [SNAKEMAKE, "-s", str(REPOSITORY / "Snakefile"), "--cores", str(cores)]
    return timed([*command, "--quiet", "all", "--", *targets], folder)


def listed(plan: Plan) -> Iterator:  # type: ignore[type-arg]
    """The runs of the configurations; controls are left out."""
    return (run for run in plan.runs() if not run.is_control)


def write_config(folder: Path, config: dict[str, object]) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [flow({key: value}) for key, value in config.items()]
    (folder / "config.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return build_plan(config)


def measure(arguments: argparse.Namespace, runs: int, base: Path) -> Iterator[tuple[str, float]]:
    """One round: every way once."""
    config = configure(arguments.workload, runs, warm=True)
    plan = build_plan(config)
    specifications = [run.canonical_json() for run in listed(plan)]
    loop = base / "loop"
    loop.mkdir()
    yield "loop", run_loop(loop, specifications)
    folder = base / "workflow"
    write_config(folder, config)
    yield "workflow", run_workflow(folder, plan, arguments.cores)
    config["configurations"]["scale-8"]["growth_interval"] = 9  # type: ignore[index]
    yield "changed", run_workflow(folder, write_config(folder, config), arguments.cores)
    if arguments.cold:
        config = configure(arguments.workload, runs, warm=False)
        cold = base / "cold"
        yield "cold", run_workflow(cold, write_config(cold, config), arguments.cores)
    if arguments.benchopt:
        for jobs in (1, arguments.cores):
            peer = base / f"benchopt{jobs}"
            peer.mkdir()
            took = run_benchopt(peer, specifications, arguments.benchopt, jobs)
            yield f"benchopt -j {jobs}", took


def repeat(once: Callable[[Path], Iterator[tuple[str, float]]], times: int) -> dict[str, float]:
    """The median of each way."""
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(times):
        with tempfile.TemporaryDirectory(prefix="halfscale-benchmark-") as folder:
            for name, seconds in once(Path(folder)):
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def whole_seeds(text: str) -> int:
    """A number of runs that is the same number of seeds for each configuration."""
    runs = int(text)
    if runs < CONFIGURATIONS or runs % CONFIGURATIONS:
        raise argparse.ArgumentTypeError(f"must be a multiple of {CONFIGURATIONS}")
    return runs


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=whole_seeds, nargs="+", default=[25, 100, 200])
    parser.add_argument("--workload", default="deep_tanh")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--benchopt", type=lambda text: Path(text).absolute(), metavar="PYTHON")
    arguments = parser.parse_args(words)
    print(f"{arguments.workload}, {STEPS} steps, {arguments.cores} cores")
    for runs in arguments.runs:
        medians = repeat(lambda base: measure(arguments, runs, base), arguments.repeats)  # noqa: B023
        loop = medians["loop"]
        shown = ", ".join(
            f"{name} {value:.1f} s ({value / loop:.2f} ×)" for name, value in medians.items()
        )
        print(f"{runs} runs: {shown}", flush=True)


if __name__ == "__main__":
    main()
