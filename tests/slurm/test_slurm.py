"""Snakemake on a real Slurm: the same tables, one job a GPU, and what is left when a job ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pandas as pd
import pytest
import yaml

from halfscale.planner import build_plan
from workflow.driver import (
    CONTROLS,
    NOTHING,
    SNAKEMAKE,
    Bench,
    clean_environment,
    finish,
    snapshot,
    trains,
    wait_until,
)

from .conftest import MakeBench, Started, misbehave, wait_for_training
from .daemons import Slurm, SlurmJob

TABLE = "results/tables/runs.csv"
SECOND = "results/runs/binary/second/seed0/run.json"
PROBE = "results/probes/binary/seed0/probe.json"


@pytest.fixture(autouse=True)
def _all_started(faulty: Started, without_gpu: Started, expected: Started) -> None:
    """Runs that wait for a limit or for the next poll go on while the other tests do."""


def assert_same_tables(bench: Bench, local: Bench) -> None:
    """All tables but plan and orphans, which hold no figures; times aside."""
    times = ["seconds", "seconds_per_step"]
    for name in ("runs", "configurations", "probes", "exponents", "calibration"):
        found, expected = (
            one.table(name).drop(columns=times, errors="ignore") for one in (bench, local)
        )
        pd.testing.assert_frame_equal(found, expected)
    for name in ("steps", "windows"):
        found, expected = (
            pd.read_parquet(one.path / f"results/tables/{name}.parquet").drop(
                columns=times, errors="ignore"
            )
            for one in (bench, local)
        )
        pd.testing.assert_frame_equal(found, expected)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in snapshot(folder).items()}


def figures(folder: Path) -> dict[str, list[str]]:
    """The columns that do not depend on the clock, of the one table of a run or probe."""
    (table,) = folder.glob("*.parquet")
    frame = pd.read_parquet(table).drop(columns="seconds", errors="ignore")
    return {name: [str(value) for value in column] for name, column in frame.items()}


def leftovers(bench: Bench) -> list[Path]:
    """Half-written files: their names begin with a dot."""
    return [path for path in (bench.path / "results").rglob(".*") if path.is_file()]


def test_a_device_that_is_left_to_be_found_is_refused_before_a_job_is_sent(
    slurm: Slurm, make_bench: MakeBench
) -> None:
    bench = make_bench("auto")
    bench.edit("device: cpu", "device: auto")
    refused = bench.snakemake(SECOND)
    assert refused.code != 0
    assert refused.complaints == [
        "halfscale: the configuration: device: 'auto': the jobs run on other machines, whose "
        "GPUs are not known here; write: device: cuda"
    ]
    assert slurm.jobs(bench.path) == []
    assert not list((bench.path / ".snakemake/locks").glob("*"))


def test_cuda_is_planned_without_a_gpu_and_a_node_without_one_fails_by_name(
    slurm: Slurm, without_gpu: Started
) -> None:
    bench = without_gpu.bench
    failed = finish(without_gpu.process)
    assert failed.code != 0
    assert any(
        line.startswith("halfscale probe-job failed: workload=binary probe seed=0: ")
        and "has no GPU that torch can use" in line
        for line in failed.text.splitlines()
    ), failed.text
    (job,) = slurm.jobs(bench.path)
    assert (job.state, job.asked) == ("FAILED", "gres:gpu:1")
    # The job has read the configuration on its own and come to the same specification.
    config = yaml.safe_load((bench.path / "config.yaml").read_text(encoding="utf-8"))
    (probe,) = build_plan(config, elsewhere=True).probes()
    log = (bench.path / "results/logs/probe/binary/seed0.log").read_text(encoding="utf-8")
    assert probe.digest in log
    assert not (bench.path / "results/probes").exists() or leftovers(bench) == []


def test_ctrl_c_cancels_the_jobs_and_the_same_command_finishes(
    slurm: Slurm, make_bench: MakeBench, tmp_path: Path
) -> None:
    bench = make_bench("interrupted")
    bench.environment["PYTHONPATH"] = misbehave(tmp_path / "faults", slow=("second",))
    process = bench.start(SECOND)
    wait_for_training(bench, "second")
    process.send_signal(signal.SIGINT)
    assert finish(process).code != 0
    # Mostly long before; but the executor forgets its jobs while it asks Slurm how they do.
    wait_until(lambda: not slurm.queue(bench.path), 30, "the job is cancelled")
    assert not (bench.path / SECOND).exists()
    assert bench.plan(SECOND).trains == trains("second")


def test_a_killed_snakemake_leaves_no_job_and_the_next_one_finishes_one_job_a_gpu(
    slurm: Slurm, make_bench: MakeBench, tmp_path: Path, local: Bench
) -> None:
    bench = make_bench("killed")
    bench.environment["PYTHONPATH"] = misbehave(tmp_path / "faults", slow=("second",))
    process = bench.start(SECOND)
    wait_for_training(bench, "second")
    process.kill()
    wait_until(lambda: not slurm.queue(bench.path), 30, "the job is cancelled")
    finish(process)
    (job,) = slurm.jobs(bench.path)
    assert job.state == "CANCELLED"
    assert not (bench.path / SECOND).exists()
    del bench.environment["PYTHONPATH"]
    before = {job.number for job in slurm.jobs(bench.path)}
    # The runs train on the CPU; a GPU is asked for, and Slurm has one to give.
    bench.make(SECOND, PROBE, "--set-resources", "train:gpu=1", "probe:gpu=1")
    first, second = (job for job in slurm.jobs(bench.path) if job.number not in before)
    for job in (first, second):
        assert (job.state, job.asked) == ("COMPLETED", "gres:gpu:1")
    assert first.end <= second.start or second.end <= first.start
    for folder in ("results/runs/binary/second/seed0", "results/probes/binary/seed0"):
        assert figures(bench.path / folder) == figures(local.path / folder)
    assert bench.plan(SECOND, PROBE) == NOTHING


def submit_whole(slurm: Slurm, bench: Bench) -> str:
    """Hand the script of the one allocation to Slurm; the job's number."""
    path = f"{SNAKEMAKE.parent}:{slurm.environment['PATH']}"
    environment = clean_environment() | bench.environment | {"PATH": path}
    script = str(bench.source / "profiles/slurm/one-allocation.sh")
    snakefile = str(bench.source / "Snakefile")
    return slurm.call(
        *("sbatch", "--parsable", "--time=00:10:00", script, "-s", snakefile, TABLE),
        cwd=bench.path,
        environment=environment,
    )


