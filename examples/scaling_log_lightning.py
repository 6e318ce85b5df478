import math
from pathlib import Path

import torch
from lightning.pytorch import Callback


class ScalingLog(Callback):
    """A row for each optimizer step; Lightning has unscaled the gradients, but not clipped yet."""

    def __init__(self, path):
        self.path, self.step = Path(path), 0
        self.path.write_text("step,scale,overflow,largest_gradient\n")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        largest = torch.nn.utils.get_total_norm(gradients, math.inf).item()
        scale = trainer.precision_plugin.scaler.get_scale()
        with self.path.open("a") as file:
            print(self.step, scale, not math.isfinite(largest), largest, sep=",", file=file)
        self.step += 1
