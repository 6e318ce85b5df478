"""Faults: damaged files, a full disk, code that fails. Each is named, none costs old results."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from .driver import Bench, finish, mend_command, replace_once, small_disk, snapshot

TABLE = "results/tables/runs.csv"


def truncate(bench: Bench) -> Path:
    path = bench.run_folder("first") / "run.json"
    path.write_bytes(path.read_bytes()[:200])
    return path


def edit_by_hand(bench: Bench) -> Path:
    path = bench.run_folder("first") / "run.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["skipped_steps"] += 1
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def bring_foreign_run(bench: Bench) -> Path:
    for name in ("run.json", "trace.parquet"):
        shutil.copyfile(bench.run_folder("second") / name, bench.run_folder("first") / name)
    return bench.run_folder("first") / "run.json"


def bring_foreign_trace(bench: Bench) -> Path:
    path = bench.run_folder("first") / "trace.parquet"
    shutil.copyfile(bench.run_folder("second") / "trace.parquet", path)
    return path


@pytest.mark.parametrize("damage", [truncate, edit_by_hand, bring_foreign_run, bring_foreign_trace])
def test_a_damaged_run_file_is_refused_by_name_and_the_mend_command_mends_it(
    bench: Bench, damage: Callable[[Bench], Path]
) -> None:
    before = bench.table().drop(columns="seconds_per_step")
    damaged = damage(bench)
    refused = bench.snakemake(TABLE)
    assert refused.code != 0
    complaint = refused.complaints[0]
    assert str(damaged.relative_to(bench.path)) in complaint
    mend = mend_command(complaint)
    assert mend == ["rm", "-r", "results/runs/binary/first/seed0"]
    subprocess.run(mend, cwd=bench.path, check=True)
    bench.make(TABLE)
    pd.testing.assert_frame_equal(bench.table().drop(columns="seconds_per_step"), before)


def test_a_refusal_is_repeated_until_it_is_mended(bench: Bench) -> None:
    truncate(bench)
    for _ in range(2):
        refused = bench.snakemake()
        assert refused.code != 0, refused.text
        assert mend_command(refused.complaints[0])


def test_a_full_disk_fails_the_job_by_name_and_keeps_the_old_result(bench: Bench) -> None:
    run = "results/runs/binary/first/seed0/run.json"
    folder = bench.run_folder("first")
    with small_disk(folder.parent, "64k"):
        before = snapshot(folder)
        bench.edit("65536", "32768")
        filler = folder.parent / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", 0) as file:
            while True:
                file.write(b"x" * 512)
        failed = bench.snakemake(run)
        assert failed.code != 0
        assert "workload=binary configuration=first seed=0" in failed.complaints[0]
        assert "No space left on device" in failed.complaints[0]
        after = snapshot(folder)
        assert {name: content for name, (content, _) in after.items()} == {
            name: content for name, (content, _) in before.items()
        }
        filler.unlink()
        bench.make(run)
        content = json.loads((bench.path / run).read_text(encoding="utf-8"))
        assert content["spec"]["policy"]["parameters"]["init_scale"] == 32768


MOODY = '''
"""Diverges in bf16, raises where the scaled gradient is large, trains otherwise."""

import torch

from halfscale.workloads import Workload
from halfscale.workloads.binary import build as build_binary


def build(seed, device, *, limit: float = 10.0):
    workload = build_binary(seed, device)

    def loss(model, batch):
        value = workload.loss(model, batch)
        bf16 = torch.is_autocast_enabled(device)
        bf16 = bf16 and torch.get_autocast_dtype(device) is torch.bfloat16
        return value * float("nan") if bf16 else value

    def look(gradient):
        if gradient.abs().max() > limit:
            raise RuntimeError("<script>alert('too large')</script>\\nin two lines")

    for parameter in workload.model.parameters():
        parameter.register_hook(look)
    return Workload(workload.model, workload.optimizer, workload.batches, loss)
'''


def test_runs_that_fail_or_diverge_are_outcomes_and_the_report_is_made(bench: Bench) -> None:
    source = bench.take_source()
    (source / "workflow/halfscale/workloads/moody.py").write_text(MOODY, encoding="utf-8")
    bench.edit("device:", "  moody: {steps: 5}\ndevice:")
    bench.edit("init_scale: 256", "init_scale: 2")
    bench.make()
    table = bench.table().set_index(["workload", "configuration"])
    outcomes = table["outcome"]
    assert outcomes["moody", "first"] == "failed"
    assert outcomes["moody", "bf16"] == "diverged"
    assert outcomes["moody", "fp32"] == "ok"
    assert set(outcomes["binary"]) == {"ok"}
    assert "RuntimeError: <script>" in table.loc[("moody", "first"), "error"]
    recommendation = json.loads(
        (bench.path / "reports/recommendation.json").read_text(encoding="utf-8")
    )
    assert list(recommendation["rejected"]) == ["first"]
    assert recommendation["recommended"] == "second"
    page = (bench.path / "reports/summary.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_failing_check_ends_the_workflow_without_a_page(bench: Bench) -> None:
    source = bench.take_source()
    replace_once(
        source / "workflow/halfscale/verify.py",
        "        exact == len(ratios),\n",
        "        exact == len(ratios) + 1,\n",
    )
    shutil.rmtree(bench.path / "reports")
    failed = finish(bench.start(merged=True))
    assert failed.code != 0
    name = "check 'ratio of scaled to unscaled gradients'"
    lines = [line for line in failed.out.splitlines() if f"verify failed: {name}" in line]
    assert lines
    assert "measured" in lines[0]
    assert "expected" in lines[0]
    assert any(name in line for line in failed.out.splitlines()[-6:])
    assert not (bench.path / "reports" / "summary.html").exists()
    assert not (bench.path / "results" / "verification" / "checks.csv").exists()


def test_a_failed_check_is_checked_again(bench: Bench) -> None:
    source = bench.take_source()
    replace_once(
        source / "workflow/halfscale/verify.py",
        "        exact == len(ratios),\n",
        "        exact == len(ratios) + 1,\n",
    )
    assert bench.snakemake().code != 0
    assert bench.plan().rules == {"verify", "plots", "summary", "all"}


def test_a_failing_cell_keeps_the_executed_part_and_no_stale_page(bench: Bench) -> None:
    notebook = bench.take_source() / "workflow/notebooks/summary.ipynb"
    content = json.loads(notebook.read_text(encoding="utf-8"))
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    cells[-1]["source"] = ["raise RuntimeError('this cell fails')"]
    notebook.write_text(json.dumps(content), encoding="utf-8")
    failed = bench.snakemake()
    assert failed.code != 0
    assert "RuntimeError: this cell fails" in failed.complaints[0]
    assert "results/logs/summary.ipynb" in failed.complaints[0]
    executed = (bench.path / "results/logs/summary.ipynb").read_text(encoding="utf-8")
    assert "runs stand behind this" in executed
    assert not (bench.path / "reports/summary.html").exists()
    assert not (bench.path / "reports/summary.ipynb").exists()


def test_a_bug_in_training_names_run_and_log_in_the_last_lines(bench: Bench) -> None:
    source = bench.take_source()
    head = "def describe_machine(spec: JobSpec, used: str) -> dict[str, str | int]:\n"
    replace_once(
        source / "workflow/halfscale/machine.py", head, f"{head}    raise TypeError('a bug')\n"
    )
    before = snapshot(bench.run_folder("second"))
    failed = finish(bench.start("results/runs/binary/second/seed0/run.json", merged=True))
    assert failed.code != 0
    last = "\n".join(failed.out.splitlines()[-8:])
    assert "workload=binary configuration=second seed=0" in last
    assert "results/logs/train/binary/second/seed0.log" in last
    assert "a bug" in last
    log = bench.path / "results/logs/train/binary/second/seed0.log"
    assert "Traceback" in log.read_text(encoding="utf-8")
    after = snapshot(bench.run_folder("second"))
    assert {name: content for name, (content, _) in after.items()} == {
        name: content for name, (content, _) in before.items()
    }
