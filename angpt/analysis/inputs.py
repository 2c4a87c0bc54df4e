"""Inputs of the measured models: validation text, and inputs unlike any training text."""

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
"""Number of training tokens in which occurrences are counted, in blocks spread over the data."""
BLOCK = 1 << 20
SAME = 512
"""Repetitions of one token, as in the paper; at most the context."""
RAREST = 0.1
"""Share of the occurring tokens that counts as rare."""
LONGER = (2, 4)
"""Longer contexts, as multiples of the trained one."""


@dataclass(frozen=True)
class TextSource:
    """Training and validation text of a model."""

    train: TokenData
    val: TokenData
    context: int
    vocab_size: int
    """Vocabulary of the model."""
    mask_documents: bool = False

    @property
    def known_tokens(self) -> int:
        """Number of tokens that can occur; the vocabulary of a model may be larger than that of its tokenizer."""
        return min(self.vocab_size, self.train.vocab_size or self.vocab_size)

    @property
    def eot(self) -> int | None:
        """Id of the end-of-text token if attention stays inside documents; otherwise None."""
        return end_of_text(self.val) if self.mask_documents else None


@dataclass(frozen=True)
class Condition:
    """Sequences of one kind of input."""

    name: str
    description: str
    tokens: Tokens
    """Token ids, (sequences, length + 1)."""
    skip: int = 0
    """Number of positions at the start that are not counted."""
    eot: int | None = None
    """Id of the end-of-text token if attention stays inside documents; otherwise None."""


@dataclass(frozen=True)
class Missing:
    """A condition that cannot be built from this data, and why."""

    name: str
    reason: str


def text_batches(source: TextSource, tokens: int, batch_tokens: int) -> Iterator[Batch]:
    """About `tokens` tokens of validation text in windows of the context, spread over the split."""
    windows = max(1, tokens // source.context)
    size = max(1, batch_tokens // source.context)
    for chosen in validation_batches(source.val, source.context, size, windows):
        yield as_batch(chosen, source.eot)


def condition_batches(condition: Condition, batch_tokens: int) -> Iterator[Batch]:
    """The sequences of a condition in batches of about `batch_tokens` tokens."""
    size = max(1, batch_tokens // (condition.tokens.shape[1] - 1))
    for i in range(0, len(condition.tokens), size):
        yield as_batch(condition.tokens[i : i + size], condition.eot)


def as_batch(tokens: Tokens, eot: int | None) -> Batch:
    """Inputs and targets from rows of context + 1 tokens."""
    rows = torch.from_numpy(tokens)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return Batch(inputs, targets, None if eot is None else document_numbers(inputs, eot))


def token_counts(train: TokenData, vocab_size: int, limit: int = COUNTED) -> Tokens:
    """Occurrences of each token in the training text; in blocks spread evenly over it if it is longer than `limit`."""
    counts = np.zeros(vocab_size, np.int64)
    size = min(BLOCK, limit)
    last = limit // size - 1
    spread = [(train.tokens - size) * i // max(1, last) for i in range(last + 1)]
    for start in range(0, train.tokens, size) if train.tokens <= limit else spread:
        block = train.read(start, min(size, train.tokens - start))
        counts += np.bincount(block, minlength=vocab_size)[:vocab_size]
    return counts


def conditions(source: TextSource, tokens: int, counts: Tokens) -> list[Condition | Missing]:
    """Inputs unlike the training text, about `tokens` tokens of each kind. Equal arguments give equal sequences."""
    rng = np.random.Generator(np.random.PCG64(0))
    rows = max(1, tokens // source.context)
    shape = rows, source.context + 1
    seen = np.flatnonzero(counts)
    seen = seen[np.argsort(-counts[seen], kind="stable")]  # the most frequent first
    rare = seen[-max(1, round(RAREST * len(seen))) :]
    drawn = "tokens drawn uniformly from the"
    found: list[Condition | Missing] = [
        _same_token(seen, min(SAME, source.context), tokens),
        Condition("random", f"{drawn} vocabulary", rng.integers(source.known_tokens, size=shape)),
        Condition("rare", f"{drawn} rarest {RAREST:.0%} of those that occur in training", rng.choice(rare, size=shape)),
    ]
    found += [_longer(source, times, tokens) for times in LONGER]
    return found + _written(source, rows, rng)


def _same_token(seen: Tokens, length: int, tokens: int) -> Condition:
    """One token repeated per sequence, from frequent to rare tokens."""
    rows = max(1, min(len(seen), tokens // length))
    chosen = seen[np.linspace(0, len(seen) - 1, rows).astype(np.int64)]
    return Condition(
        "same token",
        f"{length} repetitions of one token, a different one in each sequence, from frequent to rare",
        np.repeat(chosen[:, None], length + 1, axis=1),
    )


def _longer(source: TextSource, times: int, tokens: int) -> Condition | Missing:
    name, length = f"context × {times}", times * source.context
    if source.val.tokens < length + 1:
        return Missing(name, f"the validation split has {source.val.tokens:,} tokens, a sequence needs {length + 1:,}")
    windows = next(validation_batches(source.val, length, rows := max(1, tokens // length), rows))
    what = f"validation text in sequences {times} times as long as in training; only the positions beyond count"
    return Condition(name, what, windows, skip=source.context, eot=source.eot)


def _written(source: TextSource, rows: int, rng: np.random.Generator) -> list[Condition | Missing]:
    """Conditions whose text is written here, which requires the tokenizer."""
    needed = rows * (source.context + 1)
    marks, repeats = rng.choice([" ", "\n", "\t"], size=2 * needed), rng.integers(1, 17, size=2 * needed)
    runs = (mark * n for mark, n in zip(marks.tolist(), repeats.tolist(), strict=True))  # numpy.strings ignores Ctrl-C
    texts = {
        "whitespace": ("runs of 1 to 16 spaces, tabs or line ends", "".join(runs)),
        "German": ("a text in another language", GERMAN),
        "Russian": ("a text in another script", RUSSIAN),
    }
    folder = source.train.path
    try:
        if not (folder / TOKENIZER).exists():
            raise UserError(f"{folder / TOKENIZER} does not exist")
        tokenizer = load_tokenizer(Path(folder))
    except UserError as error:
        return [Missing(name, f"needs the tokenizer: {error}") for name in texts]
    found: list[Condition | Missing] = []
    for name, (description, text) in texts.items():
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        if len(ids) < 2 or ids.max() >= source.vocab_size:
            found.append(Missing(name, "the tokenizer encodes it with tokens outside the model's vocabulary"))
            continue
        length = min(source.context, len(ids) - 1)
        count = min(rows, len(ids) // (length + 1))
        found.append(Condition(name, description, ids[: count * (length + 1)].reshape(count, length + 1)))
    return found
