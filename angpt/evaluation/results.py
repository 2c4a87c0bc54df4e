"""Results of an evaluation: `eval/results.json` in the folder of the model, and a table for the terminal."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from angpt.config import from_dict
from angpt.errors import UserError
from angpt.evaluation.requests import Origin, Scored
from angpt.evaluation.tasks import TASKS
from angpt.present import tables
from angpt.system import write_atomically

FOLDER, RESULTS, SCORES = "eval", "results.json", "scores"


@dataclass(frozen=True)
class Evaluated:
    """Identity of a model, to tell it from others without its weights."""

    name: str
    kind: str
    """run, folded or export."""
    weights: str
    """SHA-256 of the trained weights: the same for a run, its export and what was folded from it."""
    context: int
    vocab_size: int
    tokenizer: str | None
    """Fingerprint of its tokenizer, where that is known."""


@dataclass(frozen=True)
class LossResult:
    """Loss over all windows of a split, as in training."""

    data: str
    """The folder."""
    split: str
    fingerprint: str
    """Fingerprint of its tokens."""
    limit: int | None
    """Windows to which the split was cut; None: all of them."""
    windows: int
    tokens: int
    """Tokens whose loss was taken."""
    loss: float
    """Mean, in nats per token."""
    stderr: float | None
    """Standard error of the loss over windows."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """loss / ln 2 · tokens / bytes of text; None where the number of bytes cannot be told."""
    precision: str
    device: str
    seconds: float


@dataclass(frozen=True)
class TaskResult:
    """One task of lm-evaluation-harness."""

    origin: Origin
    metric: str
    """The one that the table shows."""
    value: float
    stderr: float | None
    metrics: dict[str, float]
    """Everything that the harness reports, with standard errors where there are any."""
    samples: int
    """Documents evaluated."""
    scored: Scored


@dataclass(frozen=True)
class Results:
    model: Evaluated
    losses: tuple[LossResult, ...] = ()
    tasks: tuple[TaskResult, ...] = ()

    def with_loss(self, new: LossResult) -> "Results":
        others = (r for r in self.losses if (r.data, r.split) != (new.data, new.split))
        return replace(self, losses=(*others, new))

    def with_task(self, new: TaskResult) -> "Results":
        return replace(self, tasks=(*(r for r in self.tasks if r.origin.task != new.origin.task), new))

    def task(self, name: str) -> TaskResult | None:
        return next((r for r in self.tasks if r.origin.task == name), None)


def read_results(folder: Path) -> Results | None:
    """What `eval/results.json` below a model's folder says, if there is one."""
    path = folder / FOLDER / RESULTS
    if not path.exists():
        return None
    try:
        return from_dict(Results, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, UserError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it and evaluate again") from error


def write_results(folder: Path, results: Results) -> None:
    path = folder / FOLDER / RESULTS
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(results), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error})") from error


@dataclass(frozen=True)
class Line:
    """One row of a table with a column for each model."""

    label: str
    metric: str
    higher: bool
    """True if more is better."""
    samples: str
    values: tuple[tuple[float, float | None] | None, ...]
    """Value and standard error of each model; None where it was not evaluated, or on something else."""

    @property
    def best(self) -> int | None:
        """The model with the best value, if there is one to compare it with."""
        found = {i: v[0] for i, v in enumerate(self.values) if v is not None}
        if len(set(found.values())) < 2:
            return None
        return (max if self.higher else min)(found, key=lambda i: found[i])


def lines(models: Sequence[Results]) -> list[Line]:
    """Everything that any of the models was evaluated on. Values stand in one row only if they can be compared."""
    found = []
    for data in dict.fromkeys((r.data, r.split, r.fingerprint, r.windows) for m in models for r in m.losses):
        mine = [
            next((r for r in m.losses if (r.data, r.split, r.fingerprint, r.windows) == data), None) for m in models
        ]
        one = next(r for r in mine if r is not None)
        label = f"{one.data} {one.split}"
        size = f"{one.tokens:,}"
        found.append(Line(label, "loss", False, size, tuple((r.loss, r.stderr) if r else None for r in mine)))
        found.append(Line(label, "perplexity", False, size, tuple((r.perplexity, None) if r else None for r in mine)))
        if any(r is not None and r.bits_per_byte is not None for r in mine):
            bits = tuple((r.bits_per_byte, None) if r and r.bits_per_byte is not None else None for r in mine)
            found.append(Line(label, "bits per byte", False, size, bits))
    for task in TASKS.values():
        results = [m.task(task.name) for m in models]
        for samples, limit in dict.fromkeys((r.samples, r.origin.limit) for r in results if r is not None):
            values = [r if r and (r.samples, r.origin.limit) == (samples, limit) else None for r in results]
            size = f"{samples:,}" if limit is None else f"{samples:,} of {task.samples:,}"
            pairs = tuple((r.value, r.stderr) if r else None for r in values)
            found.append(Line(task.label, task.metric, task.higher, size, pairs))
    return found


FORMS = ((10, ".4f"), (100, ".3f"), (1e6, ".2f"))
"""Formats of numbers up to a size."""


def with_error(value: tuple[float, float | None] | None) -> str:
    """A value with its standard error: 0.2562 ± 0.0102."""
    if value is None:
        return "–"
    mean, stderr = value
    form = next((form for limit, form in FORMS if abs(mean) < limit), ".3g")
    return f"{mean:{form}}" if stderr is None else f"{mean:{form}} ± {stderr:{form}}"


def show(models: Sequence[Results], console: Console) -> None:
    """The lines as a table, the best value bold, and which weights each column stands for."""
    rows = [
        (
            line.label,
            f"{line.metric} {'↑' if line.higher else '↓'}",
            line.samples,
            *(tables.Strong(with_error(v)) if i == line.best else with_error(v) for i, v in enumerate(line.values)),
        )
        for line in lines(models)
    ]
    tables.show(console, tables.Table(("", "metric", "size", *headings(models)), rows, left=(0, 1)))
    for name, model in zip(headings(models), models, strict=True):
        console.print(f"{name}: weights {model.model.weights[:16]}", highlight=False, soft_wrap=True, markup=False)
    console.print("± is one standard error, ↑ more is better; size is tokens, samples or pages.", highlight=False)


def headings(models: Sequence[Results]) -> list[str]:
    """Names, told apart by their weights where two are the same."""
    names = [m.model.name for m in models]
    return [m.model.name if names.count(m.model.name) == 1 else f"{m.model.name} {m.model.weights[:6]}" for m in models]
