"""Which configurations figures draw where there are many, and how large the page then gets."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from halfscale import drawn as limits
from halfscale.drawn import (
    MOST_DRAWN,
    MOST_RANKED,
    choose_drawn,
    choose_ranked,
    describe_drawn,
    draws_one_seed,
    draws_seed_lines,
    steps_a_point,
)
from halfscale.fragments import Page
from halfscale.html import MOST_ROWS, long_table
from halfscale.plots import FIGURES, draw_landscape, draw_loss, draw_scale, draw_skipped
from halfscale.records import write_json
from halfscale.svg import to_data_uri, to_svg

from .crafted import Fate, Made, make, make_plan

BY_CONFIGURATION = ("loss", "scale", "skipped")


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


def verdict_of(
    kept: int, rejected: int = 0, recommended: int = 0, workloads: int = 2, seeds: int = 6
) -> dict[str, Any]:
    """What matters of a ``recommendation.json``; ``a0`` is the best, ``z0`` is rejected."""
    scores = {f"a{n}": {"ratio": {"estimate": 1.0 + n / 100}} for n in range(kept)}
    bad = {f"z{n}": "stuck" for n in range(rejected)}
    return {
        "scores": scores,
        "rejected": bad,
        "policies": dict.fromkeys([*scores, *bad], "torch"),
        "recommended": f"a{recommended}" if kept else None,
        "winning_set": list(scores),
        "evidence": {
            "workloads": {f"w{n}": 100 for n in range(workloads)},
            "seeds": list(range(seeds)),
        },
    }


@pytest.mark.parametrize(("kept", "rejected"), [(5, 0), (3, 2), (0, 4), (MOST_DRAWN, 0)])
def test_few_configurations_are_all_drawn_and_nothing_is_said(kept: int, rejected: int) -> None:
    verdict = verdict_of(kept, rejected)
    assert choose_drawn(verdict) == sorted(verdict["policies"])
    assert choose_ranked(verdict) == list(verdict["scores"])
    assert [describe_drawn(verdict, name) for name in FIGURES] == [""] * len(FIGURES)


def test_of_many_the_recommended_the_best_and_two_rejected_are_drawn() -> None:
    verdict = verdict_of(40, rejected=20, recommended=35)
    drawn = choose_drawn(verdict)
    assert set(drawn) == {"a35", *(f"a{n}" for n in range(7)), "z0", "z1"}
    assert len(drawn) == MOST_DRAWN
    for name in BY_CONFIGURATION:
        said = describe_drawn(verdict, name)
        assert said.startswith("Drawn are 10 of 60 configurations: the recommended one, then the")
        assert "2 of those rejected" in said
    assert describe_drawn(verdict, "sweep") == describe_drawn(verdict, "window") == ""


@pytest.mark.parametrize(
    ("kept", "rejected", "recommended", "said"),
    [
        (30, 0, 0, ": the recommended one, then the best; the"),
        (29, 1, 0, ": the recommended one, then the best, and 1 of those rejected; the"),
        (4, 26, 0, ": the recommended one, then the best, and 6 of those rejected; the"),
        (0, 30, 0, ": 10 of those rejected; the"),
        (30, 0, 99, ": the best; the"),
    ],
)
def test_it_is_said_which_are_drawn(kept: int, rejected: int, recommended: int, said: str) -> None:
    verdict = verdict_of(kept, rejected, recommended)
    for name in (*BY_CONFIGURATION, "landscape"):
        assert said in describe_drawn(verdict, name)


@pytest.mark.parametrize(("kept", "rejected"), [(30, 0), (0, 30), (4, 26), (29, 1)])
def test_as_many_are_drawn_as_can_be(kept: int, rejected: int) -> None:
    drawn = choose_drawn(verdict_of(kept, rejected))
    assert len(drawn) == len(set(drawn)) == MOST_DRAWN


def test_a_long_ranking_ends_with_the_recommended_one() -> None:
    verdict = verdict_of(60, recommended=50)
    assert choose_ranked(verdict) == [*(f"a{n}" for n in range(MOST_RANKED - 1)), "a50"]
    assert "30 of 60 configurations" in describe_drawn(verdict, "ranking")


def test_a_plan_of_usual_size_is_drawn_whole_and_of_a_large_one_it_is_said_what_is_left_out() -> (
    None
):
    small = verdict_of(5)
    assert draws_seed_lines(small)
    assert not draws_one_seed(small)
    assert steps_a_point(small) == 1
    large = verdict_of(60, workloads=200, seeds=2)
    assert not draws_seed_lines(large)
    assert "Of each, seed 0 is drawn." in describe_drawn(large, "scale")
    assert describe_drawn(large, "loss").endswith("Each point stands for 13 steps of all seeds.")
    long = verdict_of(2, workloads=1)
    long["evidence"]["workloads"] = {"w0": 10_000}
    assert describe_drawn(long, "loss") == (
        "Each point stands for 18 steps of all seeds, on a thin line of one."
    )


def many(folder: Path, count: int) -> Made:
    """Crafted runs of so many configurations; the last is rejected."""
    listed = {
        f"c{n:02}": {"init_scale": 2.0 ** (4 + n % 16), "growth_interval": 5 + n}
        for n in range(count)
    }
    last = f"c{count - 1:02}"
    plan = make_plan(listed, seeds=[0, 1], workloads={"binary": {"steps": 60}})
    return make(folder, plan, {last: Fate(outcome="diverged", done=30)})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return many(tmp_path_factory.mktemp("many"), 36)


def test_figures_draw_the_chosen_ones_and_their_texts_have_all(made: Made) -> None:
    evidence = made.evidence()
    drawn, styles = evidence.drawn, evidence.styles
    assert len(drawn) == MOST_DRAWN
    assert len({styles[name].colour for name in drawn}) == MOST_DRAWN
    for draw in (draw_loss, draw_scale):
        figure, text = draw(evidence)
        names = {entry.get_text() for entry in figure.legends[0].get_texts()}
        assert names & set(made.plan.configurations) == set(drawn)
        assert all(f"binary, {name}:" in text for name in made.plan.configurations)
    figure, text = draw_skipped(evidence)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == drawn
    assert all(f"binary, {name}:" in text for name in made.plan.configurations)


def test_lines_of_the_scale_stay_below_their_bound(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound, expected in ((2 * MOST_DRAWN, 2 * MOST_DRAWN), (2 * MOST_DRAWN - 1, MOST_DRAWN)):
        monkeypatch.setattr(limits, "MOST_RUN_LINES", bound)
        (axis,) = draw_scale(made.evidence())[0].axes
        assert sum(line.get_marker() != "x" for line in axis.lines) == expected


@pytest.mark.parametrize("bound", [10**6, 1000, 100])
@pytest.mark.parametrize("seed_lines", [True, False])
def test_points_of_the_losses_stay_below_their_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int, seed_lines: bool
) -> None:
    plan = make_plan({"a": {}, "b": {}}, seeds=[0, 1], workloads={"binary": {"steps": 150}})
    runs = 5 * 2
    monkeypatch.setattr(limits, "MOST_SEED_LINES", runs if seed_lines else runs - 1)
    monkeypatch.setattr(limits, "MOST_CURVE_POINTS", bound)
    (axis,) = draw_loss(make(tmp_path, plan).evidence())[0].axes
    lines = [line.get_xdata() for line in axis.lines if len(line.get_xdata())]
    assert len(lines) == 5 + (runs if seed_lines else 0)
    # The last point of a line may stand for fewer steps.
    assert sum(map(len, lines)) < bound + len(lines)
    assert min(map(len, lines)) > 1
    # One point a place, else a line goes up and down in it.
    assert all((np.diff(steps) > 0).all() for steps in lines)


def test_of_policies_beside_torch_s_the_landscape_claims_no_mark(tmp_path: Path) -> None:
    listed = {f"d{n:02}": {"policy": "deepspeed", "init_scale": 2.0 ** (4 + n)} for n in range(14)}
    made = make(tmp_path, make_plan(listed, seeds=[0], workloads={"binary": {"steps": 30}}))
    figure, text = draw_landscape(made.evidence())
    assert {line.get_label() for axis in figure.axes for line in axis.lines} == {
        "PyTorch's defaults"
    }
    assert "d00" not in text
    said = describe_drawn(made.recommendation, "landscape")
    assert said.startswith("Of 14 configurations 10 are looked for there: ")
    assert said.endswith("; the text below has the costs of all that lie in it.")


def test_pictures_grow_with_what_is_drawn_not_with_the_plan(made: Made, tmp_path: Path) -> None:
    fewer = many(tmp_path, 18)
    for name in ("loss", "scale", "skipped", "landscape"):
        small, large = (len(to_svg(FIGURES[name](runs.evidence())[0])) for runs in (fewer, made))
        assert large < 1.3 * small, name


def test_the_page_says_what_it_leaves_out_and_folds_long_tables(made: Made, tmp_path: Path) -> None:
    made.write_tables(made.results)
    write_json(tmp_path / "recommendation.json", made.recommendation)
    page = Page(str(made.results), str(tmp_path / "recommendation.json"))
    plots = made.results / "plots"
    plots.mkdir(exist_ok=True)
    figure, text = draw_loss(made.evidence())
    (plots / "loss.svg").write_text(to_svg(figure))
    (plots / "loss.txt").write_text(text)
    shown = page.figure("loss").data
    caption = re.search(r"<figcaption>(.*?)</figcaption>", shown)
    assert caption and f"Drawn are {MOST_DRAWN} of 36 configurations" in caption[1]
    scores = page.scores().data
    in_sight, folded = scores.split("<details>")
    assert in_sight.count("<tr>") == 1 + MOST_ROWS
    assert folded.count("<tr>") == 1 + len(made.verdict.scores) - MOST_ROWS
    for name in made.verdict.scores:
        assert scores.count(f"<td>{name}</td>") == 1


def test_a_long_table_has_every_row_and_a_short_one_no_fold() -> None:
    frame = pd.DataFrame({"number": range(50)})
    text = long_table(frame, "numbers", most=20).data
    assert "<summary>30 more numbers</summary>" in text
    assert [int(n) for n in re.findall(r"<td class='number'>(\d+)</td>", text)] == list(range(50))
    assert "<details>" not in long_table(frame.head(20), "numbers", most=20).data


def test_an_svg_loses_nothing_that_can_be_seen_and_is_safe_in_an_attribute() -> None:
    figure, axis = plt.subplots()
    axis.plot([0.1234567, 1 / 3, 2.0], [1e-7, 0.5, 1.0])
    axis.set_title("a 'title' with \"quotes\" & <tags> # %41")
    svg = to_svg(figure)
    whole = ElementTree.fromstring(svg)
    for element in whole.iter():
        for number in re.findall(r"\d+\.(\d+)", element.get("d", "")):
            assert len(number) <= 2
    raw = io.StringIO()
    figure.savefig(raw, format="svg", metadata={"Date": None})
    turned = re.compile(r'transform="[^"]+"')
    assert turned.findall(svg) == turned.findall(raw.getvalue()) != []
    assert len(svg) < len(raw.getvalue())
    address = to_data_uri(svg)
    head, _, body = address.partition(",")
    assert head == "data:image/svg+xml"
    assert not set(body) & set("'\"<>&#\n")
    again = ElementTree.fromstring(unquote(body))
    assert [e.attrib.get("id") for e in again.iter()] == [e.attrib.get("id") for e in whole.iter()]
