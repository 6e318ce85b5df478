"""Several GPUs through the real Snakemake: each job sees one, and the record says what it took."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pretended import boards, pretend_cuda, uuid

from .driver import ARMS, Bench

FOUR = [f"results/runs/binary/{arm}/seed0/run.json" for arm in ARMS[:3]] + [
    "results/probes/binary/seed0/probe.json"
]


@pytest.mark.parametrize(
    ("visible", "settings", "masks"),
    [
        pytest.param(
            "0,1,2,3", "warm_workers: on", {uuid(n): 1 for n in range(4)}, id="a GPU each, forked"
        ),
        pytest.param(
            "0,1,2,3", "warm_workers: off", {uuid(n): 1 for n in range(4)}, id="a GPU each, started"
        ),
        pytest.param("3,1", "runs_per_gpu: 2", {uuid(3): 2, uuid(1): 2}, id="two share one"),
    ],
)
def test_four_jobs_at_once_each_see_one_gpu(
    empty: Bench, tmp_path: Path, visible: str, settings: str, masks: dict[str, int]
) -> None:
    folder = tmp_path / "machine"
    empty.environment = pretend_cuda(folder, boards(4, busy=40, used=3 << 20), together=4)
    empty.environment["CUDA_VISIBLE_DEVICES"] = visible
    empty.edit("device: cpu", f"device: auto\n{settings}")
    empty.make("--resources", "gpu=4", "--", *FOUR, cores=4)
    seen = {file.name: file.read_text("utf-8") for file in (folder / "seen").iterdir()}
    assert len(seen) == 4
    assert Counter(seen.values()) == masks
    for file in FOUR:
        record = json.loads((empty.path / file).read_text("utf-8"))
        assert record["outcome"] == "ok"
        assert record["spec"]["device"] == "cuda"
        assert record["gpu"] == {
            "uuid": seen["-".join(Path(file).parent.parts[1:])],
            "driver": "999.99",
            "allocated": 0,
            "reserved": 0,
            "process": 3 << 20,
            "utilisation": pytest.approx(0.4),
        }
    log = (empty.path / "results/logs/probe/binary/seed0.log").read_text("utf-8")
    mask = seen["probes-binary-seed0"]
    assert f"\ngpu: Pretended GPU, {mask}\n" in log
    assert "no warm worker" not in log
    assert "\ngpu: at most 0.00 GiB in tensors, " in log
    assert "0.00 GiB in all; computing 40% of the time\n" in log


def test_another_number_of_runs_a_gpu_reruns_nothing(empty: Bench, tmp_path: Path) -> None:
    empty.environment = pretend_cuda(tmp_path / "machine", boards(1), together=1)
    empty.environment["CUDA_VISIBLE_DEVICES"] = "0"
    empty.edit("device: cpu", "device: cuda\nruns_per_gpu: 1")
    empty.make("--", FOUR[0])
    empty.edit("runs_per_gpu: 1", "runs_per_gpu: 2")
    assert not empty.plan("--", FOUR[0]).trains
