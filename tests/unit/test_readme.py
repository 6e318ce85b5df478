"""The README's commands are run somewhere, and what it shows is true."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from halfscale.planner import build_plan
from halfscale.train import train

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
# Each command of the README, the file that runs it and how it stands there.
RUN_BY = {
    "make report": ("tests/fresh_clone.sh", "make --no-print-directory report"),
    "make test": (".ci/run", "make test"),
    "python3 -m venv .venv": ("Makefile", "$(PYTHON) -m venv $(VENV)"),
    ".venv/bin/pip install -e . -c envs/constraints.txt": (
        "Makefile",
        "pip install -q -e . -c envs/constraints.txt",
    ),
    ".venv/bin/snakemake --cores 4 --resources gpu=1": (
        "Makefile",
        "snakemake --cores 4 --resources gpu=1",
    ),
    ".venv/bin/snakemake --cores 4 --configfile examples/small.yaml": (
        "tests/fresh_clone.sh",
        "snakemake --cores 4 --configfile examples/small.yaml",
    ),
    ".venv/bin/halfscale simulate --policy megatron --set init_scale=64 --set growth_interval=3"
    " --set hysteresis=2 --pattern FFXFFXFFX": (
        "tests/unit/test_simulate.py",
        '"init_scale=64", "growth_interval=3", "hysteresis=2"',
    ),
    ".venv/bin/halfscale simulate --policy torch --policy deepspeed --set init_scale=64"
    " --set growth_interval=2 --pattern FFXFF": (
        "tests/fresh_clone.sh",
        "halfscale simulate --policy torch --policy deepspeed",
    ),
    ".venv/bin/halfscale probe examples/own_model.py:build --steps 200 -o probe.parquet": (
        "tests/fresh_clone.sh",
        "halfscale probe examples/own_model.py:build --steps 200 -o probe.parquet",
    ),
    ".venv/bin/halfscale replay probe.parquet --compare init_scale=65536,growth_interval=100": (
        "tests/fresh_clone.sh",
        "halfscale replay probe.parquet --compare init_scale=65536,growth_interval=100",
    ),
    ".venv/bin/halfscale replay --log run.csv --compare init_scale=65536,growth_interval=100": (
        "tests/unit/test_scaling_log.py",
        'replay_log("run.csv", "--compare", "init_scale=65536,growth_interval=100")',
    ),
    ".venv/bin/halfscale check config.yaml": (
        "tests/fresh_clone.sh",
        "halfscale check config.yaml",
    ),
    ".venv/bin/halfscale check-workload examples/own_model.py:build --set width=32": (
        "tests/fresh_clone.sh",
        "halfscale check-workload examples/own_model.py:build --set width=32",
    ),
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_probes_it_names_are_seeds_of_one_workload() -> None:
    globs = re.findall(r"`results/probes/(\S+)/\*/probe\.parquet`", README)
    assert globs == ["digits"]


def test_every_command_is_run_by_a_test_or_by_ci() -> None:
    commands = {
        line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()
    }
    assert commands == set(RUN_BY)
    for file, written in RUN_BY.values():
        assert written in (REPOSITORY / file).read_text(encoding="utf-8"), (file, written)


def test_the_configuration_it_shows_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    shown = [yaml.safe_load(block) for block in blocks("yaml")]
    configurations = [build_plan(block).configurations for block in shown]
    assert [len(block) for block in configurations] == [2, 1, 3, 2]


def test_files_it_names_exist() -> None:
    for path in re.findall(r"\]\(([^)#]+)\)", README):
        assert (REPOSITORY / path).exists(), path


@pytest.mark.usefixtures("torch_settings")
def test_the_model_it_shows_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = (block for block in blocks("python") if "def build(" in block)
    (configuration,) = (block for block in blocks("yaml") if "entry:" in block)
    assert len(shown.splitlines()) <= 25
    for file, text in (("own_model.py", shown), ("own_model.yaml", configuration)):
        assert (REPOSITORY / "examples" / file).read_text(encoding="utf-8") == text
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "own_model.py").write_text(shown, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    plan = build_plan({**yaml.safe_load(configuration), "seeds": [0], "device": "cpu"})
    for spec in plan.runs():
        record = train(spec, tmp_path / spec.folder, lambda line: None)
        assert (record.outcome, record.error) == ("ok", None)
        assert record.evaluation is not None and record.evaluation > 0.8, "it has learned"
