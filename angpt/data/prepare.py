"""Text → tokens on disk: read documents in order, tokenize them on all cores, write shards in order.

The bytes written depend on the recipe alone, not on the number of workers nor on how often the run was interrupted.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from angpt.data.journal import Journal, complete_index
from angpt.data.shards import (
    FORMAT,
    SPLITS,
    TOKENIZER,
    Index,
    Recipe,
    ShardWriter,
    Split,
    SplitName,
    check_size,
)
from angpt.data.sources import Piece, open_source, with_splits
from angpt.data.tokenizers import end_of_text_id, fingerprint, load_tokenizer, vocab_size
from angpt.errors import UserError
from angpt.system import available_cores, write_atomically

SHARD_BYTES = 128 << 20
CHUNK_BYTES = 1 << 20
STDLIB_DEFAULTS = ("bpe:2048", 0.05)
DEFAULTS = ("EleutherAI/gpt-neox-20b", 0.01)

Documents = Callable[[], Iterator[tuple[SplitName, Piece]]]


def prepare(
    names: tuple[str, ...],
    out: Path,
    *,
    tokenizer: str | None = None,
    column: str = "text",
    subset: str | None = None,
    hub_split: str | None = None,
    val_fraction: float | None = None,
    seed: int = 0,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    console: Console | None = None,
) -> Index:
    """Make the folder `out`, or finish it. One that is complete with the same recipe is left as it is."""
    console = console or Console()
    if workers is not None and workers < 1:
        raise UserError(f"workers = {workers}: at least one is needed")
    default_tokenizer, default_fraction = STDLIB_DEFAULTS if names == ("stdlib",) else DEFAULTS
    spec = tokenizer or default_tokenizer
    fraction = default_fraction if val_fraction is None else val_fraction
    if not 0 < fraction < 1:
        raise UserError(f"--val-fraction must be between 0 and 1, not {fraction}")
    source = open_source(names, column, subset, hub_split)

    def documents() -> Iterator[tuple[SplitName, Piece]]:
        return with_splits(source.pieces(), fraction, seed)

    check_documents(documents, names)
    vocabulary = find_tokenizer(spec, out, documents)
    recipe = Recipe(
        sources=names,
        source_digest=source.digest,
        column=column,
        subset=subset,
        hub_split=hub_split,
        tokenizer=Path(spec).name if Path(spec).exists() else spec,
        tokenizer_fingerprint=fingerprint(vocabulary),
        val_fraction=fraction,
        seed=seed,
        shard_bytes=shard_bytes,
    )
    if (index := complete_index(out, recipe)) is not None:
        console.print(f"{out} is complete already", soft_wrap=True)
        return index
    journal = Journal.begin(out, recipe)
    write_atomically(out / TOKENIZER, vocabulary.to_str())
    write_shards(documents, vocabulary, journal, out, shard_bytes, workers or available_cores(), console)
    index = Index(
        format=FORMAT,
        dtype=dtype_name(vocabulary),
        eot=end_of_text_id(vocabulary),
        vocab_size=vocab_size(vocabulary),
        recipe=recipe,
        train=Split.of(journal.shards["train"]),
        val=Split.of(journal.shards["val"]),
    )
    index.write(out)
    journal.remove()
    return index


def check_documents(documents: Documents, names: tuple[str, ...]) -> None:
    """Two documents at least, or splits of its own: else there is nothing to train or nothing to validate on."""
    wanted = " ".join(names)
    firsts = (piece for _, piece in documents() if piece.first)
    if (document := next(firsts, None)) is None:
        raise UserError(f"{wanted}: no text at all; check the path")
    if document.split is None and next(firsts, None) is None:
        raise UserError(f"{wanted}: one document cannot be split into train and val; give train and val files")


def find_tokenizer(spec: str, out: Path, documents: Documents) -> Tokenizer:
    """The tokenizer that the folder has already, unless the user names a file (which may have changed)."""
    stored = out / TOKENIZER
    if stored.exists() and not Path(spec).exists():
        return load_tokenizer(stored)
    return load_tokenizer(spec, (piece.text for split, piece in documents() if split == "train"))


def dtype_name(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size(tokenizer) <= 1 << 16 else "uint32"


@dataclass
class Chunk:
    """Consecutive text of one split and one shard, enough of it to be worth a task."""

    split: SplitName
    texts: list[str] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    """Whether the document ends with the text."""
    documents: int = 0
    text_bytes: int = 0
    replaced: int = 0
    ends_shard: bool = False

    def add(self, piece: Piece) -> int:
        """Take a piece in; its size in bytes."""
        size = len(piece.text.encode())
        self.texts.append(piece.text)
        self.ends.append(piece.last)
        self.documents += piece.last
        self.text_bytes += size
        self.replaced += piece.last and piece.replaced
        return size


def chunks(documents: Documents, finished: dict[SplitName, int], shard_bytes: int) -> Iterator[Chunk]:
    """The text in order for each split, without the first `finished` documents. Shards end with a document."""
    skip = dict(finished)
    current = {split: Chunk(split) for split in SPLITS}
    shard_size = dict.fromkeys(SPLITS, 0)
    for split, piece in documents():
        if skip[split] > 0:
            skip[split] -= piece.last
            continue
        chunk = current[split]
        shard_size[split] += chunk.add(piece)
        chunk.ends_shard = piece.last and shard_size[split] >= shard_bytes
        if chunk.ends_shard or chunk.text_bytes >= CHUNK_BYTES:
            yield chunk
            current[split] = Chunk(split)
        if chunk.ends_shard:
            shard_size[split] = 0
    yield from (chunk for chunk in current.values() if chunk.texts)


def write_shards(
    documents: Documents,
    tokenizer: Tokenizer,
    journal: Journal,
    out: Path,
    shard_bytes: int,
    workers: int,
    console: Console,
) -> None:
    """All shards that the journal does not have yet."""
    dtype = np.dtype(dtype_name(tokenizer)).newbyteorder("<")
    for shard in (shard for split in SPLITS for shard in journal.shards[split]):
        check_size(out / shard.file, shard.tokens * dtype.itemsize)
    finished = {split: sum(shard.documents for shard in journal.shards[split]) for split in SPLITS}
    task = partial(encode, tokenizer, end_of_text_id(tokenizer), dtype)
    results = encoded(chunks(documents, finished, shard_bytes), task, workers)
    try:
        with Output(out, journal) as output, Meter(console) as meter, closing(results):
            for chunk, tokens in results:
                output.write(chunk, tokens)
                meter.add(chunk, len(tokens))
            output.finish()
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here")
        raise
    for split in SPLITS:
        if not journal.shards[split]:
            raise UserError(f"{out}: the source has no text for {split}; correct it, delete {out} and try again")


class Output:
    """The shards that are being written, one for each split."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        self.folder, self.journal = folder, journal
        self.writers: dict[SplitName, ShardWriter] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.writers.values():
            writer.file.close()

    def write(self, chunk: Chunk, tokens: NDArray[Any]) -> None:
        split = chunk.split
        if split not in self.writers:
            number = len(self.journal.shards[split])
            self.writers[split] = ShardWriter(self.folder / f"{split}-{number:05d}.bin")
        self.writers[split].write(tokens, chunk.documents, chunk.text_bytes, chunk.replaced)
        if chunk.ends_shard:
            self._finish(split)

    def finish(self) -> None:
        for split in list(self.writers):
            self._finish(split)

    def _finish(self, split: SplitName) -> None:
        self.journal.add(split, self.writers[split].finish())
        del self.writers[split]


