"""Workloads: built-in ones, one file each and found by name, and a user's own by an entry.

A file has one function ``build(seed, device, *, ...)`` that returns a `Workload`. Its keyword-only
parameters, with literal defaults, are the keys that ``config.yaml`` accepts for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Workload:
    """What one training needs, built from a seed.

    Attributes:
        model: The model, its parameters in fp32 on the run's device.
        optimizer: The optimizer over the model's parameters.
        batches: An endless iterator over batches on the device, in an order fixed by the seed.
        loss: ``loss(model, batch)`` gives the scalar loss; it is called under autocast.
        clip_norm: Largest L2 norm of all gradients, clipped after they were unscaled; None: not.
        accumulate: Micro-batches whose losses are averaged into one optimizer step.
        scheduler: A learning rate scheduler, stepped after each step that was taken.
        evaluate: ``evaluate(model)`` gives one number, asked for once after the training.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Any]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    clip_norm: float | None = None
    accumulate: int = 1
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    evaluate: Callable[[torch.nn.Module], float] | None = None


def shipped_file(name: str) -> Path:
    """A data file that scikit-learn ships, by its path below ``sklearn/datasets``.

    Found without importing scikit-learn, which would take longer than the training.

    Raises:
        PackageNotFoundError: If scikit-learn is not installed.
    """
    return Path(str(distribution("scikit-learn").locate_file(f"sklearn/datasets/{name}")))


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Handwritten digits: pixels, float32 of shape (1797, 64) in 0…1, and labels, int64.

    A test holds them against ``sklearn.datasets.load_digits``.
    """
    rows = torch.tensor(
        np.loadtxt(shipped_file("data/digits.csv.gz"), delimiter=","), dtype=torch.float32
    )
    return rows[:, :-1] / 16.0, rows[:, -1].long()


def build_workload(
    name: str, seed: int, device: str, parameters: dict[str, Any], entry: str | None = None
) -> Workload:
    """Build a workload; the same arguments give the same initial weights and batch order.

    Args:
        name: The workload's name, by which a built-in one is found.
        seed: What the weights and the batches are drawn from.
        device: ``"cpu"`` or ``"cuda"``.
        parameters: Further arguments of ``build``.
        entry: Where a user's own ``build`` is; None for a built-in one.

    Raises:
        UnusableWorkload: If a user's own ``build`` returned what cannot be trained.
        Exception: Whatever a user's own code raises.
    """
    # Weights are drawn on the CPU, so that every device starts from the same ones.
    torch.manual_seed(seed)
    if entry is None:
        module = import_module(f"halfscale.workloads.{name}")
        workload: Workload = module.build(seed, device, **parameters)
        return workload
    from halfscale.own import as_workload, load_function

    random.seed(seed)
    np.random.seed(seed % 2**32)
    build = load_function(entry)
    return as_workload(build(seed, device, **parameters), device)
