"""Measure large plans: dry run, nothing to do, the readers and the page, beside a trivial workflow.

    python benchmarks/scale.py [--runs 100 1000 5000] [--search] [--pairs 3]

Run files are synthetic (written by the package's own writer), so that nothing is trained. Beside
each plan stands a trivial Snakefile with as many jobs, as many output files, a log a job, a params
string as long as the longest of the plan's and one rule that takes all of them: what Snakemake
itself costs. Both are timed in turn. Snakemake's records are written by its own --touch. CPU
seconds stand beside wall seconds: on a machine that does other things as well, only their ratio
means something.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from halfscale.config import read_config
from halfscale.plan import Plan
from halfscale.planner import build_plan
from halfscale.proposals import extend_plan
from synthetic import (
    ENVIRONMENT,
    HALFSCALE,
    REPOSITORY,
    SNAKEMAKE,
    timed,
    wide_config,
    write_synthetic,
    write_synthetic_probes,
)

# By the number of runs: workloads, configurations beside the three controls, seeds.
SHAPES = {100: (2, 7, 5), 1000: (4, 22, 10), 5000: (5, 97, 10)}
WORKLOADS = {
    "binary": {"steps": 100},
    "digits": {"steps": 150},
    "deep_tanh": {"steps": 120},
    "text": {"steps": 130},
    "bursts": {"steps": 150},
}
READERS = ("predict", "tables", "verdict", "plots", "report")
BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
TRIVIAL = """\
TEXT = {text!r}
NAMES = [f"job{{number}}" for number in range({jobs})]


rule all:
    input:
        "summary.txt",


rule job:
    output:
        "jobs/{{name}}/run.json",
        "jobs/{{name}}/trace.parquet",
    log:
        "logs/{{name}}.log",
    params:
        spec=lambda wildcards: TEXT + wildcards.name,
    shell:
        "touch {{output}} && : {{params.spec:q}}"


rule summary:
    input:
        [f"jobs/{{name}}/{{file}}" for name in NAMES for file in ("run.json", "trace.parquet")],
    output:
        "summary.txt",
    shell:
        "touch {{output}}"
"""
# Snakemake's --touch waits a tenth of a second a job so that times differ; here nothing needs that.
TOUCH = (
    "from snakemake.cli import main\n"
    "from snakemake.executors import touch\n"
    "touch.Executor.SLEEPING_TIME = 0.0\n"
    "main()\n"
)


@dataclass(frozen=True)
class Cost:
    """Seconds of one command, on the wall and on the CPU."""

    wall: float
    cpu: float


def measure(command: list[str], folder: Path) -> Cost:
    """Run a command that must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = timed(command, folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, used)


def compare(
    name: str, jobs: int, pairs: int, ours: Callable[[], Cost], floor: Callable[[], Cost]
) -> None:
    """Print the medians of two costs taken in turn, their ratio and what a job costs above."""
    taken = [(ours(), floor()) for _ in range(pairs)]
    columns = list(zip(*taken, strict=True))
    cpu, floor_cpu = (statistics.median(cost.cpu for cost in column) for column in columns)
    wall, floor_wall = (statistics.median(cost.wall for cost in column) for column in columns)
    ratio = statistics.median(one.cpu / other.cpu for one, other in taken)
    print(
        f"| {name} | {wall:.2f} | {floor_wall:.2f} | {cpu:.2f} | {floor_cpu:.2f} | {ratio:.2f} × "
        f"| {(cpu - floor_cpu) / jobs * 1e3:.2f} ms |",
        flush=True,
    )


def snakemake(*arguments: str, workflow: Path | None = None) -> list[str]:
    snakefile = ["-s", str(workflow / "Snakefile")] if workflow else []
    return [*SNAKEMAKE, *snakefile, "--cores", "1", *arguments]


