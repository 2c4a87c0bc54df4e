"""What is in a folder of tokens: counts, checksums, the most frequent tokens, a sample of the text."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from angpt.data.shards import SPLITS, TOKENIZER, Index, SplitName, TokenData
from angpt.data.tokenizers import load_tokenizer
from angpt.errors import UserError
from angpt.present.tables import Table

BLOCK = 1 << 22
SAMPLE_TOKENS = 128


@dataclass(frozen=True)
class SplitInfo:
    """One split. What a raw file does not say is None."""

    split: SplitName
    tokens: int
    documents: int | None
    text_bytes: int | None
    replaced: int | None
    files: int
    max_token: int
    vocabulary_used: int
    """Different ids that occur."""
    top: tuple[tuple[str, int], ...]
    """The most frequent tokens, as text (or as ids, where there is no tokenizer), and how often they occur."""
    sample: str


@dataclass(frozen=True)
class DataInfo:
    """A folder or file of tokens."""

    path: Path
    dtype: str
    index: Index | None
    verified: bool
    """The checksums of all shards were found right."""
    splits: tuple[SplitInfo, ...]


def describe(path: str | Path, verify: bool = True, top: int = 10) -> DataInfo:
    """Read all tokens once. With `verify`, a shard that is not what the index says is an error."""
    found = [TokenData.open(path, split) for split in SPLITS]
    index = found[0].index
    if index is not None and verify:
        for split in (index.train, index.val):
            for shard in split.shards:
                _verify(Path(path) / shard.file, shard.sha256)
    return DataInfo(
        path=Path(path),
        dtype=found[0].dtype.name,
        index=index,
        verified=index is not None and verify,
        splits=tuple(_describe_split(data, top) for data in found),
    )


def render(info: DataInfo) -> RenderableType:
    """The same for a person."""
    title = f"{info.path}: {info.dtype}"
    if info.index is not None:
        recipe = info.index.recipe
        title += f"\n{' '.join(recipe.sources)}\ntokenizer {recipe.tokenizer} ({info.index.vocab_size:,} ids)"
        title += ", checksums right" if info.verified else ", checksums not verified"
    rows = []
    for name in ("tokens", "documents", "text_bytes", "replaced", "files", "max_token", "vocabulary_used"):
        values = [getattr(split, name) for split in info.splits]
        rows.append((name.replace("_", " "), *("unknown" if value is None else f"{value:,}" for value in values)))
    if info.index is not None:
        shares = [split.vocabulary_used / info.index.vocab_size for split in info.splits]
        rows.append(("share of vocabulary", *(f"{share:.1%}" for share in shares)))
        sizes = [(split.text_bytes or 0) / split.tokens for split in info.splits]
        rows.append(("bytes per token", *(f"{size:.3f}" for size in sizes)))
    first = info.splits[0]
    frequent = Text("most frequent: " + "  ".join(f"{token} {count / first.tokens:.2%}" for token, count in first.top))
    table = Table(("", *(split.split for split in info.splits)), rows)
    return Group(
        Text(title), table.rich(), frequent, Panel(Text(first.sample), title="start of train", title_align="left")
    )


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise UserError(f"{path}: its checksum is wrong, so it is damaged; delete the folder and prepare it again")


def _describe_split(data: TokenData, top: int) -> SplitInfo:
    counts = _histogram(data)
    order = np.argsort(-counts, kind="stable")[: min(top, np.count_nonzero(counts))]
    sample = data.read(0, min(SAMPLE_TOKENS, data.tokens)).tolist()
    tokenizer = None if data.index is None else load_tokenizer(data.path / TOKENIZER)
    names = [str(token) if tokenizer is None else repr(tokenizer.decode([token], False)) for token in order.tolist()]
    split = None if data.index is None else (data.index.train if data.split == "train" else data.index.val)
    return SplitInfo(
        split=data.split,
        tokens=data.tokens,
        documents=None if split is None else split.documents,
        text_bytes=None if split is None else split.text_bytes,
        replaced=None if split is None else split.replaced,
        files=len(data.files),
        max_token=int(np.flatnonzero(counts)[-1]),
        vocabulary_used=int(np.count_nonzero(counts)),
        top=tuple(zip(names, counts[order].tolist(), strict=True)),
        sample=" ".join(map(str, sample)) if tokenizer is None else tokenizer.decode(sample, False),
    )


def _histogram(data: TokenData) -> NDArray[Any]:
    counts = np.zeros(data.max_token + 1, np.int64)
    for start in range(0, data.tokens, BLOCK):
        counts += np.bincount(data.read(start, min(BLOCK, data.tokens - start)), minlength=len(counts))
    return counts
