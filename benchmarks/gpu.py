"""Check the CUDA path and time it, on a machine with a GPU, in one run of some minutes.

Holds one GPU as a job does, then prints a line a check, and one a figure:

- the GPU that is held is the one that torch computes on; the settings that make runs repeat are on;
- the default configuration and the controls on the workloads of ``config.yaml``: how they end;
- every built-in workload, short, with each arm and the probe: none fails, and the same run twice
  gives the same bytes;
- 200 steps with overflows: LossScaler equals torch.amp.GradScaler bit for bit;
- unscale + step + update against torch's, and a probe against the bf16 run it is of: ratios.

Ends with status 1 if a check fails or there is no GPU. ``--device cpu`` tries the script itself.

    python benchmarks/gpu.py [--device cpu] [--steps 300]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from halfscale.config import read_config
from halfscale.devices import count_gpus
from halfscale.gpus import hold_gpu
from halfscale.plan import Plan, ProbeSpec, RunSpec
from halfscale.planner import build_plan
from halfscale.policies import make_policy
from halfscale.probe import record_probe
from halfscale.scaling import LossScaler
from halfscale.train import Result, run_training
from halfscale.workload_plan import workload_names
from halfscale.workloads import build_workload

ROOT = Path(__file__).resolve().parents[1]
SHORT = 20
Step = Callable[[], object]


class Checks:
    """Prints checks as they are made, and keeps how many failed."""

    def __init__(self) -> None:
        self.failed = 0

    def add(self, passed: bool, name: str, measured: object) -> None:
        """Print one, and count it if it failed."""
        self.failed += not passed
        print(f"{'pass' if passed else 'FAIL'}  {name}: {measured}", flush=True)


def run(spec: RunSpec | ProbeSpec) -> tuple[Result, list[str]]:
    """Train without files; how it ended, and every figure of every step but the time."""
    rows: list[str] = []

    def record(row: Mapping[str, Any]) -> None:
        rows.append(repr({name: value for name, value in row.items() if name != "seconds"}))

    return run_training(spec, record, lambda line: None), rows


def check_device(checks: Checks, held: str) -> None:
    """The GPU that is held, and no other, is torch's."""
    count, uuid = torch.cuda.device_count(), str(torch.cuda.get_device_properties(0).uuid)
    # An instance may be held by its place, or be told by torch under its GPU's UUID.
    same = held.startswith("MIG-") or held.endswith(uuid)
    told = f"{count}, {uuid}, where {held} is held"
    checks.add(count == 1 and same, "torch sees the GPU that is held", told)


def check_settings(checks: Checks, device: str) -> None:
    """After a run: what makes it repeat."""
    found = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "no cuDNN benchmark": not torch.backends.cudnn.benchmark,
        "no TF32": not (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32),
        # Either makes cuBLAS repeat.
        "cuBLAS workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8"),
    }
    checks.add(all(found.values()), f"settings on {device}", found)


def check_default(checks: Checks, plan: Plan) -> None:
    """The default configuration and the controls, in full length."""
    for workload in plan.workloads:
        for arm in plan.arms:
            result, rows = run(plan.run(workload, arm, 0))
            told = f"{result.outcome}, {len(rows)} steps, {result.environment['arithmetic']}"
            if result.gpu:
                told += f"; {result.gpu}"
            # Without scaling anything may happen, but for a failure.
            expected = ("ok", "diverged", "stuck") if arm == "fp16-unscaled" else ("ok",)
            checks.add(result.outcome in expected, f"{workload}, {arm}", told)


def check_repeats(checks: Checks, plan: Plan) -> None:
    """Every workload, short: each arm and the probe, twice."""
    for workload in plan.workloads:
        arms = (plan.run(workload, arm, 0) for arm in plan.arms)
        for spec in (*arms, plan.probe(workload, 0)):
            (first, rows), (_, again) = run(spec), run(spec)
            ended = f"{first.outcome}{f' ({first.error})' if first.error else ''}"
            usable = first.outcome not in ("failed", "out-of-memory")
            same = rows == again and len(rows) > 0
            checks.add(usable and same, f"{spec} twice alike", f"{ended}, {len(rows)} steps")


