"""Time what recording a run costs: the training step of halfscale against one that records nothing.

Prints one table: for each model, the median step that records nothing, the recording step as a
multiple of it, and the most it may be. Both train in fp16 under LossScaler (policy torch, a scale
that does not overflow), each its own copy of the model. The plain step is what the README shows:
zero_grad, forward, backward, unscale, clip and schedule where the workload does, step, update; it
asks the device for nothing but the scaler's own figure. The recording step is `halfscale.train`'s.

The arms alternate in short blocks of steps within one process. The ratio is the median over the
rounds of the ratios of neighbouring blocks, so that other work on the machine meets both alike;
the ratio of the fastest blocks, in brackets, is what an idle machine would show.

    python benchmarks/telemetry.py [--threads 1] [--seconds 10]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count, repeat
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))

import precision
from halfscale.planner import build_plan
from halfscale.policies import make_policy
from halfscale.precision import Arithmetic, arithmetic
from halfscale.scaling import LossScaler
from halfscale.steps import Training, train_step
from halfscale.workloads import Workload, build_workload

Step = Callable[[], object]


def of_job(build: Callable[[], precision.Job]) -> Workload:
    """A model of benchmarks/precision.py as a workload."""
    torch.manual_seed(0)
    model, x, y, optimizer = build()

    def loss(model: torch.nn.Module, batch: precision.Job) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    return Workload(model, optimizer, repeat((x, y)), loss)


def shipped(name: str) -> Workload:
    """A workload of the package, as ``config.yaml`` runs it."""
    return build_workload(name, 0, "cpu", {})


MODELS: dict[str, tuple[Callable[[], Workload], float]] = {  # and the most that recording may cost
    "MLP 16-64-2 (binary)": (partial(shipped, "binary"), 1.15),
    "CNN (digits)": (partial(shipped, "digits"), 1.05),
    "CNN (of precision.py)": (partial(of_job, precision.cnn), 1.05),
    "transformer (text)": (partial(shipped, "text"), 1.05),
    "transformer (of precision.py)": (partial(of_job, precision.transformer), 1.05),
}


# Of a run's specification a step reads only where the workload's own code is: here nowhere.
SPEC = build_plan({"configurations": {"default": {}}, "device": "cpu"}).run("binary", "default", 0)


def fresh_scaler() -> LossScaler:
    return LossScaler(make_policy("torch", init_scale=2.0**10, growth_interval=10**9))


def recording_step(workload: Workload, used: Arithmetic) -> Step:
    """A step as `halfscale.train` takes it, which returns its row of the trace."""
    scaler, numbers = fresh_scaler(), count()
    training = Training.of(SPEC, workload, scaler, used)

    def step() -> dict[str, object]:
        row = train_step(training, next(numbers))
        scaler.update()
        return row

    return step


def plain_step(workload: Workload, used: Arithmetic) -> Step:
    """The same step, of which nothing is recorded."""
    scaler, model, optimizer = fresh_scaler(), workload.model, workload.optimizer

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with used.autocast():
            loss = workload.loss(model, next(workload.batches))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if workload.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        scaler.step(optimizer)
        if workload.scheduler is not None and not scaler.skipped:
            workload.scheduler.step()
        scaler.update()

    return step


ARMS = {"plain": plain_step, "recording": recording_step}


def block_seconds(step: Step, steps: int) -> float:
    """Seconds a step: the median over a block of steps after one that warms up."""
    times = []
    step()
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return median(times)


def compare(build: Callable[[], Workload], seconds: float) -> dict[str, list[float]]:
    """Seconds a step in each arm, a round an entry."""
    rounds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with arithmetic("fp16", "cpu", native=False) as used:
        steps = {arm: make(build(), used) for arm, make in ARMS.items()}
        length = min(50, max(3, round(0.02 / block_seconds(steps["plain"], 3))))
        start = time.perf_counter()
        while len(rounds["plain"]) < 12 or time.perf_counter() - start < seconds:
            # Each goes first as often as second, since who comes second finds another cache.
            for arm in list(ARMS)[:: 1 if len(rounds["plain"]) % 2 else -1]:
                rounds[arm].append(block_seconds(steps[arm], length))
    return rounds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=10, help="for each row")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print("| model | threads | plain step | recording / plain | target |")
    print("| --- | --- | --- | --- | --- |")
    for name, (build, most) in MODELS.items():
        for threads in options.threads:
            torch.set_num_threads(threads)
            rounds = compare(build, options.seconds)
            print(
                f"| {name} | {threads} | {1e3 * median(rounds['plain']):.2f} ms "
                f"| {precision.ratios(rounds['recording'], rounds['plain'])} | ≤ {most} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
