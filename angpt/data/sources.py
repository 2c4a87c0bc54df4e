"""Sources of text: the standard library of Python, local files and folders, data sets of the Hugging Face hub.

A source yields documents in a fixed order, cut into small pieces: memory does not grow with the corpus, nor with the
size of a plain text file.
"""

import contextlib
import gzip
import hashlib
import importlib
import io
import json
import lzma
import re
import shutil
import sysconfig
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from angpt.data.shards import SplitName
from angpt.errors import UserError, nearest

PIECE_BYTES = 256 << 10  # a tokenizer needs about 200 times as much memory
PLAIN, TABLES = (".txt", ".md", ".py"), (".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".xz", ".zst")
KNOWN = f"known: {' '.join(PLAIN + TABLES)}, also with {', '.join(COMPRESSIONS)}"
SPLIT_NAMES: dict[str, SplitName] = {"train": "train", "val": "val", "valid": "val", "validation": "val"}


class Piece(NamedTuple):
    """Consecutive text of one document."""

    text: str
    first: bool
    last: bool
    replaced: bool
    """True if invalid UTF-8 was replaced in the document so far."""
    split: SplitName | None
    """Split of the document in the data set itself; None if the data set has no splits."""


def open_source(
    names: tuple[str, ...], column: str, subset: str | None, hub_split: str | None
) -> "FileSource | HubSource":
    """The source for the names on the command line: `stdlib`, `hf:NAME`, or paths of files and folders."""
    alone = [name for name in names if name == "stdlib" or name.startswith("hf:")]
    if "" in names or (len(names) != 1 and (alone or not names)):
        raise UserError(f"give stdlib, one hf:NAME, or any number of files and folders, not {' '.join(names)!r}")
    if names[0].startswith("hf:"):
        return HubSource(names[0].removeprefix("hf:"), column, subset, hub_split)
    if subset is not None or hub_split is not None:
        raise UserError("--subset and --hub-split choose a part of a data set of the hub; they need a source hf:NAME")
    return FileSource(_stdlib_files() if alone else _listed_files(names), column)


class Entry(NamedTuple):
    """A file, and its name relative to the folder that the user gave."""

    name: str
    path: Path
    split: SplitName | None = None


@dataclass(frozen=True)
class FileSource:
    """Local files, one document per file (plain text) or per row (tables)."""

    entries: list[Entry]
    column: str

    @property
    def digest(self) -> str:
        """Hash of the names and sizes of the files."""
        sizes = [(entry.name, entry.path.stat().st_size) for entry in self.entries]
        return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()

    def pieces(self) -> Iterator[Piece]:
        for entry in self.entries:
            try:
                yield from self._read(entry)
            except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                raise UserError(f"{entry.path}: cannot be read ({error}); is the file complete?") from error

    def _read(self, entry: Entry) -> Iterator[Piece]:
        kind = _kind(entry.path)
        with _decompressed(entry.path) as file:
            if kind in PLAIN:
                yield from _plain_pieces(file, entry.split)
                return
            rows = _jsonl_rows if kind == ".jsonl" else _parquet_rows
            for text, replaced in rows(file, entry.path, self.column):
                yield from _cut(text, replaced, entry.split)


@dataclass(frozen=True)
class HubSource:
    """A data set of the hub, streamed. Its own validation split is used if it has one."""

    name: str
    column: str
    subset: str | None
    hub_split: str | None

    @property
    def digest(self) -> str:
        """Hash of the name of the data set."""
        return hashlib.sha256(self.name.encode()).hexdigest()

    def pieces(self) -> Iterator[Piece]:
        for split, rows in self._splits:
            for number, row in enumerate(self._stream(rows)):
                text, replaced = _text_of(row, self.column, f"hf:{self.name}, row {number}")
                yield from _cut(text, replaced, split)

    def _stream(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        try:
            yield from rows
        except Exception as error:  # network errors, after datasets has retried several times
            raise UserError(f"hf:{self.name}: broke off ({_line(error)}); run the command again to continue") from error

    @cached_property
    def _splits(self) -> Sequence[tuple[SplitName | None, Iterable[dict[str, Any]]]]:
        datasets = _optional("datasets", f"hf:{self.name}")
        try:
            found = datasets.load_dataset(self.name, self.subset, split=self.hub_split, streaming=True)
        except Exception as error:  # the hub raises many kinds
            advice = "check the name, the subset and the network"
            raise UserError(f"hf:{self.name}: cannot be loaded ({_line(error)}); {advice}") from error
        if self.hub_split is not None:
            return [(None, found)]
        own = [(SPLIT_NAMES[name], rows) for name, rows in found.items() if name in SPLIT_NAMES]
        if {split for split, _ in own} == {"train", "val"}:
            return own
        if "train" not in found:
            raise UserError(f"hf:{self.name}: has no split train; choose one of {', '.join(found)} with --hub-split")
        return [(None, found["train"])]


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def _stdlib_files() -> list[Entry]:
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = (path for path in root.rglob("*.py") if not left_out.intersection(path.relative_to(root).parts))
    return _sorted(root, files)


def _listed_files(names: tuple[str, ...]) -> list[Entry]:
    entries: list[Entry] = []
    for path in map(Path, names):
        if path.is_dir():
            files = [file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))]
            entries += _sorted(path, filter(_kind, files))
            if left_out := sum(not _kind(file) for file in files):
                count = "1 file of unknown kind is" if left_out == 1 else f"{left_out:,} files of unknown kind are"
                warnings.warn(f"{path}: {count} left out; {KNOWN}", stacklevel=2)
        elif not path.exists():
            raise UserError(f"{path}: no such file or folder (a data set of the hub is written hf:NAME)")
        elif not _kind(path):
            raise UserError(f"{path}: unknown kind of file; {KNOWN}")
        else:
            entries.append(Entry(path.name, path))
    if not entries:
        raise UserError(f"{' '.join(names)}: no text files here; {KNOWN}")
    own = [entry._replace(split=split) for entry in entries if (split := _own_split(entry.name))]
    if {entry.split for entry in own} != {"train", "val"}:
        return entries
    if others := [entry.name for entry in entries if _own_split(entry.name) is None]:
        more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
        warnings.warn(
            f"{others[0]}{more}: left out, because the names of other files say that they are train and val",
            stacklevel=2,
        )
    return own