def wait_for_end(slurm: Slurm, bench: Bench, number: str, seconds: float) -> SlurmJob:
    wait_until(lambda: number not in slurm.queue(bench.path), seconds, "the allocation ends")
    return next(job for job in slurm.jobs(bench.path) if job.number == number)


def test_one_allocation_ends_cleanly_before_its_limit_and_the_next_one_finishes(
    slurm: Slurm, make_bench: MakeBench, tmp_path: Path, local: Bench
) -> None:
    bench = make_bench("allocation")
    bench.environment["PYTHONPATH"] = misbehave(tmp_path / "faults", slow=("second",))
    number = submit_whole(slurm, bench)
    said = bench.path / f"halfscale-{number}.log"
    ended = "(Rule: train)"
    wait_until(
        lambda: said.exists() and said.read_text().count(ended) == 4, 240, "the other runs end"
    )
    wait_for_training(bench, "second")
    # What --signal=B:INT@60 of the script does a minute before the limit.
    slurm.call("scancel", "--batch", "--signal=INT", number)
    job = wait_for_end(slurm, bench, number, 60)
    assert (job.state, job.asked) == ("FAILED", "gres:gpu:1")
    assert "Terminating processes on user request" in said.read_text()
    assert not (bench.path / SECOND).exists()
    assert leftovers(bench) == []

    others = [bench.run_folder(arm) / "run.json" for arm in ("first", *CONTROLS)]
    before = {run: run.stat().st_mtime_ns for run in others}
    del bench.environment["PYTHONPATH"]
    number = submit_whole(slurm, bench)
    assert wait_for_end(slurm, bench, number, 240).state == "COMPLETED"
    assert {run: run.stat().st_mtime_ns for run in others} == before
    assert_same_tables(bench, local)


def test_a_failing_a_slow_and_a_cancelled_run_cost_neither_others_nor_old_results(
    slurm: Slurm, faulty: Started, local: Bench
) -> None:
    bench = faulty.bench
    failed = finish(faulty.process)
    assert failed.code != 0
    states = {job.comment.rpartition("_binary_")[2]: job.state for job in slurm.jobs(bench.path)}
    assert states == {
        "first_0": "FAILED",
        "second_0": "TIMEOUT",
        "fp32_0": "CANCELLED",
        "bf16_0": "COMPLETED",
    }
    for state in ("FAILED", "TIMEOUT", "CANCELLED"):
        assert f"SLURM status is: '{state}'" in failed.text
    complaint = "halfscale train failed: workload=binary configuration=first seed=0: a bug"
    log = "results/logs/train/binary/first/seed0.log"
    assert f"{complaint} (log: {log})" in failed.text.splitlines()
    for arm in ("first", "second"):
        assert contents(bench.run_folder(arm)) == contents(local.run_folder(arm))
    assert not (bench.run_folder("fp32") / "run.json").exists()
    assert leftovers(bench) == []
    del bench.environment["PYTHONPATH"]
    assert bench.plan(TABLE).trains == trains("first", "second", "fp32")


def test_the_next_call_makes_what_is_missing_and_the_tables_of_a_local_run(
    slurm: Slurm, faulty: Started, expected: Started
) -> None:
    bench = faulty.bench
    finish(faulty.process)
    bench.environment.pop("PYTHONPATH", None)
    before = {job.number for job in slurm.jobs(bench.path)}
    bench.make(TABLE)
    jobs = [job for job in slurm.jobs(bench.path) if job.number not in before]
    assert [job.state for job in jobs] == ["COMPLETED"] * 3
    assert finish(expected.process).code == 0
    assert_same_tables(bench, expected.bench)
    assert bench.plan(TABLE) == NOTHING
