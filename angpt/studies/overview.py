"""What a person sees of many runs under way: a live table in a terminal, plain lines elsewhere."""

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
from angpt.present.words import printable
from angpt.results import State
from angpt.studies.jobs import Job, state_of
from angpt.training.record import newest_values

MOST_ROWS = 24
"""Above this many runs the table shows those that run or have failed, and counts the others."""


class Overview(AbstractContextManager["Overview"]):
    """Shows the state of every run; `tick` is called with all jobs and the folders under way."""

    def __init__(self, console: Console, live: bool = True) -> None:
        self.console = console
        self.live = Live(console=console, refresh_per_second=4) if live and console.is_terminal else None
        self.said: dict[Path, State] = {}

    def __enter__(self) -> "Overview":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def tick(self, jobs: Sequence[Job], running: set[Path]) -> None:
        states = {job: state_of(job, job.folder in running) for job in jobs}
        if self.live:
            self.live.update(_table(states))
            return
        for job, state in states.items():
            if state != self.said.get(job.folder, "waiting"):
                self.said[job.folder] = state
                record = {} if state == "running" else newest_values(job.folder)
                loss = _number(record.get("val_loss"), ".4f")
                told = f"{state}, validation loss {loss}" if loss else state
                self.console.print(f"{job.folder.name}: {told}")


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


def _table(states: dict[Job, State]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("run", "state", "", "loss", "val", "tok/s"):
        table.add_column(heading, justify="left" if heading in ("run", "state", "") else "right", no_wrap=True)
    shown = states
    if len(states) > MOST_ROWS:
        shown = {job: state for job, state in states.items() if state in ("running", "failed")}
        table.caption = ", ".join(f"{n} {state}" for state, n in Counter(states.values()).most_common())
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
