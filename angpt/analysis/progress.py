"""Progress bars of an analysis, one per run."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from angpt.analysis.analyse import Tick
from angpt.present.words import printable


@contextmanager
def progress(console: Console) -> Iterator[Tick]:
    """A function that shows the progress it is called with, inside the context."""
    name, share = TextColumn("{task.description}", markup=False), TextColumn("{task.percentage:.0f} %")
    bar = Progress(name, BarColumn(), share, TimeElapsedColumn(), console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def tick(run: str, done: int, total: int) -> None:
        if run not in tasks:
            bar.start()  # only now, so that an error message has no empty line before it
            tasks[run] = bar.add_task(printable(run), total=total)
        bar.update(tasks[run], completed=done)

    try:
        yield tick
    finally:
        bar.stop()
