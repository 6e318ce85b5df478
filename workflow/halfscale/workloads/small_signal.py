"""Small signal: a loss in SI units, so small that fp16 loses the gradients unless they are scaled.

HDL cholesterol, in mol/L, of the 442 patients of scikit-learn's diabetes data from their other nine
measurements. Among those are total cholesterol and its ratio to HDL, so a perceptron can fit it
ever better. HDL varies by 3e-4 mol/L; the mean squared error starts at 1e-7 (mol/L)² and falls by
two orders of magnitude. S = 1 learns nothing, S = 2^8 loses most gradients at the start and nearly
all at the end, so a scale that starts there has to grow.
"""

from __future__ import annotations

from itertools import repeat

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from halfscale.workloads import Workload, shipped_file

HDL = 6
"""The column of HDL cholesterol among the ten measurements."""

MOL_PER_L = 10.0 / 386.65 / 1000.0
"""A cholesterol of 1 mg/dL in mol/L; its molar mass is 386.65 g/mol."""


def build(
    seed: int, device: str, *, learning_rate: float = 0.03, momentum: float = 0.9, hidden: int = 64
) -> Workload:
    """Build the task; ``learning_rate`` counts errors in standard deviations, ``hidden`` units."""
    measured = load_measurements()
    mean, deviation = measured.mean(0), measured.std(0)
    inputs = (measured - mean) / deviation
    inputs[:, HDL] = 0.0
    targets = measured[:, HDL] * MOL_PER_L
    offset, unit = float(targets.mean()), float(targets.std())
    model = nn.Sequential(
        nn.Linear(10, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, 1),
    ).to(device)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        predicted = offset + unit * model(batch[0]).squeeze(1).float()
        return mse_loss(predicted, batch[1])

    # The gradients are in (mol/L)²; a rate that is divided by it moves the weights as usual.
    rate = learning_rate / unit**2
    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum),
        batches=repeat((inputs.to(device), targets.to(device))),
        loss=loss,
    )


def load_measurements() -> Tensor:
    """Ten measurements of each patient, in the clinic's units; float32 of shape (442, 10)."""
    file = shipped_file("data/diabetes_data_raw.csv.gz")
    return torch.tensor(np.loadtxt(file), dtype=torch.float32)
