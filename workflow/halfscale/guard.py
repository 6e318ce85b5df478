"""What the Snakefile needs around the plan: environment, locks, results that no longer fit.

Runs whenever Snakemake parses the workflow, so it imports nothing slow and writes only under
``.snakemake``.
"""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from halfscale.config import ConfigError, read_config
from halfscale.devices import RUNS_PER_GPU
from halfscale.plan import FOUND, JobSpec, Plan, RunSpec, is_found
from halfscale.planner import build_plan
from halfscale.proposals import PROPOSALS, ProposalError, extend_plan, recorded_digest

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


def extended(plan: Plan, results: Path) -> Plan:
    """The plan with what its search has found so far; the plan itself if that is nothing of use."""
    try:
        return extend_plan(plan, results)
    except ProposalError:
        return plan


def find_run(plan: Plan, results: Path, workload: str, arm: str, seed: int) -> RunSpec:
    """The specification of a run, or the end of the process with one line if there is none."""
    # The proposals are read only for what they hold: a large plan asks this of every run.
    whole = extended(plan, results) if is_found(arm) else plan
    if workload not in whole.workloads or arm not in whole.arms:
        what = f"{workload} or no configuration {arm}"
        hint = "; what the search finds can be asked for once it has run" if is_found(arm) else ""
        sys.exit(f"halfscale: the configuration has no workload {what}{hint}")
    return whole.run(workload, arm, seed)


def list_first_targets(plan: Plan) -> list[str]:
    """The files that need not wait for the search, relative to the working folder."""
    return [
        *(f"results/verification/{table}.csv" for table in ("checks", "sweep")),
        *(f"results/{job.folder.as_posix()}/{job.record_name}" for job in plan.jobs()),
        *(f"results/{job.folder.as_posix()}/{job.table_name}" for job in plan.jobs()),
    ]


