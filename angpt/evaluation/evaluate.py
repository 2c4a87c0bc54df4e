"""Evaluation of models on data and tasks; results are kept in the folder of each model and not computed twice.

A task has three steps: the harness makes requests, the model scores them, the harness computes metrics from the scores.
The second step needs neither the harness nor the data of the task, so it can run on another machine.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from tokenizers import Tokenizer

from angpt.config import Device, Precision
from angpt.data.shards import TokenData
from angpt.data.tokenizers import fingerprint, load_tokenizer, were_made_with
from angpt.errors import UserError
from angpt.evaluation.loss import bits_per_byte, losses
from angpt.evaluation.requests import Origin, Requests, Scored, Scores
from angpt.evaluation.results import SCORES, LossResult, Results, TaskResult, read_results, with_error, write_results
from angpt.evaluation.scoring import Model, Progress, score
from angpt.evaluation.spread import command_line, evaluate_parts, own_part
from angpt.evaluation.subjects import Subject, open_subject
from angpt.evaluation.tasks import PAPER, TASKS, Task, choose, data_digest, harness_version, is_benchmarks
from angpt.present.terminal import terminal
from angpt.present.words import printable
from angpt.training.hardware import choose_device, present
from angpt.training.run import environment

if TYPE_CHECKING:
    from angpt.evaluation.harness import Built

BATCH_TOKENS = {"cuda": 65_536, "cpu": 8_192}


@dataclass(frozen=True)
class Settings:
    """Device, precision, batch size and limit of an evaluation."""

    device: torch.device
    precision: Literal["fp32", "bf16"]
    any_precision: bool
    """True if existing scores are accepted in any precision."""
    batch_tokens: int
    limit: int | None

    @classmethod
    def choose(cls, device: Device, precision: Precision, batch_tokens: int | None, limit: int | None) -> "Settings":
        where = present(choose_device(device))
        for name, value in (("--batch-tokens", batch_tokens), ("--limit", limit)):
            if value is not None and value < 1:
                raise UserError(f"{name} {value}: must be at least 1")
        auto = precision == "auto"
        low = precision == "bf16" or (auto and where.type == "cuda")
        return cls(where, "bf16" if low else "fp32", auto, batch_tokens or BATCH_TOKENS[where.type], limit)

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
    """Lines, which may go to a function instead of the terminal, and a progress bar in the terminal."""

    def __init__(self, progress: bool | Callable[[str], object]) -> None:
        self.console = terminal(quiet=progress is not True)
        self.note: Callable[[str], object] = self.console.print if isinstance(progress, bool) else progress

    @contextlib.contextmanager
    def bar(self, label: str) -> Iterator[Progress]:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            line = bar.add_task(printable(label), total=None)
            yield lambda done, total: bar.update(line, completed=done, total=total)


class Evaluator:
    """Evaluates one model and keeps its results."""

    def __init__(self, subject: Subject, settings: Settings, display: Display) -> None:
        self.subject, self.settings, self.display = subject, settings, display
        before, m = read_results(subject.path), subject.model
        if before is not None and before.model.weights != m.weights:
            display.note(f"{subject.path}: results of older weights ({before.model.weights[:16]}) are replaced")
            for path in (subject.path / SCORES).glob("*.safetensors"):
                path.unlink()
            before = None
        self.results = before or Results(m)
        display.note(f"{subject.path}: weights {m.weights[:16]}, context {m.context:,}, vocabulary {m.vocab_size:,}")

    @cached_property
    def model(self) -> Model:
        with self.display.bar(f"loading {self.subject.path}"):
            return self.subject.load(self.settings.device, self.settings.dtype)

    def save(self, change: Callable[[Results], Results] = lambda results: results) -> None:
        """Apply a change to the results in the folder, which another process may have extended since they were read."""
        there = read_results(self.subject.path)
        if there is None or there.model.weights != self.subject.model.weights:
            there = self.results
        self.results = change(there)
        write_results(self.subject.path, self.results)

    def loss(self, folder: Path) -> None:
        """Loss on the validation split of a prepared folder."""
        about, settings = self.subject.model, self.settings
        data = TokenData.open(folder, "val")
        for old in self.results.losses:
            if old.key == (data.split, data.fingerprint, settings.limit) and settings.accepts(old.precision):
                self.display.note(f"  {folder}: known already")
                return
        if not were_made_with(data, about.tokenizer, self.subject.tokenizer_path):
            raise UserError(f"{folder}: was prepared with a tokenizer other than that of {self.subject.path}")
        if data.max_token >= about.vocab_size:
            raise UserError(f"{folder}: has token {data.max_token}, but the model's vocabulary is {about.vocab_size}")
        model, start = self.model, time.perf_counter()
        with self.display.bar(f"{folder} loss") as progress:
            mask = self.subject.mask_documents
            found = losses(model, data, about.context, settings.batch_tokens, settings.limit, mask, progress)
        tokenizer = None
        if data.text_bytes is None:
            with contextlib.suppress(UserError):  # without a tokenizer there are no bits per byte
                tokenizer = self.subject.tokenizer(None)
        result = LossResult(
            data=str(folder),
            split=data.split,
            fingerprint=data.fingerprint,
            limit=settings.limit,
            **vars(found),
            perplexity=found.perplexity,
            bits_per_byte=bits_per_byte(found.loss, data, tokenizer),
            precision=settings.precision,
            device=settings.device_name,
            seconds=time.perf_counter() - start,
        )
        self.save(lambda results: results.with_loss(result))
        self.display.note(f"  {folder}: loss {result.loss:.4f} over {result.tokens:,} tokens")

    def score(self, requests: Requests) -> Scores:
        """The scores of requests, from the folder of the model or computed."""
        about, settings, task = self.subject.model, self.settings, requests.origin.task
        path = self.subject.path / SCORES / f"{task}-{requests.digest[:12]}-{about.weights[:12]}.safetensors"
        if path.exists():
            scores = Scores.load(path)
            if settings.accepts(scores.scored.precision) and len(scores.logprob) == len(requests):
                return scores
        if about.tokenizer not in (None, requests.origin.tokenizer):
            raise UserError(f"{task}: the requests were made with a tokenizer other than that of {self.subject.path}")
        if requests.max_token >= about.vocab_size:
            raise UserError(
                f"{task}: the requests have token {requests.max_token}, but the vocabulary of {self.subject.path} has "
                f"{about.vocab_size}; they were made with another tokenizer"
            )
        model, start = self.model, time.perf_counter()
        with self.display.bar(f"{TASKS[task].label} {about.name}") as progress:
            found = score(model, requests.pairs, about.context, settings.batch_tokens, progress)
        seconds = time.perf_counter() - start
        scored = Scored(
            weights=about.weights,
            requests=requests.digest,
            precision=settings.precision,
            device=settings.device_name,
            seconds=seconds,
            cut=found.cut,
            windowed=found.windowed,
        )
        scores = Scores(scored, found.logprob, found.greedy)
        scores.save(path)
        self.save()  # the results identify the weights of the scores
        self.display.note(f"  {task}: {len(requests):,} requests scored in {seconds:.1f} s")
        return scores

    def known(self, task: Task, origin: Origin) -> bool:
        """True if the results include this task with this origin."""
        old = self.results.task(task.name, origin.limit)
        return old is not None and old.origin == origin and self.settings.accepts(old.scored.precision)

    def task(self, built: "Built", requests: Requests) -> None:
        """Score the requests of a task, compute its metrics and save the result."""
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
        if scored.windowed and metric != "word_perplexity":  # which is always scored in windows
            notes += f"; {scored.windowed:,} continuations longer than the context were scored in windows"
        of = "" if origin.limit is None else f" of {built.task.samples:,}"
        value = with_error((result.value, result.stderr))
        self.display.note(f"  {origin.task}: {metric} {value} over {requests.samples:,}{of} samples{notes}")


class Harness:
    """The tasks with their data; each is built once for all models."""

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


def evaluate(
    models: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    data: Sequence[str | PathLike[str]] = (),
    tasks: Sequence[str] = (),
    limit: int | None = None,
    tokenizer: str | None = None,
    requests: str | PathLike[str] | None = None,
    device: Device = "auto",
    precision: Precision = "auto",
    batch_tokens: int | None = None,
    progress: bool | Callable[[str], object] = False,
) -> list[Results]:
    """Evaluate models: loss, perplexity and bits per byte on prepared data, and tasks of lm-evaluation-harness.

    Results are kept in the folder of each model, and not computed twice for the same weights. On a machine with several
    GPUs, each evaluates a share of the models.

    Args:
        models: Run folders, folded models, exports.
        data: Prepared folders, and a folder of benchmarks; without them and tasks, the models' own training data.
        tasks: Names of tasks, or paper: those of the paper's table, which a folder of benchmarks implies.
        limit: Use only this many samples of each task, or windows of prepared data.
        tokenizer: A tokenizer.json, if that of the training data cannot be found.
        requests: Score the requests in this folder, without lm-eval.
        device: cpu, cuda, or auto: cuda if available.
        precision: Precision of matrix products: fp32, bf16, or auto: bf16 on a GPU.
        batch_tokens: Tokens per forward pass; 65,536 on a GPU and 8,192 on the CPU unless given.
        progress: True: print lines, and a progress bar in a terminal. A function is called with each line.
    """
    if requests is not None and limit is not None:
        raise UserError("--limit does not apply to --requests; give it with --write-requests, where they are made")
    paths = [Path(p) for p in ([models] if isinstance(models, str | PathLike) else models)]
    prepared, benchmarks = sort_data([Path(p) for p in data])
    chosen, display = choose(tuple(tasks) or (PAPER if benchmarks else ())), Display(progress)
    settings = Settings.choose(device, precision, batch_tokens, limit)
    subjects = [open_subject(path) for path in paths]
    harness = Harness(benchmarks, limit, display)
    files = None if requests is None else read_requests(Path(requests), chosen if tasks else None)
    part = own_part(subjects)
    if part is None:
        arguments = command_line(
            paths, data=tuple(data), tasks=tuple(tasks), limit=limit, tokenizer=tokenizer, requests=requests,
            device=device, precision=precision, batch_tokens=batch_tokens,
        )  # fmt: skip
        evaluate_parts(settings.device, len(paths), arguments, quiet=progress is not True)
    results = []
    for subject in subjects if part is None else part:
        evaluator = Evaluator(subject, settings, display)
        folders = prepared
        if not folders and not chosen and files is None:
            if subject.data is None:
                raise UserError(f"{subject.path}: its training data is unknown; name data with --data or --tasks")
            folders = [subject.data]
        for folder in folders:
            evaluator.loss(folder)
        if files is not None:
            for file in files:
                evaluator.score(file)
        elif chosen:
            evaluate_tasks(evaluator, chosen, harness, subject.tokenizer(tokenizer))
        results.append(evaluator.results)
    return results


def sort_data(paths: Sequence[Path]) -> tuple[list[Path], Path | None]:
    """The prepared folders, and the folder of benchmarks, if any."""
    benchmarks = [path for path in paths if path.is_dir() and is_benchmarks(path)]
    if len(benchmarks) > 1:
        raise UserError(f"{benchmarks[0]} and {benchmarks[1]} both hold benchmarks; give one of them")
    return [path for path in paths if path not in benchmarks], next(iter(benchmarks), None)


def evaluate_tasks(evaluator: Evaluator, tasks: Sequence[Task], harness: Harness, tokenizer: Tokenizer) -> None:
    """Evaluate one model on the tasks for which it has no results."""
    known = [task for task in tasks if evaluator.known(task, harness.origin(task, tokenizer))]
    if known:
        evaluator.display.note(f"  known already: {' '.join(task.name for task in known)}")
    for task in tasks:
        if task not in known:
            evaluator.task(harness.build(task), harness.requests(task, tokenizer))


def write_requests(folder: Path, tasks: Sequence[Task], harness: Harness, tokenizer: Tokenizer) -> None:
    """Write the requests of each task to a file."""
    for task in tasks:
        path = folder / f"{task.name}.safetensors"
        requests = Requests.load(path) if path.exists() else None
        if requests is None or requests.origin != harness.origin(task, tokenizer):
            requests = harness.requests(task, tokenizer)
            requests.save(path)
        harness.display.note(f"{path}: {len(requests):,} requests from {requests.samples:,} samples")


def read_requests(folder: Path, tasks: Sequence[Task] | None) -> list[Requests]:
    """The requests that `write_requests` wrote, of these tasks or of all."""
    paths = [folder / f"{name}.safetensors" for name in (TASKS if tasks is None else [task.name for task in tasks])]
    if tasks is None:
        paths = [path for path in paths if path.exists()]
        if not paths:
            raise UserError(f"{folder}: has no requests; write them with --write-requests where lm-eval is installed")
    return [Requests.load(path) for path in paths]


def one_tokenizer(subjects: Sequence[Subject], given: str | None) -> Tokenizer:
    """The tokenizer that all models share, or without models the given one."""
    if not subjects:
        if given is None:
            raise UserError("name a model, or a tokenizer with --tokenizer: requests are made of tokens")
        return load_tokenizer(given)
    found = {fingerprint(t): t for t in (subject.tokenizer(given) for subject in subjects)}
    if len(found) > 1:
        raise UserError("these models have different tokenizers; write the requests of each to a separate folder")
    return next(iter(found.values()))
