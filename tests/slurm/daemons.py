"""A real Slurm for the tests: its daemons on loopback, their state in one folder."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "munged", "runuser")
CONF = Path(__file__).with_name("slurm.conf")


@dataclass(frozen=True)
class SlurmJob:
    """What Slurm says of a job; it remembers a job for five minutes after its end."""

    number: str
    state: str
    name: str
    comment: str
    asked: str
    start: str
    end: str


@dataclass(frozen=True)
class Slurm:
    """The daemons' folder, and how their clients are called."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def call(
        self, *words: str, cwd: Path | None = None, environment: dict[str, str] | None = None
    ) -> str:
        """Run one of Slurm's commands; what it printed."""
        return subprocess.run(
            words,
            env=(os.environ if environment is None else environment) | self.environment,
            cwd=cwd,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def queue(self, folder: Path) -> list[str]:
        """The numbers of the jobs of a working folder that wait or run."""
        lines = self.call("squeue", "-h", "-o", "%A|%Z").splitlines()
        return [line.split("|")[0] for line in lines if line.endswith(f"|{folder}")]

    def jobs(self, folder: Path) -> list[SlurmJob]:
        """All jobs of a working folder, ended ones too."""
        found = []
        for line in self.call("scontrol", "show", "job", "-o").splitlines():
            fields = dict(re.findall(r"(\w+)=(\S*)", line))
            if fields.get("WorkDir") == str(folder):
                found.append(
                    SlurmJob(
                        number=fields["JobId"],
                        state=fields["JobState"],
                        name=fields["JobName"],
                        comment=fields.get("Comment", ""),
                        asked=fields.get("TresPerJob", ""),
                        start=fields["StartTime"],
                        end=fields["EndTime"],
                    )
                )
        return found


def missing() -> str | None:
    """Why no Slurm can be started here, or None."""
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"{', '.join(lacking)} not found; apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "slurmd must be started as root"


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Start munge, the controller and two nodes; stop them, and their jobs, at the end."""
    slurm = Slurm(folder)
    _configure(folder)
    try:
        _start(slurm)
        yield slurm
    finally:
        _stop(slurm)


def _configure(folder: Path) -> None:
    for name in ("munge", "state", "log", "bin"):
        (folder / name).mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    for path in (folder / "munge", key):
        shutil.chown(path, "munge", "munge")
    text = CONF.read_text().replace("FOLDER", str(folder))
    text = text.replace("HOST", socket.gethostname().split(".")[0])
    for number, port in enumerate(_free_ports(3)):
        text = text.replace(f"PORT{number}", str(port))
    conf = folder / "slurm.conf"
    conf.write_text(text)
    (folder / "gres.conf").write_text("NodeName=pretended Name=gpu File=/dev/null\n")
    (folder / "plugstack.conf").touch()
    # The executor for the steps of a job drops SLURM_CONF from what srun is given; a cluster has
    # its configuration in /etc/slurm.
    srun = folder / "bin" / "srun"
    srun.write_text(f'#!/bin/sh\nSLURM_CONF={conf} exec /usr/bin/srun "$@"\n')
    srun.chmod(0o755)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _start(slurm: Slurm) -> None:
    munge = slurm.folder / "munge"
    options = [
        f"--{name}={munge / value}"
        for name, value in (
            ("key-file", "key"),
            ("socket", "socket"),
            ("pid-file", "munged.pid"),
            ("log-file", "munged.log"),
            ("seed-file", "seed"),
        )
    ]
    slurm.call("runuser", "-u", "munge", "--", "munged", "--num-threads=2", *options)
    slurm.call("slurmctld", "-c")
    for node in ("plain", "pretended"):
        slurm.call("slurmd", "-c", "-N", node)
    deadline = time.monotonic() + 20
    while set(slurm.call("sinfo", "-h", "-N", "-o", "%T").split()) != {"idle"}:
        if time.monotonic() > deadline:
            logs = "".join(log.read_text() for log in (slurm.folder / "log").iterdir())
            raise RuntimeError(f"Slurm's nodes did not become idle:\n{logs[-3000:]}")
        time.sleep(0.1)


def _stop(slurm: Slurm) -> None:
    """Cancel what is left and stop the daemons that were started, by their process numbers."""
    folder = slurm.folder
    if (folder / "slurmctld.pid").exists():
        subprocess.run(["scancel", "--user=root"], env=os.environ | slurm.environment)
        deadline = time.monotonic() + 10
        with suppress(subprocess.CalledProcessError):  # the controller may have died
            while slurm.call("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.1)
    pids = [*folder.glob("slurmd-*.pid"), folder / "slurmctld.pid", folder / "munge" / "munged.pid"]
    processes = []
    for pid in pids:
        if pid.exists() and psutil.pid_exists(int(pid.read_text())):
            processes.append(psutil.Process(int(pid.read_text())))
            processes[-1].terminate()
    _, alive = psutil.wait_procs(processes, timeout=10)
    for process in alive:
        process.kill()
