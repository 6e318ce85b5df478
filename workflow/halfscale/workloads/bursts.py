"""Bursts: now and then the gradients jump by three orders of magnitude, then fall back.

Scikit-learn's handwritten digits; of every 40 batches the last 8 are exposed 2000 times less.
Layer normalisation makes the network blind to the exposure, so the loss takes no notice. But its
backward pass divides by the deviation of its input, so the gradients of the first layer grow as
the light fades. A scale that was right before a burst overflows in it, and every step until it has
backed off is lost; what it has grown again by the next burst decides how many are lost there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from halfscale.workloads import Workload, read_digits


def build(
    seed: int,
    device: str,
    *,
    learning_rate: float = 0.01,
    momentum: float = 0.9,
    batch_size: int = 128,
    hidden: int = 64,
    period: int = 40,
    burst: int = 8,
    exposure: float = 0.0005,
) -> Workload:
    """Build the task; of every ``period`` batches the last ``burst`` have that ``exposure``."""
    images, labels = (tensor.to(device) for tensor in read_digits())
    first = nn.Linear(64, hidden)
    nn.init.zeros_(first.bias)
    model = nn.Sequential(
        first,
        nn.LayerNorm(hidden, eps=1e-12),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    ).to(device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for step in range(period):
                chosen = torch.randint(len(labels), (batch_size,), generator=generator).to(device)
                light = exposure if step >= period - burst else 1.0
                yield images[chosen] * light, labels[chosen]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    # Beside a dark image any offset before the normalisation is bright. The gradient of the first
    # layer's jumps most of all, and it is learned at a rate that leaves it near zero.
    offset = first.bias
    others = [parameter for parameter in model.parameters() if parameter is not offset]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": [offset], "lr": 1e-10}]
    optimizer = torch.optim.SGD(groups, lr=learning_rate, momentum=momentum)
    return Workload(model=model, optimizer=optimizer, batches=batches(), loss=loss)
