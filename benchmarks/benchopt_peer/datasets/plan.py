"""The specifications to run, one a line of the file that ``HALFSCALE_SPECIFICATIONS`` names."""

from __future__ import annotations

import os
from pathlib import Path

from benchopt import BaseDataset


class Dataset(BaseDataset):  # type: ignore[misc]
    """The plan."""

    name = "plan"

    def get_data(self) -> dict[str, object]:
        lines = Path(os.environ["HALFSCALE_SPECIFICATIONS"]).read_text(encoding="utf-8")
        return {"specifications": lines.splitlines()}
