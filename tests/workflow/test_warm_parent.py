"""A real warm parent and real clients: the same bytes as a cold process, and every way to end."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from halfscale.plan import Plan, RunSpec
from halfscale.planner import build_plan
from halfscale.sources import PACKAGE
from halfscale.warm.client import ADDRESS

from .driver import is_gone

THREADS = ("OMP", "GOTO", "OPENBLAS", "MKL", "VECLIB_MAXIMUM", "NUMEXPR")

OWNER = """
import os, sys
from halfscale.plan import Plan
from halfscale.warm import keeper
keeper.offer_worker(Plan.model_validate_json(sys.argv[1]), is_main_process=True)
print(os.environ[%r], flush=True)
sys.stdin.read()
"""

MOODY = '''
"""A workload that does to its process what the parameter says."""
import atexit, os, resource, time
import torch
from halfscale.workloads.binary import build as build_binary

def build(seed, device, *, act: str = ""):
    if act == "abort":
        os.abort()
    if act == "vanish":
        os._exit(3)
    if act == "leave a helper":
        if os.fork() == 0:
            time.sleep(200)
        os.abort()
    if act == "say at exit":
        atexit.register(print, "said at exit")
    if act == "wait":
        time.sleep(200)
    if act == "disturb":
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        os.environ["DISTURBED"] = "1"
        os.nice(5)
    if act == "look":
        variables = map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "DISTURBED"))
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        print("sees", *variables, os.nice(0), files > 64, torch.get_default_dtype())
    return build_binary(seed, device)
'''


def plan(threads: int = 1, act: str = "", folder: Path | None = None) -> Plan:
    workloads: dict[str, object] = {"digits": {"steps": 8}}
    if folder:
        entry = f"{folder / 'moody.py'}:build"
        workloads = {"moody": {"entry": entry, "steps": 3, "act": act}}
    return build_plan(
        {
            "configurations": {"high": {"init_scale": 2**24, "growth_interval": 3}},
            "workloads": workloads,
            "seeds": [0],
            "device": "cpu",
            "threads": threads,
        }
    )


def run_of(plan: Plan) -> RunSpec:
    return plan.run(next(iter(plan.workloads)), "high", 0)


@dataclass
class Owner:
    """A process that keeps a warm worker, as Snakemake does; it ends with its standard input."""

    process: subprocess.Popen[str]
    socket: Path
    environment: dict[str, str]

    @property
    def parents(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def client(
        self, *arguments: str, log: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        with log.open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "halfscale", *arguments],
                env=self.environment | {ADDRESS: str(self.socket)} | (environment or {}),
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
            )

    def train(
        self, spec: RunSpec, folder: Path, environment: dict[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Train a run; its exit status, log and standard error."""
        folder.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        arguments = ["train", "--spec", spec.canonical_json(), "--folder", str(folder)]
        client = self.client(*arguments, log=log, environment=environment)
        _, errors = client.communicate(timeout=120)
        return client.returncode, log.read_text(encoding="utf-8"), errors