def _hidden(path: Path) -> bool:
    """True for .git/config, .venv/lib/x.py and ._notes.txt."""
    return any(part.startswith(".") for part in path.parts)


def _sorted(folder: Path, files: Iterable[Path]) -> list[Entry]:
    """Entries for the files of a folder, in the order of their names."""
    return sorted(Entry(file.relative_to(folder).as_posix(), file) for file in files)


def _own_split(name: str) -> SplitName | None:
    """The split of files such as train.jsonl.xz, train/x.txt and train-00000-of-00002.parquet; None for others."""
    match = re.fullmatch(r"([a-z]+)([-_]\d[^.]*)?(\..*)?", name.split("/")[0])
    return SPLIT_NAMES.get(match[1]) if match else None


def _kind(path: Path) -> str:
    """The suffix of a file without that of its compression; empty if it is not one that can be read."""
    suffix = (path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()
    return suffix if suffix in PLAIN + TABLES else ""


def _decompressed(path: Path) -> IO[bytes]:
    openers: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zstd}
    return openers.get(path.suffix.lower(), partial(Path.open, mode="rb"))(path)


def _open_zstd(path: Path) -> IO[bytes]:
    # Not the package zstandard, which reads a truncated file without an error.
    arrow = _optional("pyarrow", path)
    return io.BufferedReader(arrow.CompressedInputStream(arrow.OSFile(str(path)), "zstd"))


