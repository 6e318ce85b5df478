"""Run files: written once and whole, read only when they are what the plan asks for.

A run leaves ``trace.parquet``, a row a step, and ``run.json``, which says what was run, how it
ended and which trace belongs to it. ``run.json`` carries a checksum of its own content and of the
trace, so a truncated, foreign or hand-edited file is refused by name. A probe leaves
``probe.parquet`` and ``probe.json`` in the same way.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from halfscale.gpu_use import GpuUse
from halfscale.magnitudes import BINS
from halfscale.plan import JobSpec, ProbeSpec, RunSpec, canonical_json
from halfscale.sources import file_digest

Outcome = Literal["ok", "diverged", "stuck", "stalled", "out-of-memory", "failed"]

TRACE_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # 0 for the first step
        ("loss", pa.float32()),  # unscaled, before the step is taken
        ("scale", pa.float64()),  # the factor the loss of this step was multiplied with
        ("overflow", pa.bool_()),  # some gradient came out Inf or NaN
        ("applied", pa.bool_()),  # the optimizer step was taken
        ("grad_norm", pa.float64()),  # L2 norm of all unscaled parameter gradients
        ("headroom", pa.float64()),  # bits: log2(65504 / largest scaled parameter gradient)
        ("seconds", pa.float64()),  # wall time of the step
    ]
)


class RecordError(RuntimeError):
    """A run file is missing, damaged or belongs to something else; the message names it.

    Attributes:
        fault: The file and what is wrong with it, without how to mend it.
    """

    def __init__(self, fault: str, mend: str = "") -> None:
        super().__init__(fault + mend)
        self.fault = fault


PROBE_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # 0 for the first step
        ("loss", pa.float32()),
        ("largest", pa.float64()),  # largest magnitude of all backward tensors; inf if not finite
        ("largest_gradient", pa.float64()),  # the same of the parameters' gradients alone
        ("batch_repeats", pa.bool_()),  # the batch was that of the step before
        # Elements of the backward tensors by exponent, see halfscale.magnitudes; and those of zero.
        ("activation_counts", pa.list_(pa.int64(), BINS)),
        ("weight_counts", pa.list_(pa.int64(), BINS)),
        ("activation_zeros", pa.int64()),
        ("weight_zeros", pa.int64()),
    ]
)


class JobRecord(BaseModel):
    """What runs and probes have in common.

    Attributes:
        digest: The digest of the specification.
        outcome: How it ended, see the table of outcomes in the README; ``stalled`` is never
            stored, since only the comparison with the fp32 control can tell it.
        error: The error's text, or None.
        steps_done: Rows of the table.
        environment: What computed it: torch, device name, arithmetic, threads.
        gpu: What it took of its GPU; None on the CPU, and in records older than this field.
        trace_sha256: The SHA-256 of the table's file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str
    outcome: Outcome
    error: str | None
    steps_done: int
    environment: dict[str, str | int]
    gpu: GpuUse | None = None
    trace_sha256: str


class RunRecord(JobRecord):
    """The content of ``run.json``.

    Attributes:
        spec: The specification that was run.
        skipped_steps: Steps the optimizer did not take.
        final_scale: The scale after the last step; None where nothing was scaled.
        evaluation: What the workload's own ``evaluate`` returned; None if not finite or none.
        seconds: Wall time of all steps.
    """

    spec: RunSpec
    skipped_steps: int
    final_scale: float | None
    evaluation: float | None
    seconds: float


class ProbeRecord(JobRecord):
    """The content of ``probe.json``.

    Attributes:
        spec: The specification that was run.
    """

    spec: ProbeSpec


