"""Runs as processes of their own, a few at a time: a crash stays inside, memory is the run's own, cores are shared."""

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from angpt.config import TrainConfig
from angpt.errors import UserError
from angpt.system import available_cores

if TYPE_CHECKING:
    from angpt.training.run import Run

POLL_SECONDS = 0.25
LOCK_SECONDS = 20.0


class Interrupted(Exception):
    """SIGINT or SIGTERM came; every run has saved what it had."""


@dataclass(frozen=True)
class Job:
    """A run to begin, to go on with, or to leave as it is if it has ended."""

    config: TrainConfig
    folder: Path


class Running(NamedTuple):
    process: ForkServerProcess
    pipe: Connection
    slot: int
    """Which of the workers it is, and so which of the GPUs it has."""


def execute(jobs: Sequence[Job], workers: int, tick: Callable[[set[Path]], None]) -> None:
    """Bring all jobs to their end, `workers` at a time. `tick` is called often, with the folders under way.

    The first failure stops the others at their next step and is raised; so is an interrupt. Both leave everything such
    that the same call goes on.
    """
    if workers < 1:
        raise UserError(f"workers = {workers}: at least one is needed")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["angpt.training.trainer"])
    threads = max(1, available_cores() // workers)
    waiting, running = list(reversed(jobs)), dict[Path, Running]()
    failure: str | None = None
    with _interrupts() as interrupted:
        while waiting or running:
            stop = failure is not None or interrupted.is_set()
            if stop:
                waiting.clear()
                for run in running.values():
                    run.process.terminate()  # SIGTERM, heard once the run is in its loop
            while waiting and len(running) < workers:
                job = waiting.pop()
                slot = min(set(range(workers)) - {run.slot for run in running.values()})
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(job, slot, threads, theirs), name=job.folder.name)
                process.start()
                theirs.close()
                running[job.folder] = Running(process, ours, slot)
            tick(set(running))
            wait([run.process.sentinel for run in running.values()], timeout=1.0 if stop else POLL_SECONDS)
            for folder, run in list(running.items()):
                if not run.process.is_alive():
                    failure = failure or _failure(folder, run, stop)
                    del running[folder]
    tick(set())
    if failure is not None:
        raise UserError(failure)
    if interrupted.is_set():
        raise Interrupted


def _failure(folder: Path, run: Running, stopping: bool) -> str | None:
    """What went wrong in a process that has ended, if anything."""
    run.process.join()
    code = run.process.exitcode
    try:
        return str(run.pipe.recv())
    except EOFError:
        stopped = stopping and code == -signal.SIGTERM  # before it had begun
        return None if code == 0 or stopped else f"{folder}: the training process died (exit code {code})"
    finally:
        run.pipe.close()


class _interrupts:
    """Notes SIGINT and SIGTERM while it is entered."""

    def __enter__(self) -> threading.Event:
        came = threading.Event()
        self.before = {s: signal.signal(s, lambda *_: came.set()) for s in (signal.SIGINT, signal.SIGTERM)}
        return came

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def _run(job: Job, slot: int, threads: int, pipe: Connection) -> None:
    """In the child: train, or say why not."""
    for number in (signal.SIGINT, signal.SIGTERM):  # outside of the loop, which listens, there is nothing to save
        signal.signal(number, signal.SIG_IGN)
    _end_with_the_parent()
    import torch

    from angpt.training.plan import make_plan
    from angpt.training.reporter import Quiet
    from angpt.training.run import Run
    from angpt.training.trainer import resume, start

    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(slot % torch.cuda.device_count())
    try:
        if job.folder.exists():
            run = Run.open(job.folder)
            if run.config() != make_plan(job.config).config:
                raise UserError(f"{job.folder}: was begun with other settings (see its config.toml); move it away")
            _wait_for_lock(run)
            resume(job.folder, Quiet())
        else:
            start(job.config, job.folder, Quiet())
    except UserError as error:
        pipe.send(str(error))


def _end_with_the_parent() -> None:
    """A parent that was killed must not leave trainings behind, which would stand in the way of the next call."""
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _wait_for_lock(run: "Run") -> None:
    """Give the process of a call that was just killed the moment that it takes to end."""
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            with run.lock():
                return
        except UserError:
            time.sleep(0.2)
