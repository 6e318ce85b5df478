"""Jobs on other machines than Snakemake's own: what must be known before, and how they end."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from halfscale.config import ConfigError, refuse_key
from halfscale.plan import Plan
from halfscale.planner import refuse_missing_gpu

SOURCE = "the configuration"
_watching: list[subprocess.Popen[bytes]] = []


def may_run_elsewhere(workflow: Any) -> bool:
    """Whether this machine's GPUs may say nothing about the jobs', while the Snakefile is read.

    Jobs of a cluster read it as well, some on machines without a GPU. In the main process
    Snakemake knows its executor only later, but ``--jobs`` is kept as nodes for a cluster's.

    Args:
        workflow: Snakemake's workflow.
    """
    return not workflow.is_main_process or workflow.resource_settings.nodes is not None


def prepare(plan: Plan, workflow: Any) -> None:
    """What is to be done when jobs start, and so it is certain where they run.

    Ends the process with one line if they run on other machines and the configuration leaves it to
    this one to find a device, or if they run here and there is no GPU for ``device: cuda``.

    Args:
        plan: What is to be run.
        workflow: Snakemake's workflow, about to run its jobs.
    """
    try:
        if not workflow.non_local_exec:
            if plan.device == "cuda":
                refuse_missing_gpu(SOURCE)
        elif plan.execution.device_found:
            reason = "the jobs run on other machines, whose GPUs are not known here"
            refuse_key(SOURCE, ("device",), "auto", reason, "cuda")
    except ConfigError as error:
        sys.exit(f"halfscale: {error}")
    # The name of all Slurm jobs of this workflow; the executor tells it nowhere else.
    executor = getattr(workflow.scheduler, "_executor", None)
    name = getattr(executor, "run_uuid", None)
    if workflow.non_local_exec and isinstance(name, str):
        _watching.append(cancel_with_owner(name))


def cancel_with_owner(name: str) -> subprocess.Popen[bytes]:
    """Have Slurm cancel all jobs of a name once this process is gone, however it went.

    Snakemake cancels its jobs on Ctrl-C alone, and not if it is just asking how they do; killed, or
    with its terminal closed, it would leave them behind.

    Args:
        name: The name of the Slurm jobs.

    Returns:
        A process that waits for the end of a pipe that only this process holds.
    """
    program = 'cat >/dev/null; exec scancel --quiet --name "$1"'
    silent = subprocess.DEVNULL
    return subprocess.Popen(  # noqa: S603
        ["/bin/sh", "-c", program, "sh", name],
        stdin=subprocess.PIPE,
        stdout=silent,
        stderr=silent,
        start_new_session=True,  # a Ctrl-C or a hang-up of the terminal is not for it
    )
