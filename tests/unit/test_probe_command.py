"""``halfscale probe``: one file that says what it is, what it shows, and when it is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from halfscale import __version__
from halfscale.cli import app
from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.plan import ProbeSpec
from halfscale.probe import probe
from halfscale.probe_files import ProbeFile, read_probe_file, write_probe_file
from halfscale.probing import summarise_probe
from halfscale.records import PROBE_SCHEMA
from halfscale.replay import Probe

from .crafted import make_plan

pytestmark = pytest.mark.usefixtures("torch_settings")

FILE = """\
import torch
from torch import nn


def build(seed, device, *, size=3, rate=0.1, kind="plain"):
    model = nn.Sequential(nn.Linear(size, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    batches = [torch.randn(8, size) for _ in range(3)]
    steps = []

    def loss(model, batch):
        steps.append(0)
        if kind == "raises" and len(steps) == 7:
            raise ValueError("a bad\\nbatch")
        value = model(batch).float().pow(2).mean()
        return value * float("inf") if kind == "diverges" and len(steps) == 7 else value

    return model, optimizer, batches if kind != "ends" else iter(batches), loss
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(FILE)
    yield tmp_path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["probe", *arguments, "--device", "cpu"])
    return result.exit_code, result.stdout, result.stderr


def succeed(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, err) == (0, ""), out
    return out


def refuse(*arguments: str) -> str:
    code, _, err = run(*arguments)
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("halfscale probe: ")
    return line.removeprefix("halfscale probe: ")


def test_a_model_of_ones_own_is_recorded_in_one_file(folder: Path) -> None:
    out = succeed("mine.py:build", "--steps", "20", "--set", "size=5", "--seed", "3", "-o", "p")
    lines = out.splitlines()
    assert lines[0] == "probe workload=mine probe seed=3: 20 steps on cpu"
    assert "step 20/20" in out
    at = lines.index("") + 1
    assert lines[at].startswith("p: mine, 20 of 20 steps, seed 3, bf16")
    assert lines[at + 1].startswith("gradient magnitudes from 2^-")
    assert [line.split("  ")[1] for line in lines[at + 3 : at + 6]] == [
        *("the first 2 steps", "the last 2 steps", "throughout")
    ]
    assert lines[-1] == "next: halfscale replay p"
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["mine.py", "p"]


def test_the_file_says_what_it_is() -> None:
    succeed("mine.py:build", "--steps", "4", "--set", "rate=1e-2", "-o", "new/p.parquet")
    metadata = pq.read_schema("new/p.parquet").metadata
    assert pq.read_schema("new/p.parquet").remove_metadata() == PROBE_SCHEMA
    spec = ProbeSpec.model_validate_json(metadata[b"halfscale.spec"])
    assert metadata[b"halfscale.spec"].decode() == spec.canonical_json()
    assert spec.parameters == {"size": 3, "rate": 0.01, "kind": "plain"}
    assert (spec.entry, spec.steps, spec.seed) == ("mine.py:build", 4, 0)
    assert metadata[b"halfscale.version"].decode() == __version__
    assert (metadata[b"halfscale.outcome"], metadata[b"halfscale.error"]) == (b"ok", b"")
    assert metadata[b"halfscale.arithmetic"].decode().startswith("bf16")
    about = read_probe_file(Path("new/p.parquet")).about
    assert about and about.spec == spec and about.environment["threads"] == 1


def test_it_records_what_the_workflows_job_records(folder: Path) -> None:
    workload = {"binary": {"steps": 8, "samples": 64}}
    spec = make_plan(seeds=[2], workloads=workload).probe("binary", 2)
    probe(spec, folder / "job", lambda line: None)
    succeed("binary", "--steps", "8", "--set", "samples=64", "--seed", "2")
    by_hand, job = read_probe_file(Path("probe.parquet")), read_probe_file(folder / "job")
    assert by_hand.table.equals(job.table)
    assert by_hand.about and by_hand.about.spec == spec
    assert job.about and (job.about.spec, job.about.version) == (spec, None)


def test_a_training_that_diverges_midway_leaves_its_steps() -> None:
    out = succeed("mine.py:build", "--steps", "20", "--set", "kind=diverges")
    assert "probe.parquet: mine, 7 of 20 steps" in out
    assert "the training diverged even in bf16: the loss became inf in step 6" in out
    file = read_probe_file(Path("probe.parquet"))
    assert file.about and file.about.outcome == "diverged"
    assert Probe.of(file.table).largest.tolist()[-1] == np.inf
    assert Probe.of(file.table).largest_gradient.tolist()[-1] == np.inf


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("mine.py:build", "--set", "kind=raises"),
            "mine.py:build: failed: step 6: ValueError: a bad batch (mine.py, line 14)",
        ),
        (
            ("mine.py:build", "--set", "kind=ends"),
            "mine.py:build: failed: batches ended after 3 of 500 steps; return a list",
        ),
        (
            ("mine.py:build", "--set", "rate=-1"),
            "mine.py:build: failed: building the workload: ValueError: Invalid learning rate",
        ),
        (("mien.py:build",), "the command line: workloads.mien.entry: 'mien.py:build': no such"),
        (("bynary",), "the command line: workloads.bynary: 'bynary': unknown workload; halfscale"),
        (
            ("mine.py:build", "--set", "siez=3"),
            "the command line: workloads.mine.siez: 3: unknown key; mine has steps, size",
        ),
        (("mine.py:build", "--set", "size"), "--set size: write it as key=value"),
        (
            ("mine.py:build", "--steps", "1"),
            "--steps 1: must be at least 2 and at most 2147483647; write --steps 500",
        ),
        (("mine.py:build", "--steps", "many"), "--steps many: is not a number; write --steps 500"),
        (("mine.py:build", "--seed", "0.5"), "--seed 0.5: must be a whole number; write --seed 0"),
        (
            ("mine.py:build", "--threads", "0"),
            "--threads 0: must be at least 1 and at most 1024; write --threads 1",
        ),
        (("mine.py:build", "-o", "."), "-o . is a folder; write -o probe.parquet"),
        (
            ("mine.py:build", "-o", "mine.py/probe.parquet"),
            "-o mine.py/probe.parquet cannot be written (File exists); write -o probe.parquet",
        ),
    ],
)
def test_what_cannot_be_probed_ends_with_one_line(
    arguments: tuple[str, ...], line: str, folder: Path
) -> None:
    assert refuse(*arguments).startswith(line)
    assert not (folder / "probe.parquet").exists()


