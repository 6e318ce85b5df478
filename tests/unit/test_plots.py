"""Figures: drawn from the tables, one colour an arm, with texts that state the numbers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from halfscale.plots import (
    FIGURES,
    draw_all,
    draw_calibration,
    draw_landscape,
    draw_loss,
    draw_ranking,
    draw_scale,
    draw_skipped,
    draw_sweep,
)

from .crafted import Made, make, make_plan, sweep_table


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def folder(contested: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All figures of the contested runs."""
    path = tmp_path_factory.mktemp("plots")
    draw_all(contested.evidence(), path)
    return path


def alternative(folder: Path, name: str) -> str:
    return (folder / f"{name}.txt").read_text("utf-8")


def test_every_figure_has_a_picture_and_a_text(folder: Path) -> None:
    names = {
        *("ranking", "window", "landscape", "calibration", "loss", "scale", "skipped"),
        *("exponents", "sweep"),
    }
    assert set(FIGURES) == names
    expected = {f"{name}.{kind}" for name in names for kind in ("svg", "txt")}
    assert {path.name for path in folder.iterdir()} == expected
    for name in names:
        assert re.search(r"\d", alternative(folder, name))
        assert len(alternative(folder, name).strip().splitlines()) == 1


@pytest.mark.parametrize("name", FIGURES)
def test_a_picture_is_whole_and_asks_nobody_for_anything(folder: Path, name: str) -> None:
    root = ElementTree.fromstring((folder / f"{name}.svg").read_text("utf-8"))
    assert root.tag.endswith("svg")
    for element in root.iter():
        assert not element.tag.endswith("script")
        for key, value in element.attrib.items():
            if key.endswith("href"):
                assert value.startswith(("#", "data:"))


def test_figures_drawn_twice_are_the_same_bytes(
    contested: Made, folder: Path, tmp_path: Path
) -> None:
    draw_all(contested.evidence(), tmp_path)
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_text_of_the_losses_states_each_final_loss(contested: Made, folder: Path) -> None:
    text = alternative(folder, "loss")
    medians = contested.runs.groupby(["workload", "configuration"])["final_loss"].median()
    assert len(medians) == 16
    for (workload, name), loss in medians.items():
        assert f"{workload}, {name}: final loss {loss:.4g}" in text


def test_the_text_of_the_skipped_steps_states_each_mean(contested: Made, folder: Path) -> None:
    text = alternative(folder, "skipped")
    assert "binary, default: 2;" in text
    assert "digits, slow: 5;" in text
    assert "binary, fast: 0;" in text
    assert "fp32" not in text


def test_the_text_of_the_scales_states_where_they_ended(contested: Made, folder: Path) -> None:
    text = alternative(folder, "scale")
    # slow: 2^20, five overflows; clean steps 5-49 and 51-99 give 2 growths each.
    assert "binary, slow: final scale 2^19, 4 growths, 5 backoffs" in text
    assert "binary, twin: final scale 2^6, 0 growths, 0 backoffs" in text


def test_the_text_of_the_ranking_states_each_ratio_and_interval(
    contested: Made, folder: Path
) -> None:
    text = alternative(folder, "ranking")
    for name, score in contested.verdict.scores.items():
        ratio = score.ratio
        assert f"{name}: {ratio.estimate:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" in text
    assert re.search(r"slow: [^;]*told apart", text)
    assert not re.search(r"fast: [^;]*told apart", text)
    assert "broken" not in text


def test_the_text_of_the_sweep_states_the_limit(folder: Path) -> None:
    text = alternative(folder, "sweep")
    assert "2^-10" in text
    assert "34 larger scales" in text
    assert "2^24" in text


def legend_colours(figure: Figure) -> dict[str, str]:
    legend = figure.legends[0]
    return {
        text.get_text(): to_hex(handle.get_color())
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
        if isinstance(handle, Line2D)
    }


def ranking_colours(figure: Figure) -> dict[str, str]:
    (axis,) = figure.axes
    labels = [label.get_text().removesuffix("  ★") for label in axis.get_yticklabels()]
    colours = {
        round(float(np.asarray(line.get_ydata())[0])): to_hex(line.get_color())  # type: ignore[arg-type]
        for line in axis.lines
        if len(np.asarray(line.get_ydata())) == 1
    }
    return {label: colours[position] for position, label in enumerate(labels)}


def skipped_colours(figure: Figure) -> list[dict[str, str]]:
    found = []
    for axis in figure.axes:
        labels = [label.get_text() for label in axis.get_yticklabels()]
        bars = sorted(axis.patches, key=lambda bar: bar.get_y())  # type: ignore[attr-defined]
        colours = [to_hex(bar.get_facecolor()) for bar in bars]
        found.append(dict(zip(labels, colours, strict=True)))
    return found


