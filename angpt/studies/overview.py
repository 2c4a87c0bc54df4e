"""What a person sees of many runs under way: a live table in a terminal, plain lines elsewhere."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from angpt.present.terminal import terminal
from angpt.present.words import duration, plural, printable
from angpt.results import State
from angpt.studies.jobs import Job, state_of
from angpt.training.record import newest_values

ENDED: tuple[State, ...] = ("finished", "diverged", "failed")
MOST_ROWS = 24
"""Above this many runs the table shows those that run or have failed, and counts the others."""


class Overview(AbstractContextManager["Overview"]):
    """Shows the state of every run; `tick` is called with all jobs and the folders under way."""

    def __init__(self, console: Console, live: bool = True) -> None:
        self.console = console
        self.live = Live(console=console, refresh_per_second=4) if live and console.is_terminal else None
        self.said: dict[Path, State] = {}
        self.left = TimeLeft()

    def __enter__(self) -> "Overview":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def tick(self, jobs: Sequence[Job], running: set[Path]) -> None:
        states = {job: state_of(job, job.folder in running) for job in jobs}
        changed = {job: state for job, state in states.items() if state != self.said.get(job.folder, "waiting")}
        if self.live:
            self.live.update(_table(states, self.left.told(states)))
            return
        ended = [job for job, state in changed.items() if state in ENDED]
        left = self.left.told(states) if changed else ""
        for job, state in changed.items():
            self.said[job.folder] = state
            record = {} if state == "running" else newest_values(job.folder)
            loss = _number(record.get("val_loss"), ".4f")
            told = f"{state}, validation loss {loss}" if loss else state
            self.console.print(f"{job.folder.name}: {told}{f'; {left}' if left and job in ended[-1:] else ''}")


class TimeLeft:
    """The time that the runs still need, at the rate of all of them together since the first call."""

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None
        """When it was called first, and the FLOPs that were done then."""

    def told(self, states: Mapping[Job, State]) -> str:
        """How many runs have ended, and the time left once some work is done; empty if all have ended."""
        ended = sum(state in ENDED for state in states.values())
        if ended == len(states):
            return ""
        now, done = time.monotonic(), sum(job.flops * _part(job, state) for job, state in states.items())
        begin, before = self.first = self.first or (now, done)
        open_flops = sum(job.flops for job in states) - done
        time_left = f", about {duration((now - begin) * open_flops / (done - before))} left" if done > before else ""
        return f"{ended} of {plural(len(states), 'run')} done{time_left}"


def _part(job: Job, state: State) -> float:
    """The fraction of the steps of a run that is done; 1 for one that is not continued."""
    return 1.0 if state in ENDED else newest_values(job.folder).get("step", 0) / job.plan.steps


class Changes:
    """Calls a function with the state of every run, by its name, whenever one has changed."""

    def __init__(self, function: Callable[[Mapping[str, State]], object]) -> None:
        self.function = function
        self.last: dict[str, State] = {}

    def tick(self, jobs: Sequence[Job], running: set[Path]) -> None:
        states = {job.folder.name: state_of(job, job.folder in running) for job in jobs}
        if states != self.last:
            self.last = states
            self.function(states)


def overview_for(
    progress: bool | Callable[[Mapping[str, State]], object], live: bool
) -> AbstractContextManager[Overview | Changes]:
    """True: an `Overview`, in a terminal a live table if `live`. False: shows nothing. A function is called."""
    if isinstance(progress, bool):
        return Overview(terminal(quiet=not progress), live and progress)
    return nullcontext(Changes(progress))


def _table(states: dict[Job, State], left: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=left)
    for heading in ("run", "state", "", "loss", "val", "tok/s"):
        table.add_column(heading, justify="left" if heading in ("run", "state", "") else "right", no_wrap=True)
    shown = states
    if len(states) > MOST_ROWS:
        shown = {job: state for job, state in states.items() if state in ("running", "failed")}
        counts = ", ".join(f"{n} {state}" for state, n in Counter(states.values()).most_common())
        table.caption = f"{counts}\n{left}"
    for job, state in shown.items():
        record: dict[str, Any] = newest_values(job.folder)
        steps = job.plan.steps
        done = steps if state == "finished" else record.get("step", 0)
        table.add_row(
            printable(job.folder.name),
            state,
            ProgressBar(total=steps, completed=done, width=20),
            _number(record.get("loss"), ".3f"),
            _number(record.get("val_loss"), ".4f"),
            _number(record.get("tokens_per_s"), ",.0f"),
        )
    return table


def _number(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)
