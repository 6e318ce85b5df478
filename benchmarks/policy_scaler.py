"""Time unscale + step + update: LossScaler against torch.amp.GradScaler, in one run.

    python benchmarks/policy_scaler.py [--steps 300]

For 100 small and 12 large parameters, under SGD and AdamW (foreach): the medians of both, and the
median of the ratios of pairs taken in turn, with the quartiles (ours / torch; below 1 ours is
faster). Both run the same optimizer on equal parameters and gradients, and none of the steps is
skipped. The lines "scaler alone" put an optimizer in its place that does nothing, so that the
scalers' own work is not lost in the optimizer's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.optim import SGD, AdamW, Optimizer

from halfscale.policies import make_policy
from halfscale.scaling import LossScaler

Step = Callable[[], None]
CASES = ((100, 64), (100, 1000), (12, 1_000_000))


class Idle(SGD):
    """An optimizer whose step costs nothing."""

    def step(self, closure: None = None) -> None:
        """Leave the parameters alone."""


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], Optimizer]] = {
    "scaler alone": Idle,
    "SGD": lambda parameters: SGD(parameters, lr=1e-6, foreach=True),
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-6, foreach=True),
}


def build_step(scaler: LossScaler | torch.amp.GradScaler, name: str, count: int, size: int) -> Step:
    """The end of a training step, on its own parameters with gradients in place."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(size, generator=generator).requires_grad_() for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(size, generator=generator)
    optimizer = OPTIMIZERS[name](parameters)
    scaler.scale(torch.ones(()))

    def step() -> None:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return step


def seconds(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure(name: str, count: int, size: int, steps: int) -> str:
    """Both medians and the ratio, in one line."""
    # A scale of 1 keeps the same gradients in place from step to step.
    settings = {"init_scale": 1.0, "growth_interval": 10**9}
    ours = build_step(LossScaler(make_policy("torch", **settings)), name, count, size)
    theirs = build_step(torch.amp.GradScaler("cpu", **settings), name, count, size)
    pairs = []
    for _ in range(steps + steps // 5):
        # Each goes first once and second once, since who comes second finds another cache.
        a, b, c, d = seconds(ours), seconds(theirs), seconds(theirs), seconds(ours)
        pairs.append(((a + d) / 2, (b + c) / 2))
    pairs = pairs[steps // 5 :]
    mine, torchs = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    low, ratio, high = statistics.quantiles((a / b for a, b in pairs), n=4)
    return (
        f"{name:12} {count:4d} x {size:>9,}: ours {mine:8.0f} µs, torch {torchs:8.0f} µs, "
        f"ratio {ratio:.3f} ({low:.3f} to {high:.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="pairs of steps for each line")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {steps} pairs")
    for name in OPTIMIZERS:
        for count, size in CASES:
            print(measure(name, count, size, steps if size < 10**6 else max(2, steps // 5)))


if __name__ == "__main__":
    main()
