"""The runs of a plan as a benchopt benchmark: the peer that `benchmarks/short_runs.py` times."""

from __future__ import annotations

from benchopt import BaseObjective


class Objective(BaseObjective):  # type: ignore[misc]
    """How a run ended."""

    name = "halfscale runs"
    sampling_strategy = "run_once"

    def set_data(self, specifications: list[str]) -> None:
        self.specifications = specifications

    def get_objective(self) -> dict[str, object]:
        return {"specifications": self.specifications}

    def evaluate_result(self, outcome: str) -> dict[str, object]:
        return {"value": float(outcome != "ok")}

    def get_one_result(self) -> dict[str, object]:
        return {"outcome": "ok"}
