"""The thread that runs the model: takes jobs from a queue into the batch at every step, and delivers their text."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from angpt.inference.generate import Writer
from angpt.inference.sampling import Sampling
from angpt.serving.batch import Batch, Row

FinishReason = Literal["stop", "length", "failed"]


class Piece(NamedTuple):
    """The next piece of a text."""

    text: str
    tokens: int
    """Number of tokens generated so far."""
    reason: FinishReason | None
    """Why the text ends with this piece: an end-of-text token or a stop string, all its tokens, or a failure."""


@dataclass(eq=False)
class Job:
    """One text to generate."""

    prompt: Sequence[int]
    new_tokens: int
    sampling: Sampling
    seed: int
    writer: Writer
    deliver: Callable[[Piece], None]
    """Called by the thread of the model with each piece."""
    row: Row | None = None
    made: int = 0
    cancelled: bool = False


class Busy(Exception):
    """The queue has no place for the jobs."""


class Stopped(Exception):
    """The scheduler takes no more jobs."""


class Scheduler:
    """Runs jobs in the order of their submission, as many at once as the batch has rows."""

    def __init__(self, batch: Batch, queue: int, on_failure: Callable[[], object] = lambda: None) -> None:
        """`queue` is the largest number of jobs that wait. `on_failure` is called by the thread if the model fails."""
        self.batch, self.queue, self.on_failure = batch, queue, on_failure
        self.changed = threading.Condition()
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.stopped = False
        self.failure: BaseException | None = None
        self.steps = self.prompt_tokens = self.generated_tokens = self.cancelled = 0
        self.thread = threading.Thread(target=self._run, name="model", daemon=True)
        self.thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of the jobs, or none of them."""
        with self.changed:
            if self.stopped:
                raise Stopped
            if len(self.waiting) + len(jobs) > self.queue + self._free():
                raise Busy
            self.waiting.extend(jobs)
            self.changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Take jobs out of the queue or, at the next step, out of the batch. Jobs that have ended are left alone."""
        with self.changed:
            for job in jobs:
                job.cancelled = True
                if job in self.waiting:
                    self.waiting.remove(job)
                    self.cancelled += 1

    def stop(self) -> None:
        """Fail all jobs, and end the thread after its current step."""
        with self.changed:
            self.stopped = True
            self.changed.notify()
        self.thread.join()

    def _run(self) -> None:
        try:
            while self._admit():
                if self.running:
                    self.batch.step()
                    self.steps += 1
                    for job in list(self.running):
                        self._take(job)
        except BaseException as error:
            self.failure = error
            self.on_failure()
        with self.changed:
            self.stopped = True
            rest = [*self.running, *self.waiting]
            self.running.clear()
            self.waiting.clear()
        for job in rest:
            with contextlib.suppress(RuntimeError):  # the event loop of its client has ended
                job.deliver(Piece("", job.made, "failed"))

    def _admit(self) -> bool:
        """Wait for work, and fill the free rows of the batch. False if the thread is to end."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.running or self.waiting)
            if self.stopped:
                return False
            for job in [job for job in self.running if job.cancelled]:
                self.cancelled += 1
                self._leave(job)
            joining = [self.waiting.popleft() for _ in range(min(len(self.waiting), self._free()))]
            self.running += joining
        for job in joining:
            job.row = self.batch.join(job.prompt, job.sampling, job.seed)
            self.prompt_tokens += len(job.prompt)
            self._take(job)
        return True

    def _free(self) -> int:
        return self.batch.size - len(self.running)

    def _take(self, job: Job) -> None:
        """Deliver the newest token of a job."""
        assert job.row is not None
        job.made += 1
        self.generated_tokens += 1
        token, writer = job.row.token, job.writer
        text = writer.add([token])
        ended = writer.stopped or token == writer.end
        reason: FinishReason | None = None
        if ended or job.made == job.new_tokens:
            text += writer.finish()  # which may complete a stop string
            reason = "stop" if ended or writer.stopped else "length"
            self._leave(job)
        if text or reason is not None:
            job.deliver(Piece(text, job.made, reason))

    def _leave(self, job: Job) -> None:
        self.running.remove(job)
        if job.row is not None:
            self.batch.leave(job.row)
