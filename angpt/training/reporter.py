"""What a person sees of a run under way: a live line in a terminal, plain lines elsewhere."""

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from angpt.training.plan import Plan


class Reporter(Protocol):
    """Is told how a run gets on."""

    def start(self, plan: Plan, step: int) -> None: ...
    def train(self, step: int, loss: float, tokens_per_s: float) -> None: ...
    def validation(self, step: int, loss: float) -> None: ...
    def stop(self) -> None: ...


class Quiet:
    """For a run that somebody else watches."""

    def start(self, plan: Plan, step: int) -> None:
        pass

    def train(self, step: int, loss: float, tokens_per_s: float) -> None:
        pass

    def validation(self, step: int, loss: float) -> None:
        pass

    def stop(self) -> None:
        pass


class TerminalReporter:
    """A progress bar with losses, speed and the time left."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self.loss = self.val = self.speed = ""

    def start(self, plan: Plan, step: int) -> None:
        self.progress.start()
        name = plan.config.model.architecture
        self.task = self.progress.add_task(name, total=plan.steps, completed=step, figures="starting")

    def train(self, step: int, loss: float, tokens_per_s: float) -> None:
        self.loss, self.speed = f"loss {loss:.3f}", f"{tokens_per_s / 1e3:,.1f}k tok/s"
        self._show(step)

    def validation(self, step: int, loss: float) -> None:
        self.val = f"val {loss:.4f}"
        self._show(step)

    def stop(self) -> None:
        self.progress.stop()

    def _show(self, step: int) -> None:
        figures = "  ".join(part for part in (self.loss, self.val, self.speed) if part)
        self.progress.update(self.task, completed=step, figures=figures)


class PlainReporter:
    """A line now and then, for logs."""

    SECONDS = 10.0

    def __init__(self, console: Console) -> None:
        self.console, self.last = console, 0.0

    def start(self, plan: Plan, step: int) -> None:
        self.steps = plan.steps
        c = plan.config
        self._print(
            f"{c.model.architecture}: {plan.parameters / 1e6:.2f}M parameters, steps {step:,} to {plan.steps:,} of "
            f"{c.batch_tokens:,} tokens, lr {c.optimizer.lr:g}, {c.precision} on {c.device}"
        )

    def train(self, step: int, loss: float, tokens_per_s: float) -> None:
        now = time.monotonic()
        if now - self.last >= self.SECONDS or step == self.steps:
            self.last = now
            self._print(f"step {step:,}/{self.steps:,}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s")

    def validation(self, step: int, loss: float) -> None:
        self._print(f"step {step:,}/{self.steps:,}  validation loss {loss:.4f}")

    def stop(self) -> None:
        pass

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def reporter_for(console: Console) -> Reporter:
    return TerminalReporter(console) if console.is_terminal else PlainReporter(console)
