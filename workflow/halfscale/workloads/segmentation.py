"""Segmentation: a mean over pixels, which leaves little to each of them.

The two photographs that scikit-learn ships, in grey; to be found are the pixels whose colour is
warm: the dahlia, and the tiles and timber of the pavilion. A fully convolutional network, SGD. The
loss is averaged over 135 680 pixels: the gradient of a pixel starts below 2^-17 and fades as the
network becomes sure of it. S = 1 loses a twentieth of the activation gradients at first and a
quarter of them at the end, S = 2^24 overflows in the first steps, and between lies a wide window.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from halfscale.workloads import Workload, shipped_file


def build(
    seed: int,
    device: str,
    *,
    learning_rate: float = 0.15,
    momentum: float = 0.9,
    channels: int = 16,
    warmth: float = 0.15,
) -> Workload:
    """Build the task; a pixel is warm if its red exceeds its blue by ``warmth``, of 0…1."""
    colours = load_photographs()
    grey = colours.mean(1, keepdim=True)
    grey = ((grey - grey.mean()) / grey.std()).to(device)
    warm = (colours[:, :1] - colours[:, 2:] > warmth).float().to(device)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.PixelShuffle(4),
    ).to(device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            mirror = [3] if torch.rand((), generator=generator) < 0.5 else []
            yield grey.flip(mirror), warm.flip(mirror)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return binary_cross_entropy_with_logits(model(batch[0]).float(), batch[1])

    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum),
        batches=batches(),
        loss=loss,
    )


def load_photographs() -> Tensor:
    """Both photographs at half their size, float32 of shape (2, 3, 212, 320) in 0…1."""
    files = [shipped_file(f"images/{name}.jpg") for name in ("china", "flower")]
    pixels = np.stack([np.asarray(Image.open(file).reduce(2)) for file in files])
    return torch.tensor(pixels[:, :212], dtype=torch.float32).permute(0, 3, 1, 2) / 255.0