def test_an_unknown_device_is_refused() -> None:
    result = CliRunner().invoke(app, ["probe", "binary", "--device", "tpu"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1 and "'tpu'" in result.stderr


# --- what it shows, by hand ---------------------------------------------------------------------


def crafted(largest: list[float], exponents: list[list[int]], path: Path) -> ProbeFile:
    """A probe with an element at each of these exponents in each step."""
    counts = np.zeros((len(largest), BINS), dtype=int)
    for step, row in enumerate(exponents):
        for exponent in row:
            counts[step, exponent - LOWEST_EXPONENT] += 1
    columns = {
        "step": list(range(len(largest))),
        "loss": [0.5] * len(largest),
        "largest": largest,
        "largest_gradient": [magnitude / 2 for magnitude in largest],
        "activation_counts": counts.tolist(),
        "weight_counts": np.zeros_like(counts).tolist(),
        "activation_zeros": [0] * len(largest),
        "weight_zeros": [0] * len(largest),
        "batch_repeats": [False] * len(largest),
    }
    spec = make_plan(seeds=[0]).probe("binary", 0)
    write_probe_file(path, columns, spec=spec, outcome="ok", error=None, environment={})
    return read_probe_file(path)


def test_the_window_of_start_end_and_throughout(folder: Path) -> None:
    # 2^-24 is kept from a scale of 2^0 on, so 2^-30 needs 2^6; a largest of 1 is safe up to 2^15.
    file = crafted([1.0, *[0.5] * 8, 0.25], [[-30, 0], *[[-24, -1]] * 8, [-26, -2]], folder / "p")
    lines = summarise_probe(file).splitlines()
    assert lines[1] == "gradient magnitudes from 2^-30 to 2^1"
    assert [line.split()[-3:] for line in lines[3:6]] == [
        ["2^5", "to", "2^15"],
        ["2^1", "to", "2^17"],
        ["2^5", "to", "2^15"],
    ]


def test_no_scale_may_be_usable_throughout(folder: Path) -> None:
    file = crafted([2.0**7, 2.0**-3], [[7], [-40]], folder / "p")
    line = summarise_probe(file).splitlines()[5]
    assert line.endswith("none: some step needs 2^15, some overflows above 2^8")


@pytest.mark.parametrize(
    ("largest", "exponents", "said"),
    [
        ([0.0, 0.0], [[], []], "all gradients are zero"),
        ([0.0, 0.0], [[], []], "throughout           every scale"),
        ([1.0, float("inf")], [[0], [0]], "none: a gradient is infinite without any scale"),
    ],
)
def test_awkward_probes_are_described(
    folder: Path, largest: list[float], exponents: list[list[int]], said: str
) -> None:
    assert said in summarise_probe(crafted(largest, exponents, folder / "p"))


def test_a_path_with_spaces_is_quoted(awkward: Path) -> None:
    file = crafted([1.0, 1.0], [[0], [0]], awkward / "a probe.parquet")
    assert "next: halfscale replay '" in summarise_probe(file)
