"""Parsing the workflow: clean, quick, without torch; what each job asks for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from pretended import boards, pretend_gpus, uuid

from .driver import ARMS, NOTHING, PROBE, Bench, clean_environment, trains

VISIBLE = {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_lint_finds_nothing(empty: Bench) -> None:
    finished = empty.snakemake("--lint")
    assert finished.code == 0, finished.text
    assert "Congratulations, your workflow is in a good condition!" in finished.text


@pytest.mark.parametrize("module", ["torch", "matplotlib", "papermill", "sklearn"])
def test_parsing_imports_nothing_slow(bench: Bench, tmp_path: Path, module: str) -> None:
    stub = tmp_path / "stubs" / module
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    bench.environment["PYTHONPATH"] = str(stub.parent)
    proof = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env=clean_environment() | bench.environment,
        capture_output=True,
        text=True,
    )
    assert "imported" in proof.stderr
    assert bench.plan() == NOTHING


def rule_gpus(bench: Bench) -> tuple[str, dict[str, str]]:
    """The plan's device and the ``gpu`` of every rule, as Snakemake has them."""
    wrapper = bench.path / "wrapper.smk"
    wrapper.write_text(
        f"include: {str(bench.source / 'Snakefile')!r}\n"
        "print('device', PLAN.device)\n"
        "for rule in workflow.rules:\n"
        "    asked = rule.resources['gpu'].value if 'gpu' in rule.resources else 0\n"
        "    print('rule', rule.name, 'gpu', asked)\n",
        encoding="utf-8",
    )
    finished = bench.snakemake("-n", "-s", str(wrapper))
    assert finished.code == 0, finished.text
    (device,) = re.findall(r"^device (\S+)$", finished.text, re.MULTILINE)
    return device, dict(re.findall(r"^rule (\S+) gpu (\S+)$", finished.text, re.MULTILINE))


def train_gpus(bench: Bench) -> tuple[str, str]:
    device, asked = rule_gpus(bench)
    return device, asked["train"]


def test_training_asks_for_no_gpu_on_a_cpu_and_for_one_on_cuda(
    empty: Bench, tmp_path: Path
) -> None:
    assert train_gpus(empty) == ("cpu", "0")
    empty.environment = VISIBLE | pretend_gpus(tmp_path / "gpus", boards(1))
    empty.edit("device: cpu", "device: auto")
    assert train_gpus(empty) == ("cuda", "1")


def test_auto_without_a_gpu_is_the_cpu(empty: Bench, tmp_path: Path) -> None:
    empty.environment = VISIBLE | pretend_gpus(tmp_path / "gpus", boards(0))
    empty.edit("device: cpu", "device: auto")
    assert train_gpus(empty) == ("cpu", "0")


def test_a_gpu_named_twice_ends_the_parsing_with_one_line(empty: Bench, tmp_path: Path) -> None:
    empty.environment = pretend_gpus(tmp_path / "gpus", boards(2))
    empty.environment["CUDA_VISIBLE_DEVICES"] = "1,1"
    empty.edit("device: cpu", "device: auto")
    finished = empty.snakemake("-n")
    assert finished.code != 0
    (complaint,) = finished.complaints
    assert f"write CUDA_VISIBLE_DEVICES={uuid(1)}, or leave" in complaint
    assert complaint.endswith("write: device: cpu")


def test_changing_the_device_reruns_every_run(bench: Bench, tmp_path: Path) -> None:
    bench.environment = VISIBLE | pretend_gpus(tmp_path / "gpus", boards(1))
    assert bench.plan() == NOTHING
    bench.edit("device: cpu", "device: cuda")
    assert bench.plan().trains == trains(*ARMS, PROBE)


def test_only_what_trains_asks_for_a_gpu(empty: Bench, tmp_path: Path) -> None:
    empty.environment = VISIBLE | pretend_gpus(tmp_path / "gpus", boards(2))
    empty.edit("device: cpu", "device: auto")
    _, asked = rule_gpus(empty)
    assert {name for name, gpus in asked.items() if gpus != "0"} == {"train", "probe"}


def count_work(bench: Bench) -> dict[str, int]:
    """How often a dry run opens each run's record and makes each run's specification."""
    wrapper = bench.path / "wrapper.smk"
    wrapper.write_text(
        "import atexit, collections, sys\n"
        f"sys.path.insert(0, {str(bench.source / 'workflow')!r})\n"
        "from halfscale.plan import Plan\n"
        "counted, make = collections.Counter(), Plan.run\n"
        "def count_run(plan, *key):\n"
        "    counted['/'.join(map(str, key))] += 1\n"
        "    return make(plan, *key)\n"
        "def count_open(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).endswith('/run.json'):\n"
        "        counted[str(arguments[0])] += 1\n"
        "Plan.run = count_run\n"
        "sys.addaudithook(count_open)\n"
        "def tell():\n"
        "    print(*(f'counted {what} {n}' for what, n in counted.items()), sep='\\n')\n"
        "atexit.register(tell)\n"
        f"include: {str(bench.source / 'Snakefile')!r}\n",
        encoding="utf-8",
    )
    finished = bench.make("-s", "wrapper.smk", "-n")
    assert "Nothing to be done" in finished.text, finished.text
    return {what: int(count) for what, count in re.findall(r"counted (\S+) (\d+)", finished.out)}


def test_with_nothing_to_do_each_run_is_looked_at_once(bench: Bench) -> None:
    counted = count_work(bench)
    records = {f"results/runs/binary/{arm}/seed0/run.json" for arm in ARMS}
    assert set(counted) == records | {f"binary/{arm}/0" for arm in ARMS}
    assert set(counted.values()) == {1}


def test_a_plan_longer_than_any_argument_reaches_its_jobs(empty: Bench) -> None:
    listed = "".join(f"  c{n}: {{growth_interval: {n + 1}}}\n" for n in range(1500))
    config = empty.path / "config.yaml"
    before, _, after = config.read_text(encoding="utf-8").partition("  first:")
    config.write_text(f"{before}{listed}  first:{after}", encoding="utf-8")
    empty.make("results/replay/predictions.csv")
    assert len(pd.read_csv(empty.path / "results/replay/predictions.csv")) == 1502
