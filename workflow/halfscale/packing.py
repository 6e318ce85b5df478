"""A plan as an argument of a command line, however long the plan is.

Linux takes no argument of 128 KiB or more, and a job's whole command is one argument of its shell.
"""

from __future__ import annotations

import base64
import zlib

LONGEST_PLAIN = 64 * 1024
_MARK = "zlib:"


def pack(text: str) -> str:
    """The text itself, or if it is long the same compressed, in letters that no shell minds."""
    if len(text) <= LONGEST_PLAIN:
        return text
    return _MARK + base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(text: str) -> str:
    """What was packed.

    Raises:
        ValueError: If it is neither plain nor whole.
    """
    if not text.startswith(_MARK):
        return text
    try:
        return zlib.decompress(base64.urlsafe_b64decode(text.removeprefix(_MARK))).decode()
    except zlib.error as error:
        raise ValueError(f"a packed text that is not whole: {error}") from None