def test_an_arm_has_one_colour_in_every_figure(contested: Made) -> None:
    evidence = contested.evidence()
    expected = {name: style.colour for name, style in evidence.styles.items()}
    loss = legend_colours(draw_loss(evidence)[0])
    assert loss == expected
    scale = legend_colours(draw_scale(evidence)[0])
    assert scale.keys() == set(contested.plan.configurations)
    for drawn in (scale, ranking_colours(draw_ranking(evidence)[0])):
        assert drawn == {name: expected[name] for name in drawn}
    for panel in skipped_colours(draw_skipped(evidence)[0]):
        # Bars are seaborn's: a little less saturated, but in the same order of hues.
        assert list(panel) == sorted(contested.plan.configurations)
        assert len(set(panel.values())) == len(panel)


def test_a_colour_does_not_change_when_another_arm_has_no_steps(contested: Made) -> None:
    evidence = contested.evidence()
    steps = evidence.steps
    without = steps[(steps["configuration"] != "broken") | (steps["workload"] != "binary")]
    fewer = contested.evidence(steps=without)
    assert legend_colours(draw_scale(fewer)[0]) == legend_colours(draw_scale(evidence)[0])


def test_the_recommended_one_is_starred_and_those_told_apart_are_hollow(contested: Made) -> None:
    figure, _ = draw_ranking(contested.evidence())
    (axis,) = figure.axes
    labels = [label.get_text() for label in axis.get_yticklabels()]
    starred = [label for label in labels if "★" in label]
    assert starred == [f"{contested.verdict.recommended}  ★"]
    points = [line for line in axis.lines if line.get_marker() not in ("None", "")]
    hollow = {
        labels[int(np.asarray(line.get_ydata())[0])].removesuffix("  ★")  # type: ignore[arg-type]
        for line in points
        if line.get_markerfacecolor() == "white"
    }
    assert hollow == set(contested.verdict.scores) - set(contested.verdict.winning_set)


def test_overflows_are_marked_where_they_happened(contested: Made) -> None:
    figure, _ = draw_scale(contested.evidence())
    crosses = {
        line.get_color(): sorted(set(np.asarray(line.get_xdata()).tolist()))
        for line in figure.axes[0].lines
        if line.get_marker() == "x" and len(np.asarray(line.get_xdata()))
    }
    styles = contested.evidence().styles
    assert crosses == {styles["default"].colour: [3, 30], styles["slow"].colour: [0, 1, 2, 3, 50]}


def test_a_tie_is_drawn_with_every_point_filled(tied: Made, tmp_path: Path) -> None:
    figure, text = draw_ranking(tied.evidence())
    figure.savefig(tmp_path / "ranking.svg")
    assert "told apart" not in text
    faces = {line.get_markerfacecolor() for line in figure.axes[0].lines}
    assert "white" not in faces


def test_rejections_of_everything_are_drawn(hopeless: Made, tmp_path: Path) -> None:
    draw_all(hopeless.evidence(), tmp_path)
    assert "none" in alternative(tmp_path, "ranking")
    for name in FIGURES:
        assert not re.search(r"\bnan\b|\binf\b", alternative(tmp_path, name)), name


