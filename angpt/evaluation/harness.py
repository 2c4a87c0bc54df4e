"""Tasks of lm-evaluation-harness: their requests, and the metrics that follow from the scores."""

import contextlib
import io
import logging
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer

from angpt.data.tokenizers import end_of_text_id
from angpt.errors import UserError
from angpt.evaluation.requests import Origin, Requests, Scores, Tokens
from angpt.evaluation.tasks import Task, write_configs

FEWSHOT_SEED = 1234
"""The harness' default; it is required, and has no effect without few-shot examples."""


class Answered(LM):  # type: ignore[misc]  # the harness is not typed
    """A model for the harness that returns existing scores."""

    def __init__(self, scores: Scores) -> None:
        super().__init__()
        self.scores = scores

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return list(zip(self.scores.logprob.tolist(), self.scores.greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        found: list[float] = self.scores.logprob.tolist()
        return found

    def generate_until(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError("none of the tasks generates text")


class Built:
    """A task with its documents and requests as text, independent of model and tokenizer."""

    def __init__(self, task: Task, data: Path | None, limit: int | None) -> None:
        self.task, self.limit = task, limit
        with quiet(), readable(task, data), tempfile.TemporaryDirectory() as folder:
            write_configs(task, data, Path(folder))
            self.loaded = TaskManager(include_defaults=False, include_path=folder).load([task.name])
            self.parts = list(self.loaded["tasks"].values())
            documents = sum(len(part.eval_docs) for part in self.parts)
            if documents != task.samples:
                raise UserError(
                    f"{task.name}: {documents:,} samples in {'the hub' if data is None else data / task.folder}, but "
                    f"the task has {task.samples:,}; the data is incomplete or another version"
                )
            for part in self.parts:
                part.set_config(key="num_fewshot", value=0)
                part.set_fewshot_seed(seed=FEWSHOT_SEED)
                part.build_all_requests(limit=limit)
                part.build_all_requests = lambda **_: None  # the evaluator would repeat it for every model
        self.instances: list[Instance] = [instance for part in self.parts for instance in part.instances]
        self.samples = documents if limit is None else sum(min(limit, len(part.eval_docs)) for part in self.parts)

    def requests(self, tokenizer: Tokenizer, origin: Origin) -> Requests:
        """The requests as tokens."""
        encode = pairs if self.instances[0].request_type == "loglikelihood" else whole_texts
        return Requests.of(origin, self.samples, encode(tokenizer, [instance.args for instance in self.instances]))

    def metrics(self, scores: Scores) -> dict[str, float]:
        """The metrics that the harness computes from the scores, with standard errors as NAME_stderr."""
        for instance in self.instances:
            instance.resps, instance.filtered_resps = [], {}
        perplexities = self.task.metric != "acc"
        try:
            with quiet():
                # No bootstrap: accuracies and perplexities have formulas for the standard error.
                options = {"bootstrap_iters": int(not perplexities), "log_samples": perplexities}
                found = evaluator.evaluate(Answered(scores), self.loaded, limit=self.limit, **options)
        except OverflowError as error:
            raise UserError(f"{self.task.name}: the perplexity overflows; did the training diverge?") from error
        values = {
            name.partition(",")[0]: float(value)
            for name, value in found["results"][self.task.name].items()
            if "," in name and isinstance(value, float | int)
        }
        if perplexities and len(samples := found["samples"][self.task.name]) > 1:
            values |= {
                f"{name}_stderr": standard_error(name, value, [sample[name] for sample in samples])
                for name, value in values.items()
            }
        return values


def pairs(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]) -> list[tuple[Tokens, Tokens]]:
    """(context, continuation) as tokens: both are encoded together, and split where the context alone would end.

    White space at the end of a context is moved to the continuation, where tokenizers put it.
    """
    stripped = [context.rstrip() for context, _ in texts]
    both = [context + continuation for context, continuation in texts]
    contexts, encoded = _encode(tokenizer, list(dict.fromkeys(stripped))), _encode(tokenizer, both)
    eot = end_of_text_id(tokenizer)
    found: list[tuple[Tokens, Tokens]] = []
    for context, text in zip(stripped, both, strict=True):
        before = contexts[context] if context else []  # an empty context becomes end-of-text
        after = encoded[text][len(before) :]
        if not after:
            raise UserError(f"the tokenizer makes no token for the end of {text[-60:]!r}")
        found.append((before or [eot], after))
    return found


def whole_texts(tokenizer: Tokenizer, texts: Sequence[tuple[str]]) -> list[tuple[Tokens, Tokens]]:
    """Whole texts as continuations of end-of-text, so that every token is scored."""
    encoded = _encode(tokenizer, [text for (text,) in texts])
    return [([end_of_text_id(tokenizer)], encoded[text]) for (text,) in texts]


def _encode(tokenizer: Tokenizer, texts: list[str]) -> dict[str, list[int]]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return {text: encoding.ids for text, encoding in zip(texts, encodings, strict=True)}


def standard_error(metric: str, value: float, samples: Sequence[Any]) -> float:
    """The standard error of a mean, or of exp(−Σ log-probabilities / Σ weights) by the delta method."""
    if metric == "acc":
        terms, weight, slope = [float(s) - value for s in samples], 1.0, 1.0
    else:
        both = [(float(s), 1.0) if isinstance(s, float) else (float(s[0]), float(s[1])) for s in samples]
        ratio = sum(logprob for logprob, _ in both) / sum(weight for _, weight in both)
        terms = [logprob - ratio * weight for logprob, weight in both]
        weight = sum(weight for _, weight in both) / len(both)
        slope = 1 / math.log(2) if metric == "bits_per_byte" else value
    n = len(terms)
    return slope * math.sqrt(sum(t * t for t in terms) / (n - 1) / n) / weight


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars and log messages of the harness."""
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, not datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def readable(task: Task, data: Path | None) -> Iterator[None]:
    """Turn any error while reading the data, whatever its class, into a UserError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        where = "the hub" if data is None else data / task.folder
        advice = "check the network, or give a local folder with --data" if data is None else "is it complete?"
        raise UserError(f"{task.name}: {where} cannot be read ({type(error).__name__}: {line}); {advice}") from error
