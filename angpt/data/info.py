"""Description of a folder of tokens: counts, checksums, the most frequent tokens, a sample of the text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from angpt.data.shards import SPLITS, TOKENIZER, Index, SplitName, TokenData, check_shards
from angpt.data.tokenizers import load_tokenizer
from angpt.present.tables import Table
from angpt.present.words import printable

BLOCK = 1 << 22
SAMPLE_TOKENS = 128


@dataclass(frozen=True)
class SplitInfo:
    """What is in one split."""

    split: SplitName
    tokens: int
    files: int
    max_token: int
    vocabulary_used: int
    """Number of different ids that occur."""
    top: tuple[tuple[str, int], ...]
    """The most frequent tokens, as text (or as ids if there is no tokenizer), and how often they occur."""
    sample: str
    documents: int | None = None
    """Unknown, as the next two, for raw files."""
    text_bytes: int | None = None
    replaced: int | None = None


@dataclass(frozen=True)
class DataInfo:
    """What is in a folder or file of tokens."""

    path: Path
    dtype: str
    index: Index | None
    splits: tuple[SplitInfo, ...]


def describe(path: str | Path, verify: bool = True, top: int = 10) -> DataInfo:
    """Describe a folder or file of tokens. With `verify`, shards are read again that were verified before."""
    found = [TokenData.open(path, split) for split in SPLITS]
    index = found[0].index
    if index is not None and verify:
        check_shards(Path(path), index, index.shards, again=True)
    splits = tuple(_describe_split(data, top) for data in found)
    return DataInfo(Path(path), found[0].dtype.name, index, splits)


def render(info: DataInfo) -> RenderableType:
    """The description as tables and text for the terminal."""
    title = f"{info.path}: {info.dtype}"
    if info.index is not None:
        recipe = info.index.recipe
        title += f"\n{' '.join(recipe.sources)}\ntokenizer {recipe.tokenizer} ({info.index.vocab_size:,} ids)"
        title += ", checksums correct"
    rows = []
    for name in ("tokens", "documents", "text_bytes", "replaced", "files", "max_token", "vocabulary_used"):
        values = [getattr(split, name) for split in info.splits]
        rows.append((name.replace("_", " "), *("unknown" if value is None else f"{value:,}" for value in values)))
    if info.index is not None:
        size = info.index.vocab_size
        rows.append(("share of vocabulary", *(f"{split.vocabulary_used / size:.1%}" for split in info.splits)))
        rows.append(("bytes per token", *(f"{(split.text_bytes or 0) / split.tokens:.3f}" for split in info.splits)))
    first = info.splits[0]
    frequent = Text("most frequent: " + "  ".join(f"{token} {count / first.tokens:.2%}" for token, count in first.top))
    table = Table(("", *(split.split for split in info.splits)), rows).rich()
    sample = Panel(Text(printable(first.sample)), title="start of train", title_align="left")
    return Group(Text(printable(title)), table, frequent, sample)


def _describe_split(data: TokenData, top: int) -> SplitInfo:
    counts = _histogram(data)
    order = np.argsort(-counts, kind="stable")[: min(top, np.count_nonzero(counts))]
    sample = data.read(0, min(SAMPLE_TOKENS, data.tokens)).tolist()
    tokenizer = None if data.index is None else load_tokenizer(data.path / TOKENIZER)
    names = [str(token) if tokenizer is None else repr(tokenizer.decode([token], False)) for token in order.tolist()]
    known = {}
    if data.index is not None:
        split = data.index.split(data.split)
        known = {name: getattr(split, name) for name in ("documents", "text_bytes", "replaced")}
    return SplitInfo(
        split=data.split,
        tokens=data.tokens,
        files=len(data.files),
        max_token=int(np.flatnonzero(counts)[-1]),
        vocabulary_used=int(np.count_nonzero(counts)),
        top=tuple(zip(names, counts[order].tolist(), strict=True)),
        sample=" ".join(map(str, sample)) if tokenizer is None else tokenizer.decode(sample, False),
        **known,
    )


def _histogram(data: TokenData) -> NDArray[Any]:
    counts = np.zeros(data.max_token + 1, np.int64)
    for start in range(0, data.tokens, BLOCK):
        counts += np.bincount(data.read(start, min(BLOCK, data.tokens - start)), minlength=len(counts))
    return counts
