"""Handwritten digits: real images that need loss scaling only mildly.

The 1797 grey images of 8×8 pixels that scikit-learn ships (UCI Optical Recognition of Handwritten
Digits), a small convolutional network, mini-batches in an order drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    channels: int = 8,
) -> Workload:
    """Build the task; ``channels`` feature maps in the first convolution, twice that after it."""
    images, labels = (tensor.to(device) for tensor in load_images())
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


def load_images() -> tuple[Tensor, Tensor]:
    """The images, float32 of shape (1797, 1, 8, 8) in 0…1, and their labels, int64."""
    pixels, labels = read_digits()
    return pixels.reshape(-1, 1, 8, 8), labels


def _shuffled_batches(
    images: Tensor, labels: Tensor, seed: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(labels), generator=generator).to(labels.device)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield images[chosen], labels[chosen]
