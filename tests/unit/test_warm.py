"""The two ends of a warm worker's socket, without a worker: requests, answers, what is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfscale.plan import Execution
from halfscale.planner import build_plan
from halfscale.warm import keeper
from halfscale.warm.client import ADDRESS, COMMANDS, HEADER, encode, hand_over
from halfscale.warm.parent import MAY_DIFFER, Request, find_difference, receive

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
NAMES = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1)


@given(folder=TEXT, arguments=st.lists(TEXT), environment=st.dictionaries(NAMES, TEXT))
def test_a_request_arrives_as_it_was_sent(
    folder: str, arguments: list[str], environment: dict[str, str]
) -> None:
    near, far = socket.socketpair()
    with near, far:
        content = encode(folder, sys.prefix, arguments, environment)  # type: ignore[arg-type]
        header = len(content).to_bytes(HEADER, "big")
        socket.send_fds(near, [header], [0, 1, 2])
        sender = threading.Thread(target=near.sendall, args=(content,))
        sender.start()
        request = receive(far)
        sender.join()
    for descriptor in request.descriptors:
        os.close(descriptor)
    assert (request.folder, request.installation) == (folder, sys.prefix)
    assert request.arguments == arguments
    assert request.environment == environment


def test_a_request_that_is_cut_off_is_refused() -> None:
    near, far = socket.socketpair()
    with near, far:
        socket.send_fds(near, [(100).to_bytes(HEADER, "big")], [0, 1, 2])
        near.sendall(b"too short")
        near.close()
        with pytest.raises(ValueError, match="not whole"):
            receive(far)


def ask(environment: dict[str, str], installation: str = sys.prefix) -> str | None:
    started_with = {"PATH": "/bin", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    request = Request("/", installation, [], environment, [])
    return find_difference(request, started_with)


def test_a_job_that_was_started_as_the_worker_was_is_no_different() -> None:
    assert ask({"PATH": "/bin", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}) is None


@pytest.mark.parametrize("name", sorted(MAY_DIFFER))
def test_what_nothing_reads_at_import_may_differ(name: str) -> None:
    assert ask({"PATH": "/bin", "LANG": "C.UTF-8", "TMPDIR": "/tmp", name: "other"}) is None


def test_a_variable_that_is_changed_missing_or_new_is_named() -> None:
    same = {"PATH": "/bin", "LANG": "C.UTF-8"}
    assert ask({**same, "LANG": "C"}) == "environment variable LANG"
    assert ask({"PATH": "/bin"}) == "environment variable LANG"
    assert ask({**same, "OMP_NUM_THREADS": "2"}) == "environment variable OMP_NUM_THREADS"


def test_another_python_is_named() -> None:
    assert ask({}, "/elsewhere") == f"Python, {sys.prefix}"


@contextmanager
def answering(folder: Path, answer: bytes) -> Iterator[str]:
    """A socket that takes one request and gives one answer."""
    listener = socket.socket(socket.AF_UNIX)
    address = str(folder / "socket")
    listener.bind(address)
    listener.listen()
    listener.settimeout(10)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            request = receive(connection)
            for descriptor in request.descriptors:
                os.close(descriptor)
            connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        thread.join()
        listener.close()


@pytest.mark.parametrize("status", [0, 1, 75])
def test_the_client_ends_as_the_worker_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with answering(tmp_path, f"exit {status}\n".encode()) as address:
        monkeypatch.setenv(ADDRESS, address)
        assert hand_over(["train", "--spec", "x"]) == status


def test_a_job_that_a_signal_ended_is_a_failure_in_log_and_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(tmp_path, b"signal 9\n") as address:
        monkeypatch.setenv(ADDRESS, address)
        spec = '{"workload": "w", "arm": "a", "seed": 3}'
        assert hand_over(["train", "--spec", spec, "--folder", "f"]) == 137
    said = capsys.readouterr()
    run = "workload=w configuration=a seed=3"
    assert f"halfscale train failed: {run}: SIGKILL ended its process" in said.out
    assert said.err == said.out


@pytest.mark.parametrize(
    ("answer", "note"), [(b"cold it has another X\n", "it has another X"), (b"", "it is gone")]
)
def test_without_an_exit_status_the_client_works_itself_and_notes_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: bytes,
    note: str,
) -> None:
    with answering(tmp_path, answer) as address:
        monkeypatch.setenv(ADDRESS, address)
        assert hand_over(["train"]) is None
    assert capsys.readouterr().out == f"no warm worker: {note}; this process does the work\n"


def test_a_missing_socket_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADDRESS, str(tmp_path / "nowhere"))
    assert hand_over(["train"]) is None
    assert "no warm worker: No such file or directory" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--version"], ["tables", "--plan", "x"]])
def test_other_commands_never_ask(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    monkeypatch.setenv(ADDRESS, str(tmp_path / "nowhere"))
    assert hand_over(arguments) is None
    assert capsys.readouterr().out == ""


def test_the_commands_that_a_worker_runs_are_jobs_of_halfscale() -> None:
    from typer.main import get_command

    from halfscale.cli import app

    assert set(COMMANDS) <= set(get_command(app).commands)  # type: ignore[attr-defined]


def test_the_client_imports_nothing_that_takes_time() -> None:
    program = "import sys, halfscale.warm.client; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert not {"socket", "json", "pathlib", "subprocess", "typer", "torch"} & set(output.split())


SMALL = {"configurations": {"default": {}}, "workloads": {"binary": {}}, "device": "cpu"}


@pytest.mark.parametrize(("wanted", "main"), [(False, True), (True, False)])
def test_no_worker_is_offered_where_it_is_off_or_a_cluster_runs_the_job(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, main: bool
) -> None:
    monkeypatch.setenv(ADDRESS, "/of/another/workflow")
    keeper.offer_worker(build_plan({**SMALL, "warm_workers": wanted}), is_main_process=main)
    assert ADDRESS not in os.environ


def test_a_folder_that_holds_no_socket_is_said_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A socket's path has at most 107 bytes.
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.delenv(ADDRESS, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    keeper.offer_worker(build_plan(SMALL), is_main_process=True)
    assert "halfscale: no warm workers: " in capsys.readouterr().err
    assert ADDRESS not in os.environ


def test_warm_workers_change_neither_plan_nor_runs() -> None:
    on, off = (build_plan({**SMALL, "warm_workers": value}) for value in (True, False))
    assert on.execution == Execution(warm_workers=True)
    assert off.execution == Execution(warm_workers=False)
    assert on.canonical_json() == off.canonical_json()
    assert [run.digest for run in on.runs()] == [run.digest for run in off.runs()]
