"""A plan of one workload, as a command line states it: ``mine.py:build --set width=32``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from halfscale.naming import suggest_name
from halfscale.plan import Plan
from halfscale.planner import build_plan
from halfscale.workload_plan import workload_names

SOURCE = "the command line"


def plan_single(
    name: str, block: dict[str, Any], device: str, *, seed: int = 0, threads: int = 1
) -> Plan:
    """The plan of one workload, with PyTorch's defaults as its one configuration.

    Args:
        name: The workload's name.
        block: Its block, as it would stand in a configuration.
        device: auto, cpu or cuda.
        seed: The one seed.
        threads: CPU threads.

    Raises:
        ConfigError: If the block or the device cannot be used.
    """
    config = {
        "configurations": {"default": {}},
        "workloads": {name: block},
        "seeds": [seed],
        "device": device,
        "threads": threads,
    }
    return build_plan(config, SOURCE)


def name_workload(entry: str) -> str:
    """The name that a workload of a user's own has in a plan, made of its file's name."""
    place = entry.rpartition(":")[0] or entry
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return suggest_name(stem, workload_names())


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` each, the value as YAML.

    Raises:
        ValueError: If a setting has another form.
    """
    read = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {setting}: write it as key=value")
        try:
            read[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            read[key] = text
    return read
