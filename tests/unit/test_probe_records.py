"""Probe files: read only if untouched and the ones asked for, as run files are."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfscale import records
from halfscale.magnitudes import BINS
from halfscale.plan import ProbeSpec
from halfscale.records import (
    PROBE_SCHEMA,
    ProbeRecord,
    RecordError,
    read_probe,
    read_run,
    write_probe,
)

from .crafted import ENVIRONMENT, make_plan, write_crafted
from .crafted_probes import craft_step, write_steps

PLAN = make_plan(seeds=[0, 1], workloads={"binary": {"steps": 4}, "digits": {"steps": 4}})
SPEC = PLAN.probe("binary", 0)
STEPS = [craft_step({-3: 5 + step, None: 2}, {-8: 2}) for step in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a probe that was written to ``tmp_path``."""
    write_steps(tmp_path, PLAN, STEPS)
    return tmp_path / SPEC.folder


def refusal(results: Path, spec: ProbeSpec = SPEC) -> str:
    with pytest.raises(RecordError) as caught:
        read_probe(results, spec)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    command = shlex.split(message.rpartition("again: ")[2])
    assert command == ["rm", "-r", str(results / spec.folder)]
    return message


counts = st.integers(0, 2**63 - 1)
rows = st.lists(
    st.tuples(
        st.integers(0, 2**31 - 1),
        st.floats(width=32),
        st.floats(),
        st.floats(),
        st.booleans(),
        *[st.builds(lambda n, b: [0] * b + [n] + [0] * (BINS - 1 - b), counts, st.integers(0, 267))]
        * 2,
        counts,
        counts,
    ),
    max_size=4,
)


@settings(max_examples=20)
@given(rows=rows, error=st.none() | st.text())
def test_what_was_written_is_read_back(
    tmp_path: Path, rows: list[tuple[Any, ...]], error: str | None
) -> None:
    columns = {name: [row[i] for row in rows] for i, name in enumerate(PROBE_SCHEMA.names)}
    written = write_probe(
        tmp_path / SPEC.folder,
        columns,
        spec=SPEC,
        outcome="failed",
        error=error,
        environment=ENVIRONMENT,
    )
    record, table = read_probe(tmp_path, SPEC)
    assert record == written
    assert (record.steps_done, record.error, record.spec) == (len(rows), error, SPEC)
    assert table.schema.equals(PROBE_SCHEMA)
    assert repr(table.to_pydict()) == repr(columns)  # NaN equals NaN here


@pytest.mark.parametrize("bins", [0, 1, BINS - 1, BINS + 1])
def test_a_histogram_of_another_length_is_not_written(tmp_path: Path, bins: int) -> None:
    with pytest.raises(ValueError):
        write_steps(tmp_path, PLAN, [{**STEPS[0], "weight_counts": [1] * bins}])
    assert not (tmp_path / SPEC.folder).exists()