def make_records(folder: Path, workflow: Path | None = None) -> None:
    """Let Snakemake record every job as done, without doing it; then nothing is to be done."""
    arguments = snakemake("--touch", "--forceall", workflow=workflow)[1:]
    timed([sys.executable, "-c", TOUCH, *arguments], folder)
    done = subprocess.run(
        snakemake("-n", workflow=workflow),
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    if "Nothing to be done" not in done.stdout + done.stderr:
        raise SystemExit(f"there is something to do in {folder}:\n{done.stdout[-2000:]}")


def make_trivial(folder: Path, jobs: int, text: str, finished: bool) -> None:
    """The trivial workflow; its files as well, where it is to be finished."""
    folder.mkdir(parents=True)
    (folder / "Snakefile").write_text(TRIVIAL.format(text=text, jobs=jobs))
    if not finished:
        return
    for number in range(jobs):
        place = folder / "jobs" / f"job{number}"
        place.mkdir(parents=True)
        for name in ("run.json", "trace.parquet"):
            (place / name).write_text("x")
    (folder / "summary.txt").write_text("x")
    make_records(folder)


def reader_commands(plan: Plan) -> dict[str, list[str]]:
    """The command of each reader, as the rules have it."""
    read = ["--plan", plan.canonical_json(), "--results", "results"]
    tables = ["--plan", "results/tables/plan.json", "--runs", "results/tables/runs.csv"]
    decided = "reports/recommendation.json"
    drawn = ["--results", "results", "--recommendation", decided]
    pages = ["--executed", "reports/summary.ipynb", "--page", "reports/summary.html"]
    arguments = {
        "predict": read,
        "tables": read,
        "verdict": [*tables, "--output", decided, "--settings", "reports/settings"],
        "plots": drawn,
        "report": [*drawn, *pages, "--attempt", "results/logs/summary.ipynb"],
    }
    return {name: [*HALFSCALE, name, *arguments[name]] for name in READERS}


def make_finished(folder: Path, config: str) -> dict[str, Cost]:
    """A folder in which the workflow has run; returns what each reader cost."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    plan = build_plan(read_config(folder / "config.yaml"))
    results = folder / "results"
    write_synthetic_probes(plan, results)
    costs = {}
    if plan.search:
        read = ["--plan", plan.canonical_json(), "--results", "results"]
        costs["search"] = measure([*HALFSCALE, "search", *read], folder)
    write_synthetic(extend_plan(plan, results), results)
    timed([*HALFSCALE, "verify", "--folder", "results/verification"], folder)
    for name, command in reader_commands(plan).items():
        costs[name] = measure(command, folder)
    return costs


def open_page(page: Path) -> tuple[float, float]:
    """Seconds until headless Chromium has loaded a page, and until it first painted something."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory(prefix="halfscale-browser-") as profile:
        for option in (*BROWSER, f"--user-data-dir={profile}"):
            options.add_argument(option)
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            driver.get(page.as_uri())
            time.sleep(1.0)  # the paint is entered after the load event
            times = driver.execute_script(
                "return [performance.getEntriesByType('navigation')[0].loadEventEnd,"
                " performance.getEntriesByName('first-contentful-paint')[0].startTime]"
            )
        finally:
            driver.quit()
    return times[0] / 1e3, times[1] / 1e3


def report_readers(folder: Path, costs: dict[str, Cost], runs: int, floor: Cost) -> None:
    """Print what the readers cost, against Snakemake's own cost of so many jobs, and the page."""
    total = Cost(sum(c.wall for c in costs.values()), sum(c.cpu for c in costs.values()))
    each = ", ".join(f"{name} {cost.cpu:.1f}" for name, cost in costs.items())
    page = folder / "reports" / "summary.html"
    load, paint = open_page(page)
    print(
        f"\nreaders of {runs} runs, CPU seconds: {each}; in all {total.cpu:.1f} ({total.wall:.1f} "
        f"on the wall), {total.cpu / runs * 1e3:.1f} ms a run; Snakemake's own cost of running as "
        f"many trivial jobs: {floor.cpu:.1f} ({floor.wall:.1f}): {total.cpu / floor.cpu:.2f} ×\n"
        f"page: {page.stat().st_size / 1e6:.2f} MB, loaded in {load:.2f} s, "
        f"first paint {paint:.2f} s\n",
        flush=True,
    )


def measure_size(runs: int, search: bool, pairs: int, folder: Path) -> None:
    """Print everything about one size."""
    workloads, configurations, seeds = SHAPES[runs]
    chosen = dict(list(WORKLOADS.items())[:workloads])
    config = yaml.safe_dump(wide_config(chosen, configurations, seeds, search))
    finished, fresh = folder / "finished", folder / "fresh"
    costs = make_finished(finished, config)
    fresh.mkdir()
    (fresh / "config.yaml").write_text(config)
    plan = extend_plan(build_plan(read_config(fresh / "config.yaml")), finished / "results")
    jobs = len(list(plan.jobs()))
    text = max((spec.canonical_json() for spec in plan.jobs()), key=len)
    make_trivial(folder / "trivial-fresh", jobs, text, finished=False)
    make_trivial(folder / "trivial", jobs, text, finished=True)
    make_records(finished, REPOSITORY)
    print(
        f"\n{runs} runs, {jobs} jobs: {workloads} workloads × {configurations + 3} arms × {seeds} "
        f"seeds, search {'on' if search else 'off'}\n\n"
        "| | ours, s | floor, s | ours, CPU s | floor, CPU s | ratio | above it, a job |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, arguments, mine, theirs in (
        ("dry run", ["-n"], fresh, folder / "trivial-fresh"),
        ("nothing to do", [], finished, folder / "trivial"),
    ):
        compare(
            name,
            jobs,
            pairs,
            lambda a=arguments, f=mine: measure(snakemake(*a, workflow=REPOSITORY), f),  # type: ignore[misc]
            lambda a=arguments, f=theirs: measure(snakemake(*a), f),  # type: ignore[misc]
        )
    floor = measure(snakemake(), folder / "trivial-fresh")
    report_readers(finished, costs, runs, floor)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--pairs", type=int, default=3)
    chosen = parser.parse_args(arguments)
    for runs in chosen.runs:
        with tempfile.TemporaryDirectory(prefix="halfscale-benchmark-") as folder:
            measure_size(runs, chosen.search, chosen.pairs, Path(folder))


if __name__ == "__main__":
    main()
