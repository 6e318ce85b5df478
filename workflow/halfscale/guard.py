"""What the Snakefile needs around the plan: environment, targets, locks, failures.

Runs whenever Snakemake parses the workflow, so it imports nothing slow and writes only under
``.snakemake``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from halfscale import outdated
from halfscale.config import ConfigError, read_config
from halfscale.devices import RUNS_PER_GPU
from halfscale.jobs import Jobs
from halfscale.plan import Plan, ProbeSpec, RunSpec, is_found
from halfscale.planner import build_plan
from halfscale.proposals import PROPOSALS

OWNER = "HALFSCALE_OWNER_PID"

FIGURES = (
    *("ranking", "window", "landscape", "calibration", "loss", "scale", "skipped", "exponents"),
    "sweep",
)
TABLES = (
    *("runs.csv", "configurations.csv", "steps.parquet", "probes.csv"),
    *("exponents.csv", "windows.parquet", "calibration.csv"),
    *("orphans.json", "plan.json"),
)
REPLAY = ("predictions.csv", "traces.parquet", "landscape.csv", "seal.json")

_LOCK_FOLDER = Path(".snakemake", "locks")
_held: list[FileLock] = []
_OURS = re.compile(
    r"(^|/)(results/(runs/[^/]+/[^/]+/seed[0-9]+/run\.json|probes/[^/]+/seed[0-9]+/probe\.json"
    r"|search/proposals\.json|replay/predictions\.csv|tables/runs\.csv|plots/loss\.svg"
    r"|verification/checks\.csv)|reports/(recommendation\.json|summary\.html))$"
)


def prepare_jobs() -> None:
    """Let jobs use this interpreter and this package, and end when this process does."""
    environment = os.environ
    environment[OWNER] = str(os.getpid())
    binaries = os.path.dirname(sys.executable)
    _prepend(environment, "PATH", binaries)
    _prepend(environment, "PYTHONPATH", str(Path(__file__).parents[1]))


def _prepend(environment: os._Environ[str], name: str, folder: str) -> None:
    parts = [part for part in environment.get(name, "").split(os.pathsep) if part]
    if parts[:1] != [folder]:
        environment[name] = os.pathsep.join([folder, *parts])


def load_plan(
    config: Mapping[str, Any],
    workflow_folder: Path,
    given_files: Iterable[Path | str] = (),
    elsewhere: bool = False,
) -> Plan:
    """The plan of this workflow, or the end of the process with one line that says why not.

    Its jobs find ``runs_per_gpu`` in their environment, since it is no part of a run.

    Args:
        config: What Snakemake was given: ``--configfile``, ``--config`` or a module's ``config:``.
            If it names no configurations, ``config.yaml`` of the working directory, or else of the
            workflow's folder, is read and ``config`` laid over it.
        workflow_folder: The folder of the Snakefile.
        given_files: The files of ``--configfile``, checked again for repeated keys.
        elsewhere: Whether the runs may be on other machines than this one.
    """
    try:
        source = "the configuration"
        for file in given_files:
            source = str(file)
            read_config(file)
        merged = dict(config)
        if "configurations" not in merged:
            path = next(
                (p for p in (Path("config.yaml"), workflow_folder / "config.yaml") if p.exists()),
                Path("config.yaml"),
            )
            source = str(path)
            merged = _lay_over(read_config(path), merged)
        plan = build_plan(merged, source, elsewhere=elsewhere)
        os.environ[RUNS_PER_GPU] = str(plan.execution.runs_per_gpu)
        return plan
    except ConfigError as error:
        sys.exit(f"halfscale: {error}")


def list_first_targets(plan: Plan) -> list[str]:
    """The files that need not wait for the search, relative to the working folder."""
    checks = [f"results/verification/{table}.csv" for table in ("checks", "sweep")]
    return [*checks, *list_probe_files(plan), *list_run_files(plan)]


def list_probe_files(plan: Plan) -> list[str]:
    """The two files of each probe, relative to the working folder."""
    return [
        f"results/probes/{workload}/seed{seed}/{file}"
        for workload, seed in plan.probe_keys()
        for file in (ProbeSpec.record_name, ProbeSpec.table_name)
    ]


def list_run_files(plan: Plan, only_found: bool = False) -> list[str]:
    """The two files of each run, or of those that the search found, as `list_probe_files` does."""
    return [
        f"results/runs/{workload}/{arm}/seed{seed}/{file}"
        for workload, arm, seed in plan.run_keys()
        if is_found(arm) or not only_found
        for file in (RunSpec.record_name, RunSpec.table_name)
    ]


def list_late_targets(plan: Plan) -> list[str]:
    """Every other file the workflow makes: what the search found, and what reads the runs.

    Not only the page: a file that is missing in the middle of the chain would not be made again
    while all that comes after it is there. None of `list_first_targets`, since Snakemake would
    work through a large plan twice.
    """
    results = [
        *([PROPOSALS.as_posix()] if plan.search else []),
        *(f"replay/{table}" for table in REPLAY),
        *(f"tables/{table}" for table in TABLES),
        *(f"plots/{figure}.{kind}" for figure in FIGURES for kind in ("svg", "txt")),
    ]
    reports = ("recommendation.json", "settings", "summary.ipynb", "summary.html")
    return [
        *list_run_files(plan, only_found=True),
        *(f"results/{file}" for file in results),
        *(f"reports/{file}" for file in reports),
    ]


def _lay_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``, block by block."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _lay_over(old, value) if both else value  # type: ignore[arg-type]
    return merged


def check_results(jobs: Jobs) -> None:
    """Put right what is left of earlier workflows; for the process that a user started alone."""
    clear_stale_locks()
    outdated.reopen_failed(jobs)
    outdated.reopen_predictions(jobs)
    outdated.stop_if_outdated(jobs)


def clear_stale_locks() -> None:
    """Remove the lock that a killed Snakemake left on this workflow's files, and only that one.

    A live workflow holds an operating system's lock on ``.snakemake/halfscale.lock``, which ends
    with the process, whatever way it ends. If nobody holds it, a Snakemake lock on halfscale's
    files is left over from a process that was killed.
    """
    if not _hold_lock():
        return
    for outputs in _LOCK_FOLDER.glob("*.output.lock"):
        try:
            files = outputs.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        if any(_is_ours(file) for file in files):
            inputs = outputs.with_name(outputs.name.replace(".output.", ".input."))
            for lock in (outputs, inputs):
                lock.unlink(missing_ok=True)
            print("halfscale: removed the lock of a workflow that was killed", file=sys.stderr)


def hold_lock() -> None:
    """Mark this workflow as running, for as long as the process lives; call it when jobs start."""
    _hold_lock(patience=10.0)


def drop_rate_limit(workflow: Any) -> None:
    """Take away Snakemake's default limit of 100 jobs a second: no jobs here come faster.

    To keep it, Snakemake 9 looks at all ready jobs again a second after each look: every finished
    job adds one more look a second, which after some hundred short jobs takes all of a core. Any
    other limit stays, and so does that of a cluster.

    Args:
        workflow: Snakemake's own object of that name.
    """
    limiter = getattr(workflow.scheduler, "job_rate_limiter", None)
    if workflow.local_exec and limiter and (limiter.max_jobs, limiter.timespan) == (100, 1):
        workflow.scheduler.job_rate_limiter = None


def _hold_lock(patience: float = 0.0) -> bool:
    if _held:
        return True
    lock = FileLock(Path(".snakemake", "halfscale.lock"))
    try:
        Path(".snakemake").mkdir(exist_ok=True)
        lock.acquire(timeout=patience)
    except (Timeout, OSError):
        return False
    _held.append(lock)
    return True


def _is_ours(file: str) -> bool:
    return bool(_OURS.search(file))


def describe_failures(logs: Path, started: float) -> list[str]:
    """The last line of every log that was written since ``started`` and tells of a failure."""
    lines = []
    for log in sorted(logs.rglob("*.log")):
        if log.stat().st_mtime >= started:
            text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if text and " failed: " in text[-1]:
                lines.append(f"{text[-1]} (log: {log})")
    return lines
