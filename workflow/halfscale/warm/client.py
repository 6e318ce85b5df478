"""Hand a job over to the warm worker and wait for its exit status.

Every training job starts with this, so it does without ``socket``, ``pathlib`` and ``json``: to
import them takes longer than all that it does.
"""

from __future__ import annotations

import _socket
import os
import sys

ADDRESS = "HALFSCALE_WARM_SOCKET"
"""The environment variable that holds the path of the parent's socket."""

COMMANDS = ("train", "probe-job")
"""The commands that a warm worker runs: those that a workflow has many of."""

HEADER = 8
"""Bytes of a request's length, which go before it."""


def hand_over(arguments: list[str]) -> int | None:
    """Let the warm worker run a command of halfscale's, as if this process did.

    Args:
        arguments: The command and its options.

    Returns:
        The command's exit status; None if it is to be run here. If a worker was to be had and could
        not do it, standard output says why.
    """
    address = os.environ.get(ADDRESS)
    if not address or not arguments or arguments[0] not in COMMANDS:
        return None
    try:
        word, _, rest = _ask(address, arguments).partition(" ")
    except OSError as error:
        word, rest = "cold", f"{error.strerror or error}"
    except KeyboardInterrupt:
        return 130
    if word == "exit":
        return int(rest)
    if word == "signal":
        return _fail(arguments, int(rest))
    print(f"no warm worker: {rest or 'it is gone'}; this process does the work", flush=True)
    return None


def _ask(address: str, arguments: list[str]) -> str:
    """Send a request and wait for the end of the job's process.

    Returns:
        The first line of the answer; empty if the worker is gone without one.
    """
    request = encode(os.getcwd(), sys.prefix, arguments, os.environ)  # noqa: PTH109 - no pathlib either
    descriptors = b"".join(n.to_bytes(4, sys.byteorder) for n in (0, 1, 2))
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(address)
    header = len(request).to_bytes(HEADER, "big")
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)
    connection.sendmsg([header], [rights])
    connection.sendall(request)
    answer = b""
    while part := connection.recv(4096):
        answer += part
    return answer.decode().partition("\n")[0]


def _fail(arguments: list[str], number: int) -> int:
    """Say in log and terminal which job a signal ended; the exit status that a shell gives it."""
    from signal import Signals

    from halfscale.cli import describe_subject

    options = dict(zip(arguments[1::2], arguments[2::2], strict=False))
    subject = describe_subject({"spec": options.get("--spec")})
    hint = "; the system does that when memory runs out" if number == Signals.SIGKILL else ""
    name = Signals(number).name
    line = f"halfscale {arguments[0]} failed: {subject}{name} ended its process{hint}"
    print(line, flush=True)
    print(line, file=sys.stderr)
    return 128 + number


def encode(
    folder: str, installation: str, arguments: list[str], environment: os._Environ[str]
) -> bytes:
    """A request: NUL between its parts, which can stand in none of them."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    parts = [folder, installation, str(len(arguments)), *arguments, *variables]
    return b"\0".join(map(os.fsencode, parts))