Record = TypeVar("Record", RunRecord, ProbeRecord)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in place in one step.

    After a crash or on a full disk ``path`` holds either the old content or the new, never a part.

    Raises:
        OSError: If the file cannot be written; the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        _sync(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        raise


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON atomically.

    Raises:
        ValueError: If a number is NaN or infinite.
    """
    write_text(path, json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n")


def write_run(folder: Path, trace: Mapping[str, list[Any]], **record: Any) -> RunRecord:
    """Write ``trace.parquet`` and ``run.json``, with the checksums that tie them together.

    Both are on the disk before either is put in place, so a full disk leaves the old pair whole.

    Args:
        folder: The run's folder, made if need be.
        trace: The columns of `TRACE_SCHEMA`, of equal length.
        record: The fields of `RunRecord` that cannot be derived; ``evaluation`` may be left out.
    """
    table = pa.table(dict(trace), schema=TRACE_SCHEMA)
    skipped = table.num_rows - sum(trace["applied"])
    derived = {"skipped_steps": skipped, "seconds": math.fsum(trace["seconds"])}
    return _write(RunRecord, folder, table, {"evaluation": None, **record, **derived})


def write_probe(folder: Path, probe: Mapping[str, list[Any]], **record: Any) -> ProbeRecord:
    """Write ``probe.parquet`` and ``probe.json``, as `write_run` does.

    Args:
        folder: The probe's folder, made if need be.
        probe: The columns of `PROBE_SCHEMA`, of equal length.
        record: The fields of `ProbeRecord` that cannot be derived.
    """
    return _write(ProbeRecord, folder, pa.table(dict(probe), schema=PROBE_SCHEMA), record)


def _write(kind: type[Record], folder: Path, table: pa.Table, record: Mapping[str, Any]) -> Record:
    spec: JobSpec = record["spec"]
    written: list[Record] = []

    def write(temporary: Path) -> None:
        pq.write_table(table, temporary)
        _sync(temporary)
        complete = kind(
            digest=spec.digest,
            steps_done=table.num_rows,
            trace_sha256=file_digest(temporary),
            **record,
        )
        content = complete.model_dump()
        write_json(folder / spec.record_name, {**content, "checksum": checksum_of(content)})
        written.append(complete)

    write_atomically(folder / spec.table_name, write)
    return written[0]


def checksum_of(content: Mapping[str, Any]) -> str:
    """SHA-256 (hexadecimal) of plain data, whatever the order of its keys.

    Raises:
        ValueError: If a number is NaN or infinite.
    """
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def read_run(results: Path, spec: RunSpec) -> tuple[RunRecord, pa.Table]:
    """Read one run and check that it is the one the plan asks for, whole and untouched.

    Raises:
        RecordError: Naming the file, what is wrong with it and the command that mends it.
    """
    return _read(RunRecord, TRACE_SCHEMA, results, spec)


def read_probe(results: Path, spec: ProbeSpec) -> tuple[ProbeRecord, pa.Table]:
    """Read one probe and check it, as `read_run` does.

    Raises:
        RecordError: Naming the file, what is wrong with it and the command that mends it.
    """
    return _read(ProbeRecord, PROBE_SCHEMA, results, spec)


def read_probe_record(folder: Path) -> ProbeRecord:
    """Read what lies beside a probe's table, whatever plan it is of, and check both.

    Raises:
        RecordError: Naming the file and what is wrong with it.
    """
    path = folder / ProbeSpec.record_name
    record = _read_record(ProbeRecord, path, folder)
    if record.digest != record.spec.digest:
        refuse(path, folder, "is the result of another specification than it says")
    _check_table(record, path, folder)
    return record


def probe_counts(table: pa.Table, tensors: str) -> NDArray[np.int64]:
    """Elements by exponent in the table of a probe, shape (steps, BINS).

    Args:
        table: A table of `PROBE_SCHEMA`.
        tensors: ``"activation"`` or ``"weight"``.
    """
    column = table[f"{tensors}_counts"].combine_chunks()
    counts: NDArray[np.int64] = column.flatten().to_numpy().reshape(len(column), BINS)
    return counts


def tenths(steps: int) -> dict[str, slice]:
    """The parts of a probe that are told apart: its first tenth, its last one, and all of it.

    Args:
        steps: How many steps it recorded; planned ones that it did not come to do not count.
    """
    tenth = max(1, steps // 10)
    return {"start": slice(tenth), "end": slice(-tenth, None), "all": slice(None)}


def _read(
    kind: type[Record], schema: pa.Schema, results: Path, spec: JobSpec
) -> tuple[Record, pa.Table]:
    folder = results / spec.folder
    path = folder / spec.record_name
    record = _read_record(kind, path, folder)
    if record.digest != spec.digest or record.spec != spec:
        refuse(
            path,
            folder,
            f"is the result of another specification ({record.digest}, not {spec.digest})",
        )
    table_path = _check_table(record, path, folder)
    try:
        # Ten times as fast as read_table, which looks for a data set of many files and threads.
        table = pq.ParquetFile(table_path).read(use_threads=False)
        if not table.schema.equals(schema):
            table = pq.read_table(table_path, schema=schema)
    except pa.ArrowException as error:
        refuse(table_path, folder, f"cannot be read: {error}")
    return record, table


def _check_table(record: RunRecord | ProbeRecord, path: Path, folder: Path) -> Path:
    """The table beside a record, if it is the one it was written with."""
    table = folder / record.spec.table_name
    try:
        digest = file_digest(table)
    except FileNotFoundError:
        refuse(table, folder, "is missing")
    if digest != record.trace_sha256:
        refuse(table, folder, f"is not the {table.stem} that its {path.name} was written with")
    return table


def _read_record(kind: type[Record], path: Path, folder: Path) -> Record:
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("checksum")
        record = kind.model_validate(content)
        # Of what it holds: one that is older than a field has none. NaN is a ValueError.
        computed = checksum_of(record.model_dump(exclude_unset=True))
    except FileNotFoundError:
        refuse(path, folder, "is missing")
    except (ValueError, KeyError, AttributeError, TypeError, ValidationError):
        refuse(path, folder, f"is truncated or no {path.stem} record")
    if computed != checksum:
        refuse(path, folder, "was edited after it was written")
    return record


def refuse(path: Path, folder: Path, reason: str) -> NoReturn:
    """Say what is wrong with a file, and that its folder is to be removed.

    Raises:
        RecordError: Always.
    """
    raise RecordError(
        f"{path} {reason}",
        ". Mend it: remove the folder and run the same command again: "
        f"rm -r {shlex.quote(str(folder))}",
    ) from None
