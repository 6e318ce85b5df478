"""The pieces of the page: they state the numbers, and nothing from a run becomes markup."""

from __future__ import annotations

import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.display import HTML

from halfscale.fragments import Page
from halfscale.html import table
from halfscale.records import write_json, write_text
from halfscale.tables import CONFIGURATION_COLUMNS, RUN_COLUMNS
from halfscale.verdict import RULE

from .crafted import HOSTILE, Made, checks_table

PIXEL = "<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>"
FIGURES = (
    *("ranking", "window", "landscape", "calibration", "loss", "scale", "skipped", "exponents"),
    "sweep",
)


class Reader(HTMLParser):
    """Collects tags, attributes and the text that a browser would show."""

    def __init__(self, html: HTML) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.pieces: list[str] = []
        self.feed(str(html.data))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def page_of(made: Made, folder: Path, orphans: list[str] | None = None) -> Page:
    made.write_tables(folder, orphans or [])
    for name in FIGURES:
        write_text(folder / "plots" / f"{name}.svg", PIXEL)
        write_text(folder / "plots" / f"{name}.txt", f"{name}: 12.5 'quoted' \"{HOSTILE}\"\n")
    write_json(folder / "recommendation.json", made.recommendation)
    return Page(str(folder), str(folder / "recommendation.json"))


