"""The arithmetic in which a run computes: fp32, bf16 autocast or fp16 autocast.

Around a whole run::

    with arithmetic("fp16", device) as used:
        record["arithmetic"] = str(used)
        for x, y in batches:
            with used.autocast():
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
"""

from halfscale.precision.choice import PRECISIONS, Arithmetic, arithmetic, choose, native_fp16

__all__ = ["PRECISIONS", "Arithmetic", "arithmetic", "choose", "native_fp16"]
