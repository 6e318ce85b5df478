import math

import torch
from lightning.pytorch import Callback


class ScalingLog(Callback):
    """A row for each optimizer step; Lightning has unscaled the gradients and not yet clipped."""

    def __init__(self, path):
        self.file, self.step = open(path, "w", buffering=1), 0
        print("step,scale,overflow,largest_gradient", file=self.file)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        largest = torch.nn.utils.get_total_norm(gradients, math.inf).item()
        scale = trainer.precision_plugin.scaler.get_scale()
        print(self.step, scale, not math.isfinite(largest), largest, sep=",", file=self.file)
        self.step += 1
