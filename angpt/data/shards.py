"""Tokens on disk: the format of a prepared folder, and a reader for it and for the `.bin` files of nanoGPT and llm.c.

A prepared folder has `train-00000.bin`, …, `val-00000.bin`, … (raw little-endian ids), `tokenizer.json` and
`index.json`, which is written last: a folder that has one is complete.
"""

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from angpt.data.verify import contents
from angpt.errors import UserError
from angpt.serialization import read_json, sealed_json
from angpt.system import check_name, file_sha256, sync, write_atomically

INDEX = "index.json"
TOKENIZER = "tokenizer.json"
FORMAT = 1

SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")

# llm.c and modded-nanogpt start their files with 256 int32: magic, version, number of tokens.
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER_BYTES = 20240520, 1, 1024

# A mapping keeps its file open; ten thousand shards at once would exceed the limit of open files.
MAPPED_SHARDS = 256


@dataclass(frozen=True)
class Shard:
    """One file of tokens, made from consecutive documents."""

    file: str
    tokens: int
    documents: int
    text_bytes: int
    replaced: int
    """Documents in which invalid UTF-8 was replaced."""
    max_token: int
    sha256: str

    def __post_init__(self) -> None:
        check_name(self.file)


@dataclass(frozen=True)
class Split:
    """The shards of a split and their totals."""

    documents: int
    tokens: int
    text_bytes: int
    replaced: int
    max_token: int
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if not self.shards:
            raise UserError("a split has no shards")

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Self:
        names = ("documents", "tokens", "text_bytes", "replaced")
        totals = {name: sum(getattr(shard, name) for shard in shards) for name in names}
        return cls(**totals, max_token=max(shard.max_token for shard in shards), shards=tuple(shards))


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the tokens of a prepared folder: equal recipes give equal bytes."""

    sources: tuple[str, ...]
    source_digest: str
    """SHA-256 of the names and sizes of all files read, or of the name of a data set of the hub."""
    column: str
    subset: str | None
    hub_split: str | None
    tokenizer: str
    tokenizer_fingerprint: str
    val_fraction: float
    seed: int
    shard_bytes: int
    """A shard ends with the document that brings its text to this size."""


@dataclass(frozen=True)
class Index:
    """The contents of `index.json`."""

    format: int
    dtype: Literal["uint16", "uint32"]
    eot: int
    """Id of the end-of-text token, which follows each document."""
    vocab_size: int
    """The tokenizer's largest id plus one."""
    recipe: Recipe
    train: Split
    val: Split

    @classmethod
    def read(cls, folder: Path) -> Self:
        return read_json(cls, folder / INDEX, "delete the folder and prepare it again", FORMAT)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Those of both splits."""
        return *self.train.shards, *self.val.shards

    def split(self, name: SplitName) -> Split:
        return self.train if name == "train" else self.val

    def write(self, folder: Path) -> None:
        write_atomically(folder / INDEX, sealed_json(self))


class ShardWriter:
    """Writes one shard under a temporary name; `finish` renames it to `path`."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_name(path.name + ".part")
        self.part.unlink(missing_ok=True)  # left by a killed process
        self.file = self.part.open("xb")
        self.digest = hashlib.sha256()
        self.counts: Counter[str] = Counter()
        self.max_token = 0

    def write(self, tokens: NDArray[Any], counts: Counter[str]) -> None:
        """Append tokens, and add their documents, text_bytes and replaced documents to the counts of the shard."""
        self.file.write(tokens.data)
        self.digest.update(tokens.data)
        self.counts.update(counts, tokens=len(tokens))
        self.max_token = max(self.max_token, int(tokens.max(initial=0)))

    def finish(self) -> Shard:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.part.replace(self.path)
        sync(self.path.parent)  # before the journal names it
        sha256 = self.digest.hexdigest()
        return Shard(file=self.path.name, **self.counts, max_token=self.max_token, sha256=sha256)

    def discard(self) -> None:
        """Remove what was written of a shard that is not finished."""
        with suppress(OSError):  # the disk may be full
            self.file.close()
        self.part.unlink(missing_ok=True)


@dataclass(frozen=True)
class BinFile:
    """A file, and which of its bytes are tokens."""

    path: Path
    offset: int
    tokens: int