def test_the_files_are_strict_json_and_plain_parquet(folder: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    content = json.loads((folder / "probe.json").read_text("utf-8"), parse_constant=refuse)
    assert content["digest"] == SPEC.digest
    assert content["spec"] == json.loads(SPEC.canonical_json())
    assert pq.read_schema(folder / "probe.parquet").equals(PROBE_SCHEMA)
    assert sorted(path.name for path in folder.iterdir()) == ["probe.json", "probe.parquet"]


def test_a_folder_with_spaces_quotes_and_letters_beyond_ascii(awkward: Path) -> None:
    written = write_steps(awkward, PLAN, STEPS)
    assert read_probe(awkward, SPEC)[0] == written
    (awkward / SPEC.folder / "probe.parquet").unlink()
    refusal(awkward)


@pytest.mark.parametrize("name", ["probe.json", "probe.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"{folder / name} is missing" in refusal(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / SPEC.folder / 'probe.json'} is missing" in refusal(tmp_path)


def test_a_record_cut_at_any_byte_is_refused(tmp_path: Path, folder: Path) -> None:
    whole = (folder / "probe.json").read_bytes()
    assert whole.endswith(b"}\n")
    for length in range(len(whole) - 1):
        (folder / "probe.json").write_bytes(whole[:length])
        message = refusal(tmp_path)
        assert f"{folder / 'probe.json'} is truncated or no probe record" in message


def test_a_table_cut_or_changed_at_any_byte_is_refused(tmp_path: Path, folder: Path) -> None:
    whole = (folder / "probe.parquet").read_bytes()
    for position in range(0, len(whole), 17):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        for content in (whole[:position], bytes(damaged)):
            (folder / "probe.parquet").write_bytes(content)
            assert str(folder / "probe.parquet") in refusal(tmp_path)


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


def _get(content: Any, field: tuple[Any, ...]) -> Any:
    for key in field:
        content = content[key]
    return content


def test_any_edited_field_is_refused(tmp_path: Path, folder: Path) -> None:
    original = json.loads((folder / "probe.json").read_text())
    fields = list(leaves(original))
    assert len(fields) > 15
    for field in fields:
        for change in other_values(_get(original, field)):
            content = json.loads(json.dumps(original))
            _get(content, field[:-1])[field[-1]] = change
            (folder / "probe.json").write_text(json.dumps(content))
            assert str(folder / "probe.json") in refusal(tmp_path), (field, change)


def test_any_missing_or_added_field_is_refused(tmp_path: Path, folder: Path) -> None:
    original = json.loads((folder / "probe.json").read_text())
    for field in original:
        content = {key: value for key, value in original.items() if key != field}
        (folder / "probe.json").write_text(json.dumps(content))
        assert str(folder / "probe.json") in refusal(tmp_path), field
    (folder / "probe.json").write_text(json.dumps({**original, "note": "hello"}))
    refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "null", "7", '"x"', "{}", "\xff", "[" * 50])
def test_something_else_in_place_of_a_record_is_refused(
    tmp_path: Path, folder: Path, text: str
) -> None:
    (folder / "probe.json").write_bytes(text.encode("latin-1"))
    assert str(folder / "probe.json") in refusal(tmp_path)


LONGER = make_plan(seeds=[0], workloads={"binary": {"steps": 5}})
WIDER = make_plan(seeds=[0], workloads={"binary": {"steps": 4, "hidden": 7}})
OTHERS = {
    "seed": PLAN.probe("binary", 1),
    "workload": PLAN.probe("digits", 0),
    "steps": LONGER.probe("binary", 0),
    "parameters": WIDER.probe("binary", 0),
    "code": SPEC.model_copy(update={"source": "0" * 16}),
    "threads": SPEC.model_copy(update={"threads": 2}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_the_whole_probe_of_another_specification_is_refused(
    tmp_path: Path, folder: Path, kind: str
) -> None:
    other = OTHERS[kind]
    message = refusal_of_stored(tmp_path, folder, other)
    assert f"{folder / 'probe.json'} is the result of another specification" in message
    assert other.digest in message
    assert SPEC.digest in message


def refusal_of_stored(results: Path, folder: Path, other: ProbeSpec) -> str:
    _, table = read_probe(results, SPEC)
    shutil.rmtree(folder)
    write_probe(
        folder,
        table.to_pydict(),
        spec=other,
        outcome="ok",
        error=None,
        environment=ENVIRONMENT,
    )
    return refusal(results)


def test_a_run_in_place_of_a_probe_is_refused(tmp_path: Path, folder: Path) -> None:
    run = PLAN.run("binary", "bf16", 0)
    write_crafted(tmp_path, run)
    shutil.copy(tmp_path / run.folder / "run.json", folder / "probe.json")
    assert f"{folder / 'probe.json'} is truncated or no probe record" in refusal(tmp_path)


def test_a_probe_in_place_of_a_run_is_refused(tmp_path: Path, folder: Path) -> None:
    run = PLAN.run("binary", "bf16", 0)
    (tmp_path / run.folder).mkdir(parents=True)
    shutil.copy(folder / "probe.json", tmp_path / run.folder / "run.json")
    with pytest.raises(RecordError, match=r"run\.json is truncated or no run record"):
        read_run(tmp_path, run)


def test_the_tables_of_two_probes_swapped_are_refused(tmp_path: Path, folder: Path) -> None:
    write_steps(tmp_path, PLAN, STEPS[::-1], seed=1)
    one, other = (tmp_path / PLAN.probe("binary", seed).folder for seed in (0, 1))
    kept = (one / "probe.parquet").read_bytes()
    shutil.copy(other / "probe.parquet", one / "probe.parquet")
    (other / "probe.parquet").write_bytes(kept)
    for seed, path in enumerate((one, other)):
        message = refusal(tmp_path, PLAN.probe("binary", seed))
        assert f"{path / 'probe.parquet'} is not the probe that its probe.json" in message


@pytest.mark.parametrize("kept", ["probe.json", "probe.parquet"])
def test_a_process_killed_between_the_two_files_leaves_no_pair_that_is_believed(
    tmp_path: Path, folder: Path, kept: str
) -> None:
    old = (folder / kept).read_bytes()
    write_steps(tmp_path, PLAN, STEPS[:2])
    (folder / kept).write_bytes(old)
    assert str(folder / "probe.parquet") in refusal(tmp_path)


def test_a_disk_that_fills_up_between_the_two_files_leaves_the_old_probe(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = read_probe(tmp_path, SPEC)[0]
    with monkeypatch.context() as patch:
        patch.setattr(records, "write_json", full_disk)
        with pytest.raises(OSError, match="space"):
            write_steps(tmp_path, PLAN, STEPS[:2])
    assert read_probe(tmp_path, SPEC)[0] == before
    assert sorted(path.name for path in folder.iterdir()) == ["probe.json", "probe.parquet"]


def test_a_probe_is_written_again_over_a_damaged_one(tmp_path: Path, folder: Path) -> None:
    (folder / "probe.json").write_text("{")
    (folder / "probe.parquet").write_bytes(b"")
    written = write_steps(tmp_path, PLAN, STEPS)
    assert read_probe(tmp_path, SPEC)[0] == written


def test_a_record_knows_no_other_outcomes(folder: Path) -> None:
    content = json.loads((folder / "probe.json").read_text())
    content.pop("checksum")
    ProbeRecord.model_validate(content)
    with pytest.raises(ValueError):
        ProbeRecord.model_validate({**content, "outcome": "fine"})