def check_scaler(checks: Checks, device: str) -> None:
    """LossScaler and torch's train the same weights through overflows and growth."""
    settings = {"init_scale": 2.0**40, "growth_interval": 20}
    weights, skipped = [], 0
    for make in (
        lambda: LossScaler(make_policy("torch", **settings)),
        lambda: torch.amp.GradScaler(device, **settings),
    ):
        workload, scaler = build_workload("digits", 0, device, {}), make()
        for _ in range(200):
            workload.optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = workload.loss(workload.model, next(workload.batches))
            scaler.scale(loss).backward()
            scaler.step(workload.optimizer)
            scaler.update()
            skipped += isinstance(scaler, LossScaler) and bool(scaler.skipped)
        parameters = [p.detach().flatten() for p in workload.model.parameters()]
        weights.append((torch.cat(parameters), scaler.get_scale()))
    (ours, scale), (theirs, other) = weights
    same = torch.equal(ours, theirs) and scale == other and bool(torch.isfinite(ours).all())
    checks.add(same and skipped > 0, "LossScaler equals torch's", f"{skipped} of 200 steps skipped")


def ratio(ours: Step, theirs: Step, repeats: int) -> str:
    """Median of the ratios of pairs taken in turn, with the quartiles; and our median time."""
    pairs = []
    for _ in range(repeats):
        # Each goes first once and second once.
        a, b, c, d = seconds(ours), seconds(theirs), seconds(theirs), seconds(ours)
        pairs.append((a + d, b + c))
    low, middle, high = statistics.quantiles((a / b for a, b in pairs), n=4)
    own = statistics.median(a for a, _ in pairs) / 2
    return f"{middle:.2f} x ({low:.2f} to {high:.2f}), {1e3 * own:.3g} ms"


def seconds(step: Step) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    started = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - started


def scaler_step(
    scaler: LossScaler | torch.amp.GradScaler, device: str, count: int, size: int
) -> Step:
    """The end of a training step, on its own parameters with gradients in place."""
    parameters = [torch.randn(size, device=device).requires_grad_() for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(size, device=device)
    optimizer = torch.optim.SGD(parameters, lr=1e-6, foreach=True)
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return step


def time_all(plan: Plan, device: str, steps: int) -> None:
    """The figures: of the scaler, and of the probe."""
    settings = {"init_scale": 1.0, "growth_interval": 10**9}
    for count, size in ((100, 1000), (12, 1_000_000)):
        ours = scaler_step(LossScaler(make_policy("torch", **settings)), device, count, size)
        theirs = scaler_step(torch.amp.GradScaler(device, **settings), device, count, size)
        ratio(ours, theirs, 5)
        told = ratio(ours, theirs, max(2, steps if size < 10**6 else steps // 5))
        print(f"time  scaler against torch's, {count} parameters of {size:,}: {told}", flush=True)
    for workload in plan.workloads:
        bf16, probe = plan.run(workload, "bf16", 0), plan.probe(workload, 0)
        told = ratio(
            lambda probe=probe: record_probe(probe, lambda line: None),
            lambda bf16=bf16: run(bf16),
            max(2, steps // 100),
        )
        print(f"time  probe of {workload} against its bf16 run: {told}", flush=True)


def examine(device: str, steps: int, held: str | None) -> int:
    """Make every check and take every figure; how many checks failed."""
    checks = Checks()
    config = read_config(ROOT / "config.yaml") | {"device": device, "search": "off"}
    default = {"default": config["configurations"]["default"]}
    plan = build_plan({**config, "configurations": default, "seeds": [0]})
    short = build_plan(
        {
            "configurations": default,
            "workloads": {name: {"steps": SHORT} for name in workload_names()},
            "seeds": [0],
            "device": device,
        }
    )
    if held:
        check_device(checks, held)
    check_default(checks, plan)
    check_settings(checks, device)
    check_repeats(checks, short)
    check_scaler(checks, device)
    time_all(plan, device, steps)
    return checks.failed


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=300, help="pairs of steps for each figure")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    print(
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    )
    # Not asked of torch: CUDA would read CUDA_VISIBLE_DEVICES before a GPU is chosen.
    if on_gpu and not count_gpus():
        sys.exit("no GPU that this torch can use; --device cpu tries the script itself")
    with hold_gpu() if on_gpu else nullcontext() as gpu:
        failed = examine(options.device, options.steps, gpu.uuid if gpu else None)
    if failed:
        sys.exit(f"{failed} checks failed")
    print("all checks passed" + ("" if on_gpu else ", on the CPU: nothing is said of CUDA"))


if __name__ == "__main__":
    main()
