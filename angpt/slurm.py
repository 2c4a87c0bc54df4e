"""Runs as jobs of a SLURM cluster, through submitit: queue one, ask which are there."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from angpt.errors import UserError

WARNING = signal.SIGUSR2
"""What submitit asks SLURM to send before the time limit, or at pre-emption where the cluster does so."""
WARNING_SECONDS = 120
TIME_LIMITS = 1000
"""How often a job may put itself back into the queue at its time limit. Each time it has made progress."""


@dataclass(frozen=True)
class SlurmConfig:
    """What is asked of SLURM for each run. sbatch's own variables (SBATCH_ACCOUNT and others) hold as well."""

    partition: str | None = None
    """Partition to queue in; the cluster's default unless given."""
    hours: float = 24.0
    """Time limit of a job. A run that needs longer saves, goes back into the queue and resumes."""
    nodes: int = 1
    """Machines of a job."""
    gpus: int = 1
    """GPUs on each machine of a job, with a process for each; 0 trains on the CPU, with one process on each."""
    cpus: int = 8
    """Cores on each machine."""
    memory_gb: float | None = None
    """Memory of each machine; the partition's default unless given."""
    account: str | None = None
    """Account to charge; the user's default unless given."""
    qos: str | None = None
    """Quality of service; the account's default unless given."""
    at_most: int = 64
    """Jobs in the queue at a time."""
    setup: tuple[str, ...] = ()
    """Shell commands before the run, such as `module load cuda`."""
    extra: dict[str, str] = field(default_factory=dict)
    """Any other options of sbatch by their long names, such as constraint a100; in a file {constraint = "a100"}."""

    def __post_init__(self) -> None:
        limits = {"hours": 0.1, "nodes": 1, "gpus": 0, "cpus": 1, "at_most": 1, "memory_gb": 0.1}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise UserError(f"slurm.{name} must be at least {least:g} and finite, not {value:g}")

    @property
    def per_node(self) -> int:
        """Processes on each machine."""
        return max(1, self.gpus)

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def threads(self) -> int:
        """Cores of a process."""
        return max(1, self.cpus // self.per_node)


class Resumable:
    """A task in a job. Warned of its end, it lets the task save, goes back into the queue, and is called again there.

    The task listens to SIGTERM and returns whether it is done. SIGTERM without a warning is SLURM's (scancel,
    pre-emption): what becomes of the job is for SLURM to say.
    """

    def __init__(self, task: Callable[[], bool]) -> None:
        self.task = task

    def __call__(self) -> None:
        requeue = signal.getsignal(WARNING)  # submitit's handler
        warned = False

        def warn(*_: Any) -> None:
            nonlocal warned
            warned = True
            signal.raise_signal(signal.SIGTERM)

        signal.signal(WARNING, warn)
        os.environ |= rank_environment()
        done = self.task()
        signal.signal(WARNING, requeue)
        if warned and not done:
            assert callable(requeue)
            requeue(WARNING, None)  # ends this process

    def checkpoint(self) -> Any:
        """What submitit calls again after a requeue: the same, since the state of a run is in its folder."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def submit(task: Callable[[], bool], logs: Path, name: str, config: SlurmConfig) -> str:
    """Queue a task (see `Resumable`) as a job of its own; the id of the job. Its output goes to the folder `logs`."""
    import submitit

    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise UserError(f"there is no {program} here: --slurm works on a machine that submits to a SLURM cluster")
    executor = submitit.SlurmExecutor(logs.resolve(), max_num_timeout=TIME_LIMITS)
    parameters: dict[str, Any] = {
        "job_name": re.sub(r"[^\w.+-]", "-", name),
        "time": round(60 * config.hours),
        "nodes": config.nodes,
        "ntasks_per_node": config.per_node,
        "cpus_per_task": config.threads,
        "signal_delay_s": WARNING_SECONDS,
        "wckey": None,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "mem": None if config.memory_gb is None else f"{round(1024 * config.memory_gb)}M",
        "gpus_per_node": config.gpus or None,
        "setup": list(config.setup) or None,
        # Without this srun would take one core of those that sbatch was given (SLURM 22.05 and later).
        "srun_args": [f"--cpus-per-task={config.threads}", "--kill-on-bad-exit=1"],
        "additional_parameters": {"requeue": True, **config.extra},
    }
    executor.update_parameters(
        **{key: value for key, value in parameters.items() if value is not None or key == "wckey"}
    )
    try:
        return str(executor.submit(Resumable(task)).job_id)
    except submitit.core.utils.FailedJobError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"SLURM does not take the job {name}: {reason or 'it gives no reason'}") from error


def rank_environment() -> dict[str, str]:
    """What torchrun would tell each process of a job that has several; nothing for a job of one process."""
    environment = os.environ
    if int(environment.get("SLURM_NTASKS", "1")) == 1:
        return {}
    job, attempt = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_RESTART_COUNT", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "MASTER_ADDR": _first_address(environment["SLURM_JOB_NODELIST"]),
        "MASTER_PORT": str(20_000 + (7 * job + attempt) % 10_000),  # another for each attempt, below those of clients
    }


def _first_address(nodes: str) -> str:
    """Where the first of a list of nodes is reached: SLURM's own names need not be known to the network."""

    def ask(*command: str) -> str:
        return subprocess.run(["scontrol", *command], capture_output=True, text=True, check=True, timeout=60).stdout

    try:
        name = ask("show", "hostnames", nodes).split()[0]
        found = re.search(r"NodeAddr=(\S+)", ask("--oneliner", "show", "node", name))
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise UserError(f"SLURM does not say where the nodes {nodes} are: {error}") from error
    return found[1] if found else name


def in_queue() -> dict[str, str] | None:
    """The jobs of this user that wait or run, with their state; None where SLURM does not answer just now."""
    command = ["squeue", "--noheader", f"--user={os.getuid()}", "--format=%i %T"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return {job: state for job, _, state in (line.strip().partition(" ") for line in lines)}


def cancelled(job: str) -> bool:
    """Whether somebody has cancelled a job; False also where SLURM does not remember it."""
    try:
        command = ["scontrol", "--oneliner", "show", "job", job]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return "JobState=CANCELLED" in text
