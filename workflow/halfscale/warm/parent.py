"""The process that has imported everything once and forks a child for each job.

It computes nothing and never asks CUDA for anything: neither can be taken back in a child. It ends
with the process that started it, which holds the other end of its standard input.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pkgutil
import shutil
import socket
import struct
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

from halfscale.warm.client import HEADER

Command = Callable[..., object]
"""A command line: given the arguments and ``prog_name``, it ends with SystemExit."""

MAY_DIFFER = {
    *("TMPDIR", "TMP", "TEMP", "TEMPDIR", "CUDA_VISIBLE_DEVICES"),
    *("_", "SHLVL", "PWD", "OLDPWD"),
}
"""Variables that nothing reads while it is imported."""

_PATIENCE = 10.0
"""Seconds that a client may be silent in the middle of its request."""

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(frozen=True)
class Request:
    """What a client asks for: a command, and the process it is to look like.

    Attributes:
        folder: The working folder.
        installation: Where the Python that the client runs in is installed.
        arguments: The command of halfscale's and its options.
        environment: The client's environment variables.
        descriptors: Its standard input, output and error.
    """

    folder: str
    installation: str
    arguments: list[str]
    environment: dict[str, str]
    descriptors: list[int]


def main() -> None:
    """Serve the listening socket whose descriptor is the one argument, until the owner ends."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    started_with = dict(os.environ)
    _end_with_owner(Path(listener.getsockname()))
    serve(listener, started_with, import_everything())


def _end_with_owner(address: Path) -> None:
    """End, and take the socket's folder along, when the owner's end of standard input closes."""

    def watch() -> None:
        os.read(0, 1)
        shutil.rmtree(address.parent, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="owner-watch").start()


def import_everything() -> Command:
    """Import what a training job imports, before and while it runs.

    Returns:
        halfscale's command line.

    Raises:
        RuntimeError: If an import has initialised CUDA.
    """
    # Should an import ask for a GPU, then not CUDA: no child could use what that initialises.
    before = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    import pandas  # noqa: F401 - pyarrow imports it with the first table
    import psutil  # noqa: F401 - a job looks with it whether its workflow is still there
    import torch
    import torch._dynamo  # an optimizer imports it in its first step
    import typer.main

    import halfscale.cli
    import halfscale.probe
    import halfscale.train
    import halfscale.workloads

    for module in pkgutil.iter_modules(halfscale.workloads.__path__):
        importlib.import_module(f"halfscale.workloads.{module.name}")
    _set_variable(_NVML_CHECK, before)
    if torch.cuda.is_initialized():
        raise RuntimeError("an import has initialised CUDA; no child could use it")
    command = typer.main.get_command(halfscale.cli.app)
    # What is here now stays: a child's collector need not look at it, nor copy its pages.
    gc.collect()
    gc.freeze()
    return command


def serve(listener: socket.socket, started_with: Mapping[str, str], command: Command) -> None:
    """Fork a child for each client, and tell a client how its child ended if that did not.

    Args:
        listener: A listening Unix socket.
        started_with: The environment in which everything was imported.
        command: halfscale's command line.
    """
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    running: dict[int, tuple[ForkProcess, socket.socket]] = {}
    while True:
        ready = multiprocessing.connection.wait([listener, *running])
        for ended in [one for one in ready if one in running]:
            _see_off(ended, *running.pop(ended))
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        if not _is_own(connection):
            connection.close()
            continue
        others = [listener, *(other for _, other in running.values())]
        process = multiprocessing.get_context("fork").Process(
            target=_run_child, args=(connection, others, started_with, command)
        )
        process.start()
        running[_open_process(process)] = process, connection


def _open_process(process: ForkProcess) -> int:
    """A descriptor that is ready when a child has ended.

    Its own sentinel is ready only when all that it has forked, such as a loader's workers, has
    ended as well; an old kernel (before Linux 5.3) has nothing better.
    """
    try:
        return os.pidfd_open(process.pid or 0)
    except OSError:
        return os.dup(process.sentinel)


