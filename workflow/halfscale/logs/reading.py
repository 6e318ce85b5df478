"""Read a log of a training's scale, whatever wrote it: a row an optimizer step."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from halfscale.logs.log import NONE, OVERFLOW, UNKNOWN, ScalingLog
from halfscale.plan import LARGEST_FP16

ALIASES = {
    "step": ("step", "global_step", "iteration"),
    "scale": ("scale", "loss_scale"),
    "overflow": ("overflow", "found_inf", "skipped"),
    "largest_gradient": ("largest_gradient",),
    "headroom": ("headroom",),
}
LARGEST_SPAN = 1_000_000

_WRITE = "write a row a step with the columns step, scale, overflow"
_FLAGS = {
    **dict.fromkeys(("true", "yes", "1", "1.0"), OVERFLOW),
    **dict.fromkeys(("false", "no", "0", "0.0"), NONE),
    **dict.fromkeys(("", "nan", "none", "null"), UNKNOWN),
}

Row = tuple[str, Mapping[str, Any]]


def read_log(path: Path) -> ScalingLog:
    """Read a log: CSV with a header, a JSON object a line, or a run's ``trace.parquet``.

    Args:
        path: The file, or the folder of a run.

    Raises:
        ValueError: If it is no such log, in one line that says what to write.
    """
    file = path / "trace.parquet" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"--log {path}: {error.strerror}; name the file of a log") from None
    rows = list(_read_rows(file, content))
    if not rows:
        raise ValueError(f"{file} holds no row; {_WRITE}")
    columns = _find_columns(file, rows[0][1])
    by_step: dict[int, tuple[float, int, float]] = {}
    order, repeated = [], []
    for where, row in rows:
        step = _whole(file, where, columns, row)
        taken = _values(file, where, columns, row)
        if step in by_step and by_step[step] != taken:
            repeated.append(step)
        by_step[step] = taken
        order.append(step)
    notes = _describe_order(order, by_step, repeated)
    return _fill(file, by_step, notes, without_overflow="overflow" not in columns)


def _read_rows(file: Path, content: bytes) -> Iterator[Row]:
    if content.startswith(b"PAR1"):
        yield from _read_parquet(file)
        return
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is neither text nor Parquet; {_WRITE}, as CSV") from None
    if text.lstrip().startswith("{"):
        yield from _read_json_lines(file, text)
        return
    head = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    yield from _read_csv(file, text, delimiter)


def _read_csv(file: Path, text: str, delimiter: str) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    line = 0
    try:
        for row in reader:
            line = reader.line_num
            # A line cut off, as by a crash, lacks its last cells: they are None, as a blank one.
            yield f"line {line}", {str(key): value for key, value in row.items()}
    except csv.Error as error:
        # An open quote is noticed long after the line that it stands in.
        raise ValueError(
            f"{file}, line {line + 1} is not CSV ({error}); mend it, as by removing a stray quote"
        ) from None


def _read_parquet(file: Path) -> Iterator[Row]:
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:80]
        raise ValueError(f"{file} is no whole Parquet file ({reason}); {_WRITE}") from None
    names = [name for known in ALIASES.values() for name in known]
    table = table.select([name for name in table.column_names if name.strip().lower() in names])
    if table.num_columns:
        yield from ((f"row {index}", row) for index, row in enumerate(table.to_pylist()))


def _read_json_lines(file: Path, text: str) -> Iterator[Row]:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                return  # cut off, as by a crash
            raise ValueError(f"{file}, line {number} is not JSON; write an object a line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{file}, line {number} is no JSON object; {_WRITE}")
        yield f"line {number}", row


def _find_columns(file: Path, row: Mapping[str, Any]) -> dict[str, str]:
    """The log's own names of what it holds."""
    given = {name.strip().lower(): name for name in row}
    columns: dict[str, str] = {}
    for column, known in ALIASES.items():
        for name in known:
            if name in given:
                columns.setdefault(column, given[name])
    if missing := [name for name in ("step", "scale") if name not in columns]:
        has = ", ".join(map(repr, list(row)[:6])) or "none"
        raise ValueError(f"{file} has no column {missing[0]!r}, but {has}; {_WRITE}")
    return columns


def _whole(file: Path, where: str, columns: Mapping[str, str], row: Mapping[str, Any]) -> int:
    value = _number(row.get(columns["step"]))
    if value is None or not 0 <= value < math.inf or value != int(value):
        given = row.get(columns["step"])
        raise ValueError(
            f"{file}, {where}: the step {given!r} is no whole number; write 0, 1, 2, …"
        )
    return int(value)


