"""Log-probabilities of continuations: rows sorted by length, batched by tokens, logits only at scored positions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from angpt.errors import UserError
from angpt.evaluation.requests import Tokens

Progress = Callable[[int, int], None]
"""Called with the amount done and the total."""
LOGITS = {"cuda": 2**29, "cpu": 2**22}
"""Entries of logits computed at a time; at least 256 positions."""


@dataclass(frozen=True)
class Model:
    """A model as two functions, so that logits = head(states(tokens)) are computed only at scored positions."""

    states: Callable[[Tensor, Tensor | None], Tensor]
    """Tokens (B, T) → (B, T, d), causal. The second argument (B, T), unless None, is the document number of each token,
    which restricts attention to its document."""
    head: Callable[[Tensor], Tensor]
    """(N, d) → logits (N, V), in fp32 or wider."""
    vocab_size: int
    device: torch.device


def log_probabilities(model: Model, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each target (N) after its state (N, d), and True where it is the most likely token."""
    size = max(256, LOGITS[model.device.type] // model.vocab_size)
    values, hits = [], []
    for part, wanted in zip(torch.split(states, size), torch.split(targets, size), strict=True):
        logits = model.head(part)
        values.append(-F.cross_entropy(logits, wanted, reduction="none"))
        # amax is far faster than argmax, which is needed only for ties.
        hit = logits.gather(1, wanted[:, None])[:, 0] >= logits.amax(dim=-1)
        hit[hit.clone()] = logits[hit].argmax(dim=-1) == wanted[hit]
        hits.append(hit)
    return torch.cat(values), torch.cat(hits)


@dataclass(frozen=True)
class Answers:
    """Results of `score`; see `requests.Scores` and `requests.Scored`."""

    logprob: NDArray[np.float64]
    greedy: NDArray[np.bool_]
    cut: int
    windowed: int


@dataclass(frozen=True)
class Target:
    """Tokens scored for a request: those that follow the last `len(tokens)` inputs of a row."""

    request: int
    tokens: Tokens


@dataclass
class Row:
    """A sequence of inputs, and the targets scored on it."""

    inputs: Tokens
    targets: list[Target]


def windows(context: Tokens, continuation: Tokens, length: int) -> Iterator[tuple[Tokens, Tokens]]:
    """(inputs, targets) of at most `length` tokens, such that every token of the continuation is a target once.

    Inputs that are too long lose the beginning of the context. A continuation longer than `length`, such as a page of
    WikiText, becomes several windows, the last one with as much context as fits. lm-evaluation-harness does the same,
    for ordinary and for rolling requests.
    """
    whole = [*context, *continuation]
    for start in range(len(context), len(whole), length):
        end = min(start + length, len(whole))
        yield whole[max(0, end - 1 - length) : end - 1], whole[start:end]


def rows(pairs: Sequence[tuple[Tokens, Tokens]], length: int) -> list[Row]:
    """The rows to compute, longest first. Requests with equal inputs share a row, such as the answers A to D to a
    question: they differ only in the last token, which is a target and not an input."""
    found: dict[tuple[int, ...], Row] = {}
    for number, (context, continuation) in enumerate(pairs):
        for inputs, targets in windows(context, continuation, length):
            row = found.setdefault(tuple(inputs), Row(inputs, []))
            row.targets.append(Target(number, targets))
    return sorted(found.values(), key=lambda row: -len(row.inputs))


def batches(rows: Sequence[Row], tokens: int) -> Iterator[Sequence[Row]]:
    """Batches of consecutive rows of at most `tokens` inputs, padding included; at least one row each."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end - start + 1) * len(rows[start].inputs) > tokens:
            yield rows[start:end]
            start = end


@torch.no_grad()
def score(
    model: Model,
    pairs: Sequence[tuple[Tokens, Tokens]],
    length: int,
    batch_tokens: int,
    progress: Progress = lambda done, total: None,
) -> Answers:
    """The log-probability of each continuation after its context, for a model with a context of `length`."""
    logprob = np.zeros(len(pairs))
    greedy = np.ones(len(pairs), np.bool_)
    todo = rows(pairs, length)
    done = 0
    for batch in batches(todo, batch_tokens):
        requests, values, hits = _score_batch(model, batch)
        np.add.at(logprob, requests, values)
        np.logical_and.at(greedy, requests, hits)
        done += len(batch)
        progress(done, len(todo))
    if not np.isfinite(logprob).all():
        raise UserError("the model's logits are not finite; did its training diverge?")
    return Answers(
        logprob,
        greedy,
        cut=sum(len(context) + len(text) > length + 1 and len(text) <= length for context, text in pairs),
        windowed=sum(len(text) > length for _, text in pairs),
    )


def _score_batch(
    model: Model, batch: Sequence[Row]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """For every target token of a batch: its request, its log-probability, and True if it is the most likely one."""
    tokens = np.zeros((len(batch), len(batch[0].inputs)), np.int64)  # padded at the end, which causal models ignore
    scored: list[tuple[int, int, int, int]] = []  # row, column, target, request
    for number, row in enumerate(batch):
        end = len(row.inputs)
        tokens[number, :end] = row.inputs
        for target in row.targets:
            columns = range(end - len(target.tokens), end)
            scored += ((number, c, t, target.request) for c, t in zip(columns, target.tokens, strict=True))
    places, columns_, targets = torch.tensor(scored, device=model.device)[:, :3].unbind(dim=1)
    states = model.states(torch.as_tensor(tokens, device=model.device), None)
    values, hits = log_probabilities(model, states[places, columns_], targets)
    return np.array([request for *_, request in scored]), values.double().cpu().numpy(), hits.cpu().numpy()
