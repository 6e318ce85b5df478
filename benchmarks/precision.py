"""Time a training step in emulated fp16 against fp32 and against torch's own fp16 on a CPU.

Prints one table: for each model and number of threads, the median step in fp32, the emulated step
as a multiple of it, and torch's own fp16 step as a multiple of the emulated one. The arms alternate
in short blocks of steps within one process. A ratio is the median over the rounds of the ratios of
neighbouring blocks, so that other work on the machine meets all arms alike; the ratio of the
fastest blocks, in brackets, is what an idle machine would show. The emulation is switched on
outside the timed steps, as around a run; the last line says what that costs.

Where other processes compete for the cores, threads that spin at a barrier wait for a whole time
slice in any arm: set OMP_WAIT_POLICY=PASSIVE there.

    python benchmarks/precision.py [--threads 1 2] [--seconds 10]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from halfscale.precision import Arithmetic, arithmetic

Step = Callable[[Arithmetic], None]
Job = tuple[nn.Module, Tensor, Tensor, torch.optim.Optimizer]  # model, inputs, labels, optimizer

ARMS = {"fp32": ("fp32", None), "emulated": ("fp16", False), "native": ("fp16", True)}
TARGETS = {  # at most this multiple of fp32, at least this many times faster than native fp16
    "mlp": (2.2, 2.5),
    "cnn": (1.15, 10.0),
    "transformer": (1.25, 10.0),
}


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, time, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        z: Tensor = x + self.mlp(self.norms[1](x))
        return z


def mlp() -> Job:
    """16-64-2, batch 2048, SGD: mostly overhead."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    x = torch.randn(2048, 16)
    return model, x, (x[:, 0] > 0).long(), torch.optim.SGD(model.parameters(), lr=0.1)


def cnn() -> Job:
    """Two convolutions and two linear layers on 64 images of 3×32×32, SGD."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,)), optimizer


def transformer() -> Job:
    """Two blocks of width 128 with 4 heads on 16 sequences of 64 tokens, AdamW."""
    model = nn.Sequential(
        nn.Embedding(64, 128), Block(128, 4), Block(128, 4), nn.LayerNorm(128), nn.Linear(128, 64)
    )
    tokens = torch.randint(64, (16, 65))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, tokens[:, :-1], tokens[:, 1:], optimizer


def training_step(build: Callable[[], Job]) -> Step:
    """One full step, forward to optimizer, of a freshly seeded model."""
    torch.manual_seed(0)
    model, x, y, optimizer = build()

    def step(used: Arithmetic) -> None:
        optimizer.zero_grad()
        with used.autocast():
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def block_seconds(step: Step, arm: str, steps: int) -> float:
    """Seconds a step: the median over a block of steps after one that warms up."""
    precision, native = ARMS[arm]
    times = []
    with arithmetic(precision, "cpu", native=native) as used:
        step(used)
        for _ in range(steps):
            start = time.perf_counter()
            step(used)
            times.append(time.perf_counter() - start)
    return median(times)


def compare(build: Callable[[], Job], seconds: float) -> dict[str, list[float]]:
    """Seconds a step in each arm, a round an entry; native fp16 has every fourth round only."""
    steps = {arm: training_step(build) for arm in ARMS}
    once = {arm: block_seconds(step, arm, 1) for arm, step in steps.items()}
    # Native steps take tens of times longer: one may be a block.
    least = {"fp32": 3, "emulated": 3, "native": 1}
    length = {arm: min(50, max(least[arm], round(0.02 / t))) for arm, t in once.items()}
    rounds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    start = time.perf_counter()
    while len(rounds["fp32"]) < 12 or time.perf_counter() - start < seconds:
        native_too = len(rounds["fp32"]) % 4 == 0
        for arm in ("fp32", "emulated", "native") if native_too else ("fp32", "emulated"):
            rounds[arm].append(block_seconds(steps[arm], arm, length[arm]))
    return rounds


def ratios(above: list[float], below: list[float]) -> str:
    """The median of the rounds' own ratios, and in brackets the ratio of the fastest rounds."""
    own = median(a / b for a, b in zip(above, below, strict=True))
    return f"{own:.2f} ({min(above) / min(below):.2f})"


def opening_milliseconds() -> float:
    """What switching the emulation on and off costs."""
    times = []
    for _ in range(101):
        start = time.perf_counter()
        with arithmetic("fp16", "cpu", native=False):
            pass
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=10, help="for each row")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print("| model | threads | fp32 step | emulated / fp32 | target | native / emulated | target |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for build in (mlp, cnn, transformer):
        most, least = TARGETS[build.__name__]
        for threads in options.threads:
            torch.set_num_threads(threads)
            rounds = compare(build, options.seconds)
            print(
                f"| {build.__name__} | {threads} | {1e3 * median(rounds['fp32']):.2f} ms "
                f"| {ratios(rounds['emulated'], rounds['fp32'])} | ≤ {most} "
                f"| {ratios(rounds['native'], rounds['emulated'][::4])} | ≥ {least} |",
                flush=True,
            )
    print(f"opening the context, once a run: {opening_milliseconds():.2f} ms")


if __name__ == "__main__":
    main()
