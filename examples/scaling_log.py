import math
from pathlib import Path

import torch


class ScalingLog:
    """A row for each optimizer step; call it after backward(), before unscale_, clipping, step."""

    def __init__(self, path):
        self.path, self.step = Path(path), 0
        self.path.write_text("step,scale,overflow,largest_gradient\n")

    def __call__(self, scaler, parameters):
        gradients = [p.grad for p in parameters if p.grad is not None]
        scale = scaler.get_scale()
        largest = torch.nn.utils.get_total_norm(gradients, math.inf).item() / scale
        with self.path.open("a") as file:
            print(self.step, scale, not math.isfinite(largest), largest, sep=",", file=file)
        self.step += 1
