"""One run of the plan, by its number."""

from __future__ import annotations

import os
from pathlib import Path

from benchopt import BaseSolver


class Solver(BaseSolver):  # type: ignore[misc]
    """Train one run and write its files."""

    name = "train"
    sampling_strategy = "run_once"
    parameters = {"number": list(range(int(os.environ.get("HALFSCALE_RUNS", "1"))))}  # noqa: RUF012

    def set_objective(self, specifications: list[str]) -> None:
        self.specification = specifications[self.number]

    def run(self, _: object) -> None:
        from halfscale.plan import RunSpec
        from halfscale.train import train

        spec = RunSpec.model_validate_json(self.specification)
        folder = Path(os.environ["HALFSCALE_SPECIFICATIONS"]).parent / spec.folder
        self.outcome = train(spec, folder, lambda line: None).outcome

    def get_result(self) -> dict[str, object]:
        return {"outcome": self.outcome}