def encode(tokenizer: Tokenizer, eot: int, dtype: np.dtype[Any], chunk: Chunk) -> NDArray[Any]:
    """The tokens of a chunk, with an end-of-text after each document."""
    encodings = tokenizer.encode_batch_fast(chunk.texts, add_special_tokens=False)
    ids = ([*e.ids, eot] if ends else e.ids for e, ends in zip(encodings, chunk.ends, strict=True))
    return np.concatenate([np.array(i, dtype) for i in ids])


def encoded(
    chunks: Iterator[Chunk], encode: Callable[[Chunk], NDArray[Any]], workers: int
) -> Generator[tuple[Chunk, NDArray[Any]]]:
    """Each chunk and its tokens, in order, with at most twice as many chunks in memory as there are workers.

    Threads are enough: the tokenizer lets go of the interpreter while it works.
    """
    pending: deque[tuple[Chunk, Future[NDArray[Any]]]] = deque()
    with single_threaded_tokenizers(), ThreadPoolExecutor(workers) as pool:
        for chunk in chunks:
            pending.append((chunk, pool.submit(encode, chunk)))
            if len(pending) > 2 * workers:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()


@contextmanager
def single_threaded_tokenizers() -> Iterator[None]:
    """A call of the tokenizer keeps to its own thread, so that `workers` says how many cores are used."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class Meter:
    """Shows how far it is: a line that moves on a terminal, else a line now and then."""

    INTERVAL = 10.0

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.console = console
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("reading")
        self.documents = self.text_bytes = self.tokens = 0
        self.start = self.printed = time.monotonic()

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        self.console.print(str(self), highlight=False, soft_wrap=True)

    def add(self, chunk: Chunk, tokens: int) -> None:
        self.documents += chunk.documents
        self.text_bytes += chunk.text_bytes
        self.tokens += tokens
        self.progress.update(self.task, description=str(self))
        if not self.console.is_terminal and time.monotonic() - self.printed > self.INTERVAL:
            self.printed = time.monotonic()
            self.console.print(str(self), highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        rate = self.tokens / max(time.monotonic() - self.start, 1e-9)
        return (
            f"{self.documents:,} documents, {self.text_bytes / 1e6:,.1f} MB, {self.tokens:,} tokens, "
            f"{rate:,.0f} tokens/s"
        )
