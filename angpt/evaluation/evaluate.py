"""Models times data: what is known already is taken from their folders, the rest is computed and written there.

A task goes through three steps: the harness makes requests, the model scores them, the harness makes metrics of the
scores. The second step needs neither the harness nor the data of the task and can happen on another machine.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from tokenizers import Tokenizer

from angpt.config import Device, Precision
from angpt.data.shards import TokenData
from angpt.data.tokenizers import fingerprint, load_tokenizer
from angpt.errors import UserError
from angpt.evaluation.loss import bits_per_byte, losses
from angpt.evaluation.requests import Origin, Requests, Scored, Scores
from angpt.evaluation.results import (
    FOLDER,
    SCORES,
    LossResult,
    Results,
    TaskResult,
    read_results,
    with_error,
    write_results,
)
from angpt.evaluation.scoring import Model, Progress, score
from angpt.evaluation.subjects import Subject
from angpt.evaluation.tasks import TASKS, Task, data_digest, harness_version
from angpt.training.hardware import choose_device, present
from angpt.training.run import environment

if TYPE_CHECKING:
    from angpt.evaluation.harness import Built

BATCH_TOKENS = {"cuda": 65_536, "cpu": 8_192}


@dataclass(frozen=True)
class How:
    """Where and how models are run."""

    device: torch.device
    precision: Literal["fp32", "bf16"]
    any_precision: bool
    """Scores that are there already are good in whatever precision."""
    batch_tokens: int
    limit: int | None

    @classmethod
    def choose(cls, device: Device, precision: Precision, batch_tokens: int | None, limit: int | None) -> "How":
        where = present(choose_device(device))
        for name, value in (("--batch-tokens", batch_tokens), ("--limit", limit)):
            if value is not None and value < 1:
                raise UserError(f"{name} {value}: at least one is needed")
        return cls(
            device=where,
            precision="bf16" if precision == "bf16" or (precision == "auto" and where.type == "cuda") else "fp32",
            any_precision=precision == "auto",
            batch_tokens=batch_tokens or BATCH_TOKENS[where.type],
            limit=limit,
        )

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @cached_property
    def device_name(self) -> str:
        found = environment(self.device)
        return found.get("gpu", found["cpu"])

    def accepts(self, precision: str) -> bool:
        return self.any_precision or precision == self.precision


class Display:
    """Output for a person: lines, and a progress bar in a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    @contextlib.contextmanager
    def bar(self, label: str) -> Iterator[Progress]:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Bar(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            line = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(line, completed=done, total=total)


class Evaluator:
    """One model and its folder."""

    def __init__(self, subject: Subject, how: How, display: Display) -> None:
        self.subject, self.how, self.display = subject, how, display
        before = read_results(subject.path)
        if before is not None and before.model.weights != subject.model.weights:
            display.note(f"{subject.path}: results of older weights ({before.model.weights[:16]}) are replaced")
            for path in (subject.path / FOLDER / SCORES).glob("*.safetensors"):
                path.unlink()
            before = None
        self.results = before or Results(subject.model)
        m = subject.model
        display.note(f"{subject.path}: weights {m.weights[:16]}, context {m.context:,}, vocabulary {m.vocab_size:,}")

    @cached_property
    def model(self) -> Model:
        with self.display.bar(f"loading {self.subject.path}"):
            return self.subject.load(self.how.device, self.how.dtype)

    def save(self, change: Callable[[Results], Results] = lambda results: results) -> None:
        """Apply a change to the results in the folder, to which another process may have added since they were read."""
        there = read_results(self.subject.path)
        same = there is not None and there.model.weights == self.subject.model.weights
        self.results = change(there if there is not None and same else self.results)
        write_results(self.subject.path, self.results)

    def loss(self, folder: Path) -> None:
        """Loss on the validation split of a prepared folder."""
        about, how = self.subject.model, self.how
        data = TokenData.open(folder, "val")
        for old in self.results.losses:
            same = (old.data, old.fingerprint, old.limit) == (str(folder), data.fingerprint, how.limit)
            if same and how.accepts(old.precision):
                self.display.note(f"  {folder}: known already")
                return
        if None not in (data.tokenizer_fingerprint, about.tokenizer) and data.tokenizer_fingerprint != about.tokenizer:
            raise UserError(f"{folder}: was prepared with another tokenizer than {self.subject.path} was trained with")
        if data.max_token >= about.vocab_size:
            raise UserError(f"{folder}: has token {data.max_token}, but the model's vocabulary is {about.vocab_size}")
        model, start = self.model, time.perf_counter()
        with self.display.bar(f"{folder} loss") as progress:
            mask = self.subject.mask_documents
            found = losses(model, data, about.context, how.batch_tokens, how.limit, mask, progress)
        tokenizer = None
        if data.text_bytes is None:
            with contextlib.suppress(UserError):  # there is none, and no bits per byte
                tokenizer = self.subject.tokenizer(None)
        result = LossResult(
            data=str(folder),
            split=data.split,
            fingerprint=data.fingerprint,
            limit=how.limit,
            windows=found.windows,
            tokens=found.tokens,
            loss=found.loss,
            stderr=found.stderr,
            perplexity=found.perplexity,
            bits_per_byte=bits_per_byte(found.loss, data, tokenizer),
            precision=how.precision,
            device=how.device_name,
            seconds=time.perf_counter() - start,
        )
        self.save(lambda results: results.with_loss(result))
        self.display.note(f"  {folder}: loss {result.loss:.4f} over {result.tokens:,} tokens")

    def score(self, requests: Requests) -> Scores:
        """The answers to requests: those that are there, else new ones."""
        about, how, task = self.subject.model, self.how, requests.origin.task
        name = f"{task}-{requests.digest[:12]}-{about.weights[:12]}.safetensors"
        path = self.subject.path / FOLDER / SCORES / name
        if path.exists():
            scores = Scores.load(path)
            if how.accepts(scores.scored.precision) and len(scores.logprob) == len(requests):
                return scores
        if about.tokenizer not in (None, requests.origin.tokenizer):
            raise UserError(f"{task}: the requests were made with another tokenizer than that of {self.subject.path}")
        if requests.max_token >= about.vocab_size:
            raise UserError(
                f"{task}: the requests have token {requests.max_token}, but the vocabulary of {self.subject.path} has "
                f"{about.vocab_size}; they were made with another tokenizer"
            )
        model, start = self.model, time.perf_counter()
        with self.display.bar(f"{TASKS[task].label} {about.name}") as progress:
            found = score(model, requests.pairs, about.context, how.batch_tokens, progress)
        seconds = time.perf_counter() - start
        scored = Scored(
            weights=about.weights,
            requests=requests.digest,
            precision=how.precision,
            device=how.device_name,
            seconds=seconds,
            cut=found.cut,
            windowed=found.windowed,
        )
        scores = Scores(scored, found.logprob, found.greedy)
        scores.save(path)
        self.save()  # it says whose scores these are
        self.display.note(f"  {task}: {len(requests):,} requests scored in {seconds:.1f} s")
        return scores

    def known(self, task: Task, origin: Origin) -> bool:
        """True if there is a result of this task, of these weights, on this data."""
        old = self.results.task(task.name)
        return old is not None and old.origin == origin and self.how.accepts(old.scored.precision)

    def task(self, built: "Built", requests: Requests) -> None:
        """One task to its end."""
        scores = self.score(requests)
        metrics = built.metrics(scores)
        origin, scored, metric = requests.origin, scores.scored, built.task.metric
        result = TaskResult(
            origin=origin,
            metric=metric,
            value=metrics[metric],
            stderr=metrics.get(f"{metric}_stderr"),
            metrics=metrics,
            samples=requests.samples,
            scored=scored,
        )
        self.save(lambda results: results.with_task(result))
        notes = f"; {scored.cut:,} requests were cut on the left to fit the context" if scored.cut else ""
        if scored.windowed and metric != "word_perplexity":  # for which that is the rule
            notes += f"; {scored.windowed:,} continuations longer than the context were scored in windows"
        of = "" if origin.limit is None else f" of {built.task.samples:,}"
        value = with_error((result.value, result.stderr))
        self.display.note(f"  {origin.task}: {metric} {value} over {requests.samples:,}{of} samples{notes}")


class Harness:
    """The tasks with their data; each is built once, however many models there are."""

    def __init__(self, data: Path | None, limit: int | None, display: Display) -> None:
        self.data, self.limit, self.display = data, limit, display
        self.built: dict[str, Built] = {}
        self.tokenized: dict[tuple[str, str], Requests] = {}

    def origin(self, task: Task, tokenizer: Tokenizer) -> Origin:
        return Origin(task.name, data_digest(task, self.data), self.limit, harness_version(), fingerprint(tokenizer))

    def build(self, task: Task) -> "Built":
        if task.name not in self.built:
            from angpt.evaluation.harness import Built

            with self.display.bar(f"{task.label} requests"):
                self.built[task.name] = Built(task, self.data, self.limit)
        return self.built[task.name]

    def requests(self, task: Task, tokenizer: Tokenizer) -> Requests:
        key = task.name, fingerprint(tokenizer)
        if key not in self.tokenized:
            self.tokenized[key] = self.build(task).requests(tokenizer, self.origin(task, tokenizer))
        return self.tokenized[key]


def evaluate_tasks(evaluator: Evaluator, tasks: Sequence[Task], harness: Harness, tokenizer: Tokenizer) -> None:
    """All tasks of one model; those that it has results of are left out."""
    known = [task for task in tasks if evaluator.known(task, harness.origin(task, tokenizer))]
    if known:
        evaluator.display.note(f"  known already: {' '.join(task.name for task in known)}")
    for task in tasks:
        if task not in known:
            evaluator.task(harness.build(task), harness.requests(task, tokenizer))


def write_requests(folder: Path, tasks: Sequence[Task], harness: Harness, tokenizer: Tokenizer) -> None:
    """The requests of tasks as files, one for each."""
    for task in tasks:
        path = folder / f"{task.name}.safetensors"
        requests = Requests.load(path) if path.exists() else None
        if requests is None or requests.origin != harness.origin(task, tokenizer):
            requests = harness.requests(task, tokenizer)
            requests.save(path)
        harness.display.note(f"{path}: {len(requests):,} requests from {requests.samples:,} samples")


def read_requests(folder: Path, tasks: Sequence[Task] | None) -> list[Requests]:
    """The files that `write_requests` has written, of some tasks or of all."""
    paths = [folder / f"{name}.safetensors" for name in TASKS]
    if tasks is not None:
        paths = [folder / f"{task.name}.safetensors" for task in tasks]
    elif not any(path.exists() for path in paths):
        raise UserError(f"{folder}: no requests here; --write-requests makes them where lm-eval and the data are")
    else:
        paths = [path for path in paths if path.exists()]
    return [Requests.load(path) for path in paths]


def one_tokenizer(subjects: Sequence[Subject], given: str | None) -> Tokenizer:
    """The tokenizer of all of the models; without models the one that the user names."""
    if not subjects:
        if given is None:
            raise UserError("name a model, or the tokenizer with --tokenizer: requests are made of tokens")
        return load_tokenizer(given)
    found = {fingerprint(t): t for t in (subject.tokenizer(given) for subject in subjects)}
    if len(found) > 1:
        raise UserError("these models have different tokenizers; write the requests of each into a folder of its own")
    return next(iter(found.values()))
