"""Log-probabilities of continuations: rows sorted by length, batches counted in tokens, logits only where they are
asked for."""

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
"""Is told how much is done, and of how much."""

LOGITS = {"cuda": 2**29, "cpu": 2**22}
"""Entries of logits at a time, but those of 256 positions at least."""


@dataclass(frozen=True)
class Model:
    """What evaluation asks of a model: logits = head(states(tokens)), split so that logits are computed only where they
    are looked at."""

    states: Callable[[Tensor, Tensor | None], Tensor]
    """Tokens (B, T) → (B, T, d), causal. The second argument (B, T), where there is one, numbers the document of each
    token and keeps attention inside it."""
    head: Callable[[Tensor], Tensor]
    """(N, d) → logits (N, V), in fp32 or wider."""
    vocab_size: int
    device: torch.device


def log_probabilities(model: Model, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each target (N) after its state (N, d), and whether it is the likeliest token."""
    size = max(256, LOGITS[model.device.type] // model.vocab_size)
    values, hits = [], []
    for part, wanted in zip(torch.split(states, size), torch.split(targets, size), strict=True):
        logits = model.head(part)
        values.append(-F.cross_entropy(logits, wanted, reduction="none"))
        # The largest value is found far faster than its place, which matters for ties only.
        hit = logits.gather(1, wanted[:, None])[:, 0] >= logits.amax(dim=-1)
        hit[hit.clone()] = logits[hit].argmax(dim=-1) == wanted[hit]
        hits.append(hit)
    return torch.cat(values), torch.cat(hits)


@dataclass(frozen=True)
class Answers:
    logprob: NDArray[np.float64]
    greedy: NDArray[np.bool_]
    cut: int
    windowed: int


@dataclass(frozen=True)
class Target:
    """Tokens whose log-probability counts for a request: those that follow the last `len(tokens)` inputs of a row."""

    request: int
    tokens: Tokens


@dataclass
class Row:
    """A sequence of inputs, and everything that is asked about it."""

    inputs: Tokens
    targets: list[Target]


def windows(context: Tokens, continuation: Tokens, length: int) -> Iterator[tuple[Tokens, Tokens]]:
    """(inputs, targets), each at most `length` long, in which every token of the continuation is a target once.

    Each window reaches back as far as it can: one that is too long loses the beginning of its context, and a text
    longer than the model's context, such as a page of WikiText, becomes several windows, the last one with as much
    context as fits. This is what lm-evaluation-harness does, for requests and for rolling ones.
    """
    whole = [*context, *continuation]
    for start in range(len(context), len(whole), length):
        end = min(start + length, len(whole))
        yield whole[max(0, end - 1 - length) : end - 1], whole[start:end]


def rows(pairs: Sequence[tuple[Tokens, Tokens]], length: int) -> list[Row]:
    """The rows to compute, longest first. Requests with the same inputs share one: the answers A to D of a question
    are four requests that differ in their last token alone, which is a target and no input."""
    found: dict[tuple[int, ...], Row] = {}
    for number, (context, continuation) in enumerate(pairs):
        for inputs, targets in windows(context, continuation, length):
            row = found.setdefault(tuple(inputs), Row(inputs, []))
            row.targets.append(Target(number, targets))
    return sorted(found.values(), key=lambda row: -len(row.inputs))


def batches(rows: Sequence[Row], tokens: int) -> Iterator[Sequence[Row]]:
    """Consecutive rows of at most `tokens` inputs, padding included; a row at least."""
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
    """Every target token of a batch: its request, its log-probability, and whether it is the likeliest."""
    tokens = np.zeros((len(batch), len(batch[0].inputs)), np.int64)  # padded at the end, where nothing looks at it
    looked: list[tuple[int, int, int, int]] = []  # row, column, token that follows, request
    for number, row in enumerate(batch):
        end = len(row.inputs)
        tokens[number, :end] = row.inputs
        for target in row.targets:
            columns = range(end - len(target.tokens), end)
            looked += ((number, c, t, target.request) for c, t in zip(columns, target.tokens, strict=True))
    places, columns_, targets = torch.tensor(looked, device=model.device)[:, :3].unbind(dim=1)
    states = model.states(torch.as_tensor(tokens, device=model.device), None)
    values, hits = log_probabilities(model, states[places, columns_], targets)
    return np.array([request for *_, request in looked]), values.double().cpu().numpy(), hits.cpu().numpy()
