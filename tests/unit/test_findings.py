from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_findings_is_what_its_script_computes() -> None:
    computed = runpy.run_path(str(DOCS / "findings.py"))["page"]()
    assert (DOCS / "findings.md").read_text(encoding="utf-8") == computed


def test_the_figure_can_be_drawn_again(tmp_path: Path) -> None:
    runpy.run_path(str(DOCS / "findings.py"))["draw"](tmp_path / "findings.svg")
    assert (tmp_path / "findings.svg").stat().st_size > 10_000
