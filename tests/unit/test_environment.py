"""The pinned versions, the conda file and pyproject.toml say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).parents[2]
CONDA_NAMES = {"torch": "pytorch"}


def read_lock() -> dict[str, str]:
    lines = (REPOSITORY / "envs/constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}


def read_requirements(group: str | None = None) -> list[Requirement]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    texts = project["optional-dependencies"][group] if group else project["dependencies"]
    return [Requirement(text) for text in texts]


def test_every_dependency_is_pinned_within_its_range() -> None:
    lock = read_lock()
    groups = (None, "slurm", "dev")
    for requirement in (one for group in groups for one in read_requirements(group)):
        if requirement.name == "halfscale":  # with its own optional dependencies
            continue
        assert requirement.name.lower() in lock, requirement.name
        assert requirement.specifier.contains(Version(lock[requirement.name.lower()]))


def test_torch_is_pinned_to_the_version_that_was_measured() -> None:
    assert read_lock()["torch"] == "2.13.0"


def test_the_conda_file_names_every_dependency_at_the_pinned_version() -> None:
    lock = read_lock()
    content = yaml.safe_load((REPOSITORY / "envs/halfscale.yaml").read_text())
    found = dict(line.split("=", 1) for line in content["dependencies"])
    assert found.pop("python") == "3.11"
    expected = {
        CONDA_NAMES.get(requirement.name, requirement.name): lock[requirement.name]
        for requirement in read_requirements()
    }
    assert found == expected
