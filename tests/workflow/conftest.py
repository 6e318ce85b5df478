"""One small workflow, run once for all tests; each test works on its own copy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from .driver import CONFIG, REPOSITORY, Bench


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test session share."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "halfscale-shared"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def source(shared: Path) -> Path:
    """A copy of the workflow, so that an edit to the repository does not disturb the session."""
    copy = shared / "source"
    with FileLock(shared / "source.lock"):
        if not copy.exists():
            partial = shared / "source.partial"
            partial.mkdir()
            for name in ("Snakefile", "config.yaml"):
                shutil.copy2(REPOSITORY / name, partial / name)
            for name in ("workflow", "profiles", "envs"):
                shutil.copytree(
                    REPOSITORY / name, partial / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            partial.rename(copy)
    return copy


@pytest.fixture(scope="session")
def baseline(shared: Path, source: Path) -> Path:
    """A folder in which the whole workflow has run; copy it, do not touch it."""
    folder = shared / "baseline"
    with FileLock(shared / "baseline.lock"):
        if not folder.exists():
            partial = shared / "baseline.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            (partial / "config.yaml").write_text(CONFIG, encoding="utf-8")
            Bench(partial, source).make()
            partial.rename(folder)
    return folder


@pytest.fixture
def bench(baseline: Path, source: Path, tmp_path: Path) -> Bench:
    """A copy of the finished workflow, with Snakemake's records and all times kept."""
    path = tmp_path / "work"
    shutil.copytree(baseline, path)
    return Bench(path, source)


@pytest.fixture
def empty(source: Path, tmp_path: Path) -> Bench:
    """A folder with nothing but ``config.yaml``."""
    path = tmp_path / "work"
    path.mkdir()
    (path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return Bench(path, source)
