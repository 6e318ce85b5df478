"""The machine a run computes on: what is set so that its numbers repeat, and what is recorded."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from halfscale.gpu_use import GpuUse, watch_gpu
from halfscale.plan import JobSpec


def stop_without_gpu(spec: JobSpec) -> None:
    """Stop where a run that was planned for a GPU finds none: the plan was made on another machine.

    Raises:
        RuntimeError: If there is none that torch can use.
    """
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"{platform.node()} has no GPU that torch can use, and device: cuda asks for one; "
            "let the job ask the cluster for a GPU, or write: device: cpu"
        )


def make_deterministic(spec: JobSpec) -> None:
    """Let nothing but the specification decide a number."""
    # cuBLAS reads this once, when CUDA is initialised.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # The fp32 control is to compute in fp32.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def describe_machine(spec: JobSpec, used: str) -> dict[str, str | int]:
    """What computes a run, for its record."""
    on_gpu = spec.device == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "arithmetic": used,
        "threads": spec.threads,
        "source": spec.source,
    }


@contextmanager
def watched_gpu(spec: JobSpec) -> Iterator[Callable[[], GpuUse | None]]:
    """Watch a run's GPU; what is given tells, inside, what the run has taken of it so far.

    It tells None for a run on the CPU.
    """
    if spec.device != "cuda":
        yield lambda: None
        return
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with watch_gpu() as watch:
        yield lambda: GpuUse(
            allocated=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.max_memory_reserved(),
            **(watch.figures() if watch else {}),
        )
