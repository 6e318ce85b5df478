"""Which device the runs use, decided without importing torch."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version


def count_gpus() -> int:
    """The number of NVIDIA GPUs that this process may use; 0 if there is none.

    Asks the driver through NVML, which creates no CUDA context, and honours an empty
    ``CUDA_VISIBLE_DEVICES``. A torch build without CUDA can use none.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return 0
    try:
        if version("torch").endswith("+cpu"):
            return 0
    except PackageNotFoundError:
        return 0
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
