"""Data frames as HTML tables, everything in them escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import Any

import pandas as pd
from IPython.display import HTML

MOST_ROWS = 30


def table(frame: pd.DataFrame) -> HTML:
    """A data frame as an HTML table, every text escaped, numbers short, columns in words."""
    head = "".join(f"<th>{escape(str(name)).replace('_', ' ')}</th>" for name in frame.columns)
    body = "".join(f"<tr>{_row(values)}</tr>" for values in frame.itertuples(index=False))
    rows = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return HTML(f"<div class='wide'><table>{rows}</table></div>")


def long_table(frame: pd.DataFrame, what: str, most: int = MOST_ROWS) -> HTML:
    """A table whose first rows are in sight and whose others are folded.

    Args:
        frame: The rows, the most important first.
        what: What a row is, in the plural.
        most: How many rows are in sight.
    """
    shown = table(frame.head(most)).data
    rest = frame.iloc[most:]
    if rest.empty:
        return HTML(shown)
    return HTML(f"{shown}{fold(f'{len(rest)} more {what}', table(rest).data)}")


def fold(summary: str, content: str) -> str:
    """HTML that is seen once its summary, a text, is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _row(values: Iterable[Any]) -> str:
    cells = []
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        text = _cell(value)
        kind = " class='number'" if number else " class='long'" if len(text) > 40 else ""
        cells.append(f"<td{kind}>{escape(text)}</td>")
    return "".join(cells)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return "not reached" if math.isinf(value) else f"{value:.5g}"
    return str(value)