@dataclass(frozen=True)
class TokenData:
    """The tokens of one split, as one stream over memory-mapped files."""

    path: Path
    split: SplitName
    files: tuple[BinFile, ...]
    dtype: np.dtype[Any]
    fingerprint: str
    """Equal for equal data: a hash of the checksums in the index, or of the size, head and tail of each raw file."""
    max_token: int
    """The largest id in the files."""
    index: Index | None = None
    """None for raw files, which have no index."""

    @classmethod
    def open(cls, path: str | Path, split: SplitName) -> Self:
        """A prepared folder, or a folder or file of nanoGPT (`train.bin`) or llm.c (`*_train_*.bin`).

        Files that have changed since they were last opened are read: shards must have the checksums of the index.
        """
        path = Path(path)
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; `angpt data prepare` makes one")
        if (path / INDEX).exists():
            return cls._open_prepared(path, split)
        return cls._open_raw(path, split)

    @classmethod
    def _open_prepared(cls, folder: Path, split: SplitName) -> Self:
        index = Index.read(folder)
        check_tokenizer(folder / TOKENIZER, index.recipe.tokenizer_fingerprint)
        dtype = np.dtype(index.dtype).newbyteorder("<")
        shards = index.split(split).shards
        check_shards(folder, index, shards)
        identity = json.dumps([index.dtype, *(shard.sha256 for shard in shards)])
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        files = tuple(BinFile(folder / shard.file, 0, shard.tokens) for shard in shards)
        return cls(folder, split, files, dtype, fingerprint, max(shard.max_token for shard in shards), index)

    @classmethod
    def _open_raw(cls, path: Path, split: SplitName) -> Self:
        files = tuple(_bin_file(file) for file in _raw_paths(path, split))
        digest = hashlib.sha256()
        for file in files:
            digest.update(_head_and_tail(file.path))
        dtype = np.dtype("<u2")
        found = contents([(file.path, file.offset) for file in files], dtype)
        return cls(path, split, files, dtype, digest.hexdigest(), max(of_file.max_token for of_file in found))

    @property
    def eot(self) -> int | None:
        """Id of the end-of-text token; None for raw files."""
        return None if self.index is None else self.index.eot

    @property
    def vocab_size(self) -> int | None:
        return None if self.index is None else self.index.vocab_size

    @property
    def tokenizer_fingerprint(self) -> str | None:
        return None if self.index is None else self.index.recipe.tokenizer_fingerprint

    @property
    def text_bytes(self) -> int | None:
        """Bytes of UTF-8 text that the tokens encode; None for raw files."""
        return None if self.index is None else self.index.split(self.split).text_bytes

    @cached_property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)

    def part(self, start: int, stop: int) -> Self:
        """The tokens start … stop − 1 as a `TokenData`."""
        files = []
        for file, first, last in zip(self.files, self._starts.tolist(), self._ends.tolist(), strict=True):
            lower, upper = max(start, first), min(stop, last)
            if lower < upper:
                offset = file.offset + (lower - first) * self.dtype.itemsize
                files.append(BinFile(file.path, offset, upper - lower))
        return dataclasses.replace(self, files=tuple(files), fingerprint=f"{self.fingerprint}[{start}:{stop}]")

    def read(self, start: int, length: int) -> NDArray[Any]:
        """The tokens start … start + length − 1 of the stream."""
        if not 0 <= start <= start + length <= self.tokens:
            raise IndexError(f"tokens {start} to {start + length} of {self.tokens}")
        parts = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while length > 0:
            local = start - int(self._starts[shard])
            part = self._shard(shard)[local : local + length]
            parts.append(part)
            start, length, shard = start + len(part), length - len(part), shard + 1
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """(len(starts), length) tokens: a row from each start."""
        out = np.empty((len(starts), length), np.int64)
        shards = np.searchsorted(self._ends, starts, side="right")
        inside = starts + length <= self._ends[shards]
        for shard in np.unique(shards[inside]):
            rows = np.flatnonzero(inside & (shards == shard))
            windows = np.lib.stride_tricks.sliding_window_view(self._shard(shard), length)
            out[rows] = windows[starts[rows] - self._starts[shard]]
        for row in np.flatnonzero(~inside):  # the few rows that cross from one file into the next
            out[row] = self.read(int(starts[row]), length)
        return out

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([file.tokens for file in self.files], dtype=np.int64)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(1, np.int64), self._ends[:-1]])

    @cached_property
    def _shard(self) -> Callable[[int], NDArray[Any]]:
        """A function from the number of a file to its tokens, mapped into memory."""

        @lru_cache(maxsize=MAPPED_SHARDS)
        def mapped(number: int) -> NDArray[Any]:
            file = self.files[number]
            # asarray, because slicing an np.memmap takes several times as long.
            return np.asarray(np.memmap(file.path, self.dtype, mode="r", offset=file.offset, shape=(file.tokens,)))

        return mapped


