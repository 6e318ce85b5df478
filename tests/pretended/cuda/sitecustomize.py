"""Let runs that are planned for CUDA compute on the CPU, and note which GPU each of them sees.

Found by Python on its way in. All but the training itself is as it would be: the choice of the GPU,
the questions to the driver, the record. A run notes ``CUDA_VISIBLE_DEVICES`` in a file of the
folder PRETENDED_SEEN and goes on once PRETENDED_TOGETHER runs are there at the same time.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

TIME_LIMIT = 120.0


def meet(name: str) -> None:
    seen = Path(os.environ["PRETENDED_SEEN"])
    (seen / name).write_text(os.environ["CUDA_VISIBLE_DEVICES"], encoding="utf-8")
    deadline = time.monotonic() + TIME_LIMIT
    while len(list(seen.iterdir())) < int(os.environ["PRETENDED_TOGETHER"]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is alone with {sorted(seen.iterdir())}")
        time.sleep(0.05)


def pretend(train: ModuleType) -> None:
    real = train.run_training

    def run_training(spec: Any, *arguments: Any, **keywords: Any) -> Any:
        if spec.device == "cpu":
            return real(spec, *arguments, **keywords)
        with train.watched_gpu(spec) as gpu_use:
            meet("-".join(spec.folder.parts))
            cpu = spec.model_copy(update={"device": "cpu"})
            return replace(real(cpu, *arguments, **keywords), gpu=gpu_use())

    train.run_training = run_training


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "halfscale.train":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            pretend(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
