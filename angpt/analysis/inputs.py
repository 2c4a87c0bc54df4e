"""What is sent through a model: validation text, and inputs that no training text looks like."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from angpt.analysis.languages import GERMAN, RUSSIAN
from angpt.data.loader import Batch, document_numbers, end_of_text, validation_batches
from angpt.data.shards import TOKENIZER, TokenData
from angpt.data.tokenizers import load_tokenizer
from angpt.errors import UserError

Tokens = NDArray[np.int64]

COUNTED = 1 << 24
"""Training tokens in which the occurrences of each token are counted, in blocks spread over the data."""
BLOCK = 1 << 20
SAME = 512
"""Repetitions of one token, as in the paper; the context where that is shorter."""
RAREST = 0.1
"""Part of the tokens that occur which counts as rare."""
LONGER = (2, 4)
"""Contexts beyond the trained one, as multiples of it."""
SEED = 0


@dataclass(frozen=True)
class TextSource:
    """The text that belongs to a model."""

    train: TokenData
    val: TokenData
    context: int
    vocab_size: int
    """Vocabulary of the model."""
    mask_documents: bool = False

    @property
    def known_tokens(self) -> int:
        """Ids below this one can occur; a model may have more rows than its tokenizer has tokens."""
        return min(self.vocab_size, self.train.vocab_size or self.vocab_size)


@dataclass(frozen=True)
class Condition:
    """Sequences of one kind."""

    name: str
    description: str
    tokens: Tokens
    """(sequences, length + 1)."""
    skip: int = 0
    """Positions at the start that are not counted."""


@dataclass(frozen=True)
class Missing:
    """A condition that cannot be made here."""

    name: str
    reason: str


def text_batches(source: TextSource, tokens: int, batch_tokens: int) -> Iterator[Batch]:
    """About `tokens` tokens of validation text in windows of the context, spread over the split."""
    windows = max(1, tokens // source.context)
    size = max(1, batch_tokens // source.context)
    eot = end_of_text(source.val) if source.mask_documents else None
    for chosen in validation_batches(source.val, source.context, size, windows):
        yield as_batch(chosen, eot)


def condition_batches(condition: Condition, batch_tokens: int) -> Iterator[Batch]:
    size = max(1, batch_tokens // (condition.tokens.shape[1] - 1))
    for i in range(0, len(condition.tokens), size):
        yield as_batch(condition.tokens[i : i + size])


def as_batch(tokens: Tokens, eot: int | None = None) -> Batch:
    """Inputs and targets of rows of tokens, each one longer than the context."""
    rows = torch.from_numpy(tokens)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return Batch(inputs, targets, None if eot is None else document_numbers(inputs, eot))


def token_counts(train: TokenData, vocab_size: int, limit: int = COUNTED) -> Tokens:
    """Occurrences of each token in the training text, or in blocks spread evenly over a longer one."""
    counts = np.zeros(vocab_size, np.int64)
    if train.tokens <= limit:
        blocks = [(start, min(BLOCK, train.tokens - start)) for start in range(0, train.tokens, BLOCK)]
    else:
        size = min(BLOCK, limit)
        number = limit // size
        blocks = [((train.tokens - size) * i // max(1, number - 1), size) for i in range(number)]
    for start, size in blocks:
        counts += np.bincount(train.read(start, size), minlength=vocab_size)[:vocab_size]
    return counts


def conditions(source: TextSource, tokens: int, counts: Tokens) -> list[Condition | Missing]:
    """Inputs unlike the training text, about `tokens` tokens of each. Equal arguments give equal sequences."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    context = source.context
    rows = max(1, tokens // context)
    seen = np.flatnonzero(counts)
    seen = seen[np.argsort(-counts[seen], kind="stable")]  # the most frequent first
    found: list[Condition | Missing] = [
        _same_token(seen, min(SAME, context), tokens),
        Condition(
            "random",
            "tokens drawn uniformly from the vocabulary",
            rng.integers(source.known_tokens, size=(rows, context + 1)),
        ),
        Condition(
            "rare",
            f"tokens drawn uniformly from the rarest {RAREST:.0%} of those that occur in training",
            rng.choice(seen[-max(1, round(RAREST * len(seen))) :], size=(rows, context + 1)),
        ),
    ]
    found += [_longer(source, times, tokens) for times in LONGER]
    return found + _written(source, rows, rng)


def _same_token(seen: Tokens, length: int, tokens: int) -> Condition:
    """One token per sequence, from frequent to rare ones."""
    rows = max(1, min(len(seen), tokens // length))
    chosen = seen[np.linspace(0, len(seen) - 1, rows).astype(np.int64)]
    return Condition(
        "same token",
        f"{length} repetitions of one token, the token another one in each sequence, from frequent to rare",
        np.repeat(chosen[:, None], length + 1, axis=1),
    )


def _longer(source: TextSource, times: int, tokens: int) -> Condition | Missing:
    name, length = f"context × {times}", times * source.context
    if source.val.tokens < length + 1:
        return Missing(name, f"the validation split has {source.val.tokens:,} tokens, a sequence needs {length + 1:,}")
    windows = next(validation_batches(source.val, length, rows := max(1, tokens // length), rows))
    what = f"validation text in sequences {times} times as long as in training; what lies beyond counts"
    return Condition(name, what, windows, skip=source.context)


def _written(source: TextSource, rows: int, rng: np.random.Generator) -> list[Condition | Missing]:
    """Conditions whose text is written here, and so needs the tokenizer."""
    names = ("whitespace", "German", "Russian")
    folder = source.train.path
    try:
        if not (folder / TOKENIZER).exists():
            raise UserError(f"{folder / TOKENIZER} does not exist")
        tokenizer = load_tokenizer(Path(folder))
    except UserError as error:
        return [Missing(name, f"it takes the tokenizer: {error}") for name in names]

    def encode(text: str) -> Tokens:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    needed = rows * (source.context + 1)
    runs = rng.choice([" ", "\n", "\t"], size=2 * needed), rng.integers(1, 17, size=2 * needed)
    blank = "".join(str(mark) * int(times) for mark, times in zip(*runs, strict=True))
    texts = {
        "whitespace": ("runs of 1 to 16 spaces, tabs or line ends", blank),
        "German": ("a text in another language", GERMAN),
        "Russian": ("a text in another script", RUSSIAN),
    }
    found: list[Condition | Missing] = []
    for name in names:
        description, text = texts[name]
        ids = encode(text)
        if len(ids) < 2 or ids.max() >= source.vocab_size:
            found.append(Missing(name, "the tokenizer has no tokens of the model's vocabulary for it"))
            continue
        length = min(source.context, len(ids) - 1)
        count = min(rows, len(ids) // (length + 1))
        found.append(Condition(name, description, ids[: count * (length + 1)].reshape(count, length + 1)))
    return found
