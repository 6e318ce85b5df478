"""Results that no longer fit the plan, where Snakemake alone would call them up to date.

Runs whenever Snakemake parses the workflow, so it imports nothing slow, opens each record at most
once and writes only under ``.snakemake``.
"""

from __future__ import annotations

import base64
import csv
import json
import sys
from pathlib import Path

from halfscale.jobs import Job, Jobs, recorded_digest
from halfscale.plan import FOUND
from halfscale.proposals import PROPOSALS


def stop_if_outdated(jobs: Jobs) -> None:
    """End the process if results belong to another configuration and Snakemake cannot know it.

    With its records Snakemake sees a changed specification and runs it again. Without them (a
    deleted ``.snakemake``, results copied from elsewhere) it would call old results up to date.
    """
    results = jobs.results
    outdated = [
        (results / job.record).parents[1]
        for job in jobs.outdated
        if not _is_recorded(results / job.record)
    ]
    if _is_search_outdated(jobs) and not _is_recorded(results / PROPOSALS):
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
    if _are_tables_outdated(jobs):
        sys.exit(
            "halfscale: the tables belong to another configuration, and Snakemake's records of "
            f"them (.snakemake) are gone; remove them and run the same command again: "
            f"rm -r {results / 'tables'}"
        )


def _are_tables_outdated(jobs: Jobs) -> bool:
    """Whether the tables are of another plan and nothing that they are made of is missing."""
    results = jobs.results
    tables = results / "tables" / "plan.json"
    return (
        tables.exists()
        and not _is_recorded(tables)
        and tables.read_text(encoding="utf-8").strip() != jobs.whole().canonical_json()
        and all((results / job.record).exists() for job in jobs.listed())
        and (jobs.plan.search is None or recorded_digest(results / PROPOSALS) is not None)
    )


def reopen_failed(jobs: Jobs) -> None:
    """Let Snakemake run again what failed while an older result was kept.

    Snakemake records the parameters of a failed job as if it had finished (its issue 3808), so the
    kept result of another specification would count as up to date. Such a file is marked as
    Snakemake marks interrupted ones; the profile's ``rerun-incomplete`` then makes it again.
    """
    for job in jobs.outdated:
        if _finished(jobs.results / "logs" / job.spec.log, job):
            continue
        name = _record_name(jobs.results / job.record)
        try:
            record = json.loads(Path(".snakemake", "metadata", name).read_bytes())
            claims_it = any(job.text in text for text in record["params"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if claims_it:
            _mark_incomplete(name)


def reopen_predictions(jobs: Jobs) -> None:
    """Let Snakemake predict again if the predictions are others and it cannot know it.

    Their inputs are the probes, which an edited configuration leaves as they are; without its
    records Snakemake would call old predictions up to date.
    """
    path = jobs.results / "replay" / "predictions.csv"
    if _is_recorded(path):
        return
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = {row["digest"] for row in csv.DictReader(file)}
    except (OSError, KeyError, UnicodeDecodeError):
        return
    asked = {run.digest for run in jobs.runs() if run.spec.policy is not None}
    if found != asked:
        _mark_incomplete(_record_name(path))


def _mark_incomplete(name: str) -> None:
    """Mark a file, by its record's name, as Snakemake marks those whose job was interrupted."""
    mark = Path(".snakemake", "incomplete", name)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text('{"external_jobid": null}', encoding="utf-8")


def _finished(log: Path, job: Job) -> bool:
    """Whether the last job that wrote this log had this specification and came to an outcome."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return f"({job.digest})" in text and "\noutcome: " in text


def _record_name(path: Path) -> str:
    """The name under which Snakemake keeps what it knows of a file: its path in base64."""
    return base64.urlsafe_b64encode(path.as_posix().encode()).decode()


def _is_recorded(path: Path) -> bool:
    """Whether Snakemake keeps metadata of a file."""
    name = _record_name(path)
    # A file whose job was interrupted is marked incomplete instead, and made again for that.
    return any(Path(".snakemake", kind, name).exists() for kind in ("metadata", "incomplete"))


def _is_search_outdated(jobs: Jobs) -> bool:
    """Whether the proposals on the disk belong to another search."""
    spec = jobs.plan.search_spec
    found = recorded_digest(jobs.results / PROPOSALS)
    return spec is not None and found not in (None, spec.digest)