def _optional(package: str, wanted_by: object) -> Any:
    """Import a package that only some sources need."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.split(".")[0]
        raise UserError(f"{wanted_by}: needs the package {name}; install it with: pip install 'angpt[data]'") from error


def _jsonl_rows(file: IO[bytes], path: Path, column: str) -> Iterator[tuple[str, bool]]:
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        where = f"{path}, line {number}"
        text, replaced = _decode(line)
        try:
            row = json.loads(text)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error}); correct or remove the line") from error
        text, wrong = _text_of(row, column, where)
        yield text, replaced or wrong


def _parquet_rows(file: IO[bytes], path: Path, column: str) -> Iterator[tuple[str, bool]]:
    arrow, parquet = _optional("pyarrow", path), _optional("pyarrow.parquet", path)
    with contextlib.ExitStack() as stack:
        if path.suffix.lower() in COMPRESSIONS:  # parquet needs random access, which a compressed stream lacks
            plain = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(file, plain)
            file = plain
        try:
            table = parquet.ParquetFile(file, pre_buffer=False)
            if column not in (names := table.schema_arrow.names):
                raise UserError(f"{path}: has no column {column!r} (--column): {nearest(column, names)}")
            batches = table.iter_batches(batch_size=128, columns=[column])
            values = (value for batch in batches for value in batch.column(0).cast(arrow.large_binary()).to_pylist())
            for number, value in enumerate(values, 1):
                if value is None:
                    raise UserError(f"{path}, row {number}: column {column!r} is null; remove the row")
                yield _decode(value)
        except arrow.ArrowException as error:
            raise UserError(f"{path}: cannot be read as text in parquet ({error}); is the file complete?") from error


def _text_of(row: Any, column: str, where: str) -> tuple[str, bool]:
    """The text of a row, and True if invalid Unicode in it was replaced."""
    if not isinstance(row, dict) or column not in row:
        names = f" (--column): {nearest(column, row)}" if isinstance(row, dict) else ""
        raise UserError(f"{where}: has no column {column!r}{names}")
    text = row[column]
    if not isinstance(text, str):
        raise UserError(f"{where}: column {column!r} holds {type(text).__name__}, not text; correct or remove it")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can hold half of a surrogate pair
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
    return text, False


def _decode(raw: bytes) -> tuple[str, bool]:
    """The text, and True if invalid UTF-8 in it was replaced."""
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def _cut(text: str, replaced: bool, split: SplitName | None) -> Iterator[Piece]:
    """The pieces of a document in memory."""
    if len(text) < PIECE_BYTES // 4:
        yield Piece(text, True, True, replaced, split)
    else:
        yield from _plain_pieces(io.BytesIO(text.encode()), split, replaced)


def _plain_pieces(file: IO[bytes], split: SplitName | None, replaced: bool = False) -> Iterator[Piece]:
    """The pieces of a document in a file, read one at a time."""
    first, rest, ends = True, b"", False
    while not ends:
        block = rest + file.read(PIECE_BYTES - len(rest))
        ends = len(block) < PIECE_BYTES
        cut = len(block) if ends else _cut_before_space(block)
        text, wrong = _decode(block[:cut])
        replaced |= wrong
        yield Piece(text, first, ends, replaced, split)
        first, rest = False, block[cut:]


def _cut_before_space(block: bytes) -> int:
    """Start of the last white space, where a cut changes no token of a byte-level tokenizer.

    In a block without white space, the start of the last character.
    """
    space = max(block.rfind(b" "), block.rfind(b"\n"))
    cut = len(block[: max(space, 0)].rstrip())
    if cut > 0:
        return cut
    return next((i for i in range(len(block) - 1, len(block) - 5, -1) if block[i] & 0xC0 != 0x80), len(block))


def with_splits(pieces: Iterable[Piece], val_fraction: float, seed: int) -> Iterator[tuple[SplitName, Piece]]:
    """Each piece with its split: the data set's own, or a random one that depends on the document's number alone.

    Without splits of its own, the first document goes to val and the second to train, so that neither is empty.
    Empty documents are left out.
    """
    threshold = int(val_fraction * 2**64)
    number, sampled = -1, False
    for piece in pieces:
        if piece.first:
            if piece.last and not piece.text:
                continue
            number += 1
            word = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
            sampled = number == 0 or (number > 1 and int.from_bytes(word, "little") < threshold)
        yield piece.split or ("val" if sampled else "train"), piece


def cut_in_two(pieces: Iterable[Piece], border: int) -> Iterator[tuple[SplitName, Piece]]:
    """One document as two: its first `border` characters for train, the others for val."""
    place = 0
    for piece in pieces:
        head, tail = piece.text[: max(0, border - place)], piece.text[max(0, border - place) :]
        place += len(piece.text)
        if head:
            yield "train", piece._replace(text=head, last=place >= border)
        if tail or piece.last:
            yield "val", piece._replace(text=tail, first=place - len(tail) == border)
