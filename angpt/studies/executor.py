"""Bring runs to their end: in this process, or as processes of their own, a few at a time.

In a process of its own a crash stays inside, memory is the run's own, and cores are shared. Jobs of a cluster are in
studies/cluster.py.
"""

import itertools
import multiprocessing as mp
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple, Protocol

from angpt.errors import UserError
from angpt.studies.jobs import Job, bring_to_end, check_settings, ended, reason
from angpt.system import available_threads
from angpt.training.reporter import Quiet, Reporter

POLL_SECONDS = 0.25
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that stop a study; its runs save and end."""


class Interrupted(Exception):
    """SIGINT or SIGTERM came; every run has saved what it had."""


class Ended(NamedTuple):
    job: Job
    failure: str | None
    """The reason of a failure; None for a run that ended, or was interrupted and saved."""


class Pool(Protocol):
    """A place where runs are executed."""

    slots: int
    """Largest number of runs at a time."""

    @property
    def taken(self) -> set[Path]:
        """Folders of the runs that were started and have not ended."""

    @property
    def running(self) -> set[Path]:
        """Folders of the runs that are under way; others of `taken` wait in a queue."""

    def start(self, job: Job) -> None: ...

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that have ended, after this many seconds at most."""

    def stop(self) -> None:
        """Let every run save and end; called until none is running."""


def execute(
    jobs: Callable[[], Sequence[Job]],
    pool: Pool,
    tick: Callable[[Sequence[Job], set[Path]], None],
    failed: Callable[[Job, str], None],
    signals: bool = True,
) -> None:
    """Bring all jobs to their end.

    `jobs` is asked again when a run has ended, for what came out may call for further ones. `tick` is called often,
    with all jobs and the folders under way. `failed` is told what went wrong with a run, and the others go on. With
    `signals`, SIGINT and SIGTERM raise `Interrupted`. That, a KeyboardInterrupt or an error of `tick` stops all runs at
    their next step, saved; the same call goes on.
    """
    failures: set[Path] = set()
    with _interrupts() if signals else nullcontext(threading.Event()) as interrupted, _stopped(pool):
        current = jobs()
        for job in current:
            check_settings(job)
        waiting = _to_do(current, pool, failures)
        while True:
            if interrupted.is_set():
                waiting = []
                pool.stop()
            while waiting and len(pool.taken) < pool.slots and not interrupted.is_set():
                pool.start(waiting.pop())
            tick(current, pool.running)
            if not waiting and not pool.taken:
                break
            over = pool.wait(1.0 if interrupted.is_set() else POLL_SECONDS)
            for job, failure in over:
                if failure is not None:
                    failures.add(job.folder)
                    failed(job, failure)
            if over:
                current = jobs()
                waiting = _to_do(current, pool, failures)
    tick(current, set())
    if interrupted.is_set():
        raise Interrupted


@contextmanager
def _stopped(pool: Pool) -> Iterator[None]:
    """Let the runs of a pool save and end if an exception leaves the block."""
    try:
        yield
    except BaseException:
        while pool.taken:
            pool.stop()
            pool.wait(1.0)
        raise


def _to_do(jobs: Sequence[Job], pool: Pool, failures: set[Path]) -> list[Job]:
    """The jobs to start, the first of them last."""
    skipped = pool.taken | failures
    open_jobs = [j for j in jobs if j.folder not in skipped and ended(j.folder) is None and not j.failure.exists()]
    return open_jobs[::-1]


