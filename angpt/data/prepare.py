"""Text → tokens on disk: read documents in order, tokenize them on all cores, write shards in order.

The bytes written depend on the recipe alone, not on the number of workers or on interruptions.
"""

import os
import time
from collections import Counter, deque
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

from angpt.config import PrepareConfig
from angpt.data.journal import Journal, complete_index, lock
from angpt.data.shards import (
    FORMAT,
    SPLITS,
    TOKENIZER,
    Index,
    Recipe,
    ShardWriter,
    Split,
    SplitName,
    check_shards,
    check_size,
)
from angpt.data.sources import Piece, cut_in_two, open_source, with_splits
from angpt.data.tokenizers import check_usable, end_of_text_id, fingerprint, load_tokenizer, vocab_size
from angpt.errors import UserError
from angpt.present.terminal import terminal
from angpt.system import available_cores, write_atomically

SHARD_BYTES = 128 << 20
CHUNK_BYTES = 1 << 20
STDLIB_DEFAULTS = ("bpe:2048", 0.05)
DEFAULTS = ("EleutherAI/gpt-neox-20b", 0.01)

Documents = Callable[[], Iterator[tuple[SplitName, Piece]]]


def default_name(sources: tuple[str, ...]) -> str:
    """The last part of the source's path or hub name, without the suffixes of a file."""
    if len(sources) != 1:
        raise UserError("give one source (stdlib, hf:NAME, a file, a folder), or several and the folder with --out")
    path = Path(sources[0].removeprefix("hf:")).resolve()
    return path.name.split(".")[0] if path.is_file() else path.name


def prepare(
    names: tuple[str, ...],
    out: Path,
    config: PrepareConfig | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    console: Console | None = None,
) -> Index:
    """Make or finish the prepared folder `out`. A folder that is complete with the same recipe is left as it is."""
    config, console = config or PrepareConfig(), console or terminal()
    default_tokenizer, default_fraction = STDLIB_DEFAULTS if names == ("stdlib",) else DEFAULTS
    spec, fraction = config.tokenizer or default_tokenizer, config.val_fraction or default_fraction
    source = open_source(names, config.column, config.subset, config.hub_split)
    documents = split_documents(lambda: with_splits(source.pieces(), fraction, config.seed), fraction, names)
    tokenizer = find_tokenizer(spec, out, documents)
    check_usable(tokenizer)
    recipe = Recipe(
        sources=names,
        source_digest=source.digest,
        column=config.column,
        subset=config.subset,
        hub_split=config.hub_split,
        tokenizer=Path(spec).name if Path(spec).exists() else spec,
        tokenizer_fingerprint=fingerprint(tokenizer),
        val_fraction=fraction,
        seed=config.seed,
        shard_bytes=shard_bytes,
    )
    if (index := complete_index(out, recipe)) is not None:
        check_shards(out, index, index.shards)
        console.print(f"{out} is complete already")
        return index
    with lock(out):
        if (index := complete_index(out, recipe)) is not None:  # by a process that has just ended
            return index
        journal = Journal.begin(out, recipe)
        write_atomically(out / TOKENIZER, tokenizer.to_str())
        write_shards(documents, tokenizer, journal, shard_bytes, config.workers or available_cores(), console)
        index = Index(
            format=FORMAT,
            dtype=dtype_name(tokenizer),
            eot=end_of_text_id(tokenizer),
            vocab_size=vocab_size(tokenizer),
            recipe=recipe,
            train=Split.of(journal.shards["train"]),
            val=Split.of(journal.shards["val"]),
        )
        check_shards(out, index, index.shards)
        index.write(out)
        journal.path.unlink(missing_ok=True)  # a process that found the index may have removed it
    return index


def split_documents(documents: Documents, val_fraction: float, names: tuple[str, ...]) -> Documents:
    """The same documents; of a document that is alone and has no split of its own, the end becomes val."""
    firsts = (piece for _, piece in documents() if piece.first)
    if (document := next(firsts, None)) is None:
        raise UserError(f"{' '.join(names)}: no text at all; check the path")
    if document.split is not None or next(firsts, None) is not None:
        return documents
    size = sum(len(piece.text) for _, piece in documents())
    if size < 2:
        raise UserError(f"{' '.join(names)}: one character cannot be split into train and val; give more text")
    border = min(max(1, round((1 - val_fraction) * size)), size - 1)
    return lambda: cut_in_two((piece for _, piece in documents()), border)


def find_tokenizer(spec: str, out: Path, documents: Documents) -> Tokenizer:
    """The tokenizer in the folder if it has one, unless the user names a file, which may have changed."""
    stored = out / TOKENIZER
    if stored.exists() and not Path(spec).exists():
        return load_tokenizer(stored)
    return load_tokenizer(spec, (piece.text for split, piece in documents() if split == "train"))


