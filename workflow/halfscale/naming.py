"""Which names a configuration may have: they become folders, cells of tables and plot labels."""

from __future__ import annotations

import re
from collections.abc import Iterable

from halfscale.plan import CONTROLS, FOUND

LONGEST = 64

_NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9_])?")
_MISREAD = {"yes", "no", "on", "off", "true", "false", "null", "none", "nan", "na", "y", "n"}
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul"} | {
    f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10)
}


def find_fault(name: str, others: Iterable[str]) -> str | None:
    """What is wrong with a name, or None; ``others`` are the names before it."""
    folded = name.casefold()
    if folded in CONTROLS:
        return "is the name of a control, which is always run"
    if folded.startswith(FOUND):
        return "is kept for configurations that the search finds"
    if folded in _MISREAD or folded.split(".")[0] in _WINDOWS_DEVICES:
        return "is a reserved word of YAML, pandas or Windows"
    if not _NAME.fullmatch(name):
        return (
            "is not usable as a folder name: use letters, digits, '-', '_' and '.', a letter "
            f"first, {LONGEST} characters at most"
        )
    for other in others:
        if other.casefold() == folded:
            return f"differs from {other!r} only in case"
    return None


def suggest_name(name: str, taken: Iterable[str]) -> str:
    """A usable name like the given one, that nothing else has."""
    taken = list(taken)
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", name, flags=re.ASCII).strip("-_")[: LONGEST - 8]
    stem = stem.rstrip("-") or "configuration"
    for prefix in ("", "my-"):
        if not find_fault(prefix + stem, ()):
            stem = prefix + stem
            break
    number, candidate = 1, stem
    while find_fault(candidate, taken):
        number += 1
        candidate = f"{stem}-{number}"
    return candidate
