"""Source digests: a changed byte is seen by exactly what depends on the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfscale import sources

PATTERNS = {
    name: getattr(sources, name)
    for name in (
        *("TRAINING", "PROBING", "SEARCH", "PREDICTION", "VERIFICATION", "TABLES", "VERDICT"),
        "PLOTS",
        "REPORT",
    )
}
FILES = sorted(
    path.relative_to(sources.PACKAGE).as_posix() for path in sources.PACKAGE.rglob("*.py")
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package that may be edited."""
    copy = tmp_path / "halfscale"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(sources.PACKAGE, copy, ignore=ignore)
    monkeypatch.setattr(sources, "PACKAGE", copy)
    sources.source_digest.cache_clear()
    yield copy
    sources.source_digest.cache_clear()


def digests() -> dict[str, str]:
    sources.source_digest.cache_clear()
    return {name: sources.source_digest(*patterns) for name, patterns in PATTERNS.items()}


def holders(package: Path, file: str) -> set[str]:
    return {
        name
        for name, patterns in PATTERNS.items()
        if any(package / file in package.glob(pattern) for pattern in patterns)
    }


@pytest.mark.parametrize("file", FILES)
def test_a_changed_byte_changes_the_digests_of_exactly_the_patterns_that_hold_it(
    package: Path, file: str
) -> None:
    before = digests()
    path = package / file
    path.write_bytes(path.read_bytes() + b"\n")
    after = digests()
    changed = {name for name in PATTERNS if before[name] != after[name]}
    assert changed == holders(package, file)


def test_what_a_run_is_computed_with_is_part_of_its_digest(package: Path) -> None:
    for file in (
        "train.py",
        "steps.py",
        "own.py",
        "faults.py",
        "precision/choice.py",
        "scaling/manual.py",
        "workloads/__init__.py",
    ):
        assert "TRAINING" in holders(package, file)
    for file in ("plots.py", "verdict.py", "report.py", "cli.py", "workloads/binary.py"):
        assert "TRAINING" not in holders(package, file)


def test_a_workload_is_digested_only_in_its_own_runs(package: Path) -> None:
    def both() -> list[str]:
        sources.source_digest.cache_clear()
        patterns = [(*sources.TRAINING, f"workloads/{name}.py") for name in ("binary", "digits")]
        return [sources.source_digest(*pattern) for pattern in patterns]

    before = both()
    path = package / "workloads" / "digits.py"
    path.write_text(path.read_text() + "# edited\n")
    after = both()
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]


def test_a_new_a_renamed_and_a_removed_file_are_seen(package: Path) -> None:
    before = sources.source_digest("scaling/*.py")
    (package / "scaling" / "other.py").write_text("")
    seen = {before}
    for change in ("new", "renamed"):
        sources.source_digest.cache_clear()
        seen.add(sources.source_digest("scaling/*.py"))
        if change == "new":
            (package / "scaling" / "other.py").rename(package / "scaling" / "zother.py")
    assert len(seen) == 3
    (package / "scaling" / "zother.py").unlink()
    sources.source_digest.cache_clear()
    assert sources.source_digest("scaling/*.py") == before


def test_bytes_moved_from_one_file_to_another_are_seen(package: Path) -> None:
    one, other = package / "scaling" / "a.py", package / "scaling" / "b.py"
    one.write_text("xy")
    other.write_text("z")
    before = sources.source_digest("scaling/*.py")
    one.write_text("x")
    other.write_text("yz")
    sources.source_digest.cache_clear()
    assert sources.source_digest("scaling/*.py") != before


def test_times_and_the_place_of_the_package_do_not_count(package: Path) -> None:
    before = digests()
    for path in package.rglob("*.py"):
        os.utime(path, (1, 1))
    assert digests() == before
    moved = package.rename(package.with_name("elsewhere"))
    sources.PACKAGE = moved
    assert digests() == before


def test_a_pattern_without_files_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sources.source_digest("nowhere/*.py")


def test_the_notebook_is_where_its_digest_is_taken_from() -> None:
    assert len(sources.file_digest(sources.NOTEBOOK)) == 64


def test_the_page_says_which_configurations_the_replay_itself_chose() -> None:
    cells = json.loads(sources.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (cell,) = [cell for cell in cells if cell["id"] == "prediction"]
    assert "the search chose the `found-*` configurations by that same replay" in cell["source"][-1]
