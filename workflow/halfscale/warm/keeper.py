"""Keep a warm worker for the jobs of this Snakemake process.

The socket is there from the beginning and costs nothing. The parent is started when the first job
asks for it: not for a dry run, and not when there is nothing to do.
"""

from __future__ import annotations

import atexit
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from halfscale.plan import Plan
from halfscale.warm.client import ADDRESS

STARTS = 3
"""How often a parent is started: once, and again after a crash."""

_THREAD_LIMITS = (
    *("OMP_NUM_THREADS", "GOTO_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"),
)
"""The environment variables that Snakemake sets to a job's number of threads."""


def offer_worker(plan: Plan, is_main_process: bool, cores: int | None = None) -> None:
    """Let the jobs that this process starts be forked from a warm parent, if the plan wants it.

    Args:
        plan: The plan; its ``execution`` says whether workers are wanted.
        is_main_process: Whether this is the Snakemake that a user started. One that a cluster's job
            or a group starts has a single job to run, maybe on another machine.
        cores: The cores that Snakemake may use, which bound a job's threads; None: no bound.
    """
    # What was inherited belongs to another workflow.
    os.environ.pop(ADDRESS, None)
    if not is_main_process or not plan.execution.warm_workers or sys.platform != "linux":
        return
    try:
        listener = _listen()
    except OSError as error:
        print(f"halfscale: no warm workers: {error}; jobs import torch", file=sys.stderr)
        return
    os.environ[ADDRESS] = listener.getsockname()
    threads = min(plan.threads, cores or plan.threads)
    environment = dict.fromkeys(_THREAD_LIMITS, str(threads))
    threading.Thread(
        target=_keep, args=(listener, environment), daemon=True, name="warm-keeper"
    ).start()


def _listen() -> socket.socket:
    """A listening socket that only this user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="halfscale-warm-"))  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = folder / "warm"
    listener.bind(str(address))
    address.chmod(0o600)
    listener.listen(128)
    return listener


def _keep(listener: socket.socket, environment: dict[str, str]) -> None:
    """Start a parent whenever a client knocks and there is none; give up after some crashes."""
    for _ in range(STARTS):
        select.select([listener], [], [])
        with _start_parent(listener, environment) as parent:
            parent.wait()
    listener.close()


def _start_parent(listener: socket.socket, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - this very interpreter
        [sys.executable, "-P", "-m", "halfscale.warm.parent", str(listener.fileno())],
        env=os.environ | environment,
        pass_fds=[listener.fileno()],
        # The parent ends when this pipe closes: with this process, whatever way it ends.
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Not in the terminal's group: Ctrl-C ends it by way of this process. Its children are.
        process_group=0,
    )
