"""What reruns: the table of the design, each row asked from the real Snakemake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from .driver import (
    ARMS,
    NOTHING,
    PREDICTORS,
    PROBE,
    READERS,
    Bench,
    Planned,
    mend_command,
    trains,
)

FIRST = "first: {init_scale: 65536, growth_factor: 2, backoff_factor: 0.5, growth_interval: 3}"
SECOND = "second: {init_scale: 256, growth_factor: 2, backoff_factor: 0.25, growth_interval: 1}"


def reverse_keys(value: object) -> object:
    if isinstance(value, dict):
        return {key: reverse_keys(value[key]) for key in reversed(value)}
    return value


def reorder(bench: Bench) -> None:
    path = bench.path / "config.yaml"
    reordered = yaml.safe_dump(
        reverse_keys(yaml.safe_load(path.read_text(encoding="utf-8"))), sort_keys=False
    )
    assert reordered.index("second") < reordered.index("first")
    path.write_text(reordered, encoding="utf-8")


def spell_scale(text: str) -> Callable[[Bench], None]:
    return lambda bench: bench.edit("65536", text)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda bench: None, id="none"),
        pytest.param(lambda bench: bench.edit("seeds:", "# a note\n\nseeds:"), id="comment"),
        pytest.param(reorder, id="key-order"),
        pytest.param(lambda bench: bench.edit("steps: 5", "steps: 5.0"), id="steps-5.0"),
        pytest.param(spell_scale("65536.0"), id="65536.0"),
        pytest.param(spell_scale("2**16"), id="2**16"),
        pytest.param(spell_scale('"2**16"'), id="quoted-2**16"),
        pytest.param(spell_scale("0x10000"), id="0x10000"),
        pytest.param(spell_scale("6.5536e4"), id="6.5536e4"),
        pytest.param(
            lambda bench: bench.edit("device: cpu", "device: cpu\nthreads: 1"),
            id="default-written-out",
        ),
        pytest.param(
            lambda bench: bench.edit("device: cpu", "device: cpu\nruns_per_gpu: 4"),
            id="runs_per_gpu",
        ),
    ],
)
def test_an_edit_that_changes_no_meaning_reruns_nothing(
    bench: Bench, edit: Callable[[Bench], None]
) -> None:
    edit(bench)
    assert bench.plan() == NOTHING


def test_a_default_that_is_left_out_reruns_nothing(bench: Bench) -> None:
    bench.edit("init_scale: 65536, growth_factor: 2, backoff_factor: 0.5, ", "")
    assert bench.plan() == NOTHING


@pytest.mark.parametrize(
    "pattern",
    [
        "config.yaml",
        "results/runs/**/*",
        "results/verification/*",
        "results/tables/*",
        "results/plots/*",
        "results/logs/**/*",
        "reports/*",
        "**/*",
    ],
)
def test_touching_files_reruns_nothing(bench: Bench, pattern: str) -> None:
    now = time.time()
    files = [path for path in bench.path.glob(pattern) if ".snakemake" not in path.parts]
    assert files
    for path in files:
        os.utime(path, (now, now))
    assert bench.plan() == NOTHING


def test_touching_the_sources_reruns_nothing(bench: Bench) -> None:
    now = time.time()
    for path in bench.take_source().rglob("*"):
        os.utime(path, (now, now))
    assert bench.plan() == NOTHING


def test_another_tmpdir_reruns_nothing(bench: Bench, tmp_path: Path) -> None:
    other = tmp_path / "other-tmp"
    other.mkdir()
    bench.environment["TMPDIR"] = str(other)
    assert bench.plan() == NOTHING


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("256", "512", id="init_scale"),
        pytest.param("0.25", "0.125", id="backoff_factor"),
        # 2 is a value of this configuration already: a set of values would not change.
        pytest.param("growth_interval: 1", "growth_interval: 2", id="growth_interval-1-to-2"),
    ],
)
def test_one_field_reruns_its_configuration_and_the_readers(
    bench: Bench, old: str, new: str
) -> None:
    bench.edit(old, new)
    assert bench.plan() == Planned(trains("second"), PREDICTORS | {"train"})


def test_swapped_values_within_a_configuration_rerun_it(bench: Bench) -> None:
    bench.edit(
        FIRST,
        "first: {init_scale: 65536, growth_factor: 3, backoff_factor: 0.5, growth_interval: 2}",
    )
    assert bench.plan() == Planned(trains("first"), PREDICTORS | {"train"})


def test_values_swapped_between_configurations_rerun_both(bench: Bench) -> None:
    bench.edit("65536", "swapped")
    bench.edit("256", "65536")
    bench.edit("swapped", "256")
    assert bench.plan() == Planned(trains("first", "second"), PREDICTORS | {"train"})


def test_swapped_names_rerun_both(bench: Bench) -> None:
    bench.edit(FIRST, FIRST.replace("first", "renamed"))
    bench.edit(SECOND, SECOND.replace("second", "first"))
    bench.edit("renamed", "second")
    assert bench.plan() == Planned(trains("first", "second"), PREDICTORS | {"train"})


def test_a_new_configuration_runs_alone(bench: Bench) -> None:
    bench.edit("seeds:", "  third: {init_scale: 1024}\nseeds:")
    assert bench.plan() == Planned(trains("third"), PREDICTORS | {"train"})


def test_a_new_seed_runs_alone(bench: Bench) -> None:
    bench.edit("seeds: [0]", "seeds: [7, 0]")
    assert bench.plan() == Planned(trains(*ARMS, PROBE, seed=7), PREDICTORS | {"train", "probe"})


def test_a_new_workload_runs_alone(bench: Bench) -> None:
    bench.edit("device:", "  digits: {steps: 5}\ndevice:")
    expected = trains(*ARMS, PROBE, workload="digits")
    assert bench.plan() == Planned(expected, PREDICTORS | {"train", "probe"})


def test_a_parameter_of_a_workload_reruns_all_its_runs(bench: Bench) -> None:
    bench.edit("steps: 5", "steps: 5, hidden: 32")
    assert bench.plan() == Planned(trains(*ARMS, PROBE), PREDICTORS | {"train", "probe"})


def test_a_removed_configuration_reruns_the_readers_and_is_listed_as_an_orphan(
    bench: Bench,
) -> None:
    bench.edit(f"  {SECOND}\n", "")
    assert bench.plan() == Planned(frozenset(), PREDICTORS)
    bench.make()
    orphans = json.loads((bench.path / "results/tables/orphans.json").read_text(encoding="utf-8"))
    assert orphans == ["runs/binary/second/seed0"]
    assert "runs/binary/second/seed0" in (bench.path / "reports/summary.html").read_text("utf-8")
    assert "second" not in set(bench.table()["configuration"])
    assert (bench.run_folder("second") / "run.json").exists()
    assert bench.plan() == NOTHING


@pytest.mark.parametrize(
    ("file", "runs", "rules"),
    [
        ("scaling/manual.py", (*ARMS, PROBE), {"verify", "train", "probe"} | PREDICTORS),
        ("scaling/__init__.py", (*ARMS, PROBE), {"verify", "train", "probe"} | PREDICTORS),
        ("precision/choice.py", (*ARMS, PROBE), {"verify", "train", "probe"} | PREDICTORS),
        ("train.py", (*ARMS, PROBE), {"train", "probe"} | PREDICTORS),
        ("workloads/binary.py", (*ARMS, PROBE), {"train", "probe"} | PREDICTORS),
        ("probe.py", (PROBE,), {"probe"} | PREDICTORS),
        ("workloads/digits.py", (), set()),
        ("verify.py", (), {"verify", "plots", "summary", "all"}),
        ("tables.py", (), READERS),
        ("probe_tables.py", (), READERS),
        ("verdict.py", (), READERS),
        ("predict.py", (), PREDICTORS),
        ("replay/engine.py", (), PREDICTORS),
        ("grid.py", (), PREDICTORS),
        ("calibration.py", (), READERS),
        ("replay_plots.py", (), {"plots", "summary", "all"}),
        ("replay_fragments.py", (), {"summary", "all"}),
        ("plots.py", (), {"plots", "summary", "all"}),
        ("probe_plots.py", (), {"plots", "summary", "all"}),
        ("style.py", (), {"plots", "summary", "all"}),
        ("fragments.py", (), {"summary", "all"}),
        ("report.py", (), {"summary", "all"}),
        ("../notebooks/summary.ipynb", (), {"summary", "all"}),
    ],
)
def test_an_edited_source_file_reruns_what_depends_on_it(
    bench: Bench, file: str, runs: tuple[str, ...], rules: set[str]
) -> None:
    path = bench.take_source() / "workflow" / "halfscale" / file
    path.write_bytes(path.read_bytes() + b"\n")
    assert bench.plan() == Planned(trains(*runs), frozenset(rules))


def test_an_edited_workload_reruns_only_its_own_runs(bench: Bench) -> None:
    bench.edit("device:", "  digits: {steps: 2}\ndevice:")
    targets = [f"results/runs/{workload}/fp32/seed0/run.json" for workload in ("binary", "digits")]
    bench.make(*targets)
    assert bench.plan(*targets) == NOTHING
    source = bench.take_source()
    for workload in ("binary", "digits"):
        path = source / "workflow" / "halfscale" / "workloads" / f"{workload}.py"
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        assert bench.plan(*targets).trains == trains("fp32", workload=workload)
        path.write_bytes(before)


@pytest.mark.parametrize("file", ["run.json", "trace.parquet"])
def test_a_deleted_run_file_reruns_that_run_and_the_readers(bench: Bench, file: str) -> None:
    (bench.run_folder("second") / file).unlink()
    assert bench.plan() == Planned(trains("second"), READERS | {"train"})


@pytest.mark.parametrize("file", ["probe.json", "probe.parquet"])
def test_a_deleted_probe_file_reruns_that_probe_and_the_readers(bench: Bench, file: str) -> None:
    (bench.path / "results" / "probes" / "binary" / "seed0" / file).unlink()
    assert bench.plan() == Planned(trains(PROBE), PREDICTORS | {"probe"})


def test_a_deleted_table_or_figure_is_made_again(bench: Bench) -> None:
    (bench.path / "results/plots/loss.svg").unlink()
    assert bench.plan().rules == {"plots", "summary", "all"}
    (bench.path / "results/tables/runs.csv").unlink()
    assert bench.plan() == Planned(frozenset(), READERS)
    (bench.path / "results/replay/landscape.csv").unlink()
    assert bench.plan() == Planned(frozenset(), PREDICTORS)


def test_a_deleted_seal_of_the_predictions_predicts_again(bench: Bench) -> None:
    (bench.path / "results/replay/seal.json").unlink()
    assert bench.plan() == Planned(frozenset(), PREDICTORS)


def test_without_records_and_without_an_edit_nothing_reruns(bench: Bench) -> None:
    shutil.rmtree(bench.path / ".snakemake")
    assert bench.plan() == NOTHING


def test_without_records_an_edit_stops_and_the_mend_command_helps(bench: Bench) -> None:
    before = bench.table().set_index("configuration")["digest"]
    shutil.rmtree(bench.path / ".snakemake")
    bench.edit("65536", "32768")
    stopped = bench.snakemake()
    assert stopped.code != 0
    (complaint,) = stopped.complaints
    mend = mend_command(complaint)
    assert mend == ["rm", "-r", "results/runs/binary/first"]
    subprocess.run(mend, cwd=bench.path, check=True)
    assert bench.plan() == Planned(trains("first"), PREDICTORS | {"train"})
    bench.make("results/runs/binary/first/seed0/run.json", "results/tables/runs.csv")
    after = bench.table().set_index("configuration")["digest"]
    assert list(after.index[after != before]) == ["first"]


def test_without_records_a_removed_configuration_never_leaves_stale_tables(bench: Bench) -> None:
    shutil.rmtree(bench.path / ".snakemake")
    bench.edit(f"  {SECOND}\n", "")
    stopped = bench.snakemake()
    assert stopped.code != 0
    (complaint,) = stopped.complaints
    subprocess.run(mend_command(complaint), cwd=bench.path, check=True)
    assert bench.plan() == Planned(frozenset(), PREDICTORS)


def test_without_records_a_new_configuration_runs_alone(bench: Bench) -> None:
    shutil.rmtree(bench.path / ".snakemake")
    bench.edit("seeds:", "  third: {init_scale: 1024}\nseeds:")
    assert bench.plan() == Planned(trains("third"), PREDICTORS | {"train"})


def test_a_finished_folder_can_be_moved(bench: Bench, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    bench.path.rename(moved)
    bench.path = moved
    assert bench.plan() == NOTHING
