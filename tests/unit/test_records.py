"""Run files: written whole or not at all, read only if untouched and the ones asked for."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfscale import records
from halfscale.plan import RunSpec
from halfscale.records import (
    TRACE_SCHEMA,
    RecordError,
    RunRecord,
    read_run,
    write_atomically,
    write_json,
    write_run,
    write_text,
)

from .crafted import ENVIRONMENT, Fate, tiny_spec, write_crafted

SPEC = tiny_spec(steps=6)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that was written to ``tmp_path``."""
    write_crafted(tmp_path, SPEC, Fate(skipped=[1, 2]))
    return tmp_path / SPEC.folder


def refusal(results: Path, spec: RunSpec = SPEC) -> str:
    with pytest.raises(RecordError) as caught:
        read_run(results, spec)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    command = shlex.split(message.rpartition("again: ")[2])
    assert command == ["rm", "-r", str(results / spec.folder)]
    return message


floats = st.floats(width=32)
rows = st.lists(
    st.tuples(
        st.integers(0, 2**31 - 1),
        floats,
        st.floats(),
        st.booleans(),
        st.booleans(),
        st.floats(),
        st.floats(),
        st.floats(0, 1e9),
    ),
    max_size=5,
)


@settings(max_examples=25)
@given(rows=rows, final_scale=st.none() | st.floats(0, 1e300), error=st.none() | st.text())
def test_what_was_written_is_read_back(
    tmp_path: Path, rows: list[tuple[Any, ...]], final_scale: float | None, error: str | None
) -> None:
    columns = {name: [row[i] for row in rows] for i, name in enumerate(TRACE_SCHEMA.names)}
    written = write_run(
        tmp_path / SPEC.folder,
        columns,
        spec=SPEC,
        outcome="failed",
        error=error,
        final_scale=final_scale,
        environment=ENVIRONMENT,
    )
    record, trace = read_run(tmp_path, SPEC)
    assert record == written
    assert (record.steps_done, record.error, record.final_scale) == (len(rows), error, final_scale)
    assert record.skipped_steps == sum(not row[4] for row in rows)
    assert trace.schema.equals(TRACE_SCHEMA)
    assert repr(trace.to_pydict()) == repr(columns)  # NaN equals NaN here


