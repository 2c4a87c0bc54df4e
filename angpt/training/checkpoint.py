"""Checkpoints that are whole or absent: safetensors and JSON in a folder that gets its name when it is complete.

One process writes model.safetensors and optimizer.safetensors. Where matrices are sharded, each rank writes the rows
that it holds to files of its own, whose headers say which rows these are; any number of processes can read them.
"""

import errno
import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from angpt.config import from_dict
from angpt.errors import UserError
from angpt.system import sync, write_atomically
from angpt.training.strategy import Shard, Strategy

T = TypeVar("T")

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
PREFIX, PART = "step-", ".part-"
RNG = "rng"
"""Name of the state of the random number generator among the tensors of the optimizer."""
ROWS = "rows"
"""Key in the metadata of a header: for each tensor of which the file has some rows, its whole shape and first row."""
DCP = "DCP_SHARDING_INFO"
"""The same in the headers of torch.distributed.checkpoint, by which several ranks wrote checkpoints at first."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
CHUNK_BYTES = 2**24
"""Bytes that are written and hashed at a time."""


@dataclass(frozen=True)
class State:
    """Where a run stands, beside its tensors. The position in the data is the step alone."""

    step: int
    """Steps done."""
    architecture: str
    metrics_bytes: int
    """Length of metrics.jsonl at this point; what is behind it belongs to steps that will be done again."""
    seconds: float
    """Time spent training so far."""
    val_loss: float | None
    """Of the last evaluation."""
    data_fingerprint: str
    tokenizer_fingerprint: str | None
    sha256: dict[str, str]
    """Checksums of the tensor files."""

    @property
    def fingerprint(self) -> str:
        """Tells checkpoints apart by their parameters."""
        return self.sha256.get(MODEL) or hashlib.sha256(json.dumps(self.sha256, sort_keys=True).encode()).hexdigest()


class Writer:
    """Writes the checkpoints of all ranks below a folder that they share, one at a time, in a thread.

    Used in a `with` block, which ends when the last checkpoint is complete.
    """

    def __init__(self, strategy: Strategy, folder: Path, keep: int) -> None:
        """`keep`: how many of the newest checkpoints stay."""
        self.strategy, self.folder, self.keep = strategy, folder, keep
        self.thread: threading.Thread | None = None
        self.error: UserError | None = None
        self.host: dict[str, Tensor] = {}
        """Buffers in host memory by name, page-locked where tensors come from a GPU."""

    def save(self, tensors: Mapping[str, Shard], state: State) -> None:
        """Begin a checkpoint; tensors may be changed when this returns. The state that counts is that of rank 0."""
        self.finish()
        copies = {name: replace(s, rows=self._copy(name, s.rows)) for name, s in tensors.items() if s.primary}
        self.thread = threading.Thread(target=self._write, args=(copies, state), name="checkpoint", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; raise the error that stopped it."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif isinstance(error, Exception):  # it says more than an error of the writer would
            with suppress(UserError):
                self.finish()

    def _copy(self, name: str, rows: Tensor) -> Tensor:
        if name not in self.host:
            self.host[name] = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        return self.host[name].copy_(rows)

    def _write(self, tensors: Mapping[str, Shard], state: State) -> None:
        rank, main, writers = self.strategy.rank, self.strategy.main, self.strategy.writers
        try:
            self._on_all(lambda: begin(self.folder, state.step) if main else None)
            written = self._on_all(lambda: write_files(unfinished(self.folder, state.step), tensors, rank, writers))
            sums = {name: digest for of_rank in written for name, digest in of_rank.items()}
            self._on_all(lambda: complete(self.folder, replace(state, sha256=sums), self.keep) if main else None)
        except Exception as error:  # also of the connection, where another rank was lost
            words = f"{self.folder}: the checkpoint of step {state.step:,} could not be written ({error})"
            self.error = failure(self.folder, state.step, error) if main else UserError(words)

    def _on_all(self, act: Callable[[], T]) -> list[T]:
        """What `act` returns on each rank; where it fails on one of them, an error on all."""
        answer: Any = None
        cause: OSError | None = None
        try:
            answer = act()
        except OSError as error:
            cause = error
        answers = self.strategy.exchange((answer, cause))
        for rank, (_, failed) in enumerate(answers):
            if failed is not None:
                raise _FailedOnRank(rank, failed)
        return [answer for answer, _ in answers]


class _FailedOnRank(Exception):
    def __init__(self, rank: int, cause: OSError) -> None:
        super().__init__(f"rank {rank}: {cause}")
        self.cause = cause


def save(folder: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: State, keep: int) -> Path:
    """Write a checkpoint of whole tensors below `folder`, and remove all but the newest `keep`."""
    tensors = {name: Shard(t.detach(), tuple(t.shape), 0, True) for name, t in {**model, **optimizer}.items()}
    try:
        sums = write_files(begin(folder, state.step), tensors)
        return complete(folder, replace(state, sha256=sums), keep)
    except OSError as error:
        raise failure(folder, state.step, error) from error


def unfinished(folder: Path, step: int) -> Path:
    """The folder of a checkpoint that is being written."""
    return folder / f"{PART}{step:09d}"


def begin(folder: Path, step: int) -> Path:
    """Make an empty folder for the files of a checkpoint, which does not count until `complete`."""
    _remove_unfinished(folder)
    part = unfinished(folder, step)
    part.mkdir(parents=True)
    return part


def write_files(part: Path, tensors: Mapping[str, Shard], rank: int = 0, writers: int = 1) -> dict[str, str]:
    """Write the files of one of several ranks; return their names and checksums."""
    sums = {}
    for file, of_optimizer in ((MODEL, False), (OPTIMIZER, True)):
        chosen = {name: shard for name, shard in tensors.items() if _of_optimizer(name) == of_optimizer}
        if writers > 1:
            file = file.replace(".", f"-{rank + 1:05d}-of-{writers:05d}.")
        if chosen or rank == 0:
            sums[file] = write_file(part / file, chosen)
    return sums


def write_file(path: Path, tensors: Mapping[str, Shard]) -> str:
    """Write tensors as safetensors and bring the file to the disk; return its SHA-256, computed on the way."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].rows.element_size(), item[0]))
    header: dict[str, Any] = {}
    if rows := {name: {"shape": s.shape, "first_row": s.first_row} for name, s in ordered if s.split}:
        header["__metadata__"] = {ROWS: json.dumps(rows)}
    end = 0
    for name, shard in ordered:
        start, end = end, end + shard.rows.numel() * shard.rows.element_size()
        dtype = next(key for key, dtype in DTYPES.items() if dtype == shard.rows.dtype)
        header[name] = {"dtype": dtype, "shape": list(shard.rows.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        contents = (_bytes(shard.rows) for _, shard in ordered)
        for content in chain((memoryview(len(text).to_bytes(8, "little")), memoryview(text)), contents):
            for at in range(0, len(content), CHUNK_BYTES):
                file.write(content[at : at + CHUNK_BYTES])
                digest.update(content[at : at + CHUNK_BYTES])
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def complete(folder: Path, state: State, keep: int) -> Path:
    """Give a checkpoint its state and its name, and remove all but the newest `keep`."""
    target, part = folder / f"{PREFIX}{state.step:09d}", unfinished(folder, state.step)
    write_atomically(part / STATE, json.dumps(asdict(state), indent=1) + "\n")
    sync(part)
    if target.exists():  # a damaged one, which the run passed again
        target.rename(folder / f"{part.name}-old")
    part.rename(target)
    sync(folder)
    # What lies behind this step was damaged, or the run would have gone on from it.
    ahead = [path for path in found(folder) if path.name > target.name]
    for path in [*found(folder)[: -keep - len(ahead)], *ahead]:
        shutil.rmtree(path)
    _remove_unfinished(folder)
    return target


def failure(folder: Path, step: int, error: BaseException) -> UserError:
    """The error to raise for a checkpoint that could not be written, whose files are removed."""
    shutil.rmtree(unfinished(folder, step), ignore_errors=True)
    cause = error.cause if isinstance(error, _FailedOnRank) else error
    words = "the disk is full" if getattr(cause, "errno", None) == errno.ENOSPC else str(cause)
    good = newest(folder)
    return UserError(
        f"{folder / f'{PREFIX}{step:09d}'}: the checkpoint could not be written: {words}. "
        + (f"The last good one is {good.name}; " if good else "There is no earlier one; ")
        + "make room and go on with --resume"
    )


def found(folder: Path) -> list[Path]:
    """The complete checkpoints below a folder, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir())


def newest(folder: Path) -> Path | None:
    """The newest checkpoint whose files are what they were when it was written; damaged ones are named and skipped."""
    for path in reversed(found(folder)):
        try:
            read_state(path)
            return path
        except UserError as error:
            warnings.warn(f"skipping a damaged checkpoint: {error}", stacklevel=2)
    return None


def read_state(path: Path, verify: bool = True) -> State:
    """The state of a checkpoint, its tensor files checked against their checksums."""
    try:
        values: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        state = from_dict(State, values)
        for name, expected in state.sha256.items() if verify else ():
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise UserError(f"the checksum of {name} is wrong")
    except (OSError, ValueError, TypeError, UserError) as error:
        raise UserError(f"{path}: the checkpoint is damaged ({error})") from error
    return state


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor in one file."""

    file: Any
    """Opened by `safe_open`."""
    first_row: int
    shape: tuple[int, ...]


class Reader:
    """Reads any rows of any tensor of a checkpoint, from one file or several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: dict[str, list[Piece]] = {}
        for each in sorted(path.glob("*.safetensors")):
            file: Any = safe_open(each, framework="pt")
            metadata = file.metadata() or {}
            rows, dcp = (json.loads(metadata.get(key, "{}")) for key in (ROWS, DCP))
            first_rows = {name: entry["first_row"] for name, entry in rows.items()}
            first_rows |= {name: next(iter(entry["saved_offsets"]), 0) for name, entry in dcp.items()}
            for name in file.keys():  # noqa: SIM118
                shape = tuple(file.get_slice(name).get_shape())
                self.pieces.setdefault(name, []).append(Piece(file, first_rows.get(name, 0), shape))
        for pieces in self.pieces.values():
            pieces.sort(key=lambda piece: piece.first_row)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        last = self.pieces[name][-1]
        return (last.first_row + last.shape[0], *last.shape[1:]) if last.shape else ()

    def read(self, name: str, first_row: int = 0, rows: int | None = None) -> Tensor:
        """So many rows of a tensor from `first_row` on; all that follow unless given."""
        pieces, shape = self.pieces[name], self.shape(name)
        if len(pieces) == 1 and rows in (None, *shape[:1]):
            whole: Tensor = pieces[0].file.get_tensor(name)
            return whole
        end = shape[0] if rows is None else first_row + rows
        found = []
        for piece in pieces:
            start, stop = (min(max(row - piece.first_row, 0), piece.shape[0]) for row in (first_row, end))
            if start < stop:
                found.append(piece.file.get_slice(name)[start:stop])
        read = torch.cat(found) if found else torch.empty(0, *shape[1:])
        if len(read) != end - first_row:
            raise UserError(f"{self.path}: the checkpoint lacks rows of {name}")
        return read

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Shard]) -> None:
        """Set the rows that this rank holds of each tensor."""
        expected = {name: shard.shape for name, shard in tensors.items()}
        there = {name: self.shape(name) for name in self.pieces if name in tensors or not _of_optimizer(name)}
        if expected != there:
            raise UserError(f"{self.path}: the checkpoint does not fit the model of config.toml")
        for name, shard in tensors.items():
            rows = len(shard.rows) if shard.split else None
            shard.rows.copy_(self.read(name, shard.first_row, rows))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, whole: parameters, moments, the state of the random number generator."""
    reader = Reader(path)
    return {name: reader.read(name) for name in reader.pieces}


def load_model(path: Path) -> dict[str, Tensor]:
    """The parameters of a checkpoint by name, whole, whichever number of processes has written it."""
    reader = Reader(path)
    return {name: reader.read(name) for name in reader.pieces if not _of_optimizer(name)}


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f"{PART}*"):
        shutil.rmtree(path)


def _of_optimizer(name: str) -> bool:
    return "/" in name or name == RNG
