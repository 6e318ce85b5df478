"""The page of a thousand runs: small, whole, and readable in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from selenium import webdriver

from halfscale.drawn import MOST_DRAWN
from halfscale.html import MOST_ROWS
from unit.crafted import Fate, make, make_plan

from .conftest import Browser, Report, build

LARGEST_PAGE = 5e6
WORKLOADS = {"binary": {"steps": 100}, "digits": {"steps": 150}}
COUNT = 80


@pytest.fixture(scope="module")
def large(driver: webdriver.Chrome, tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """The page of 80 configurations and three controls on 2 workloads and 6 seeds: 996 runs."""
    folder = tmp_path_factory.mktemp("large")
    names = {
        f"c{n:02}": {"init_scale": 2.0 ** (n % 20), "growth_interval": 5 + n // 20}
        for n in range(COUNT)
    }
    fates = {name: Fate(pace=10 + n % 17, skipped=range(n % 9)) for n, name in enumerate(names)}
    for name in list(names)[:40]:
        fates[name] = Fate(outcome="diverged", done=50)
    plan = make_plan(names, seeds=range(6), workloads=WORKLOADS)
    report: Report = build(folder, make(folder / "results", plan, fates))
    shown = Browser(driver, report, [], [])
    shown.resize(1200, 900)
    driver.get(report.page.as_uri())
    return shown


def test_the_page_of_a_thousand_runs_stays_small(large: Browser) -> None:
    assert len(large.report.made.runs) == 996
    size = Path(large.report.page).stat().st_size
    assert 5e5 < size < LARGEST_PAGE


def test_every_picture_of_it_is_drawn_and_says_what_it_leaves_out(large: Browser) -> None:
    images = large.run("return [...document.images].map(i => [i.complete, i.naturalWidth])")
    assert all(done and width > 100 for done, width in images)
    captions = large.run(
        "return [...document.querySelectorAll('figcaption')].map(e => e.innerText)"
    )
    said = [caption for caption in captions if f"Drawn are {MOST_DRAWN} of {COUNT}" in caption]
    assert len(said) == 3
    marked = [text for text in captions if f"Of {COUNT} configurations {MOST_DRAWN}" in text]
    assert len(marked) == 1


def test_no_run_or_configuration_is_missing_from_its_tables(large: Browser) -> None:
    made = large.report.made
    body = str(large.run("return document.body.textContent"))
    for name in made.plan.configurations:
        assert name in body
    rows = large.run(
        "return [...document.querySelectorAll('tr')].filter(r =>"
        " r.children[3]?.textContent === 'diverged').length"
    )
    hidden = large.run(
        "return [...document.querySelectorAll('details')].filter(d =>"
        " /more runs that did not end ok/.test(d.querySelector('summary').textContent)).length"
    )
    diverged = int((made.runs["outcome"] == "diverged").sum())
    assert diverged == 480
    assert rows == diverged
    assert hidden == 1


def test_long_lists_are_folded_and_nothing_scrolls_sideways(large: Browser) -> None:
    tables = large.run(
        "return [...document.querySelectorAll('table')].filter(t => !t.closest('details'))"
        ".map(t => t.tBodies[0].rows.length)"
    )
    assert max(tables) <= MOST_ROWS
    folded = large.run("return [...document.querySelectorAll('summary')].map(e => e.textContent)")
    assert [text for text in folded if re.fullmatch(r"\w+: 83 arms", text)] == [
        "binary: 83 arms",
        "digits: 83 arms",
    ]
    large.resize(400, 900)
    assert large.run("return document.documentElement.scrollWidth") <= 400
