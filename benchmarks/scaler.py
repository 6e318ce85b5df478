"""Time unscale + check + step: ManualGradScaler against torch.amp.GradScaler, in one run.

    python benchmarks/scaler.py

Prints, for 100 small and 12 large parameters, both medians and the median of the ratios of pairs
taken in turn (manual / torch; below 1 the manual scaler is faster).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from halfscale.scaling import ManualGradScaler


def build_cases(count: int, size: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """The two ways to end a step, each on its own model with gradients in place."""

    def model() -> torch.nn.ParameterList:
        parameters = torch.nn.ParameterList(torch.randn(size) for _ in range(count))
        for parameter in parameters:
            parameter.grad = torch.randn(size)
        return parameters

    manual_model, torch_model = model(), model()
    manual_optimizer = torch.optim.SGD(manual_model.parameters(), lr=0.0)
    torch_optimizer = torch.optim.SGD(torch_model.parameters(), lr=0.0)
    manual_scaler = ManualGradScaler(1.0)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
    torch_scaler.scale(torch.ones(()))

    def manual() -> None:
        manual_scaler.unscale_grads(manual_model)
        manual_scaler.step(manual_optimizer)

    def reference() -> None:
        torch_scaler.unscale_(torch_optimizer)
        torch_scaler.step(torch_optimizer)
        torch_scaler.update()

    return manual, reference


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread")
    for count, size in ((100, 64), (100, 1000), (12, 1_000_000)):
        manual, reference = build_cases(count, size)
        pairs = [(seconds(manual), seconds(reference)) for _ in range(300)][50:]
        ours, theirs = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(
            f"{count:4d} parameters of {size:>9,}: manual {ours:7.0f} µs, torch {theirs:7.0f} µs, "
            f"ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