def test_runs_that_all_failed_before_their_first_step_are_drawn(
    contested: Made, tmp_path: Path
) -> None:
    evidence = contested.evidence()
    verdict = evidence.recommendation
    nothing = contested.evidence(
        runs=evidence.runs.assign(final_loss=np.nan, skipped_steps=0, outcome="failed"),
        configurations=evidence.configurations.assign(final_loss=np.nan),
        steps=evidence.steps.iloc[:0],
        exponents=evidence.exponents.iloc[:0],
        windows=evidence.windows.iloc[:0],
        calibration=evidence.calibration.assign(compared_steps=0),
        landscape=evidence.landscape.iloc[:0],
        recommendation={**verdict, "scores": {}, "winning_set": [], "recommended": None},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, draw in FIGURES.items():
            draw(nothing)[0].savefig(tmp_path / f"{name}.svg")


def test_losses_that_are_not_finite_are_drawn(contested: Made, tmp_path: Path) -> None:
    evidence = contested.evidence()
    steps = evidence.steps.copy()
    steps.loc[steps["configuration"] == "slow", "loss"] = np.nan
    steps.loc[steps["step"] == 99, "loss"] = np.inf
    figure, _ = draw_loss(contested.evidence(steps=steps))
    figure.savefig(tmp_path / "loss.svg")


def test_one_workload_and_one_seed_are_drawn(tmp_path: Path) -> None:
    made = make(tmp_path, make_plan(seeds=[0]))
    for name, draw in FIGURES.items():
        figure, text = draw(made.evidence())
        figure.savefig(tmp_path / f"{name}.svg")
        assert "nan" not in text


def test_a_sweep_read_back_from_the_disk_is_drawn(contested: Made, tmp_path: Path) -> None:
    sweep_table().to_csv(tmp_path / "sweep.csv", index=False)
    evidence = contested.evidence()
    again = contested.evidence(sweep=pd.read_csv(tmp_path / "sweep.csv"))
    assert draw_sweep(again)[1] == draw_sweep(evidence)[1]


def test_the_usable_range_is_shaded_and_said(contested: Made, folder: Path) -> None:
    text = alternative(folder, "scale")
    # The crafted probes: elements of 2^-30 to 2^-3 and a largest of just below 2^-2, every step.
    low, high = contested.windows[["smallest_useful", "largest_safe"]].iloc[0]
    assert f"binary: 2^{low:g} to 2^{high:g} and 2^{low:g} to 2^{high:g};" in text
    figure, _ = draw_scale(contested.evidence())
    (band,) = figure.axes[0].collections
    heights = np.log2(np.asarray(band.get_paths()[0].vertices)[:, 1])
    assert (heights.min(), heights.max()) == (low, high)
    assert "usable range (probe)" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_usable_range_far_from_the_scales_does_not_hide_them(contested: Made) -> None:
    far = contested.windows.assign(smallest_useful=-np.inf, largest_safe=100.0)
    figure, text = draw_scale(contested.evidence(windows=far))
    low, high = np.log2(figure.axes[0].get_ylim())
    assert low > -6
    assert high < 30
    assert "binary: up to 2^100 and up to 2^100" in text
    nothing = contested.windows.assign(smallest_useful=-np.inf, largest_safe=-np.inf)
    assert "binary: none and none" in draw_scale(contested.evidence(windows=nothing))[1]


def test_no_usable_range_is_said(contested: Made) -> None:
    none = contested.windows.assign(smallest_useful=9.0, largest_safe=3.0)
    assert "binary: none and none" in draw_scale(contested.evidence(windows=none))[1]


def test_the_landscape_marks_what_lies_in_it(contested: Made, folder: Path) -> None:
    figure, text = draw_landscape(contested.evidence())
    scale, factors = figure.axes[:2]
    # All configurations have PyTorch's factors.
    expected = {*contested.plan.configurations, "PyTorch's defaults"}
    assert {line.get_label() for line in scale.lines} == expected
    places = {
        line.get_label(): (float(np.asarray(line.get_xdata())[0]), line.get_marker())
        for line in scale.lines
    }
    assert places["fast"][0] == 10
    assert places["PyTorch's defaults"] == (16, "*")
    # The plane of the factors is at one configuration's scale and interval.
    assert [line.get_label() for line in factors.lines] == ["default"]
    assert "init_scale 2^16, growth_interval 20" in factors.get_xlabel()
    assert re.search(
        r"binary, init_scale × growth_interval at .*: cheapest at init_scale \S+,", text
    )
    table = contested.landscape[contested.landscape["workload"] == "binary"]
    cell = table[(table["init_scale"] == 2**10) & (table["growth_interval"] == 20)]
    assert f"fast about {cell['cost'].iloc[0]:.3g}," in text
    assert alternative(folder, "landscape").strip() == text


def test_costs_are_drawn_as_shares_of_the_steps(contested: Made) -> None:
    figure, _ = draw_landscape(contested.evidence())
    drawn = figure.axes[0].collections[0].get_array()
    table = contested.landscape
    mine = table[(table["workload"] == "binary") & (table["plane"] == "scale")]
    assert drawn is not None
    assert drawn.max() == pytest.approx(mine["cost"].max() / 100)
    assert drawn.min() == pytest.approx(mine["cost"].min() / 100)


def test_every_prediction_is_a_point_and_the_misses_are_named(
    contested: Made, folder: Path
) -> None:
    table = contested.calibration
    compared = table[table["compared_steps"] > 0]
    figure, text = draw_calibration(contested.evidence())
    sizes = [
        size for points in figure.axes[0].collections[1:] for size in points.get_sizes().tolist()
    ]
    assert sum((size / 36) ** 2 for size in sizes) == pytest.approx(len(compared))
    within = (compared["difference"].abs() <= 1).sum()
    assert f"{within} of {len(compared)} runs within 1 step" in text
    missed = compared[compared["difference"].abs() > 1]
    assert len(missed)
    for row in missed.to_dict("records"):
        name = f"{row['workload']}, {row['configuration']}, seed {row['seed']}"
        figures = f"predicted {row['predicted_skipped_steps']}, had {row['skipped_steps']}"
        assert f"{name}: {figures}" in text
    columns = ["predicted_skipped_steps", "skipped_steps", "difference"]
    read_back = table.astype(dict.fromkeys(columns, float))
    assert draw_calibration(contested.evidence(calibration=read_back))[1] == text
    assert alternative(folder, "calibration").strip() == text