def dtype_name(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size(tokenizer) <= 1 << 16 else "uint32"


@dataclass
class Chunk:
    """Consecutive text of one split and one shard, large enough to be one task of a worker."""

    split: SplitName
    texts: list[str] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    """For each text, True if its document ends there."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of documents, text_bytes and replaced documents, as in `Shard`."""
    ends_shard: bool = False


def chunks(documents: Documents, finished: dict[SplitName, int], shard_bytes: int) -> Iterator[Chunk]:
    """The text of each split in order, without its first `finished` documents. Shards end with a document."""
    skip = dict(finished)
    current = {split: Chunk(split) for split in SPLITS}
    shard_size = dict.fromkeys(SPLITS, 0)
    for split, piece in documents():
        if skip[split] > 0:
            skip[split] -= piece.last
            continue
        chunk, size = current[split], len(piece.text.encode())
        chunk.texts.append(piece.text)
        chunk.ends.append(piece.last)
        chunk.counts.update(documents=int(piece.last), text_bytes=size, replaced=int(piece.last and piece.replaced))
        shard_size[split] += size
        chunk.ends_shard = piece.last and shard_size[split] >= shard_bytes
        if chunk.ends_shard or chunk.counts["text_bytes"] >= CHUNK_BYTES:
            yield chunk
            current[split] = Chunk(split)
        if chunk.ends_shard:
            shard_size[split] = 0
    yield from (chunk for chunk in current.values() if chunk.texts)


def write_shards(
    documents: Documents, tokenizer: Tokenizer, journal: Journal, shard_bytes: int, workers: int, console: Console
) -> None:
    """Write all shards that are not in the journal, into its folder."""
    out, dtype = journal.path.parent, np.dtype(dtype_name(tokenizer)).newbyteorder("<")
    for shard in (shard for split in SPLITS for shard in journal.shards[split]):
        check_size(out / shard.file, shard.tokens * dtype.itemsize)
    finished = {split: sum(shard.documents for shard in journal.shards[split]) for split in SPLITS}
    task = partial(encode, tokenizer, end_of_text_id(tokenizer), dtype)
    results = encoded(chunks(documents, finished, shard_bytes), task, workers)
    writers: dict[SplitName, ShardWriter] = {}

    def finish(split: SplitName) -> None:
        journal.add(split, writers[split].finish())
        del writers[split]

    try:
        with Meter(console) as meter, closing(results):
            for chunk, tokens in results:
                split = chunk.split
                if split not in writers:
                    writers[split] = ShardWriter(out / f"{split}-{len(journal.shards[split]):05d}.bin")
                writers[split].write(tokens, chunk.counts)
                if chunk.ends_shard:
                    finish(split)
                meter.add(chunk, len(tokens))
            for split in list(writers):
                finish(split)
    except KeyboardInterrupt:
        console.print("interrupted; run the same command again to continue")
        raise
    finally:
        for writer in writers.values():
            writer.discard()
    for split, shards in journal.shards.items():
        if not shards:
            raise UserError(f"{out}: the source has no text for {split}; correct it, delete {out} and try again")


def encode(tokenizer: Tokenizer, eot: int, dtype: np.dtype[Any], chunk: Chunk) -> NDArray[Any]:
    """The tokens of a chunk, with an end-of-text token after each document."""
    encodings = tokenizer.encode_batch_fast(chunk.texts, add_special_tokens=False)
    ids = ([*e.ids, eot] if ends else e.ids for e, ends in zip(encodings, chunk.ends, strict=True))
    return np.concatenate([np.array(i, dtype) for i in ids])


def encoded(
    chunks: Iterator[Chunk], encode: Callable[[Chunk], NDArray[Any]], workers: int
) -> Generator[tuple[Chunk, NDArray[Any]]]:
    """Each chunk and its tokens, in order, with about two chunks per worker in memory.

    Threads suffice: the tokenizer releases the GIL.
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
    """Turn off the threads of the tokenizers library, so that `workers` is the number of cores in use."""
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
    """Shows progress: a live line on a terminal, otherwise a line every INTERVAL seconds."""

    INTERVAL = 10.0

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self.console = console
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("reading")
        self.counts: Counter[str] = Counter()
        self.start = self.printed = time.monotonic()

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        self.console.print(str(self))

    def add(self, chunk: Chunk, tokens: int) -> None:
        self.counts.update(chunk.counts, tokens=tokens)
        self.progress.update(self.task, description=str(self))
        if not self.console.is_terminal and time.monotonic() - self.printed > self.INTERVAL:
            self.printed = time.monotonic()
            self.console.print(str(self))

    def __str__(self) -> str:
        tokens, megabytes = self.counts["tokens"], self.counts["text_bytes"] / 1e6
        rate = tokens / max(time.monotonic() - self.start, 1e-9)
        return f"{self.counts['documents']:,} documents, {megabytes:,.1f} MB, {tokens:,} tokens, {rate:,.0f} tokens/s"