class InProcess:
    """Runs one after the other in this process."""

    slots = 1

    def __init__(
        self, reporter: Callable[[], Reporter] = Quiet, threads: int | None = None, signals: bool = True
    ) -> None:
        self.reporter, self.threads, self.signals = reporter, threads, signals
        self.over: list[Ended] = []

    @property
    def taken(self) -> set[Path]:
        return {e.job.folder for e in self.over}

    @property
    def running(self) -> set[Path]:
        return set()

    def start(self, job: Job) -> None:
        import torch

        failure, before = None, torch.get_num_threads()
        torch.set_num_threads(self.threads or available_threads())
        try:
            if not bring_to_end(job, self.reporter(), self.signals).ended:
                signal.raise_signal(signal.SIGINT)  # the run has heard it; now `execute` hears it too
        except Exception as error:
            failure = reason(error)
        finally:
            torch.set_num_threads(before)
        self.over.append(Ended(job, failure))

    def wait(self, seconds: float) -> list[Ended]:
        over, self.over = self.over, []
        return over

    def stop(self) -> None:
        pass


def default_workers() -> int:
    """One per GPU; on the CPU two, since the threads of one process do not fill the cores with small matrices."""
    import torch

    return torch.cuda.device_count() or min(2, available_threads())


class Running(NamedTuple):
    job: Job
    process: ForkServerProcess
    pipe: Connection
    slot: int
    """Index of the worker, which gives its GPU."""


class Processes:
    """Several runs at a time, each in a process that ends with this one."""

    def __init__(self, workers: int, threads: int | None = None) -> None:
        if workers < 1:
            raise UserError(f"workers = {workers}: at least one is needed")
        self.slots = workers
        self.threads = threads or max(1, available_threads() // workers)
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["angpt.training.launch"])
        self.runs: list[Running] = []

    @property
    def taken(self) -> set[Path]:
        return {run.job.folder for run in self.runs}

    @property
    def running(self) -> set[Path]:
        return self.taken

    def start(self, job: Job) -> None:
        used = {run.slot for run in self.runs}
        slot = next(number for number in itertools.count() if number not in used)
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_run, args=(job, slot, self.threads, theirs), name=job.folder.name)
        _start_server()
        with _hidden_script():
            process.start()
        theirs.close()
        self.runs.append(Running(job, process, ours, slot))
        with suppress(EOFError):  # it died, as `wait` will find
            ours.recv()  # now no signal ends it

    def wait(self, seconds: float) -> list[Ended]:
        wait([run.process.sentinel for run in self.runs], timeout=seconds)
        over = [run for run in self.runs if not run.process.is_alive()]
        self.runs = [run for run in self.runs if run not in over]
        return [Ended(run.job, self._failure(run)) for run in over]

    def stop(self) -> None:
        for run in self.runs:
            run.process.terminate()  # SIGTERM, heard once the run is in its loop

    def _failure(self, run: Running) -> str | None:
        """The reason why a process that has ended failed; None if it did not."""
        run.process.join()
        code = run.process.exitcode
        try:
            return str(run.pipe.recv())
        except EOFError:
            return None if code == 0 else f"{run.job.folder}: the training process died (exit code {code})"
        finally:
            run.pipe.close()


def _start_server() -> None:
    """Start the server from which runs are forked. A signal to the whole process group does not end it: it inherits the
    mask."""
    resource_tracker.ensure_running()  # first, because it unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _hidden_script() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's script in the child: a run needs nothing from it, and a script
    without `if __name__ == "__main__"` would begin its study there again."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _run(job: Job, slot: int, threads: int, pipe: Connection) -> None:
    """Train in the child process. Sends None once signals cannot end it, and the reason if the run fails."""
    for number in SIGNALS:  # outside the loop, which listens, there is nothing to save
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    pipe.send(None)
    _end_with_the_parent()
    import torch

    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(slot % torch.cuda.device_count())
    try:
        bring_to_end(job, Quiet())
    except Exception as error:
        pipe.send(reason(error))


def _end_with_the_parent() -> None:
    """A parent that was killed must not leave trainings behind, which would stand in the way of the next call."""
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class _interrupts:
    """Notes SIGINT and SIGTERM while it is entered."""

    def __enter__(self) -> threading.Event:
        came = threading.Event()

        def note(number: int, frame: FrameType | None) -> None:
            came.set()

        self.before = {s: signal.signal(s, note) for s in SIGNALS}
        return came

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
