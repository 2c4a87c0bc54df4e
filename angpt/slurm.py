"""Runs as jobs of a SLURM cluster, through submitit: submit a job, list the jobs in the queue."""

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
"""Signal that SLURM sends before the time limit, or at pre-emption if the cluster does so."""
WARNING_SECONDS = 120
TIME_LIMITS = 1000
"""Largest number of times that a job requeues itself at its time limit."""


@dataclass(frozen=True)
class SlurmConfig:
    """Resources of the SLURM job of each run. sbatch's own variables (SBATCH_ACCOUNT and others) apply as well."""

    partition: str | None = None
    """Partition to queue in; the cluster's default unless given."""
    hours: float = 24.0
    """Time limit of a job. A run that needs longer saves a checkpoint, is requeued and resumes."""
    nodes: int = 1
    """Machines per job."""
    gpus: int = 1
    """GPUs per machine, with one process each; 0 trains on the CPU, with one process per machine."""
    cpus: int = 8
    """Cores per machine."""
    memory_gb: float | None = None
    """Memory per machine; the partition's default unless given."""
    account: str | None = None
    """Account to charge; the user's default unless given."""
    qos: str | None = None
    """Quality of service; the account's default unless given."""
    at_most: int = 64
    """Largest number of jobs in the queue at a time."""
    setup: tuple[str, ...] = ()
    """Shell commands to run first, such as `module load cuda`."""
    extra: dict[str, str] = field(default_factory=dict)
    """Other options of sbatch by their long names, such as constraint a100; in a file {constraint = "a100"}."""

    def __post_init__(self) -> None:
        limits = {"hours": 0.1, "nodes": 1, "gpus": 0, "cpus": 1, "at_most": 1, "memory_gb": 0.1}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise UserError(f"slurm.{name} must be at least {least:g} and finite, not {value:g}")

    @property
    def per_node(self) -> int:
        """Processes per machine."""
        return max(1, self.gpus)

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def threads(self) -> int:
        """Cores per process."""
        return max(1, self.cpus // self.per_node)


class Resumable:
    """A task that survives the time limit of its job: warned, it saves, and the job is requeued and calls it again.

    The task must save and return at SIGTERM; it returns True if it is done. After a SIGTERM without a warning (scancel,
    pre-emption) the job does not requeue itself.
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
        """What submitit calls after a requeue: the same task, since the state of a run is in its folder."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def submit(task: Callable[[], bool], logs: Path, name: str, config: SlurmConfig) -> str:
    """Submit a task (see `Resumable`) as a job and return the job's id. Its output goes to the folder `logs`."""
    import submitit

    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise UserError(f"there is no {program} here; submit from a machine of a SLURM cluster")
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
        # Otherwise srun would use only one of the cores of the job (SLURM 22.05 and later).
        "srun_args": [f"--cpus-per-task={config.threads}", "--kill-on-bad-exit=1"],
        "additional_parameters": {"requeue": True, **config.extra},
    }
    chosen = {key: value for key, value in parameters.items() if value is not None or key == "wckey"}
    executor.update_parameters(**chosen)
    try:
        return str(executor.submit(Resumable(task)).job_id)
    except submitit.core.utils.FailedJobError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"SLURM rejects the job {name}: {reason or 'it gives no reason'}") from error


def rank_environment() -> dict[str, str]:
    """The environment variables that torchrun would set for this process; none in a job of one process."""
    environment = os.environ
    if int(environment.get("SLURM_NTASKS", "1")) == 1:
        return {}
    job, attempt = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_RESTART_COUNT", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "MASTER_ADDR": _first_address(environment["SLURM_JOB_NODELIST"]),
        "MASTER_PORT": str(
            20_000 + (7 * job + attempt) % 10_000
        ),  # differs between attempts, below the ephemeral ports
    }


def _first_address(nodes: str) -> str:
    """The network address of the first of a list of nodes; SLURM's name of a node need not be its host name."""
    try:
        name = _output("scontrol", "show", "hostnames", nodes).split()[0]
        found = re.search(r"NodeAddr=(\S+)", _output("scontrol", "--oneliner", "show", "node", name))
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise UserError(f"SLURM does not give the address of the nodes {nodes}: {error}") from error
    return found[1] if found else name


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def in_queue() -> dict[str, str] | None:
    """The waiting and running jobs of this user, with their states; None if SLURM does not answer."""
    try:
        lines = _output("squeue", "--noheader", f"--user={os.getuid()}", "--format=%i %T").splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return {job: state for job, _, state in (line.strip().partition(" ") for line in lines)}


def cancelled(job: str) -> bool:
    """True if a job was cancelled; False also if SLURM no longer knows it."""
    try:
        return "JobState=CANCELLED" in _output("scontrol", "--oneliner", "show", "job", job)
    except (OSError, subprocess.SubprocessError):
        return False