def _see_off(descriptor: int, process: ForkProcess, connection: socket.socket) -> None:
    """Let a client go whose child has ended; the child's own answer, if any, came first."""
    process.join()
    os.close(descriptor)
    code = process.exitcode or 0
    if code:
        _answer(connection, f"exit {code}" if code > 0 else f"signal {-code}")
    connection.close()
    process.close()


def _is_own(connection: socket.socket) -> bool:
    """Whether the client belongs to this user: the socket's mode says so already."""
    return _ask_client(connection)[1] == os.getuid()


def _ask_client(connection: socket.socket) -> tuple[int, int, int]:
    """The client's process, user and group, from the kernel."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    process, user, group = struct.unpack("3i", credentials)
    return process, user, group


def _answer(connection: socket.socket, text: str) -> None:
    with suppress(OSError):  # the client is gone
        connection.sendall(f"{text}\n".encode())


def _run_child(
    connection: socket.socket,
    others: list[socket.socket],
    started_with: Mapping[str, str],
    command: Command,
) -> None:
    """Be the process that a client asks for."""
    for other in others:
        other.close()
    try:
        request = receive(connection)
    except (OSError, ValueError) as error:
        _answer(connection, f"cold it could not read the request: {error}")
        return
    if difference := find_difference(request, started_with):
        _answer(connection, f"cold it was started with another {difference}")
        return
    _end_with_client(connection)
    try:
        _look_like(request, connection)
    except OSError as error:
        _answer(connection, f"cold it cannot take the client's place: {error}")
        return
    # Those of the imports are the parent's; those of the job are to run, as in a cold process.
    atexit._clear()
    status = _run_command(command, request.arguments)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    _answer(connection, f"exit {status}")


def receive(connection: socket.socket) -> Request:
    """Read a client's request.

    Raises:
        OSError: If it does not come in time.
        ValueError: If it is none.
    """
    connection.settimeout(_PATIENCE)
    header, descriptors, _, _ = socket.recv_fds(connection, HEADER, 3)
    length = int.from_bytes(header, "big")
    content = b""
    while len(content) < length and (part := connection.recv(length - len(content))):
        content += part
    connection.settimeout(None)
    if len(descriptors) != 3 or len(content) != length:
        raise ValueError("it is not whole")
    folder, installation, count, *rest = [os.fsdecode(part) for part in content.split(b"\0")]
    arguments, variables = rest[: int(count)], rest[int(count) :]
    environment = {name: value for name, _, value in (text.partition("=") for text in variables)}
    return Request(folder, installation, arguments, environment, descriptors)


def find_difference(request: Request, started_with: Mapping[str, str]) -> str | None:
    """What of the client's process this one cannot become any more; None if nothing is."""
    if request.installation != sys.prefix:
        return f"Python, {sys.prefix}"
    for name in sorted({*request.environment, *started_with} - MAY_DIFFER):
        if request.environment.get(name) != started_with.get(name):
            return f"environment variable {name}"
    return None


def _end_with_client(connection: socket.socket) -> None:
    """End this process when its client ends.

    What the job forks must not hold the connection, since its end tells the client of the job's.
    """

    def watch() -> None:
        with suppress(OSError):
            connection.recv(1)
        os._exit(75)

    threading.Thread(target=watch, daemon=True, name="client-watch").start()
    os.register_at_fork(after_in_child=connection.close)


def _look_like(request: Request, connection: socket.socket) -> None:
    """Take over the client's folder, environment, streams, arguments and process group."""
    with suppress(OSError):  # Ctrl-Z, say, is for the whole group
        os.setpgid(0, os.getpgid(_ask_client(connection)[0]))
    for number, descriptor in enumerate(request.descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.folder)
    for name in MAY_DIFFER:
        _set_variable(name, request.environment.get(name))
    tempfile.tempdir = None
    sys.argv = ["halfscale", *request.arguments]


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _run_command(command: Command, arguments: list[str]) -> int:
    """Run one of halfscale's commands, and return the exit status that Python would give it."""
    try:
        command(arguments, prog_name="halfscale")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # as the interpreter does
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