def _values(
    file: Path, where: str, columns: Mapping[str, str], row: Mapping[str, Any]
) -> tuple[float, int, float]:
    """Scale, overflow and largest gradient of a row; NaN and UNKNOWN for what is blank."""

    def read(column: str, parse: Callable[[Any], Any], wanted: str) -> Any:
        given = row.get(columns[column]) if column in columns else None
        value = parse(given)
        if value is None or value < 0:
            raise ValueError(f"{file}, {where}: {columns[column]} is {given!r}; write {wanted}")
        return value

    def parse(value: Any) -> float | None:
        number = _number(value)
        return math.inf if number is not None and math.isnan(number) else number

    scale = read("scale", parse, "the scale of the step, such as 65536")
    overflow = _FLAGS.get(str(row.get(columns.get("overflow", ""), "")).strip().lower())
    if overflow is None:
        given = row.get(columns["overflow"])
        raise ValueError(
            f"{file}, {where}: {columns['overflow']} is {given!r}; write 1 for an overflow, else 0"
        )
    largest = read("largest_gradient", parse, "the largest unscaled gradient magnitude")
    scale = math.nan if scale == math.inf else scale
    if "largest_gradient" not in columns and "headroom" in columns and scale:
        headroom = _number(row.get(columns["headroom"]))
        if headroom is not None and math.isfinite(headroom):
            largest = LARGEST_FP16 / 2.0**headroom / scale
    return scale, overflow, math.nan if largest == math.inf else largest


def _number(value: Any) -> float | None:
    """A number, NaN for a blank; None for what is none."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null")):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _describe_order(
    order: list[int], by_step: Mapping[int, object], repeated: list[int]
) -> list[str]:
    notes = []
    if order != sorted(order):
        at = next(step for before, step in pairwise(order) if step < before)
        notes.append(f"the rows are not in the order of the steps (step {at} comes late); sorted")
    if len(by_step) < len(order):
        count = len(order) - len(by_step)
        text = f"{count} row{'s repeat' if count > 1 else ' repeats'} a step that was there already"
        differs = f", step {repeated[0]} with other values: the last row counts" if repeated else ""
        notes.append(text + differs)
    return notes


def _fill(
    file: Path,
    by_step: Mapping[int, tuple[float, int, float]],
    notes: list[str],
    *,
    without_overflow: bool,
) -> ScalingLog:
    """Give every step from the first to the last its place."""
    first, last = min(by_step), max(by_step)
    if (span := last - first + 1) > LARGEST_SPAN:
        raise ValueError(
            f"{file}: steps {first} to {last} are more than {LARGEST_SPAN}; give a part of the log"
        )
    scale, largest = np.full(span, np.nan), np.full(span, np.nan)
    overflow = np.full(span, UNKNOWN, dtype=np.int8)
    for step, values in by_step.items():
        scale[step - first], overflow[step - first], largest[step - first] = values
    there = np.zeros(span, dtype=np.bool_)
    there[np.fromiter(by_step, dtype=np.int64) - first] = True
    if without_overflow:
        overflow = _from_falls(scale)
        notes.append(
            "there is no column overflow: a step is taken to overflow where the scale falls after "
            "it; of the last step that is unknown"
        )
    blank = np.flatnonzero(there & (np.isnan(scale) | (overflow == UNKNOWN)))
    if without_overflow:
        blank = np.flatnonzero(there & np.isnan(scale))
    if len(blank):
        notes.append(
            f"{len(blank)} rows have no scale or no overflow, the first at step "
            f"{first + blank[0]}: what happened there is unknown"
        )
    if len(missing := np.flatnonzero(~there)):
        notes.append(_describe_gaps(first, missing, len(by_step)))
    return ScalingLog(file, first, scale, overflow, largest, len(by_step), tuple(notes))


def _from_falls(scale: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, Any]:
    after = np.append(scale[1:], np.nan)
    known = ~(np.isnan(scale) | np.isnan(after))
    return np.where(known, np.where(after < scale, OVERFLOW, NONE), UNKNOWN).astype(np.int8)


def _describe_gaps(first: int, missing: np.ndarray[Any, Any], rows: int) -> str:
    text = f"{len(missing)} steps are missing, the first {first + missing[0]}"
    if len(missing) >= rows:
        text += f" (one row in about {round((len(missing) + rows) / rows)} steps)"
    return f"{text}: whether they overflowed is unknown and widens every range; log every step"