def check_tokenizer(path: Path, fingerprint: str) -> None:
    """Raise an error unless the tokenizer's file has this fingerprint, its SHA-256."""
    if not path.exists():
        raise UserError(f"{path}: is missing; restore it or prepare the data again")
    if file_sha256(path) != fingerprint:
        raise UserError(f"{path}: is not the tokenizer that the tokens were made with; prepare the data again")


def check_shards(folder: Path, index: Index, shards: Sequence[Shard], again: bool = False) -> None:
    """Raise an error unless shards are as the index says. They are read if they have changed, or with `again`."""
    dtype = np.dtype(index.dtype).newbyteorder("<")
    for shard in shards:
        check_size(folder / shard.file, shard.tokens * dtype.itemsize)
    found = contents([(folder / shard.file, 0) for shard in shards], dtype, again)
    for shard, (sha256, max_token) in zip(shards, found, strict=True):
        if (sha256, max_token) != (shard.sha256, shard.max_token) or max_token >= index.vocab_size:
            raise UserError(
                f"{folder / shard.file}: is damaged (its tokens are not those of {INDEX}); restore it, or delete the "
                "folder and prepare it again"
            )


def check_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise UserError(f"{path}: the shard is missing; restore it, or delete the folder and prepare it again")
    if (size := path.stat().st_size) != expected:
        raise UserError(
            f"{path}: has {size:,} bytes and should have {expected:,}; delete the folder and prepare it again"
        )


def _raw_paths(path: Path, split: SplitName) -> list[Path]:
    """The `.bin` files of a split: `train.bin`, or all of `*_train_*.bin` sorted by name."""
    if path.is_file():
        other: SplitName = "val" if split == "train" else "train"
        file = path.with_name(path.name.replace(other, split))
        if not file.exists() or (split == "val" and split not in file.name):
            raise UserError(f"{path}: there is no {split} file beside it; give the folder that holds both splits")
        return [file]
    plain = path / f"{split}.bin"
    files = [plain] if plain.exists() else sorted(path.glob(f"*_{split}_*.bin"))
    if not files:
        raise UserError(
            f"{path}: no tokens of the split {split!r}: neither {INDEX}, {split}.bin nor *_{split}_*.bin; "
            "`angpt data prepare` makes such a folder (run it again if it was interrupted)"
        )
    return files


def _bin_file(path: Path) -> BinFile:
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", LLMC_HEADER_BYTES // 4)
    if len(header) == LLMC_HEADER_BYTES // 4 and header[0] == LLMC_MAGIC:
        if header[1] != LLMC_VERSION:
            raise UserError(f"{path}: llm.c format version {header[1]}; only version {LLMC_VERSION} can be read")
        tokens = int(header[2])
        check_size(path, LLMC_HEADER_BYTES + 2 * tokens)
        if tokens == 0:
            raise UserError(f"{path}: has no tokens; prepare it again")
        return BinFile(path, LLMC_HEADER_BYTES, tokens)
    if size == 0 or size % 2:
        raise UserError(f"{path}: {size:,} bytes are not a sequence of uint16 tokens; the file is empty or truncated")
    return BinFile(path, 0, size // 2)


def _head_and_tail(path: Path) -> bytes:
    """The size of a file, its first and its last MiB: identifies a large file without reading all of it."""
    size, length = path.stat().st_size, 1 << 20
    with path.open("rb") as file:
        head = file.read(length)
        file.seek(max(0, size - length))
        return size.to_bytes(8, "little") + head + file.read()
