"""What a person sees of many runs under way: a live table in a terminal, plain lines elsewhere."""

import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from angpt.studies.executor import Job
from angpt.training.plan import make_plan

TAIL_BYTES = 65_536


class Overview:
    """Shows the state of every run; `tick` is called with all jobs and the folders under way."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self.said: dict[Path, str] = {}

    def __enter__(self) -> "Overview":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def tick(self, jobs: Sequence[Job], running: set[Path]) -> None:
        states = [(job, state_of(job.folder, job.folder in running)) for job in jobs]
        if self.live:
            self.live.update(_table(states))
            return
        for job, (state, record) in states:
            if state != self.said.get(job.folder, "waiting"):
                self.said[job.folder] = state
                loss = "" if state == "running" else _number(record.get("val_loss"), ".4f")
                told = f"{state}, validation loss {loss}" if loss else state
                self.console.print(f"{job.folder.name}: {told}", highlight=False, soft_wrap=True)


def state_of(folder: Path, running: bool) -> tuple[str, dict[str, Any]]:
    """waiting, running, or how it ended; and its newest figures."""
    record = newest_record(folder / "metrics.jsonl")
    summary = folder / "summary.json"
    if running:
        return "running", record
    if summary.exists():
        return str(json.loads(summary.read_text(encoding="utf-8"))["status"]), record
    return ("stopped" if folder.exists() else "waiting"), record


def newest_record(path: Path) -> dict[str, Any]:
    """The newest value of everything at the end of metrics.jsonl."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().split(b"\n")
    merged: dict[str, Any] = {}
    for line in lines[:-1]:
        try:
            merged |= json.loads(line)
        except ValueError:  # the first may begin in the middle
            continue
    return merged


def _table(states: Sequence[tuple[Job, tuple[str, dict[str, Any]]]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("run", "state", "", "loss", "val", "tok/s"):
        table.add_column(heading, justify="left" if heading in ("run", "state", "") else "right", no_wrap=True)
    for job, (state, record) in states:
        steps = _steps(job)
        done = steps if state == "finished" else record.get("step", 0)
        table.add_row(
            job.folder.name,
            state,
            ProgressBar(total=steps, completed=done, width=20),
            _number(record.get("loss"), ".3f"),
            _number(record.get("val_loss"), ".4f"),
            _number(record.get("tokens_per_s"), ",.0f"),
        )
    return table


def _number(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)


@cache
def _steps(job: Job) -> int:
    return make_plan(job.config).steps