def test_the_files_are_strict_json_and_plain_parquet(run: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    content = json.loads((run / "run.json").read_text("utf-8"), parse_constant=refuse)
    assert content["digest"] == SPEC.digest
    assert content["spec"] == json.loads(SPEC.canonical_json())
    assert pq.read_schema(run / "trace.parquet").equals(TRACE_SCHEMA)
    assert sorted(path.name for path in run.iterdir()) == ["run.json", "trace.parquet"]


def test_a_folder_with_spaces_quotes_and_letters_beyond_ascii(awkward: Path) -> None:
    written = write_crafted(awkward, SPEC)
    assert read_run(awkward, SPEC)[0] == written
    (awkward / SPEC.folder / "trace.parquet").unlink()
    refusal(awkward)


def test_a_record_cut_at_any_byte_is_refused(tmp_path: Path, run: Path) -> None:
    whole = (run / "run.json").read_bytes()
    assert whole.endswith(b"}\n")
    for length in range(len(whole) - 1):
        (run / "run.json").write_bytes(whole[:length])
        assert str(run / "run.json") in refusal(tmp_path)


def test_a_trace_cut_at_any_byte_is_refused(tmp_path: Path, run: Path) -> None:
    whole = (run / "trace.parquet").read_bytes()
    for length in range(0, len(whole), 7):
        (run / "trace.parquet").write_bytes(whole[:length])
        assert str(run / "trace.parquet") in refusal(tmp_path)


def test_a_trace_with_any_bit_flipped_is_refused(tmp_path: Path, run: Path) -> None:
    whole = (run / "trace.parquet").read_bytes()
    for position in range(0, len(whole), 11):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        (run / "trace.parquet").write_bytes(damaged)
        assert str(run / "trace.parquet") in refusal(tmp_path)


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def other_values(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int | float):
        return [value + 1, -value - 1, None, "x", math.nan, math.inf]
    if value is None:
        return [1, "x"]
    return [f"{value}x", "", 7, None]


def test_any_edited_field_is_refused(tmp_path: Path, run: Path) -> None:
    original = json.loads((run / "run.json").read_text())
    fields = list(leaves(original))
    assert len(fields) > 20
    for field in fields:
        for change in other_values(_get(original, field)):
            content = json.loads(json.dumps(original))
            _get(content, field[:-1])[field[-1]] = change
            (run / "run.json").write_text(json.dumps(content))
            assert str(run / "run.json") in refusal(tmp_path), (field, change)


def test_any_missing_or_added_field_is_refused(tmp_path: Path, run: Path) -> None:
    original = json.loads((run / "run.json").read_text())
    for field in original:
        content = {key: value for key, value in original.items() if key != field}
        (run / "run.json").write_text(json.dumps(content))
        assert str(run / "run.json") in refusal(tmp_path), field
    (run / "run.json").write_text(json.dumps({**original, "note": "hello"}))
    refusal(tmp_path)


def _get(content: Any, field: tuple[Any, ...]) -> Any:
    for key in field:
        content = content[key]
    return content


@pytest.mark.parametrize("text", ["", "[]", "null", "7", '"x"', "{}", "\xff", "[" * 50])
def test_something_else_in_place_of_a_record_is_refused(
    tmp_path: Path, run: Path, text: str
) -> None:
    (run / "run.json").write_bytes(text.encode("latin-1"))
    assert str(run / "run.json") in refusal(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "trace.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, run: Path, name: str) -> None:
    (run / name).unlink()
    assert f"{run / name} is missing" in refusal(tmp_path)


@pytest.mark.parametrize(
    "other",
    [tiny_spec(steps=6, seed=1), tiny_spec(steps=6, init_scale=2), tiny_spec("fp32", steps=6)],
    ids=["seed", "scale", "arm"],
)
def test_the_whole_run_of_another_specification_is_refused(
    tmp_path: Path, run: Path, other: RunSpec
) -> None:
    write_crafted(tmp_path / "other", other)
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "other" / other.folder, run)
    message = refusal(tmp_path)
    assert str(run / "run.json") in message
    assert other.digest in message
    assert SPEC.digest in message


def test_the_trace_of_another_run_is_refused(tmp_path: Path, run: Path) -> None:
    write_crafted(tmp_path / "other", SPEC, Fate(pace=3))
    shutil.copy(tmp_path / "other" / SPEC.folder / "trace.parquet", run / "trace.parquet")
    assert str(run / "trace.parquet") in refusal(tmp_path)


def test_a_run_is_written_again_over_a_damaged_one(tmp_path: Path, run: Path) -> None:
    (run / "run.json").write_text("{")
    (run / "trace.parquet").write_bytes(b"")
    written = write_crafted(tmp_path, SPEC)
    assert read_run(tmp_path, SPEC)[0] == written


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file with old content, alone in its folder."""
    path = tmp_path / "folder" / "file.txt"
    write_text(path, "old")
    return path


def assert_untouched(old: Path) -> None:
    assert old.read_text() == "old"
    assert [path.name for path in old.parent.iterdir()] == [old.name]


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_in_mid_write_leaves_the_old_file(old: Path, error: BaseException) -> None:
    def write(path: Path) -> None:
        path.write_text("half of the ne")
        raise error

    with pytest.raises(type(error)):
        write_atomically(old, write)
    assert_untouched(old)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_names_it(
    old: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        if call == "fsync":
            patch.setattr(os, "fsync", full_disk)
        if call == "replace":
            patch.setattr(Path, "replace", full_disk)
        write_atomically(old, full_disk if call == "write" else lambda path: path.write_text("x"))
    assert caught.value.errno == errno.ENOSPC
    assert str(old) in str(caught.value)
    assert_untouched(old)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the operating system refuse to write more bytes into any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_refusal_by_the_operating_system_leaves_the_old_run(tmp_path: Path, run: Path) -> None:
    before = read_run(tmp_path, SPEC)
    files = {path.name: path.read_bytes() for path in run.iterdir()}
    for size in (0, 100, 1000):
        with largest_file(size), pytest.raises(OSError) as caught:
            write_crafted(tmp_path, SPEC, Fate(pace=2))
        assert re.search(r"trace\.parquet|run\.json", str(caught.value)), str(caught.value)
        assert {path.name: path.read_bytes() for path in run.iterdir()} == files
    assert read_run(tmp_path, SPEC)[0] == before[0]


def test_a_disk_that_fills_up_between_the_two_files_leaves_the_old_run(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_run(tmp_path, SPEC)[0]
    with monkeypatch.context() as patch:
        patch.setattr(records, "write_json", full_disk)
        with pytest.raises(OSError):
            write_crafted(tmp_path, SPEC, Fate(pace=2))
    assert read_run(tmp_path, SPEC)[0] == before
    assert sorted(path.name for path in run.iterdir()) == ["run.json", "trace.parquet"]


@pytest.mark.parametrize("kept", ["run.json", "trace.parquet"])
def test_a_process_killed_between_the_two_files_leaves_no_pair_that_is_believed(
    tmp_path: Path, run: Path, kept: str
) -> None:
    old = (run / kept).read_bytes()
    write_crafted(tmp_path, SPEC, Fate(pace=2))
    (run / kept).write_bytes(old)
    assert str(run / "trace.parquet") in refusal(tmp_path)


def test_numbers_that_are_no_json_are_refused_and_the_old_file_stays(old: Path) -> None:
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError):
            write_json(old, {"a": [number]})
        assert_untouched(old)


def test_missing_folders_are_made_and_files_get_the_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    before = os.umask(0o027)
    try:
        write_text(path, "é\n")
    finally:
        os.umask(before)
    assert path.read_bytes() == "é\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640


def test_readers_see_the_old_or_the_new_file_never_a_part(old: Path) -> None:
    seen = []

    def write(path: Path) -> None:
        for part in ("n", "e", "w"):
            with path.open("a") as file:
                file.write(part)
            seen.append(old.read_text())

    write_atomically(old, write)
    assert seen == ["old"] * 3
    assert old.read_text() == "new"


def test_a_record_knows_no_other_outcomes(run: Path) -> None:
    content = json.loads((run / "run.json").read_text())
    content.pop("checksum")
    with pytest.raises(ValueError):
        RunRecord.model_validate({**content, "outcome": "fine"})
