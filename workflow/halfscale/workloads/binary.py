"""The published task: a two-class problem that needs no loss scaling, where all arms must tie.

2048 points with 16 standard normal features, labelled by ``2 x0 + 1.5 x1 + 0.1 noise > 0``; a
16-64-2 perceptron trained on all of them at once with plain SGD.
"""

from __future__ import annotations

from itertools import repeat

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from halfscale.workloads import Workload


def build(
    seed: int, device: str, *, learning_rate: float = 0.1, samples: int = 2048, hidden: int = 64
) -> Workload:
    """Build the task; ``samples`` points, ``hidden`` units in the one hidden layer."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 16, generator=generator)
    noise = torch.randn(samples, generator=generator)
    targets = (2.0 * inputs[:, 0] + 1.5 * inputs[:, 1] + 0.1 * noise > 0).long()
    model = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 2)).to(device)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=learning_rate),
        batches=repeat((inputs.to(device), targets.to(device))),
        loss=loss,
    )
