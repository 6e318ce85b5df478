"""The page in a real browser: what a reader sees first, and what it must never do."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from halfscale import guard
from unit.crafted import HOSTILE

from .conftest import Browser

FIGURES = len(guard.FIGURES)


def box(browser: Browser, selector: str) -> dict[str, float]:
    found = browser.run(f"return document.querySelector({selector!r}).getBoundingClientRect()")
    return dict(found)


def text(browser: Browser, selector: str = "body") -> str:
    return str(browser.run(f"return document.querySelector({selector!r}).innerText"))


def test_the_first_screen_holds_the_answer_the_line_to_paste_and_the_runs(
    browser: Browser,
) -> None:
    browser.resize(1200, 900)
    made = browser.report.made
    assert text(browser, ".answer") == made.verdict.sentence
    shown = [".answer", ".evidence"]
    if made.verdict.recommended:
        shown.append("pre.paste")
        assert text(browser, "pre.paste").strip() == made.recommendation["constructor"]
    else:
        assert browser.run("return document.querySelector('pre.paste')") is None
    assert f"{len(made.runs)} runs" in text(browser, ".evidence")
    browser.run("window.scrollTo(0, 0)")
    for selector in shown:
        place = box(browser, selector)
        assert place["top"] >= 0
        assert place["bottom"] <= 900
        assert 0 <= place["left"] < place["right"] <= 1200
    assert box(browser, ".answer")["top"] < box(browser, ".evidence")["top"]


def test_nothing_is_asked_of_any_other_host(browser: Browser) -> None:
    page = browser.report.page.as_uri()
    assert browser.requests[0] == page
    others = [url for url in browser.requests if url != page and not url.startswith("data:")]
    assert others == []
    addresses = browser.run(
        "return [...document.querySelectorAll('[src], [href]')]"
        ".map(e => e.getAttribute('src') || e.getAttribute('href'))"
    )
    assert all(address.startswith(("data:", "#")) for address in addresses)
    entries = browser.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(entry.startswith("data:") for entry in entries)


def test_every_figure_is_drawn_and_has_a_text_with_its_numbers(browser: Browser) -> None:
    images = browser.run(
        "return [...document.images].map(i => ({alt: i.alt, width: i.naturalWidth,"
        " done: i.complete, shown: i.getBoundingClientRect().height}))"
    )
    assert len(images) == FIGURES
    for image in images:
        assert image["done"]
        assert image["width"] > 100
        assert image["shown"] > 50
        enough = 3 if "none" not in image["alt"] else 1
        assert len(re.findall(r"\d+", image["alt"])) >= enough
    # The same texts are there for a reader who sees the pictures.
    details = browser.run(
        "return [...document.querySelectorAll('figure details p')].map(p => p.textContent)"
    )
    assert details == [image["alt"] for image in images]


@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_does_not_scroll_sideways(browser: Browser, width: int) -> None:
    browser.resize(width, 900)
    inner, scroll, body = browser.run(
        "return [window.innerWidth, document.documentElement.scrollWidth,"
        " document.body.scrollWidth]"
    )
    assert inner == width
    assert scroll <= width
    assert body <= width
    # Words that run out of the page without a scroll bar would be lost.
    lost = browser.run(
        "return [...document.querySelectorAll('h1, h2, p, li, summary, figcaption, dt, dd')]"
        f".filter(e => e.getBoundingClientRect().right > {width} + 1 && !e.closest('.wide, pre'))"
        ".map(e => e.textContent.slice(0, 80))"
    )
    assert lost == []


def test_hostile_texts_are_shown_and_run_nothing(browser: Browser) -> None:
    assert browser.run("return window.hacked === undefined")
    assert browser.run("return document.scripts.length") == 0
    body = str(browser.run("return document.body.textContent"))
    failed = (browser.report.made.runs["outcome"] == "failed").sum()
    # Orphans name it once; each failed run and the reason of a rejection do as well.
    assert body.count(HOSTILE) >= 1 + failed + bool(failed)


def test_the_console_is_silent(browser: Browser) -> None:
    assert browser.console == []


def test_headings_are_in_order(browser: Browser) -> None:
    levels = browser.run(
        "return [...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].map(e => +e.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(levels) >= 5


def test_code_is_hidden(browser: Browser) -> None:
    body = str(browser.run("return document.documentElement.textContent"))
    for code in ("page.answer()", "from halfscale", "In [", "Out[", "<IPython"):
        assert code not in body
    assert browser.run("return document.querySelectorAll('.input, .jp-InputArea').length") == 0


def test_the_page_says_who_it_is(browser: Browser) -> None:
    assert "halfscale" in browser.driver.title
    assert browser.run("return document.documentElement.lang") == "en"
    assert browser.run("return document.characterSet") == "UTF-8"


def test_what_stands_behind_the_answer_is_on_the_page(browser: Browser) -> None:
    made = browser.report.made
    body = str(browser.run("return document.body.textContent"))
    for name, reason in made.verdict.rejected.items():
        assert name in body
        assert reason in body
    for name, score in made.verdict.scores.items():
        assert f"{score.ratio.estimate:.3f}" in body, name
    for arm in made.plan.arms:
        assert arm in body
    assert "nan" not in re.split(r"\W+", body.lower())


def test_words_can_be_read_on_their_background(browser: Browser) -> None:
    """Contrast of text against white, by the formula of WCAG 2: at least 4.5."""
    colours = browser.run(
        "return [...new Set([...document.querySelectorAll('main *')]"
        ".filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))"
        ".map(e => getComputedStyle(e).color))]"
    )
    for colour in colours:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        assert 1.05 / (luminance + 0.05) >= 4.5, colour
