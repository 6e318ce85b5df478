"""Handwritten digits: real images that need loss scaling only mildly.

The 1797 grey images of 8×8 pixels that scikit-learn ships (UCI Optical Recognition of Handwritten
Digits), a small convolutional network, mini-batches in an order drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from halfscale.workloads import Workload


def build(
    seed: int,
    device: str,
    *,
    learning_rate: float = 0.01,
    momentum: float = 0.9,
    batch_size: int = 128,
    channels: int = 8,
) -> Workload:
    """Build the task; ``channels`` feature maps in the first convolution, twice that after it."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1).to(device) / 16.0
    labels = torch.tensor(data.target, dtype=torch.long).to(device)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * 16, 10),
    ).to(device)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum),
        batches=_shuffled_batches(images, labels, seed, batch_size),
        loss=loss,
    )


def _shuffled_batches(
    images: Tensor, labels: Tensor, seed: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(labels), generator=generator).to(labels.device)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield images[chosen], labels[chosen]
