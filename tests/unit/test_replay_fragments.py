"""What the page says of the predictions: the share that came true, the misses, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from IPython.display import HTML

from halfscale import replay_fragments
from halfscale.fragments import Page

from .crafted import HOSTILE, Made
from .test_fragments import Reader, page_of

PIECES: list[Callable[[Page], HTML]] = [
    replay_fragments.calibration_sentence,
    replay_fragments.calibration_table,
    replay_fragments.calibration_misses,
]


@pytest.fixture
def page(contested: Made, tmp_path: Path) -> Page:
    return page_of(contested, tmp_path)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("made", ["contested", "tied", "hopeless"])
def test_no_name_or_note_becomes_markup(
    piece: Callable[[Page], HTML], made: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    page = page_of(request.getfixturevalue(made), tmp_path)
    hostile = page.calibration.assign(workload=HOSTILE, note=HOSTILE, configuration=HOSTILE)
    page.calibration = hostile
    reader = Reader(piece(page))
    assert not {"script", "img"} & set(reader.tags)
    assert not reader.attributes or {key for _, key, _ in reader.attributes} == {"class"}
    assert reader.text


def test_the_sentence_states_the_share_and_the_worst(page: Page) -> None:
    table = page.calibration
    compared = table[table["compared_steps"] > 0]
    within = int((compared["difference"].abs() <= 1).sum())
    worst = compared.loc[compared["difference"].abs().idxmax()]
    text = Reader(replay_fragments.calibration_sentence(page)).text
    assert f"of {within} of {len(compared)} runs ({within / len(compared):.1%}) to within 1" in text
    assert f"{worst['workload']}, {worst['configuration']}, seed {worst['seed']}: predicted" in text
    assert "could not be compared" not in text


def test_predictions_that_all_came_true_have_no_worst(page: Page) -> None:
    page.calibration = page.calibration.assign(difference=0)
    text = Reader(replay_fragments.calibration_sentence(page)).text
    assert "(100.0%)" in text
    assert "worst" not in text
    misses = Reader(replay_fragments.calibration_misses(page)).text
    assert misses == "No prediction was farther off."


def test_runs_that_could_not_be_compared_are_counted_and_say_why(
    hopeless: Made, tmp_path: Path
) -> None:
    page = page_of(hopeless, tmp_path)
    assert "10 could not be compared" in Reader(replay_fragments.calibration_sentence(page)).text
    reader = Reader(replay_fragments.calibration_misses(page))
    assert reader.text.count("not compared: the run ended before its first step") == 10
    table = Reader(replay_fragments.calibration_table(page)).text
    assert "5 of 10" in table
    assert "nan" not in (table + reader.text).lower()


def test_nothing_to_compare_is_said(page: Page) -> None:
    page.calibration = page.calibration.assign(compared_steps=0)
    text = Reader(replay_fragments.calibration_sentence(page)).text
    assert text == "No run could be compared with its prediction."
    assert "0 of 50" in Reader(replay_fragments.calibration_table(page)).text


def test_the_misses_come_worst_first_and_not_all_of_very_many(page: Page) -> None:
    page.calibration = page.calibration.assign(
        difference=range(-2, -2 - len(page.calibration), -1), note="why"
    )
    reader = Reader(replay_fragments.calibration_misses(page))
    assert reader.tags.count("tr") == 1 + 30
    more = len(page.calibration) - 30
    assert f"{more} more are in results/tables/calibration.csv" in reader.text
    last = page.calibration.iloc[-1]
    first = reader.text.index(f"{last['workload']}{last['configuration']}{last['seed']}")
    assert first < reader.text.index("why")
