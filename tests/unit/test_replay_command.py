"""``halfscale replay`` over probes: the ranking, what it is compared with, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from halfscale.candidates import make_grid, parse_choice
from halfscale.cli import app
from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.plan import PolicyChoice, ProbeSpec
from halfscale.planner import build_plan
from halfscale.probe_files import write_probe_file
from halfscale.records import PROBE_SCHEMA
from halfscale.replay import OBJECTIVE, Probe, replay
from halfscale.wording import describe, show_number, spread

from .crafted import make_plan, write_crafted, write_crafted_probe

GRID = ("--grid", "init_scale=2**8,2**12,2**15,2**20", "--grid", "growth_interval=5..2000*20")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_probe(
    path: str, largest: list[float], seed: int = 0, steps: int = 100, **spec: Any
) -> Path:
    """A probe by hand: half the elements at 2^-40, half at the largest."""
    counts = [0] * BINS
    counts[-40 - LOWEST_EXPONENT] = counts[-LOWEST_EXPONENT] = 8
    n = len(largest)
    columns = {
        "step": list(range(n)),
        "loss": [0.5] * n,
        "largest": largest,
        "largest_gradient": [magnitude / 2 for magnitude in largest],
        "activation_counts": [counts] * n,
        "weight_counts": [[0] * BINS] * n,
        "activation_zeros": [0] * n,
        "weight_zeros": [0] * n,
        "batch_repeats": [False] * n,
    }
    block = {"steps": steps, **spec}
    made = make_plan(seeds=[seed], workloads={"binary": block}).probe("binary", seed)
    outcome = "ok" if n == steps else "diverged"
    write_probe_file(
        Path(path), columns, spec=made, outcome=outcome, error=None, environment={"threads": 1}
    )
    return Path(path)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["replay", *arguments])
    return result.exit_code, result.stdout, result.stderr


def succeed(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, err) == (0, ""), err
    return out


def refuse(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("halfscale replay: ")
    return line.removeprefix("halfscale replay: ")


def rows(out: str) -> list[list[str]]:
    """The table, without what is added in brackets."""
    lines = out.splitlines()
    head = next(index for index, line in enumerate(lines) if line.split()[:1] == ["rank"])
    end = next(index for index, line in enumerate(lines) if line.startswith("(cost"))
    return [line.split("  (and")[0].split(maxsplit=7) for line in lines[head + 1 : end]]


# A largest magnitude of 1 is safe up to 2^15.
CALM = [1.0] * 100


def test_the_ranking_names_the_best_the_defaults_and_what_is_compared() -> None:
    write_probe("p.parquet", CALM)
    out = succeed("p.parquet", *GRID, "--compare", "init_scale=65536,growth_interval=100")
    assert out.startswith("p.parquet: binary, seed 0, 100 steps\n")
    assert " ".join(OBJECTIVE.split()) in " ".join(out.split())
    table = rows(out)
    places = {row[7].partition(" (and")[0]: row for row in table}
    assert table[0][0] == "1"
    default = places["PyTorch's defaults"]
    assert default[2:4] == ["1", "1"], "2^16 overflows once, 2^15 does not"
    same = places["--compare init_scale=65536,growth_interval=100"]
    assert same[1:] == [*default[1:7], same[7]], "100 clean steps never follow in 100 steps"
    assert all(float(row[1]) >= float(table[0][1]) for row in table)
    best = parse_choice(table[0][7].partition(" (and")[0])
    assert best.constructor("cpu") in out
    block = out.strip().splitlines()[-1]
    plan = build_plan({**yaml.safe_load(block), "workloads": {"binary": {}}, "device": "cpu"})
    assert plan.configurations["best"] == best


def test_figures_are_those_of_the_replay() -> None:
    path = write_probe("p.parquet", [1.0, 8.0, 0.5, 4.0] * 25)
    out = json.loads(succeed(str(path), *GRID, "--json", "--top", "100"))
    probe = Probe.of(pq.read_table(path))
    for entry in [*out["ranked"], *out["compared"].values()]:
        choice = PolicyChoice(policy=entry["policy"], parameters=entry["parameters"])
        result = replay([choice], [probe])
        for name in ("skipped", "longest_streak", "below_window", "final_scale"):
            assert entry[name] == getattr(result, name)[0].tolist(), name
    ranks = [entry["rank"] for entry in out["ranked"]]
    assert ranks == list(range(1, len(ranks) + 1))
    assert (out["configurations"], out["steps"]) == (8, 100)
    assert len(out["ranked"]) == out["behaviours"]
    default = out["compared"]["PyTorch's defaults"]
    assert default["rank"] is None and 0 <= default["ahead"] <= out["behaviours"]


def test_only_the_grid_is_ranked() -> None:
    write_probe("p.parquet", CALM)
    bad = ("--grid", "init_scale=2**20", "--compare", "init_scale=2**15")
    out = succeed("p.parquet", *bad)
    assert "1 configurations, 1 different behaviours; the best:" in out
    table = rows(out)
    assert [row[0] for row in table] == ["1", "<1", "<1"]
    assert [row[7] for row in table] == [
        "init_scale=2**20",
        "PyTorch's defaults",
        "--compare init_scale=2**15",
    ]
    assert "init_scale=2.0**20" in out.split("\n\n")[-2], "the line to paste is of the grid"
    assert "a rank <1, 1–2 or >9: not in the grid" in " ".join(out.split())
    data = json.loads(succeed("p.parquet", *bad, "--json"))
    assert (data["behaviours"], len(data["ranked"])) == (1, 1)
    assert data["compared"]["PyTorch's defaults"]["rank"] is None
    assert rows(succeed("p.parquet", "--grid", "init_scale=2**15,2**20"))[-1][0] == "1–2"
    assert rows(succeed("p.parquet", "--grid", "init_scale=2**15"))[-1][0] == ">1"


def test_what_is_compared_has_the_rank_of_what_acts_like_it() -> None:
    write_probe("p.parquet", CALM)
    out = succeed("p.parquet", "--grid", "init_scale=2**15,2**16", "--grid", "growth_interval=500")
    (best, second, default) = rows(out)
    assert (best[0], second[0], default[0]) == ("1", "2", "2")
    assert second[7].startswith("growth_interval=500")
    assert "PyTorch's defaults (and 1 alike)" in out
    assert "growth_interval=500 (and" not in out
    assert "not in the grid" not in out


def test_several_probes_are_several_seeds() -> None:
    write_probe("a.parquet", CALM)
    write_probe("b.parquet", [4.0] * 100, seed=1)
    out = succeed("a.parquet", "b.parquet", *GRID)
    default = next(row for row in rows(out) if row[7].startswith("PyTorch's"))
    assert (default[2], default[3], default[5]) == ("1–3", "1–3", "2**13–2**15")
    assert out.startswith("a.parquet: binary, seed 0, 100 steps\nb.parquet: binary, seed 1, 100 s")


def test_a_configuration_that_gets_stuck_has_no_rank() -> None:
    write_probe("p.parquet", [2.0**10] * 6, steps=6)
    out = succeed("p.parquet", "--grid", "init_scale=2**4")
    assert rows(out)[-1][0] == "stuck"
    out = succeed("p.parquet", "--grid", "init_scale=2**20")
    assert "every configuration aborts or gets stuck; try a lower init_scale" in out
    assert "GradScaler(" not in out
    entry = json.loads(succeed("p.parquet", "--grid", "init_scale=2**20", "--json"))
    assert (entry["ranked"], entry["constructor"]) == ([], None)


def test_other_policies_have_their_own_ranges() -> None:
    write_probe("p.parquet", CALM)
    options = ("--policy", "torch", "--policy", "deepspeed")
    ranges = ("--grid", "init_scale=2**8,2**17", "--grid", "deepspeed.hysteresis=1,2")
    out = json.loads(succeed("p.parquet", *options, *ranges, "--json", "--top", "9"))
    assert out["configurations"] == 2 + 4
    assert {entry["policy"] for entry in out["ranked"]} == {"torch", "deepspeed"}


def test_a_run_that_ended_early_says_so() -> None:
    write_probe("p.parquet", CALM, steps=120)
    first = succeed("p.parquet", *GRID).splitlines()[0]
    assert first == "p.parquet: binary, seed 0, 120 steps, which diverged after 100"


def test_probes_of_the_workflow_are_read_as_they_are(folder: Path) -> None:
    plan = make_plan(seeds=[0, 1])
    specs = [plan.probe("binary", seed) for seed in (0, 1)]
    for spec in specs:
        write_crafted_probe(folder / "results", spec)
    files = [str(Path("results") / spec.folder / "probe.parquet") for spec in specs]
    out = succeed(*files, *GRID)
    assert out.startswith(
        f"{files[0]}: binary, seed 0, 100 steps\n{files[1]}: binary, seed 1, 100 steps\n"
    )
    assert '"cpu",' in out
    assert rows(succeed(str(Path("results") / specs[0].folder), *GRID))
    Path(files[0]).with_name("probe.json").unlink()
    out = succeed(files[0], *GRID)
    assert out.startswith(f"{files[0]}: 100 steps\n")
    assert '"cuda",' in out, "nothing says otherwise"


def test_probes_of_the_workflow_are_checked_against_their_records(folder: Path) -> None:
    same = {"binary": {"steps": 50}, "digits": {"steps": 50}}
    plan = make_plan(seeds=[0], workloads=same)
    for spec in plan.probes():
        write_crafted_probe(folder, spec)
    one, other = (spec.folder / "probe.parquet" for spec in plan.probes())
    assert refuse(str(one), str(other)).startswith("the probes are not seeds of one training, but")
    record = one.with_name("probe.json")
    again = "; remove both and run the workflow again"
    whole = record.read_text()
    record.write_text(whole.replace('"seed": 0', '"seed": 1'))
    assert refuse(str(one)) == f"{record} was edited after it was written{again}"
    record.write_text(whole[:-20])
    assert refuse(str(one)) == f"{record} is truncated or no probe record{again}"
    record.write_text(whole)
    write_crafted_probe(folder / "else", plan.probe("binary", 0), done=49)
    one.write_bytes((folder / "else" / one).read_bytes())
    assert refuse(str(one)) == (
        f"{one} is not the probe that its probe.json was written with{again}"
    )
    alone = one.rename("alone.parquet")
    assert succeed(str(alone), *GRID).startswith("alone.parquet: 49 steps\n")


# --- refused ------------------------------------------------------------------------------------


def test_files_that_are_no_probe_are_refused(folder: Path) -> None:
    plan = make_plan(seeds=[0])
    (folder / "text").write_text("step,scale\n")
    pq.write_table(pa.table({"a": [1]}), "other.parquet")
    write_crafted(folder, plan.run("binary", "default", 0))
    trace = plan.run("binary", "default", 0).folder / "trace.parquet"
    write_crafted_probe(folder / "empty", plan.probe("binary", 0), done=0)
    empty = Path("empty") / plan.probe("binary", 0).folder / "probe.parquet"
    record = "; record one with: halfscale probe path/to/file.py:build -o probe.parquet"
    assert refuse("gone.parquet") == f"gone.parquet: there is no such probe{record}"
    line = refuse("text")
    assert line.startswith("text is no whole Parquet file (") and line.endswith(record)
    assert refuse("other.parquet") == f"other.parquet is no probe: it has the columns a{record}"
    assert refuse(str(trace)) == (
        f"{trace} is the trace of a run, no probe; replay it as a log: halfscale replay --log "
        f"{trace}"
    )
    failed = " (failed: building the workload)"
    assert refuse(str(empty)) == f"{empty} holds no step{failed}{record}"


def test_a_damaged_or_foreign_probe_is_refused(folder: Path) -> None:
    path = write_probe("p.parquet", CALM)
    table = pq.read_table(path)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    assert "is no whole Parquet file" in refuse("p.parquet")
    metadata = {**table.schema.metadata, b"halfscale.spec": b"{}"}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    assert "what it says of itself cannot be read" in refuse("p.parquet")
    bare = table.replace_schema_metadata(None)
    loss = bare.column_names.index("loss")
    pq.write_table(bare.set_column(loss, "loss", bare["loss"].cast(pa.float64())), path)
    assert "is a probe of another version of halfscale" in refuse("p.parquet")


def test_probes_that_do_not_belong_together_are_refused() -> None:
    write_probe("a.parquet", CALM)
    write_probe("short.parquet", CALM[:60], seed=1)
    write_probe("other.parquet", CALM, samples=64)
    assert refuse("a.parquet", "short.parquet") == (
        "the probes differ in length: a.parquet has 100 steps, short.parquet has 60 steps; record "
        "all of them with the same --steps, or replay each alone"
    )
    assert refuse("a.parquet", "other.parquet") == (
        "the probes are not seeds of one training, but of 2 (binary, or other settings or code); "
        "replay each alone"
    )
    assert refuse("a.parquet", "./a.parquet").endswith(
        "a.parquet is given twice; give the probe of each seed once"
    )


WRITE_GRID = "write it as --grid init_scale=2**8,2**12,2**16 or --grid growth_interval=5..2000*2"
WRITE_COMPARE = "write it as --compare init_scale=65536,growth_interval=100"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--grid", "init_scale"), f"--grid init_scale: {WRITE_GRID}"),
        (("--grid", "init_scale="), f"--grid init_scale=: {WRITE_GRID}"),
        (
            ("--grid", "init_scale=1..2**24"),
            "--grid init_scale=1..2**24: a range needs a stride; write --grid init_scale=1..2**24"
            "*2",
        ),
        (
            ("--grid", "init_scal=1"),
            "--grid init_scal=1: torch has no parameter 'init_scal'; it has init_scale, "
            "growth_factor, backoff_factor, growth_interval",
        ),
        (
            ("--grid", "keras.init_scale=1"),
            "--grid keras.init_scale=1: 'keras' is no --policy given; write --policy keras",
        ),
        (
            ("--grid", "init_scale=1", "--grid", "init_scale=2"),
            "--grid init_scale=2: init_scale is given twice; give all its values once",
        ),
        (
            ("--grid", "init_scale=big"),
            f"grid of torch: init_scale: 'big' is not a number; {WRITE_GRID}",
        ),
        (
            ("--grid", "growth_factor=0.5,2"),
            f"grid of torch: growth_factor must be greater than 1, got 0.5; {WRITE_GRID}",
        ),
        (
            ("--grid", "init_scale=1..10**9+1"),
            f"grid of torch: init_scale has more than 200000 values; {WRITE_GRID}",
        ),
        (("--policy", "tensorflow"), "unknown policy 'tensorflow'; known are torch, static"),
        (
            ("--compare", "init_scale"),
            f"--compare init_scale: 'init_scale' is not key=value; {WRITE_COMPARE}",
        ),
        (
            ("--compare", "init_scale=2,init_scale=3"),
            f"--compare init_scale=2,init_scale=3: init_scale is given twice; {WRITE_COMPARE}",
        ),
        (
            ("--compare", "init_scale=big"),
            f"--compare init_scale=big: 'big' is not a number; {WRITE_COMPARE}",
        ),
        (
            ("--compare", "init_scal=3"),
            "--compare init_scal=3: policy torch has no parameter init_scal; it has init_scale, "
            f"growth_factor, backoff_factor, growth_interval; {WRITE_COMPARE}",
        ),
        (
            ("--compare", "policy=none"),
            "--compare policy=none: unknown policy 'none'; known are torch",
        ),
        (("--top", "0"), "--top 0: must be at least 1 and at most 1000; write --top 10"),
        (("--top", "few"), "--top few: is not a number; write --top 10"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_one_line(
    arguments: tuple[str, ...], line: str
) -> None:
    write_probe("p.parquet", CALM)
    assert refuse("p.parquet", *arguments).startswith(line)


def test_either_probes_or_a_log() -> None:
    said = "give either probes, such as halfscale replay probe.parquet, or a log: --log run.csv"
    assert refuse() == said
    assert refuse("p.parquet", "--log", "run.csv") == said


# --- configurations in words --------------------------------------------------------------------


def test_ranges_are_read_as_people_write_them() -> None:
    choices = make_grid((), ["init_scale = 2**8 , 1e4", "growth_interval=5..20*2"], 1000)
    values = [(c.parameters["init_scale"], c.parameters["growth_interval"]) for c in choices]
    assert values == [(s, i) for s in (256, 10000) for i in (5, 10, 20)]
    choices = make_grid((), ["init_scale=2**0..2**24*4"], 1000)
    assert [c.parameters["init_scale"] for c in choices] == [2.0**p for p in range(0, 25, 2)]
    choices = make_grid((), ["growth_interval=5..20+5"], 1000)
    assert [c.parameters["growth_interval"] for c in choices] == [5, 10, 15, 20]
    apex = make_grid(["apex"], ["min_scale=none,4"], 1000)
    assert [c.parameters["min_scale"] for c in apex] == [None, 4.0]
    flags = make_grid(["deepspeed"], ["consecutive_hysteresis=true,false"], 1000)
    assert [c.parameters["consecutive_hysteresis"] for c in flags] == [True, False]


@pytest.mark.parametrize(
    "text",
    [
        "init_scale=2**10,growth_interval=50",
        "growth_factor=1.5,backoff_factor=0.25",
        "policy=deepspeed,init_scale=2**8,consecutive_hysteresis=true",
    ],
)
def test_a_configuration_in_words_is_read_back(text: str) -> None:
    assert describe(parse_choice(text)) == text


def test_numbers_in_words() -> None:
    assert describe(PolicyChoice.of("torch")) == "PyTorch's defaults"
    shown = [show_number(value) for value in (True, None, 2.0**15, 16.0, 0.1, 20, float("inf"))]
    assert shown == ["true", "none", "2**15", "16", "0.1", "20", "inf"]
    assert (spread([2, 2]), spread([3, 1, 2])) == ("2", "1–3")


def test_replaying_imports_no_torch() -> None:
    write_probe("p.parquet", CALM)
    code = (
        "import sys; from halfscale.cli import app\n"
        "try: app(['replay', 'p.parquet', '--grid', 'init_scale=1,2'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_schema_of_a_probe_by_hand_is_that_of_the_workflow() -> None:
    path = write_probe("p.parquet", CALM)
    assert pq.read_schema(path).remove_metadata() == PROBE_SCHEMA
    assert ProbeSpec.table_name == "probe.parquet"