def list_targets(plan: Plan) -> list[str]:
    """Every file the workflow makes, relative to the working folder.

    Not only the page: a file that is missing in the middle of the chain would not be made again
    while all that comes after it is there.
    """
    results = [
        *([PROPOSALS.as_posix()] if plan.search else []),
        *(f"replay/{table}" for table in REPLAY),
        *(f"tables/{table}" for table in TABLES),
        *(f"plots/{figure}.{kind}" for figure in FIGURES for kind in ("svg", "txt")),
    ]
    reports = ("recommendation.json", "settings", "summary.ipynb", "summary.html")
    return [
        *list_first_targets(plan),
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


def check_results(plan: Plan, results: Path) -> None:
    """Put right what is left of earlier workflows; for the process that a user started alone."""
    clear_stale_locks()
    reopen_failed(plan, results)
    reopen_predictions(plan, results)
    stop_if_outdated(plan, results)


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
    job adds one more look a second, which after some hundred short jobs takes all of a core. A
    limit that a user asked for stays, and so does that of a cluster.

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


def stop_if_outdated(plan: Plan, results: Path) -> None:
    """End the process if results belong to another configuration and Snakemake cannot know it.

    With its records Snakemake sees a changed specification and runs it again. Without them (a
    deleted ``.snakemake``, results copied from elsewhere) it would call old results up to date.
    """
    outdated = [
        (results / spec.folder).parent
        for spec in _outdated_jobs(plan, results)
        if not _is_recorded(results / spec.folder / spec.record_name)
    ]
    if _is_search_outdated(plan, results) and not _is_recorded(results / PROPOSALS):
        # With the runs of what it found: under the same names another search finds other ones.
        outdated += [(results / PROPOSALS).parent, *results.glob(f"runs/*/{FOUND}*")]
    if outdated:
        folders = sorted(set(outdated))
        names = " ".join(str(folder) for folder in folders)
        sys.exit(
            f"halfscale: {len(outdated)} results belong to another configuration or version, and "
            f"Snakemake's records of them (.snakemake) are gone; remove them and run the same "
            f"command again: rm -r {names}"
        )
    tables = results / "tables" / "plan.json"
    if (
        tables.exists()
        and tables.read_text(encoding="utf-8").strip() != extended(plan, results).canonical_json()
        and not _is_recorded(tables)
        and all((results / job.folder / job.record_name).exists() for job in plan.jobs())
        and (plan.search is None or recorded_digest(results) is not None)
    ):
        sys.exit(
            "halfscale: the tables belong to another configuration, and Snakemake's records of "
            f"them (.snakemake) are gone; remove them and run the same command again: "
            f"rm -r {tables.parent}"
        )


def reopen_failed(plan: Plan, results: Path) -> None:
    """Let Snakemake run again what failed while an older result was kept.

    Snakemake records the parameters of a failed job as if it had finished (its issue 3808), so the
    kept result of another specification would count as up to date. Such a file is marked as
    Snakemake marks interrupted ones; the profile's ``rerun-incomplete`` then makes it again.
    """
    for spec in _outdated_jobs(plan, results):
        if _finished(results / "logs" / spec.log, spec):
            continue
        name = _record_name(results / spec.folder / spec.record_name)
        try:
            record = json.loads(Path(".snakemake", "metadata", name).read_bytes())
            claims_it = any(spec.canonical_json() in text for text in record["params"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if claims_it:
            _mark_incomplete(name)


def reopen_predictions(plan: Plan, results: Path) -> None:
    """Let Snakemake predict again if the predictions are others and it cannot know it.

    Their inputs are the probes, which an edited configuration leaves as they are; without its
    records Snakemake would call old predictions up to date.
    """
    path = results / "replay" / "predictions.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = {row["digest"] for row in csv.DictReader(file)}
    except (OSError, KeyError, UnicodeDecodeError):
        return
    asked = {run.digest for run in extended(plan, results).runs() if not run.is_control}
    if found != asked and not _is_recorded(path):
        _mark_incomplete(_record_name(path))


def _mark_incomplete(name: str) -> None:
    """Mark a file, by its record's name, as Snakemake marks those whose job was interrupted."""
    mark = Path(".snakemake", "incomplete", name)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text('{"external_jobid": null}', encoding="utf-8")


def _finished(log: Path, spec: JobSpec) -> bool:
    """Whether the last job that wrote this log was for this specification and had an outcome."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return f"({spec.digest})" in text and "\noutcome: " in text


def _record_name(path: Path) -> str:
    """The name under which Snakemake keeps what it knows of a file: its path in base64."""
    return base64.urlsafe_b64encode(path.as_posix().encode()).decode()


def _is_recorded(path: Path) -> bool:
    """Whether Snakemake keeps metadata of a file."""
    name = _record_name(path)
    # A file whose job was interrupted is marked incomplete instead, and made again for that.
    return any(Path(".snakemake", kind, name).exists() for kind in ("metadata", "incomplete"))


def _is_search_outdated(plan: Plan, results: Path) -> bool:
    """Whether the proposals on the disk belong to another search."""
    spec = plan.search_spec
    return spec is not None and recorded_digest(results) not in (None, spec.digest)


def _outdated_jobs(plan: Plan, results: Path) -> list[JobSpec]:
    """The runs and probes whose result on the disk belongs to another specification."""
    return [
        spec
        for spec in extended(plan, results).jobs()
        if _recorded_digest(results / spec.folder / spec.record_name) not in (None, spec.digest)
    ]


def _recorded_digest(record: Path) -> str | None:
    """The digest that a record claims, or None if there is no readable one."""
    try:
        digest = json.loads(record.read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(digest)


def describe_failures(logs: Path, started: float) -> list[str]:
    """The last line of every log that was written since ``started`` and tells of a failure."""
    lines = []
    for log in sorted(logs.rglob("*.log")):
        if log.stat().st_mtime >= started:
            text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if text and " failed: " in text[-1]:
                lines.append(f"{text[-1]} (log: {log})")
    return lines