def start_owner(threads: int = 1) -> Owner:
    inherited = {key: value for key, value in os.environ.items() if key != "HALFSCALE_OWNER_PID"}
    environment = inherited | {
        "PYTHONPATH": str(PACKAGE.parent),
        "CUDA_VISIBLE_DEVICES": "",
        **{f"{name}_NUM_THREADS": str(threads) for name in THREADS if name != "VECLIB_MAXIMUM"},
        "VECLIB_MAXIMUM_THREADS": str(threads),
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", OWNER % ADDRESS, plan(threads).canonical_json()],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    socket = Path(process.stdout.readline().strip())
    return Owner(process, socket, {**environment, ADDRESS: str(socket)})


def end(owner: Owner) -> None:
    owner.process.communicate("", timeout=20)


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    """A worker for the tests that leave it as it is."""
    owner = start_owner()
    yield owner
    end(owner)


Start = Callable[..., Owner]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a worker of the test's own; it ends with the test, whatever that does."""
    started = []

    def start_one(threads: int = 1) -> Owner:
        started.append(start_owner(threads))
        return started[-1]

    yield start_one
    for owner in started:
        owner.process.kill()
        owner.process.communicate()


@pytest.fixture
def moody(tmp_path: Path) -> Path:
    (tmp_path / "moody.py").write_text(MOODY, encoding="utf-8")
    return tmp_path


def content(folder: Path) -> tuple[dict[str, object], dict[str, list[object]]]:
    """What a run left, without its times and what depends on them."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for name in ("seconds", "trace_sha256", "checksum"):
        record.pop(name)
    trace = pq.read_table(folder / "trace.parquet").drop_columns(["seconds"])
    return record, {name: [repr(v) for v in values] for name, values in trace.to_pydict().items()}


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_cold(log: str) -> bool:
    return log.startswith("no warm worker: ")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_warm_job_leaves_what_a_cold_one_leaves(
    start: Start, tmp_path: Path, threads: int
) -> None:
    owner = start(threads)
    spec = run_of(plan(threads))
    warm = owner.train(spec, tmp_path / "warm")
    cold = owner.train(spec, tmp_path / "cold", {ADDRESS: ""})
    assert warm == cold
    assert warm[0] == 0
    assert not is_cold(warm[1])
    assert content(tmp_path / "warm") == content(tmp_path / "cold")


def test_the_socket_is_its_users_alone_and_goes_with_the_worker(
    start: Start, tmp_path: Path
) -> None:
    owner = start()
    mode, folder_mode = (
        stat.S_IMODE(path.stat().st_mode) for path in (owner.socket, owner.socket.parent)
    )
    assert (mode, folder_mode) == (0o600, 0o700)
    assert owner.parents == []  # none before the first job
    end(owner)
    assert not owner.socket.parent.exists()


def test_a_job_that_fails_fails_alike(owner: Owner, tmp_path: Path) -> None:
    spec = run_of(plan())
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / "below"
    arguments = ["train", "--spec", spec.canonical_json(), "--folder", str(blocked)]
    ends = []
    for name, environment in (("warm", {}), ("cold", {ADDRESS: ""})):
        client = owner.client(*arguments, log=tmp_path / name, environment=environment)
        _, errors = client.communicate(timeout=120)
        ends.append((client.returncode, errors, (tmp_path / name).read_text().splitlines()[-1]))
    assert ends[0] == ends[1]
    assert ends[0][0] == 1
    assert "workload=digits configuration=high seed=0" in ends[0][1]


def test_wrong_arguments_are_refused_alike(owner: Owner, tmp_path: Path) -> None:
    ends = []
    for environment in ({}, {ADDRESS: ""}):
        client = owner.client("train", "--speck", log=tmp_path / "log", environment=environment)
        ends.append((client.communicate(timeout=120)[1], client.returncode))
    assert ends[0] == ends[1]
    assert ends[0][1] == 2


def test_a_crash_is_one_jobs_and_says_which_signal(owner: Owner, moody: Path) -> None:
    crashed = owner.train(run_of(plan(act="abort", folder=moody)), moody / "crash")
    assert crashed[0] == 128 + signal.SIGABRT
    run = "workload=moody configuration=high seed=0"
    assert f"halfscale train failed: {run}: SIGABRT ended its process" in crashed[2]
    status, log, _ = owner.train(run_of(plan(folder=moody)), moody / "next")
    assert status == 0
    assert not is_cold(log)


def test_a_job_that_ends_its_process_itself_is_not_run_again(owner: Owner, moody: Path) -> None:
    status, log, _ = owner.train(run_of(plan(act="vanish", folder=moody)), moody / "run")
    assert status == 3
    assert "no warm worker" not in log


def test_a_crash_is_told_at_once_though_a_helper_of_the_job_lives_on(
    owner: Owner, moody: Path
) -> None:
    spec = run_of(plan(act="leave a helper", folder=moody)).canonical_json()
    arguments = ("train", "--spec", spec, "--folder", str(moody / "run"))
    client = owner.client(*arguments, log=moody / "log")
    try:
        assert client.wait(60) == 128 + signal.SIGABRT  # the helper sleeps for 200 s
    finally:
        for left in [p for p in psutil.process_iter() if is_a_fork_of(owner, p)]:
            left.kill()
    client.communicate()


def is_a_fork_of(owner: Owner, process: psutil.Process) -> bool:
    """Whether a process has the parent's command and another parent than the owner."""
    try:
        (parent,) = owner.parents
        return process.cmdline() == parent.cmdline() and process.ppid() != owner.process.pid
    except psutil.Error:
        return False


def test_what_is_to_run_at_exit_runs(owner: Owner, moody: Path) -> None:
    status, log, _ = owner.train(run_of(plan(act="say at exit", folder=moody)), moody / "run")
    assert status == 0
    assert log.endswith("said at exit\n")


def test_a_job_is_in_the_process_group_of_its_client(owner: Owner, moody: Path) -> None:
    client, job = waiting(owner, moody)
    assert os.getpgid(job.pid) == os.getpgid(client.pid)
    client.kill()
    client.communicate()


def test_what_one_job_does_to_its_process_reaches_no_other(owner: Owner, moody: Path) -> None:
    assert owner.train(run_of(plan(act="disturb", folder=moody)), moody / "first")[0] == 0
    looking = run_of(plan(act="look", folder=moody))
    _, log, _ = owner.train(looking, moody / "second", {"CUDA_VISIBLE_DEVICES": "GPU-1234"})
    assert not is_cold(log)
    assert f"sees GPU-1234 None {os.nice(0)} True torch.float32" in log


def test_a_variable_that_imports_may_read_makes_the_job_cold(owner: Owner, tmp_path: Path) -> None:
    spec = run_of(plan())
    status, log, _ = owner.train(spec, tmp_path / "run", {"MKL_CBWR": "COMPATIBLE"})
    assert status == 0
    assert log.startswith(
        "no warm worker: it was started with another environment variable MKL_CBWR;"
    )


def waiting(owner: Owner, moody: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A client whose job waits, and that job's process."""
    spec = run_of(plan(act="wait", folder=moody))
    log = moody / "waiting.log"
    folder = str(moody / "waiting")
    client = owner.client("train", "--spec", spec.canonical_json(), "--folder", folder, log=log)
    wait_until(lambda: log.read_text() != "")
    assert not is_cold(log.read_text())
    (parent,) = owner.parents
    return client, parent.children()[0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_job_ends_with_its_client(owner: Owner, moody: Path, how: signal.Signals) -> None:
    client, job = waiting(owner, moody)
    client.send_signal(how)
    client.communicate(timeout=20)
    assert client.returncode != 0
    wait_until(lambda: is_gone(job))


def test_a_job_that_is_killed_fails_its_client(owner: Owner, moody: Path) -> None:
    client, job = waiting(owner, moody)
    job.kill()
    _, errors = client.communicate(timeout=20)
    assert client.returncode == 137
    assert "SIGKILL ended its process; the system does that when memory runs out" in errors


def test_jobs_outlive_a_killed_parent_and_after_three_they_are_cold(
    start: Start, tmp_path: Path, moody: Path
) -> None:
    owner = start()
    spec = run_of(plan())
    client, job = waiting(owner, moody)
    for number in range(3):
        status, log, _ = owner.train(spec, tmp_path / f"warm{number}")
        assert status == 0
        assert not is_cold(log)
        (parent,) = owner.parents
        parent.kill()
        wait_until(lambda: not owner.parents)
    assert not is_gone(job)
    status, log, _ = owner.train(spec, tmp_path / "cold")
    assert status == 0
    assert is_cold(log)
    assert content(tmp_path / "cold") == content(tmp_path / "warm0")
    client.kill()
    client.communicate()
    wait_until(lambda: is_gone(job))
    end(owner)


def test_a_killed_owner_takes_the_parent_along(start: Start, tmp_path: Path) -> None:
    owner = start()
    assert owner.train(run_of(plan()), tmp_path / "run")[0] == 0
    (parent,) = owner.parents
    owner.process.kill()
    owner.process.communicate()
    wait_until(lambda: is_gone(parent))
    wait_until(lambda: not owner.socket.parent.exists())


def test_an_owner_that_ends_while_torch_is_imported_takes_the_parent_along(
    start: Start, tmp_path: Path
) -> None:
    owner = start()
    client = owner.client("train", log=tmp_path / "log")
    wait_until(lambda: owner.parents)
    (parent,) = owner.parents
    end(owner)
    wait_until(lambda: is_gone(parent))
    client.kill()
    client.communicate()


def test_the_parent_asks_cuda_for_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, torch\n"
        "def asked(*arguments, **keywords):\n"
        "    raise AssertionError('CUDA was asked')\n"
        "torch.cuda._lazy_init = torch.cuda.init = asked\n"
        "for name in ('_cuda_init', '_cuda_getDeviceCount', '_cuda_isInBadFork'):\n"
        "    setattr(torch._C, name, asked)\n"
        "torch._C._cuda_getCurrentRawStream = torch._C._cuda_getArchFlags = asked\n"
        "torch.version.cuda = '13.0'\n"
        "torch.cuda._is_compiled = lambda: True\n"
        "from halfscale.warm import parent\n"
        "parent.import_everything()\n"
        "print('imported', torch.cuda.is_initialized())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "imported False\n", done.stderr
