"""Tables and figures of the probes: from counts worked by hand, also where there are none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from halfscale.evidence import Evidence
from halfscale.plan import Plan
from halfscale.probe_plots import draw_exponents, draw_window
from halfscale.probe_tables import (
    EXPONENT_COLUMNS,
    PROBE_COLUMNS,
    WINDOW_COLUMNS,
    collect_probes,
    lost_share_of,
    part_of,
    usable_window,
)
from halfscale.records import RecordError

from .crafted import make_plan
from .crafted_probes import craft_step
from .crafted_probes import write_steps as write


def plan_of(
    steps: int = 20, seeds: Sequence[int] = (0,), names: Sequence[str] = ("binary",)
) -> Plan:
    return make_plan(seeds=seeds, workloads={name: {"steps": steps} for name in names})


def elements(exponents: pd.DataFrame, part: str, tensors: str) -> dict[int | None, int]:
    chosen = exponents[(exponents["part"] == part) & (exponents["tensors"] == tensors)]
    keys = [None if pd.isna(key) else int(key) for key in chosen["exponent"]]
    return dict(zip(keys, chosen["elements"].astype(int), strict=True))


# Tables.


def test_elements_are_summed_over_the_parts_of_a_training(tmp_path: Path) -> None:
    plan = plan_of(steps=20)
    first = craft_step({-3: 5, 0: 1, None: 7}, {-8: 2})
    middle = craft_step({-4: 1}, {-9: 3, None: 1})
    last = craft_step({-5: 100, None: 4}, {2: 6})
    write(tmp_path, plan, [first, first, *[middle] * 16, last, last])
    exponents, *_ = collect_probes(plan, tmp_path)
    assert list(exponents.columns) == list(EXPONENT_COLUMNS)
    # A tenth of 20 steps is two.
    assert elements(exponents, "start", "activation") == {-3: 10, 0: 2, None: 14}
    assert elements(exponents, "start", "weight") == {-8: 4, None: 0}
    assert elements(exponents, "end", "activation") == {-5: 200, None: 8}
    assert elements(exponents, "end", "weight") == {2: 12, None: 0}
    assert elements(exponents, "all", "activation") == {-3: 10, 0: 2, -4: 16, -5: 200, None: 22}
    assert elements(exponents, "all", "weight") == {-8: 4, -9: 48, 2: 12, None: 16}


def test_elements_are_summed_over_the_seeds_and_kept_apart_by_workload(tmp_path: Path) -> None:
    plan = plan_of(steps=2, seeds=(0, 3), names=("binary", "digits"))
    for factor, (name, seed) in enumerate(
        [("binary", 0), ("binary", 3), ("digits", 0), ("digits", 3)]
    ):
        write(tmp_path, plan, [craft_step({-1: 10**factor})] * 2, name, seed)
    exponents, windows, _ = collect_probes(plan, tmp_path)
    binary, digits = (exponents[exponents["workload"] == name] for name in plan.workloads)
    assert elements(binary, "all", "activation") == {-1: 22, None: 0}
    assert elements(digits, "all", "activation") == {-1: 2200, None: 0}
    # Of two steps the first is the start and the last the end.
    assert elements(binary, "start", "activation") == {-1: 11, None: 0}
    keys = windows[["workload", "seed", "step"]].itertuples(index=False)
    assert [tuple(key) for key in keys] == [
        (name, seed, step) for name in ("binary", "digits") for seed in (0, 3) for step in (0, 1)
    ]


def test_the_ends_of_the_range_are_not_lost(tmp_path: Path) -> None:
    plan = plan_of(steps=2)
    write(tmp_path, plan, [craft_step({-140: 1, 127: 2})] * 2)
    exponents, *_ = collect_probes(plan, tmp_path)
    assert elements(exponents, "all", "activation") == {-140: 2, 127: 4, None: 0}


def test_the_window_of_each_step(tmp_path: Path) -> None:
    plan = plan_of(steps=4)
    # Of 100 elements 5 may go. Step 0 has 4 at 2^-30 and the next at 2^-20; largest 1.5 × 2^3.
    # Step 1 has 3 of each kind of tensors there, 6 in all, which is too many.
    steps = [
        craft_step({-30: 4, -20: 90}, {3: 6}, largest_gradient=8.0),
        craft_step({-30: 3, -20: 90}, {-30: 3, 3: 4}),
        craft_step({None: 9}),
        craft_step({-10: 5}, largest=math.inf, largest_gradient=math.inf),
    ]
    write(tmp_path, plan, steps)
    _, windows, _ = collect_probes(plan, tmp_path)
    assert list(windows.columns) == list(WINDOW_COLUMNS)
    assert windows["step"].tolist() == [0, 1, 2, 3]
    assert windows["largest"].tolist() == [12.0, 12.0, 0.0, math.inf]
    assert windows["largest_gradient"].tolist() == [8.0, 0.25, 0.25, math.inf]
    # 12 × 2^12 = 49152 fits, 98304 does not.
    assert windows["largest_safe"].tolist() == [12, 12, math.inf, -math.inf]
    # 2^-20 × 2^-5 = 2^-25 and 2^-30 × 2^5 = 2^-25: from there on kept.
    assert windows["smallest_useful"].tolist() == [-5, 5, -math.inf, -15]
    assert usable_window(windows[:3]) == (5.0, 12.0)
    assert usable_window(windows) == (5.0, -math.inf)


def test_a_window_may_be_empty() -> None:
    windows = pd.DataFrame({"smallest_useful": [3.0, 9.0], "largest_safe": [8.0, 14.0]})
    low, high = usable_window(windows)
    assert (low, high) == (9.0, 8.0)


def test_the_lost_share_adds_up_both_kinds_of_tensors(tmp_path: Path) -> None:
    plan = plan_of(steps=2)
    write(tmp_path, plan, [craft_step({-30: 1, None: 50}, {-26: 1, 0: 2})] * 2)
    exponents, *_ = collect_probes(plan, tmp_path)
    part = exponents[exponents["part"] == "all"]
    scales = np.array([-30.0, 0.0, 1.0, 4.0, 4.0 + math.log2(4 / 3), 5.0, 40.0])
    # Zeros are not lost; at 4/3 of 2^4 the element of 2^-30 goes half.
    expected = pytest.approx([1.0, 0.5, 0.25, 0.25, 0.125, 0.0, 0.0])
    assert lost_share_of(part, scales).tolist() == expected
    again = tmp_path / "exponents.csv"
    part.to_csv(again, index=False)
    assert lost_share_of(pd.read_csv(again), scales).tolist() == expected
    weights = part[part["tensors"] == "weight"]
    assert lost_share_of(weights, scales[:2]).tolist() == [1.0, 1 / 3]
    assert lost_share_of(part[:0], scales).tolist() == [0.0] * 7


def test_a_probe_that_ended_early_has_the_parts_it_came_to(tmp_path: Path) -> None:
    plan = plan_of(steps=40)
    rows = [craft_step({step: 1}) for step in range(6)]
    write(tmp_path, plan, rows, outcome="failed")
    exponents, windows, _ = collect_probes(plan, tmp_path)
    # A tenth of the 6 steps that it recorded, not of the 40 that were planned.
    assert elements(exponents, "start", "activation") == {0: 1, None: 0}
    assert elements(exponents, "end", "activation") == {5: 1, None: 0}
    assert len(windows) == 6


def test_shares_and_windows_are_of_the_same_steps_of_each_seed(tmp_path: Path) -> None:
    plan = plan_of(steps=40, seeds=(0, 1))
    write(tmp_path, plan, [craft_step({step - 60: 1}) for step in range(40)], seed=0)
    early = [craft_step({step: 1}) for step in range(6)]
    write(tmp_path, plan, early, seed=1, outcome="failed")
    exponents, windows, _ = collect_probes(plan, tmp_path)
    expected = {"start": [-60, -59, -58, -57, 0], "end": [-24, -23, -22, -21, 5]}
    for part, found in expected.items():
        assert [*elements(exponents, part, "activation")] == [None, *found]
        largest = part_of(windows, part)["largest"]
        assert [math.frexp(value)[1] - 1 for value in largest] == found
    assert part_of(windows, "all").equals(windows)


def test_a_probe_that_failed_before_its_first_step_has_no_windows(tmp_path: Path) -> None:
    plan = plan_of()
    write(tmp_path, plan, [], outcome="failed")
    exponents, windows, _ = collect_probes(plan, tmp_path)
    assert windows.empty
    assert list(windows.columns) == list(WINDOW_COLUMNS)
    for part in ("start", "end", "all"):
        for tensors in ("activation", "weight"):
            assert elements(exponents, part, tensors) == {None: 0}
    shares = lost_share_of(exponents[exponents["part"] == "all"], np.array([0.0, 8.0]))
    assert shares.tolist() == [0.0, 0.0]


def test_a_probe_that_failed_does_not_hide_the_others(tmp_path: Path) -> None:
    plan = plan_of(steps=2, seeds=(0, 1), names=("binary", "digits"))
    for seed in (0, 1):
        write(tmp_path, plan, [], "binary", seed, "failed")
    write(tmp_path, plan, [], "digits", 0, "failed")
    write(tmp_path, plan, [craft_step({-1: 3})] * 2, "digits", 1)
    exponents, windows, _ = collect_probes(plan, tmp_path)
    digits = exponents[exponents["workload"] == "digits"]
    assert elements(digits, "all", "activation") == {-1: 6, None: 0}
    assert windows["seed"].tolist() == [1, 1]
    assert windows["largest_safe"].tolist() == [16, 16]
    assert pd.api.types.is_numeric_dtype(windows["largest_safe"])


def test_a_missing_probe_is_named(tmp_path: Path) -> None:
    plan = plan_of(seeds=(0, 1))
    write(tmp_path, plan, [craft_step({-1: 3})])
    with pytest.raises(RecordError) as caught:
        collect_probes(plan, tmp_path)
    assert str(tmp_path / plan.probe("binary", 1).folder / "probe.json") in str(caught.value)


# Figures.


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


def evidence_of(plan: Plan, results: Path, through_csv: bool = False) -> Evidence:
    exponents, windows, _ = collect_probes(plan, results)
    if through_csv:
        exponents.to_csv(results / "exponents.csv", index=False)
        windows.to_csv(results / "windows.csv", index=False)
        exponents = pd.read_csv(results / "exponents.csv")
        windows = pd.read_csv(results / "windows.csv")
    runs = pd.DataFrame({"workload": list(plan.workloads), "configuration": "default"})
    nothing = pd.DataFrame()
    return Evidence(
        runs=runs,
        configurations=nothing,
        steps=nothing,
        sweep=nothing,
        exponents=exponents,
        windows=windows,
        calibration=nothing,
        landscape=nothing,
        choices={},
        recommendation={},
    )


def draw_both(evidence: Evidence, folder: Path) -> tuple[str, str]:
    texts = []
    for draw in (draw_exponents, draw_window):
        figure, text = draw(evidence)
        path = folder / f"{draw.__name__}.svg"
        figure.savefig(path)
        ElementTree.parse(path)
        assert "nan" not in text
        assert len(text.splitlines()) == 1
        texts.append(text)
    return texts[0], texts[1]


@pytest.mark.parametrize("through_csv", [False, True])
def test_figures_state_the_range_and_the_window(tmp_path: Path, through_csv: bool) -> None:
    plan = plan_of(steps=2, names=("binary", "digits"))
    write(tmp_path, plan, [craft_step({-30: 1, -20: 3, None: 4}, {-2: 1})] * 2, "binary")
    write(tmp_path, plan, [craft_step({-30: 1, 20: 3})] * 2, "digits")
    exponents, window = draw_both(evidence_of(plan, tmp_path, through_csv), tmp_path)
    said = "binary, activation gradients: 2^-30 to 2^-19, 25.0% of them below fp16's smallest"
    assert said in exponents
    assert "and 50% of all are zero" in exponents
    assert "binary, weight gradients: 2^-2 to 2^-1, 0.0% of them below" in exponents
    # All of 5 are to be kept: from 2^5 on. 1.5 × 2^-2 × 2^17 = 49152.
    assert "binary: usable throughout: 2^5 to 2^17" in window
    assert "digits: usable throughout: none" in window


def test_the_share_of_steps_that_overflow_jumps_above_the_largest_safe_scale(
    tmp_path: Path,
) -> None:
    plan = plan_of(steps=4)
    write(tmp_path, plan, [craft_step({exponent: 1}) for exponent in (0, 0, 4, 4)])
    figure, _ = draw_window(evidence_of(plan, tmp_path))
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    x, y = (np.asarray(data) for data in lines["steps that overflow"].get_data())
    overflow = dict(zip(x.tolist(), y.tolist(), strict=True))
    # 1.5 × 2^15 fits, 24 × 2^11 as well.
    assert [overflow[scale] for scale in (11, 12, 15, 16)] == [0, 50, 50, 100]


def test_a_window_of_one_scale_and_an_empty_one_are_drawn(tmp_path: Path) -> None:
    plan = plan_of(steps=2)
    for low, said in {-40: "2^15 to 2^15", -41: "usable throughout: none"}.items():
        write(tmp_path, plan, [craft_step({low: 1, 0: 1})] * 2)
        assert said in draw_both(evidence_of(plan, tmp_path), tmp_path)[1]


@pytest.mark.parametrize("through_csv", [False, True])
def test_a_workload_without_a_step_is_said_to_have_none(tmp_path: Path, through_csv: bool) -> None:
    plan = plan_of(steps=2, names=("binary", "digits"))
    write(tmp_path, plan, [craft_step({-3: 1})] * 2, "binary")
    write(tmp_path, plan, [], "digits", outcome="failed")
    for text in draw_both(evidence_of(plan, tmp_path, through_csv), tmp_path):
        assert "digits: nothing was recorded" in text
        assert "binary: nothing" not in text
        assert "2^" in text


@pytest.mark.parametrize("through_csv", [False, True])
@pytest.mark.parametrize(
    "steps",
    [[], [craft_step({None: 5})] * 2, [craft_step(largest=math.inf)] * 2],
    ids=["no step", "zeros", "nothing finite"],
)
def test_probes_without_any_magnitude_are_drawn(
    tmp_path: Path, steps: list[dict[str, Any]], through_csv: bool
) -> None:
    plan = plan_of(steps=2)
    write(tmp_path, plan, steps)
    for text in draw_both(evidence_of(plan, tmp_path, through_csv), tmp_path):
        assert "binary: nothing was recorded" in text


def test_a_step_that_is_not_finite_leaves_no_usable_scale(tmp_path: Path) -> None:
    plan = plan_of(steps=2)
    write(tmp_path, plan, [craft_step({-3: 1}), craft_step({-3: 1}, largest=math.inf)])
    _, window = draw_both(evidence_of(plan, tmp_path), tmp_path)
    assert "usable throughout: none" in window


def test_how_each_probe_ended_is_a_table(tmp_path: Path) -> None:
    plan = plan_of(steps=3)
    write(tmp_path, plan, [craft_step({0: 1})], outcome="failed")
    _, _, probes = collect_probes(plan, tmp_path)
    assert list(probes.columns) == list(PROBE_COLUMNS)
    assert set(probes["outcome"]) == {"failed"}
    assert set(probes["steps"]) == {3}
    assert set(probes["steps_done"]) == {1}
