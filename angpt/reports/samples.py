"""What the trained models write: the same beginnings of validation documents, continued by each."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from angpt.data.shards import TOKENIZER, TokenData
from angpt.data.tokenizers import load_tokenizer
from angpt.errors import UserError
from angpt.inference.fold import fold
from angpt.inference.generate import generate
from angpt.inference.sampling import Sampling
from angpt.inference.source import Source
from angpt.models.folded import Folded
from angpt.present.words import label
from angpt.reports.inside import LARGEST
from angpt.reports.records import Material
from angpt.training.hardware import choose_device

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 8, 60
SEED = 0
SEARCHED = 1 << 20
"""Validation tokens among which the first documents are looked for."""


@dataclass(frozen=True)
class Continuation:
    architecture: str
    text: str
    ended: bool
    """The model ended the document here."""


@dataclass(frozen=True)
class Sample:
    """A prompt, and what each model makes of it."""

    prompt: str
    continuations: tuple[Continuation, ...]


@dataclass(frozen=True)
class Samples:
    samples: tuple[Sample, ...]
    note: str
    """Why there is nothing, or not from every model."""


def make_samples(study: Material, sources: Mapping[str, Source]) -> Samples:
    """Continue the first validation documents with the run that stands for each architecture."""
    runs = study.representatives()
    if not runs:
        return Samples((), "No run has started yet.")
    folder = Path(runs[0].record.config.data.path)
    if not (folder / TOKENIZER).exists():
        return Samples((), f"There is no tokenizer to write text with: {folder / TOKENIZER} does not exist.")
    try:
        tokenizer = load_tokenizer(folder)
        data = TokenData.open(folder, "val")
        prompts = first_documents(data)
    except UserError as error:
        return Samples((), f"The data cannot be read: {error}.")
    if not len(prompts):
        return Samples((), f"No validation document in {folder} has {PROMPT_TOKENS} tokens.")
    columns, notes = [], []
    for run in runs:
        if run.result.name not in sources:
            notes.append(f"{label(run.result.architecture)} has no good checkpoint yet.")
            continue
        model = _folded(sources[run.result.name], large=run.result.parameters > LARGEST)
        tokens = generate(model, prompts, NEW_TOKENS, Sampling(), seed=SEED, end=data.eot, sliding=True)
        made = [_until_end(row, data.eot) for row in tokens]
        columns.append(
            [
                Continuation(run.result.architecture, tokenizer.decode(row, skip_special_tokens=False), ended)
                for row, ended in made
            ]
        )
    texts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts.tolist()]
    rows = zip(*columns, strict=True) if columns else ()
    return Samples(tuple(Sample(text, row) for text, row in zip(texts, rows, strict=False)), " ".join(notes))


def _folded(source: Source, large: bool) -> Folded:
    """The model for inference: a large one on the GPU where there is one, others on the CPU."""
    return fold(source.decoder().to(choose_device("auto" if large else "cpu")))


def first_documents(data: TokenData) -> Tensor:
    """The first tokens of the first documents, (prompts, PROMPT_TOKENS); of a stream without known documents, of parts
    of equal length."""
    tokens = data.read(0, min(data.tokens, SEARCHED)).astype(np.int64)
    if data.eot is None:
        starts = np.arange(PROMPTS) * (len(tokens) // PROMPTS)
        ends = starts + len(tokens) // PROMPTS
    else:
        ends = np.flatnonzero(tokens == data.eot)
        starts = np.concatenate([[0], ends[:-1] + 1])
    long_enough = [int(start) for start, end in zip(starts, ends, strict=False) if end - start >= PROMPT_TOKENS]
    rows = [tokens[start : start + PROMPT_TOKENS] for start in long_enough[:PROMPTS]]
    return torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, PROMPT_TOKENS))


def _until_end(tokens: list[int], eot: int | None) -> tuple[list[int], bool]:
    if eot is None or eot not in tokens:
        return tokens, False
    return tokens[: tokens.index(eot)], True
