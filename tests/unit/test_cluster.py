"""Jobs on other machines: which device may be left to be found, and who ends them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from halfscale import cluster, planner
from halfscale.cli import app
from halfscale.config import ConfigError
from halfscale.machine import stop_without_gpu
from halfscale.plan import Plan
from halfscale.planner import build_plan

CONFIG: dict[str, Any] = {"configurations": {"a": {}}, "workloads": {"binary": {}}}


def plan_for(device: str, gpus: int, monkeypatch: pytest.MonkeyPatch, *, elsewhere: bool) -> Plan:
    monkeypatch.setattr(planner, "count_gpus", lambda: gpus)
    return build_plan({**CONFIG, "device": device}, elsewhere=elsewhere)


def running(executor: object = None, *, elsewhere: bool) -> SimpleNamespace:
    """Snakemake's workflow when its jobs are about to start."""
    scheduler = SimpleNamespace(_executor=executor or object())
    return SimpleNamespace(non_local_exec=elsewhere, scheduler=scheduler)


def test_for_other_machines_cuda_needs_no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        plan_for("cuda", 0, monkeypatch, elsewhere=False)
    assert plan_for("cuda", 0, monkeypatch, elsewhere=True).device == "cuda"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_is_the_same_on_a_node_with_a_gpu_and_on_one_without(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [plan_for(device, gpus, monkeypatch, elsewhere=True) for gpus in (0, 1)]
    assert plans[0].canonical_json() == plans[1].canonical_json()
    digests = [[job.digest for job in plan.jobs()] for plan in plans]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_device_to_be_found_is_refused_where_jobs_go_to_other_machines(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for("auto", gpus, monkeypatch, elsewhere=True)
    with pytest.raises(SystemExit, match=r"device: 'auto': .*; write: device: cuda$"):
        cluster.prepare(plan, running(elsewhere=True))
    cluster.prepare(plan, running(elsewhere=False))


def test_a_named_device_is_taken_where_jobs_go_to_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device in ("cpu", "cuda"):
        plan = plan_for(device, 0, monkeypatch, elsewhere=True)
        cluster.prepare(plan, running(elsewhere=True))


def test_cuda_without_a_gpu_is_refused_where_jobs_run_here_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_for("cuda", 0, monkeypatch, elsewhere=True)
    with pytest.raises(SystemExit, match=r"no NVIDIA GPU .*; write: device: auto$"):
        cluster.prepare(plan, running(elsewhere=False))
    monkeypatch.setattr(planner, "count_gpus", lambda: 1)
    cluster.prepare(plan, running(elsewhere=False))


@pytest.mark.parametrize(
    ("main", "nodes", "expected"), [(True, None, False), (True, 4, True), (False, None, True)]
)
def test_other_machines_are_possible_for_a_job_and_with_jobs(
    main: bool, nodes: int | None, expected: bool
) -> None:
    settings = SimpleNamespace(nodes=nodes)
    workflow = SimpleNamespace(is_main_process=main, resource_settings=settings)
    assert cluster.may_run_elsewhere(workflow) is expected


def test_check_takes_cuda_and_says_that_there_is_no_gpu_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "count_gpus", lambda: 0)
    monkeypatch.setattr("halfscale.devices.count_gpus", lambda: 0)
    config = tmp_path / "config.yaml"
    config.write_text("configurations: {a: {}}\ndevice: cuda\n")
    result = CliRunner().invoke(app, ["check", str(config)])
    assert result.exit_code == 0
    assert "runs on cuda" in result.output
    assert "no GPU that torch can use" in result.output


def test_a_run_for_a_gpu_fails_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cpu"):
        plan = plan_for(device, 0, monkeypatch, elsewhere=True)
        (probe, *_) = plan.probes()
        if device == "cpu":
            stop_without_gpu(probe)
        else:
            with pytest.raises(RuntimeError, match="has no GPU that torch can use"):
                stop_without_gpu(probe)


REPOSITORY = Path(__file__).parents[2]
# Each command of docs/clusters.md, a file that runs it, with other values, and how it stands there.
RUN_BY = {
    '.venv/bin/pip install -e ".[slurm]" -c envs/constraints.txt': (
        "pyproject.toml",
        '"halfscale[slurm]",',
    ),
    ".venv/bin/snakemake --workflow-profile profiles/slurm": (
        "tests/slurm/conftest.py",
        '("--workflow-profile", str(self.source / "profiles" / "slurm"))',
    ),
    "sbatch profiles/slurm/one-allocation.sh": (
        "tests/slurm/test_slurm.py",
        '"profiles/slurm/one-allocation.sh"',
    ),
    "sbatch --partition=gpu --account=me --time=08:00:00 profiles/slurm/one-allocation.sh"
    " --configfile mine.yaml": (
        "tests/slurm/test_slurm.py",
        '"--time=00:10:00", script, "-s",',
    ),
}


def test_every_command_of_the_page_has_its_like_in_a_test_or_in_the_lock() -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
    commands = {
        line
        for block in re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
        for line in block.splitlines()
    }
    assert commands == set(RUN_BY)
    for file, written in RUN_BY.values():
        assert written in (REPOSITORY / file).read_text(encoding="utf-8"), (file, written)


OWNER = """
import os, sys
from halfscale.cluster import cancel_with_owner
cancel_with_owner(sys.argv[1])
print("started", flush=True)
if len(sys.argv) > 2:
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("signal", [[], ["9"], ["1"]], ids=["an end", "SIGKILL", "SIGHUP"])
def test_slurm_is_told_to_cancel_the_jobs_of_a_process_however_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: list[str]
) -> None:
    said = tmp_path / "said"
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" > {said}.part\nmv {said}.part {said}\n')
    scancel.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(Path(cluster.__file__).parents[1]))
    command = [sys.executable, "-c", OWNER, "a name; of jobs", *signal]
    owner = subprocess.run(command, capture_output=True, text=True)
    assert owner.stdout == "started\n", owner.stderr
    assert (owner.returncode == 0) is (not signal)
    deadline = time.monotonic() + 10
    while not said.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert said.read_text() == "--quiet --name a name; of jobs\n"


def test_slurm_is_told_nothing_while_the_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    watching = cluster.cancel_with_owner("name")
    with pytest.raises(subprocess.TimeoutExpired):
        watching.wait(0.5)
    assert watching.stdin is not None
    watching.stdin.close()
    watching.wait(10)


def test_only_the_jobs_of_slurm_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(cluster, "cancel_with_owner", names.append)
    plan = plan_for("cpu", 0, monkeypatch, elsewhere=True)
    for executor in (SimpleNamespace(run_uuid="a-run"), SimpleNamespace(), None):
        cluster.prepare(plan, running(executor, elsewhere=True))
    assert names == ["a-run"]
