"""The same specification gives the same numbers, whatever runs beside it and whatever its name."""

from __future__ import annotations

from pathlib import Path

from .driver import CONFIG, Bench, trace_columns

TARGETS = [f"results/runs/{workload}/second/seed0/run.json" for workload in ("binary", "digits")]


def test_one_core_and_four_give_the_same_traces(source: Path, tmp_path: Path) -> None:
    traces = []
    for cores in (1, 4):
        path = tmp_path / f"cores{cores}"
        path.mkdir()
        bench = Bench(path, source)
        text = CONFIG.replace("device:", "  digits: {steps: 5}\ndevice:")
        (path / "config.yaml").write_text(text, encoding="utf-8")
        bench.make(*TARGETS, cores=cores)
        traces.append([trace_columns((path / target).parent) for target in TARGETS])
    assert traces[0] == traces[1]
    assert all(len(trace["loss"]) == 5 for trace in traces[0])


def test_one_configuration_under_two_names_gives_identical_runs(bench: Bench) -> None:
    bench.edit(
        "seeds:",
        "  twin: {growth_interval: 3, backoff_factor: .5, growth_factor: 2.0, init_scale: 2**16}\n"
        "seeds:",
    )
    bench.make("results/tables/runs.csv", "reports/recommendation.json")
    table = bench.table().set_index("configuration")
    assert table.loc["twin", "curve"] == table.loc["first", "curve"]
    assert trace_columns(bench.run_folder("twin")) == trace_columns(bench.run_folder("first"))
    assert trace_columns(bench.run_folder("second")) != trace_columns(bench.run_folder("first"))
    same = ["outcome", "steps_to_target", "final_loss", "skipped_steps", "final_scale"]
    assert table.loc["twin", same].equals(table.loc["first", same].rename("twin"))


def test_every_arm_of_a_seed_starts_from_the_same_loss(bench: Bench) -> None:
    losses = {
        arm: float(trace_columns(bench.run_folder(arm))["loss"][0])
        for arm in ("first", "second", "fp32", "bf16", "fp16-unscaled")
    }
    assert losses["first"] == losses["second"] == losses["fp16-unscaled"]
    assert max(losses.values()) - min(losses.values()) < 0.01


def test_each_log_counts_the_steps(bench: Bench) -> None:
    log = bench.path / "results" / "logs" / "train" / "binary" / "first" / "seed0.log"
    assert "step 5/5" in log.read_text(encoding="utf-8")
