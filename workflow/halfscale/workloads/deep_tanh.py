"""Deep tanh: underflow at S = 1 and overflow at S = 2^16, both in the first step.

Benign or malignant, from the 30 measurements of cell nuclei in scikit-learn's breast cancer data:
24 tanh layers whose initial weights halve signals on their way forth and gradients on their way
back, and a loss that is summed over the 569 cases. The last bias has a gradient of 72, most weights
of some 1e-8: S = 1 loses about half of all weight gradients or more, S = 2^10 overflows. The window
moves as the layers learn to pass signals on.
"""

from __future__ import annotations

from itertools import pairwise, repeat

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from halfscale.workloads import Workload, shipped_file


def build(
    seed: int,
    device: str,
    *,
    learning_rate: float = 3e-4,
    layers: int = 24,
    hidden: int = 32,
    gain: float = 0.45,
) -> Workload:
    """Build the task; ``gain`` is that of the Xavier initialisation of every layer."""
    inputs, benign = (tensor.to(device) for tensor in load_cases())
    widths = [inputs.shape[1], *[hidden] * layers]
    model = nn.Sequential()
    for inner, outer in pairwise(widths):
        model.extend([nn.Linear(inner, outer), nn.Tanh()])
    model.append(nn.Linear(hidden, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    model.to(device)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0]).squeeze(1).float()
        return binary_cross_entropy_with_logits(logits, batch[1], reduction="sum")

    return Workload(
        model=model,
        # Beside Adam's default epsilon of 1e-8 the gradients of the first layers would not count.
        optimizer=torch.optim.Adam(model.parameters(), lr=learning_rate, eps=1e-12),
        batches=repeat((inputs, benign)),
        loss=loss,
    )


def load_cases() -> tuple[Tensor, Tensor]:
    """Standardised measurements, float32 of shape (569, 30), and 1 for benign, 0 for malignant."""
    file = shipped_file("data/breast_cancer.csv")
    rows = torch.tensor(np.loadtxt(file, delimiter=",", skiprows=1), dtype=torch.float32)
    measured, benign = rows[:, :-1], rows[:, -1]
    return (measured - measured.mean(0)) / measured.std(0), benign
