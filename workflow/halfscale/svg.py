"""SVG files as small as they get without a difference to be seen, and their way into the page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Attributes in points; matplotlib writes them to a millionth, half of a large figure's bytes.
_PLACES = re.compile(r'(?<= [dxy]=")[^"]+')
_LONG = re.compile(r"\d+\.\d{3,}")
_UNQUOTED = " /:;=,.()-"


def to_svg(figure: Figure) -> str:
    """A figure as SVG, to a hundredth of a point; the same figure gives the same text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _PLACES.sub(lambda places: _LONG.sub(_shorten, places[0]), buffer.getvalue())


def _shorten(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def to_data_uri(svg: str) -> str:
    """An SVG as the address of an image, safe in an attribute; shorter than in base64."""
    return f"data:image/svg+xml,{quote(' '.join(svg.splitlines()), safe=_UNQUOTED)}"
