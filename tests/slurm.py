"""A real SLURM on this machine, for tests: munged, slurmctld and a slurmd for each node, with all their files in one
temporary folder and on free ports. `local_slurm(nodes=2)` emulates two nodes on localhost."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
SBIN = "/usr/sbin:/sbin"
PARTITION = "main"


class CannotStart(Exception):
    """Why there is no SLURM on this machine; a test is skipped with it."""


@dataclass(frozen=True)
class LocalSlurm:
    """SLURM under way. Its commands find it through `SLURM_CONF`, which `environment` holds."""

    folder: Path
    environment: dict[str, str]

    def call(self, *command: str) -> str:
        """The output of a SLURM command."""
        return subprocess.run(
            command, env=os.environ | self.environment, check=True, capture_output=True, text=True
        ).stdout

    def queue(self) -> dict[str, str]:
        """The jobs that wait or run, with their state."""
        lines = self.call("squeue", "--noheader", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def logs(self) -> str:
        """What the daemons said, for the message of a failing test."""
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in self.folder.glob("*.log"))


@contextmanager
def local_slurm(nodes: int = 1, cpus: int | None = None) -> Iterator[LocalSlurm]:
    """A cluster of so many nodes, each with `cpus` cores (those of this machine unless given)."""
    path = os.environ.get("PATH", "") + ":" + SBIN
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        raise CannotStart(f"{', '.join(missing)}: not installed (Debian: slurm-wlm and munge)")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket has at most 107 characters
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    slurm = LocalSlurm(folder, environment)
    names = [f"n{i + 1}" for i in range(nodes)]
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / f"{Path(command[0]).name}-{len(daemons)}.log").open("wb") as log:
            daemons.append(
                subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True)
            )

    try:
        _write_configuration(folder, names, cpus or os.cpu_count() or 1)
        key, files = (
            folder / "munge.key",
            {"socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"},
        )
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        start(
            "munged", "--force", "--foreground", f"--key-file={key}", *(f"--{k}={folder / v}" for k, v in files.items())
        )
        _wait(lambda: (folder / "munge.socket").exists(), slurm, daemons)
        start("slurmctld", "-D")
        for name in names:
            start("slurmd", "-D", "-N", name)
        _wait(lambda: _idle(slurm) == set(names), slurm, daemons)
        yield slurm
    finally:
        if len(daemons) > 1:
            with_jobs = os.environ | environment
            subprocess.run(["scancel", "--partition", PARTITION, "--signal=KILL"], env=with_jobs, capture_output=True)
            subprocess.run(["scancel", "--partition", PARTITION], env=with_jobs, capture_output=True)
        for process in reversed(daemons):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _write_configuration(folder: Path, names: list[str], cpus: int) -> None:
    ports = _free_ports(1 + len(names))
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": "localhost(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmUser": _user(),
        "SlurmdUser": _user(),
        "AuthType": "auth/munge",
        # A requeued job waits until its old credential has expired; two minutes are too long for a test.
        "AuthInfo": f"socket={folder / 'munge.socket'},cred_expire=5",
        "CryptoType": "crypto/munge",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "MpiDefault": "none",
        "ReturnToService": "2",
        "KillWait": "5",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool-%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    # `Boards=1` and so on from CPUs alone: the real topology of a machine with two emulated nodes would be refused.
    lines += [
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000"
        for name, port in zip(names, ports[1:], strict=True)
    ]
    lines.append(f"PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    (folder / "state").mkdir()
    for name in names:
        (folder / f"spool-{name}").mkdir()
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def _idle(slurm: LocalSlurm) -> set[str]:
    try:
        lines = slurm.call("sinfo", "--noheader", "--Node", "--format=%N %T").split("\n")
    except subprocess.CalledProcessError:
        return set()
    return {name for name, _, state in (line.partition(" ") for line in lines) if state == "idle"}


def _wait(ready, slurm: LocalSlurm, daemons: list[subprocess.Popen[bytes]], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline or any(process.poll() is not None for process in daemons):
            raise CannotStart(f"SLURM does not start here:\n{slurm.logs()}")
        time.sleep(0.1)
