"""Results of an evaluation: `eval/results.json` in the folder of the model, and a table for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from angpt.errors import UserError
from angpt.evaluation.requests import Origin, Scored
from angpt.evaluation.tasks import TASKS
from angpt.present import tables
from angpt.serialization import read_json, sealed_json
from angpt.system import write_atomically

RESULTS, SCORES = Path("eval/results.json"), Path("eval/scores")
SHOWN = 6
"""Characters of a checksum that a table shows."""
FORMS = ((10, ".4f"), (100, ".3f"), (1e6, ".2f"))
"""Formats of numbers below a limit."""


@dataclass(frozen=True)
class Evaluated:
    """Identity of an evaluated model."""

    name: str
    kind: str
    """run, folded or export."""
    weights: str
    """SHA-256 of the trained weights: equal for a run, its export and its folded model."""
    context: int
    vocab_size: int
    tokenizer: str | None
    """Fingerprint of its tokenizer, if known."""


@dataclass(frozen=True)
class LossResult:
    """Loss over all windows of a split, as in training."""

    data: str
    """The prepared folder, as it was named; the same tokens may have other names."""
    split: str
    fingerprint: str
    """Fingerprint of the tokens."""
    limit: int | None
    """Most windows that were evaluated; None: all."""
    windows: int
    tokens: int
    """Number of tokens that the loss is the mean of."""
    loss: float
    """Mean, in nats per token."""
    stderr: float | None
    """Standard error of the loss over windows."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """loss / ln 2 · tokens / bytes of text; None if the number of bytes is unknown."""
    precision: str
    device: str
    seconds: float

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What was evaluated; a new result takes the place of that with the same key."""
        return self.split, self.fingerprint, self.limit


@dataclass(frozen=True)
class TaskResult:
    """One task of lm-evaluation-harness."""

    origin: Origin
    metric: str
    """The metric that the table shows."""
    value: float
    stderr: float | None
    metrics: dict[str, float]
    """All metrics of the harness, with standard errors where known."""
    samples: int
    """Number of documents evaluated."""
    scored: Scored


@dataclass(frozen=True)
class Results:
    model: Evaluated
    losses: tuple[LossResult, ...] = ()
    tasks: tuple[TaskResult, ...] = ()

    def with_loss(self, new: LossResult) -> "Results":
        return replace(self, losses=(*(r for r in self.losses if r.key != new.key), new))

    def with_task(self, new: TaskResult) -> "Results":
        key = new.origin.task, new.origin.limit
        return replace(self, tasks=(*(r for r in self.tasks if (r.origin.task, r.origin.limit) != key), new))

    def task(self, name: str, limit: int | None = None) -> TaskResult | None:
        """The result of a task on all samples, or with this limit."""
        return next((r for r in self.tasks if (r.origin.task, r.origin.limit) == (name, limit)), None)


def read_results(folder: Path) -> Results | None:
    """The results in a model's folder; None if it has none."""
    path = folder / RESULTS
    return read_json(Results, path, "delete it and evaluate again") if path.exists() else None


def write_results(folder: Path, results: Results) -> None:
    path = folder / RESULTS
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, sealed_json(results))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error})") from error


@dataclass(frozen=True)
class Line:
    """One row of a table with a column for each model."""

    label: str
    metric: str
    higher: bool
    """True if a higher value is better."""
    samples: str
    values: tuple[tuple[float, float | None] | None, ...]
    """Value and standard error of each model; None if it was not evaluated on this."""

    @property
    def best(self) -> int | None:
        """Index of the model with the best value; None unless two values differ."""
        found = {i: v[0] for i, v in enumerate(self.values) if v is not None}
        if len(set(found.values())) < 2:
            return None
        return (max if self.higher else min)(found, key=lambda i: found[i])


def lines(models: Sequence[Results]) -> list[Line]:
    """Everything that any of the models was evaluated on; values in one row can be compared.

    Other tokens of the same name, and tasks with other data, another tokenizer or another version of the harness, have
    rows of their own, whose labels say so.
    """
    found = []
    by_tokens = [{(r.split, r.fingerprint, r.windows): r for r in m.losses} for m in models]
    keys = dict.fromkeys(key for losses in by_tokens for key in losses)
    named = {key: next(losses[key] for losses in by_tokens if key in losses) for key in keys}
    for key, first in named.items():
        own = [losses.get(key) for losses in by_tokens]
        tokens = {r.fingerprint for r in named.values() if (r.data, r.split) == (first.data, first.split)}
        label = f"{first.data} {first.split}" + (f", tokens {first.fingerprint[:SHOWN]}" if len(tokens) > 1 else "")
        label += "" if first.limit is None else f", {first.windows:,} windows"
        size = f"{first.tokens:,}"
        columns = {
            "loss": tuple((r.loss, r.stderr) if r else None for r in own),
            "perplexity": tuple((r.perplexity, None) if r else None for r in own),
            "bits per byte": tuple((r.bits_per_byte, None) if r and r.bits_per_byte is not None else None for r in own),
        }
        found += [Line(label, metric, False, size, values) for metric, values in columns.items() if any(values)]
    for task in TASKS.values():
        results = [{(r.samples, r.origin): r for r in m.tasks if r.origin.task == task.name} for m in models]
        kinds = list(dict.fromkeys(kind for by_origin in results for kind in by_origin))
        for samples, origin in kinds:
            values = [by_origin.get((samples, origin)) for by_origin in results]
            size = f"{samples:,}" if origin.limit is None else f"{samples:,} of {task.samples:,}"
            pairs = tuple((r.value, r.stderr) if r else None for r in values)
            label = ", ".join([task.label, *marks(origin, [other for _, other in kinds])])
            found.append(Line(label, task.metric, task.higher, size, pairs))
    return found


def marks(origin: Origin, others: Sequence[Origin]) -> list[str]:
    """What tells an origin from others of the same task, besides the limit."""
    parts = {"lm-eval": "harness", "data": "data", "tokenizer": "tokenizer"}
    return [
        f"{words} {getattr(origin, name) if name == 'harness' else getattr(origin, name)[:SHOWN]}"
        for words, name in parts.items()
        if len({getattr(other, name) for other in others}) > 1
    ]


def with_error(value: tuple[float, float | None] | None) -> str:
    """A value with its standard error: 0.2562 ± 0.0102."""
    if value is None:
        return "–"
    mean, stderr = value
    form = next((form for limit, form in FORMS if abs(mean) < limit), ".3g")
    return f"{mean:{form}}" if stderr is None else f"{mean:{form}} ± {stderr:{form}}"


def show(models: Sequence[Results], console: Console) -> None:
    """Print the lines as a table, with the best values bold, and the weights of each column."""
    rows = []
    for line in lines(models):
        cells = [tables.Strong(with_error(v)) if i == line.best else with_error(v) for i, v in enumerate(line.values)]
        rows.append((line.label, f"{line.metric} {'↑' if line.higher else '↓'}", line.samples, *cells))
    tables.show(console, tables.Table(("", "metric", "size", *headings(models)), rows, left=(0, 1)))
    for name, model in zip(headings(models), models, strict=True):
        console.print(f"{name}: weights {model.model.weights[:16]}")
    console.print("± is one standard error; ↑ higher is better; size: tokens, samples or pages.")


def headings(models: Sequence[Results]) -> list[str]:
    """Names of the models, followed by their kind and weights where names are equal."""
    names = [m.model.name for m in models]
    return [
        m.model.name if names.count(m.model.name) == 1 else f"{m.model.name} ({m.model.kind}, {m.model.weights[:6]})"
        for m in models
    ]
