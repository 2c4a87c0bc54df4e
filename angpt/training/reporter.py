"""What a person sees of a running run: a progress bar in a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from angpt.present.terminal import terminal
from angpt.present.words import duration, printable
from angpt.training.plan import Plan


class Reporter:
    """Shows the progress of a run."""

    def start(self, plan: Plan, step: int) -> None:
        """The run starts after `step` steps."""

    def train(self, step: int, loss: float, tokens_per_s: float) -> None:
        """The training loss of a step is known."""

    def validation(self, step: int, loss: float) -> None:
        """The model was evaluated after a step."""

    def stop(self) -> None:
        """The run has ended."""


class Quiet(Reporter):
    """Shows nothing."""


@dataclass(frozen=True)
class TrainProgress:
    """How far a run is."""

    step: int
    """Steps done."""
    steps: int
    """Steps of the whole run."""
    loss: float | None = None
    """Newest training loss."""
    val_loss: float | None = None
    """Newest validation loss."""
    tokens_per_s: float | None = None


class Callback(Reporter):
    """Calls a function with a `TrainProgress` at the start, whenever losses are read and after each evaluation."""

    def __init__(self, function: Callable[[TrainProgress], object]) -> None:
        self.function = function

    def start(self, plan: Plan, step: int) -> None:
        self._tell(TrainProgress(step, plan.steps))

    def train(self, step: int, loss: float, tokens_per_s: float) -> None:
        self._tell(replace(self.newest, step=step, loss=loss, tokens_per_s=tokens_per_s))

    def validation(self, step: int, loss: float) -> None:
        self._tell(replace(self.newest, step=step, val_loss=loss))

    def _tell(self, newest: TrainProgress) -> None:
        self.newest = newest
        self.function(newest)


class TerminalReporter(Reporter):
    """A progress bar with losses, speed and the time left."""

    def __init__(self, console: Console) -> None:
        name, figures = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[figures]}")
        columns = (name, BarColumn(), MofNCompleteColumn(), figures, TimeRemainingColumn())
        self.progress = Progress(*columns, console=console)
        self.figures = dict.fromkeys(("loss", "val", "speed"), "")

    def start(self, plan: Plan, step: int) -> None:
        self.progress.start()
        name = printable(plan.config.recipe)
        self.task = self.progress.add_task(name, total=plan.steps, completed=step, figures="starting")

    def train(self, step: int, loss: float, tokens_per_s: float) -> None:
        self._show(step, loss=f"loss {loss:.3f}", speed=f"{tokens_per_s / 1e3:,.1f}k tok/s")

    def validation(self, step: int, loss: float) -> None:
        self._show(step, val=f"val {loss:.4f}")

    def stop(self) -> None:
        self.progress.stop()

    def _show(self, step: int, **figures: str) -> None:
        self.figures |= figures
        self.progress.update(self.task, completed=step, figures="  ".join(filter(None, self.figures.values())))


class PlainReporter(Reporter):
    """A line every ten seconds and for every evaluation, for logs."""

    SECONDS = 10.0

    def __init__(self, console: Console) -> None:
        self.console, self.last = console, 0.0

    def start(self, plan: Plan, step: int) -> None:
        self.steps, self.batch_tokens = plan.steps, plan.batch_tokens
        c = plan.config
        self._print(
            f"{c.recipe}: {plan.parameters / 1e6:.2f}M parameters, steps {step:,} to {plan.steps:,} of "
            f"{c.batch_tokens:,} tokens, lr {c.optimizer.lr:g}, {c.precision} on {c.device}"
        )

    def train(self, step: int, loss: float, tokens_per_s: float) -> None:
        now = time.monotonic()
        if now - self.last >= self.SECONDS or step == self.steps:
            self.last = now
            left = duration((self.steps - step) * self.batch_tokens / tokens_per_s)
            speed = f"{tokens_per_s:,.0f} tokens/s" + (f"  {left} left" if step < self.steps else "")
            self._print(f"step {step:,}/{self.steps:,}  loss {loss:.4f}  {speed}")

    def validation(self, step: int, loss: float) -> None:
        self._print(f"step {step:,}/{self.steps:,}  validation loss {loss:.4f}")

    def _print(self, text: str) -> None:
        self.console.print(text)


def reporter_for(progress: bool | Callable[[TrainProgress], object]) -> Reporter:
    """True: a progress bar in a terminal, lines elsewhere. False: nothing. A function is called."""
    if not isinstance(progress, bool):
        return Callback(progress)
    if not progress:
        return Quiet()
    console = terminal()
    return TerminalReporter(console) if console.is_terminal else PlainReporter(console)
