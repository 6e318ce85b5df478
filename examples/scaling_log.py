import math

import torch


class ScalingLog:
    """A row for each optimizer step; call it after backward(), before unscale_, clipping, step."""

    def __init__(self, path):
        self.file, self.step = open(path, "w", buffering=1), 0
        print("step,scale,overflow,largest_gradient", file=self.file)

    def __call__(self, scaler, parameters):
        gradients = [p.grad for p in parameters if p.grad is not None]
        largest = torch.nn.utils.get_total_norm(gradients, math.inf).item()
        scale = scaler.get_scale()
        print(self.step, scale, not math.isfinite(largest), largest / scale, sep=",", file=self.file)
        self.step += 1
