"""The seal of the predictions: their files are read only as they were written, for these probes.

``seal.json`` carries the SHA-256 of each file of the folder, the digests of the probes that were
replayed and a checksum of its own, so a truncated, foreign or hand-edited file is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from halfscale.plan import Plan
from halfscale.records import checksum_of, refuse, write_json
from halfscale.sources import file_digest

REPLAY = Path("replay")
"""Where the predictions are, relative to the results folder."""

_NAME = "seal.json"
_FILES = ("predictions.csv", "traces.parquet", "landscape.csv")


class _Seal(BaseModel):
    """The content of ``seal.json``, beside its own checksum.

    Attributes:
        files: The SHA-256 of each file, by name.
        probes: The digest of each probe's specification, by its folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: dict[str, str]
    probes: dict[str, str]


def seal_replay(plan: Plan, results: Path) -> None:
    """Write the seal of the predictions below ``results``; call it when their files are in place.

    Raises:
        OSError: If a file cannot be read or written.
    """
    folder = results / REPLAY
    seal = _Seal(files={name: file_digest(folder / name) for name in _FILES}, probes=_digests(plan))
    content = seal.model_dump()
    write_json(folder / _NAME, {**content, "checksum": checksum_of(content)})


def check_replay(plan: Plan, results: Path, *names: str) -> list[Path]:
    """The paths of some files of the predictions, found as they were written and for this plan.

    Raises:
        RecordError: Naming the file, what is wrong with it and the command that mends it.
    """
    folder = results / REPLAY
    seal = _read_seal(folder)
    if seal.probes != _digests(plan):
        refuse(folder / _NAME, folder, "belongs to the predictions of other probes")
    for name in names:
        try:
            if file_digest(folder / name) != seal.files.get(name):
                refuse(folder / name, folder, f"is not the one that {_NAME} was written with")
        except FileNotFoundError:
            refuse(folder / name, folder, "is missing")
    return [folder / name for name in names]


def _digests(plan: Plan) -> dict[str, str]:
    return {probe.folder.as_posix(): probe.digest for probe in plan.probes()}


def _read_seal(folder: Path) -> _Seal:
    path = folder / _NAME
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("checksum")
        seal = _Seal.model_validate(content)
    except FileNotFoundError:
        refuse(path, folder, "is missing")
    except (ValueError, KeyError, AttributeError, TypeError, ValidationError):
        refuse(path, folder, "is truncated or no seal of predictions")
    if checksum_of(seal.model_dump()) != checksum:
        refuse(path, folder, "was edited after it was written")
    return seal
