"""Pages built from crafted runs, and a real browser to look at them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

import halfscale
from halfscale.plots import draw_all
from halfscale.records import write_json
from halfscale.report import execute_notebook, render_page
from halfscale.sources import NOTEBOOK

sys.path.insert(0, str(Path(__file__).parents[1]))
from unit.crafted import (
    HOSTILE,
    Made,
    make_contested,
    make_hopeless,
    make_tied,
)

MAKERS: dict[str, Callable[[Path], Made]] = {
    "winner": make_contested,
    "tie": make_tied,
    "no winner": make_hopeless,
}
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@dataclass(frozen=True)
class Report:
    """A page and what it was made of."""

    page: Path
    made: Made


def build(folder: Path, made: Made) -> Report:
    """Write what the workflow's rules would have written, and the page from it."""
    results = made.results
    made.write_tables(results, [f"runs/binary/{HOSTILE}/seed0"])
    write_json(folder / "recommendation.json", made.recommendation)
    draw_all(made.evidence(), results / "plots")
    parameters = {
        "results": str(results),
        "recommendation": str(folder / "recommendation.json"),
    }
    executed, page = folder / "summary.ipynb", folder / "summary.html"
    execute_notebook(NOTEBOOK, executed, folder / "attempt.ipynb", parameters)
    render_page(executed, page)
    return Report(page, made)


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Report]:
    """Build each kind of page once."""
    built: dict[str, Report] = {}

    def get(kind: str) -> Report:
        if kind not in built:
            folder = tmp_path_factory.mktemp(f"report {kind}")
            with pytest.MonkeyPatch.context() as patch:
                package = str(Path(halfscale.__file__).parents[1])
                path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
                patch.setenv("PYTHONPATH", path)
                built[kind] = build(folder, MAKERS[kind](folder / "results"))
        return built[kind]

    return get


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Headless Chromium that logs every request and every message on its console."""
    browser, service = shutil.which("chromium"), shutil.which("chromedriver")
    if not (browser and service):
        reason = "chromium and chromedriver are needed to look at the page, and are not in PATH"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(service))
    yield chrome
    chrome.quit()


@dataclass
class Browser:
    """A page as the browser shows it."""

    driver: webdriver.Chrome
    report: Report
    requests: list[str]
    console: list[str]

    def run(self, script: str) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script)  # type: ignore[no-untyped-call]

    def resize(self, width: int, height: int) -> None:
        """Give the page a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.fixture(scope="module", params=MAKERS)
def browser(
    request: pytest.FixtureRequest,
    driver: webdriver.Chrome,
    reports: Callable[[str], Report],
) -> Browser:
    """Each kind of page, loaded in a window of 1200 × 900."""
    report = reports(request.param)
    shown = Browser(driver, report, [], [])
    shown.resize(1200, 900)
    for log in ("performance", "browser"):
        driver.get_log(log)  # type: ignore[no-untyped-call]
    driver.get(report.page.as_uri())
    events = [json.loads(e["message"])["message"] for e in driver.get_log("performance")]  # type: ignore[no-untyped-call]
    shown.requests += [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    shown.console += [entry["message"] for entry in driver.get_log("browser")]  # type: ignore[no-untyped-call]
    return shown
