"""Digests of the package's own source files.

A run depends on the code that computed it, so the digest of that code is part of its specification:
an edit to the training code is then seen like an edit to the configuration, wherever the files lie
and whatever their times are.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent
NOTEBOOK = PACKAGE.parent / "notebooks" / "summary.ipynb"

TRAINING = (
    *("train.py", "steps.py", "faults.py", "machine.py", "own.py", "workloads/__init__.py"),
    *("precision/*.py", "scaling/*.py", "policies/*.py"),
)
PROBING = (*TRAINING, "probe.py", "batches.py", "magnitudes.py")
VERIFICATION = ("verify.py", "precision/*.py", "scaling/*.py", "policies/*.py")
SEARCH = (
    *("search.py", "grid.py", "magnitudes.py", "records.py", "plan.py"),
    *("replay/*.py", "policies/*.py"),
)
PREDICTION = ("predict.py", "replay_seal.py", *SEARCH[1:])
TABLES = (
    *("tables.py", "probe_tables.py", "calibration.py", "magnitudes.py", "records.py"),
    *("verdict.py", "replay_seal.py"),
)
VERDICT = ("verdict.py", "export.py", "settings.py", "policies/*.py")
PLOTS = (
    *("plots.py", "probe_plots.py", "replay_plots.py", "evidence.py", "drawn.py", "style.py"),
    "svg.py",
    *("calibration.py", "probe_tables.py", "magnitudes.py", "wording.py"),
    *("records.py", "replay_seal.py"),
)
REPORT = (
    *("report.py", "fragments.py", "search_fragments.py", "replay_fragments.py", "html.py"),
    *("calibration.py", "probe_tables.py", "wording.py", "drawn.py", "svg.py"),
)


@cache
def source_digest(*patterns: str) -> str:
    """SHA-256 (first 16 hex digits) over the names and bytes of the matching package files.

    Raises:
        FileNotFoundError: If a pattern matches no file.
    """
    digest = hashlib.sha256()
    for pattern in patterns:
        files = sorted(PACKAGE.glob(pattern))
        if not files:
            raise FileNotFoundError(f"no source file of halfscale matches {pattern}")
        for file in files:
            digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """SHA-256 (hexadecimal) of one file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
