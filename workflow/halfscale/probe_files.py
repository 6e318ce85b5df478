"""A probe in one file: recorded by hand, without a workflow around it.

The table is that of `halfscale.records.PROBE_SCHEMA`. What was recorded, and how it ended, stands
in the metadata of its Parquet schema. A workflow's ``probe.parquet`` is the same table without it;
there the ``probe.json`` beside it says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from halfscale import __version__
from halfscale.plan import ProbeSpec, canonical_json
from halfscale.records import (
    PROBE_SCHEMA,
    TRACE_SCHEMA,
    Outcome,
    RecordError,
    read_probe_record,
    write_atomically,
)

_PREFIX = "halfscale."
_RECORD = "record one with: halfscale probe path/to/file.py:build -o probe.parquet"


class ProbeAbout(BaseModel):
    """What a probe's file says of itself.

    Attributes:
        spec: What was recorded.
        version: The version of halfscale that recorded it; None for a probe of a workflow.
        outcome: How the training ended.
        error: The error's text, or None.
        environment: What computed it: torch, device name, arithmetic, threads.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    spec: ProbeSpec
    version: str | None
    outcome: Outcome
    error: str | None
    environment: dict[str, str | int]

    @property
    def arithmetic(self) -> str:
        return str(self.environment.get("arithmetic", "bf16"))


@dataclass(frozen=True, eq=False)
class ProbeFile:
    """A probe that was read: its path, its table, and what it says of itself if it does."""

    path: Path
    table: pa.Table
    about: ProbeAbout | None


def write_probe_file(
    path: Path,
    probe: Mapping[str, list[Any]],
    *,
    spec: ProbeSpec,
    outcome: Outcome,
    error: str | None,
    environment: Mapping[str, str | int],
) -> None:
    """Write a probe and what it is into one file, atomically.

    Args:
        path: The file, put in place whole.
        probe: The columns of `PROBE_SCHEMA`, of equal length.
        spec: What was recorded.
        outcome: How the training ended.
        error: The error's text, or None.
        environment: What computed it.

    Raises:
        OSError: If the file cannot be written.
    """
    about = {
        "spec": spec.canonical_json(),
        "version": __version__,
        "outcome": outcome,
        "error": error or "",
        "arithmetic": str(environment.get("arithmetic", "")),
        "environment": canonical_json(environment),
    }
    table = pa.table(dict(probe), schema=PROBE_SCHEMA)
    table = table.replace_schema_metadata({_PREFIX + key: text for key, text in about.items()})
    write_atomically(path, partial(pq.write_table, table))


def read_probe_file(path: Path) -> ProbeFile:
    """Read a probe: a file of `write_probe_file`, or one that a workflow left, or its folder.

    Raises:
        ValueError: If it is no probe, holds no step or is not what the ``probe.json`` beside it was
            written with; one line that says what to do.
    """
    file = path / ProbeSpec.table_name if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path}: there is no such probe; {_RECORD}")
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:80]
        raise ValueError(f"{file} is no whole Parquet file ({reason}); {_RECORD}") from None
    about = _read_about(file, table)
    table = table.replace_schema_metadata(None)
    if not table.schema.equals(PROBE_SCHEMA):
        raise ValueError(f"{file} is {_describe_other(file, table)}")
    if not len(table):
        ended = f" ({about.outcome}: {about.error})" if about and about.error else ""
        raise ValueError(f"{file} holds no step{ended}; {_RECORD}")
    return ProbeFile(file, _without_nan(table), about)


def _read_about(file: Path, table: pa.Table) -> ProbeAbout | None:
    metadata = {key.decode(): value for key, value in (table.schema.metadata or {}).items()}
    if f"{_PREFIX}spec" not in metadata:
        return _read_beside(file)
    try:
        given: dict[str, Any] = {
            key: metadata[_PREFIX + key].decode() for key in ("version", "outcome", "error")
        }
        spec, environment = (json.loads(metadata[_PREFIX + key]) for key in ("spec", "environment"))
        error = given.pop("error") or None
        return ProbeAbout(spec=spec, environment=environment, error=error, **given)
    except (KeyError, ValueError, ValidationError):
        raise ValueError(f"{file}: what it says of itself cannot be read; {_RECORD}") from None


def _read_beside(file: Path) -> ProbeAbout | None:
    """What the record beside a workflow's probe says; None if there is none."""
    if file.name != ProbeSpec.table_name or not (file.parent / ProbeSpec.record_name).is_file():
        return None
    try:
        record = read_probe_record(file.parent)
    except RecordError as error:
        raise ValueError(f"{error.fault}; remove both and run the workflow again") from None
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}; make it readable") from None
    given = record.model_dump(include={"spec", "outcome", "error", "environment"})
    return ProbeAbout(version=None, **given)


def _describe_other(file: Path, table: pa.Table) -> str:
    names = set(table.column_names)
    if names >= set(TRACE_SCHEMA.names):
        return f"the trace of a run, no probe; replay it as a log: halfscale replay --log {file}"
    if names == set(PROBE_SCHEMA.names):
        return f"a probe of another version of halfscale; {_RECORD}"
    return f"no probe: it has the columns {', '.join(sorted(names)[:6]) or 'none'}; {_RECORD}"


def _without_nan(table: pa.Table) -> pa.Table:
    """The same with a step that has no finite gradient as the replay expects one: infinite."""
    largest, gradient = (table[name].to_numpy().copy() for name in ("largest", "largest_gradient"))
    broken = ~(np.isfinite(largest) & np.isfinite(gradient))
    for name, column in (("largest", largest), ("largest_gradient", gradient)):
        column[broken] = np.inf
        index = table.column_names.index(name)
        table = table.set_column(index, PROBE_SCHEMA.field(name), pa.array(column))
    return table
