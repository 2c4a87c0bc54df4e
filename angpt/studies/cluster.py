"""Runs of a study as jobs of a SLURM cluster. The study's folder remembers which job does which run, so that this
process may come and go: the jobs stay in the queue, and a later call finds them there."""

import json
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from angpt import slurm
from angpt.errors import UserError
from angpt.serialization import json_values, typed
from angpt.slurm import SlurmConfig
from angpt.studies.executor import Ended
from angpt.studies.jobs import Job, bring_to_end, ended, failure_of, note_failure, reason
from angpt.system import write_atomically
from angpt.training.run import Run

ASK_SECONDS = 5.0
"""Seconds between two queries of the queue."""


class Cluster:
    """A pool whose runs are jobs of SLURM."""

    def __init__(self, folder: Path, config: SlurmConfig, threads: int | None = None) -> None:
        self.folder, self.config, self.threads = folder / "slurm", config, threads or config.threads
        self.slots = config.at_most
        self.jobs: dict[Path, Job] = {}
        self.ids = known_jobs(folder)
        self.queue = slurm.in_queue() or {}
        self.asked = time.monotonic()

    @property
    def taken(self) -> set[Path]:
        return set(self.jobs)

    @property
    def running(self) -> set[Path]:
        return {folder for folder in self.jobs if self.queue.get(self.ids[folder.name]) == "RUNNING"}

    def start(self, job: Job) -> None:
        """Queue a run, unless an earlier call has done so."""
        name = job.folder.name
        if self.ids.get(name) not in self.queue:
            task = partial(train_in_job, _absolute(job), self.threads)
            self.ids[name] = slurm.submit(task, self.folder, name, self.config)
            self.queue[self.ids[name]] = "PENDING"
            write_atomically(self.folder / "jobs.json", json.dumps(self.ids, indent=1) + "\n")
        self.jobs[job.folder] = job

    def wait(self, seconds: float) -> list[Ended]:
        time.sleep(seconds)
        if time.monotonic() - self.asked < ASK_SECONDS or (queue := slurm.in_queue()) is None:
            return []
        self.queue, self.asked = queue, time.monotonic()
        over = [job for job in self.jobs.values() if self.ids[job.folder.name] not in queue]
        for job in over:
            del self.jobs[job.folder]
        return [Ended(job, self._failure(job)) for job in over]

    def stop(self) -> None:
        """Stop watching; the jobs stay in the queue."""
        self.jobs.clear()

    def _failure(self, job: Job) -> str | None:
        """The reason why a job that has left the queue failed; None if it did not."""
        number = self.ids[job.folder.name]
        if ended(job.folder) is not None:
            return None
        if (noted := failure_of(job)) is not None:
            return noted
        if slurm.cancelled(number):
            return f"job {number} was cancelled"
        if Run(job.folder).summary() is not None:
            return None  # pre-empted, and saved
        return f"job {number} ended without a word; see {self.folder}/{number}_0_log.err"


def known_jobs(folder: Path) -> dict[str, str]:
    """The job that was last queued for each run, by the name of the run."""
    path = folder / "slurm" / "jobs.json"
    if not path.exists():
        return {}
    try:
        return {name: typed(str, number, name) for name, number in json_values(path).items()}
    except UserError as error:
        raise UserError(
            f"{path}: cannot be read ({error}); remove it when no job of the study is in the queue"
        ) from error


def in_queue(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The runs of a study whose jobs wait or run, with SLURM's word for it."""
    jobs = known_jobs(folder)
    queue = (slurm.in_queue() or {}) if jobs else {}
    return {name: queue[jobs[name]] for name in names if jobs.get(name) in queue}


def train_in_job(job: Job, threads: int) -> bool:
    """Train inside a job; True if the run has ended. A failure is noted in the folder of the study."""
    import torch

    from angpt.present.terminal import terminal
    from angpt.training.reporter import PlainReporter

    torch.set_num_threads(threads)
    try:
        return bring_to_end(job, PlainReporter(terminal())).ended
    except Exception as error:
        note_failure(job, reason(error))
        raise


def _absolute(job: Job) -> Job:
    return Job(job.config, job.folder.resolve())