@pytest.fixture(scope="module")
def page(contested: Made, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(contested, tmp_path_factory.mktemp("page"), [f"runs/binary/{HOSTILE}/seed0"])


PIECES: dict[str, Callable[[Page], HTML]] = {
    "answer": Page.answer,
    "verdict_details": Page.verdict_details,
    "scores": Page.scores,
    "configuration_table": Page.configuration_table,
    "window_table": Page.window_table,
    "search": Page.search,
    "failed_runs": Page.failed_runs,
    "verification": Page.verification,
    "appendix": Page.appendix,
    **{name: lambda page, name=name: page.figure(name) for name in FIGURES},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("made", ["contested", "tied", "hopeless"])
def test_no_text_from_a_run_becomes_markup(
    made: str, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    page = page_of(request.getfixturevalue(made), tmp_path, [HOSTILE])
    reader = Reader(PIECES[name](page))
    assert "script" not in reader.tags
    assert all(not attribute.startswith("on") for _, attribute, _ in reader.attributes)
    assert all(source.startswith("data:") for _, key, source in reader.attributes if key == "src")
    assert reader.tags.count("img") == (name in FIGURES)


def test_the_answer_comes_with_the_line_to_paste_and_the_runs_behind_it(
    page: Page, contested: Made
) -> None:
    text = Reader(page.answer()).text
    assert contested.verdict.sentence in text
    assert contested.recommendation["constructor"] in text
    assert "80 runs" in text
    assert "2 workloads × 8 arms × 5 seeds on cpu" in text
    assert "70 ok" in text
    assert "10 failed" in text
    assert "2 of 2 checks" in text
    assert contested.recommendation["evidence"]["digest"][:12] in text


def test_no_winner_shows_no_line_to_paste(hopeless: Made, tmp_path: Path) -> None:
    reader = Reader(page_of(hopeless, tmp_path).answer())
    assert "pre" not in reader.tags
    assert hopeless.verdict.sentence in reader.text


def test_a_short_growth_interval_comes_with_a_warning(page: Page) -> None:
    assert "growth_interval = 20" in Reader(page.answer()).text


def test_the_verdict_says_who_was_rejected_why_and_what_was_identical(
    page: Page, contested: Made
) -> None:
    text = Reader(page.verdict_details()).text
    for name in contested.verdict.winning_set:
        assert name in text
    assert contested.verdict.deciding_step in text
    assert contested.verdict.rejected["broken"] in text
    assert HOSTILE in text
    assert "fast, twin" in text
    assert "backoff_factor" in text
    for part in RULE:
        assert part in text


def test_the_scores_state_every_ratio(page: Page, contested: Made) -> None:
    text = Reader(page.scores()).text
    for name, score in contested.verdict.scores.items():
        ratio = score.ratio
        assert name in text
        assert f"{ratio.estimate:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" in text
    assert "10 of 10" in text


def test_the_table_has_a_row_per_workload_and_arm(page: Page) -> None:
    reader = Reader(page.configuration_table())
    assert reader.tags.count("tr") == 1 + 2 * 8
    assert "5 of 5" in reader.text
    assert "2^19" in reader.text
    assert "nan" not in reader.text.lower()


def test_a_target_never_reached_is_said_in_words(contested: Made, tmp_path: Path) -> None:
    configurations = contested.configurations.copy()
    never = configurations["configuration"] == "slow"
    configurations.loc[never, "reached"] = 0
    configurations.loc[never, "steps_to_target"] = math.inf
    made = Made(**{**vars(contested), "configurations": configurations})
    text = Reader(page_of(made, tmp_path).configuration_table()).text
    assert "0 of 5" in text
    assert "not reached" in text
    assert "inf" not in text.lower()


def test_failed_runs_are_listed_with_their_errors(page: Page, tied: Made, tmp_path: Path) -> None:
    text = Reader(page.failed_runs()).text
    assert text.count(f"ValueError: {HOSTILE}") == 10
    assert Reader(page_of(tied, tmp_path).failed_runs()).text == "All 60 runs ended ok."


def test_every_check_is_shown_with_its_result(page: Page) -> None:
    reader = Reader(page.verification())
    assert reader.text.count("pass") == 2
    for cell in checks_table()[["name", "measured", "expected"]].to_numpy().flatten():
        assert cell in reader.text


def test_a_failed_check_is_shown_as_such(contested: Made, tmp_path: Path) -> None:
    page = page_of(contested, tmp_path)
    page.checks = page.checks.assign(passed=[True, False])
    assert "FAIL" in Reader(page.verification()).text
    assert "1 of 2 checks" in Reader(page.answer()).text


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_states_its_numbers_in_words(page: Page, name: str) -> None:
    reader = Reader(page.figure(name))
    expected = f"{name}: 12.5 'quoted' \"{HOSTILE}\""
    assert [value for tag, key, value in reader.attributes if (tag, key) == ("img", "alt")] == [
        expected
    ]
    assert expected in reader.text
    assert {"figure", "figcaption", "details"} <= set(reader.tags)


def test_the_appendix_explains_the_columns_and_lists_orphans(page: Page) -> None:
    text = Reader(page.appendix()).text
    for columns in (CONFIGURATION_COLUMNS, RUN_COLUMNS):
        for name, meaning in columns.items():
            assert name in text
            assert meaning in text
    assert HOSTILE in text
    assert "torch" in text
    assert "fp16 (crafted)" in text


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)


@given(names=st.lists(texts, min_size=1, max_size=4, unique=True), cells=st.lists(texts))
def test_any_text_in_a_table_is_shown_as_it_is(names: list[str], cells: list[str]) -> None:
    frame = pd.DataFrame({name: cells for name in names})
    reader = Reader(table(frame))
    assert set(reader.tags) <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert reader.text == "".join([*(name.replace("_", " ") for name in names)]) + "".join(
        cell * len(names) for cell in cells
    )


def test_numbers_in_a_table_are_short_and_absent_ones_are_empty() -> None:
    frame = pd.DataFrame(
        {"a": [1 / 3, math.nan, math.inf], "b": [7, 8, 9], "c": [True, False, True]}
    )
    reader = Reader(table(frame))
    assert "0.33333" in reader.text
    assert "nan" not in reader.text
    assert "True" in reader.text


def test_several_policies_are_grouped_and_one_is_not(contested: Made, tmp_path: Path) -> None:
    page = page_of(contested, tmp_path)
    assert page.by_policy().data == ""
    names = list(page.verdict["policies"])
    page.verdict["policies"] = dict.fromkeys(names, "torch") | {names[0]: "megatron"}
    text = Reader(page.by_policy()).text
    assert "megatron" in text and "torch" in text
    inside = sum(name != names[0] for name in page.verdict["winning_set"])
    assert f"{inside} of {len(names) - 1}" in text


def test_the_settings_of_every_tool_are_shown_with_what_it_cannot_express(
    contested: Made, hopeless: Made, tmp_path: Path
) -> None:
    text = Reader(page_of(contested, tmp_path / "winner").settings()).text
    for tool in ("PyTorch", "Lightning", "Accelerate", "DeepSpeed", "Megatron-LM", "fairseq"):
        assert f"{tool} (" in text
    assert "GradScaler(" in text and "initial_scale_power" in text
    assert "no recommended set" in Reader(page_of(hopeless, tmp_path / "none").settings()).text


def test_a_reference_run_that_ended_early_is_said(contested: Made, tmp_path: Path) -> None:
    page = page_of(contested, tmp_path)
    assert "ended early" not in Reader(page.window_table()).text
    page.probes = page.probes.head(1).assign(outcome="failed", error=HOSTILE)
    read = Reader(page.window_table())
    assert "Reference runs that ended early" in read.text
    assert HOSTILE in read.text
    assert "script" not in read.tags


def test_where_no_gradient_is_finite_no_scale_is_usable(contested: Made, tmp_path: Path) -> None:
    page = page_of(contested, tmp_path)
    page.windows = page.windows.assign(smallest_useful=-math.inf, largest_safe=-math.inf)
    text = Reader(page.window_table()).text
    assert "every scale" not in text
    assert "binarynonenonenone" in text


def test_the_last_tenth_is_that_of_each_seed(contested: Made, tmp_path: Path) -> None:
    page = page_of(contested, tmp_path)
    steps = [(0, step) for step in range(40)] + [(1, step) for step in range(6)]
    windows = pd.DataFrame(steps, columns=["seed", "step"]).assign(workload="binary")
    # The last step of the seed that ended early is the only one above 2^0.
    ended = (windows["seed"] == 1) & (windows["step"] == 5)
    page.windows = windows.assign(smallest_useful=np.where(ended, 3.0, 0.0), largest_safe=9.0)
    text = Reader(page.window_table()).text
    assert "binary2^0 to 2^92^3 to 2^92^3 to 2^9" in text
