"""Checkpoints that are whole or absent: safetensors and JSON in a folder that gets its name when it is complete.

One process writes model.safetensors and optimizer.safetensors. Where matrices are sharded, each rank writes the rows
that it holds to files of its own, whose headers say which rows these are; any number of processes can read them.
"""

import hashlib
import json
import math
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from angpt.config import RESUME_SETTINGS, TrainConfig, differences
from angpt.errors import UserError
from angpt.serialization import check_settings, from_dict, json_values, parse_json, sealed_json, typed, unseal
from angpt.system import check_name, file_sha256, remove, sync, write_atomically
from angpt.training.strategy import Shard, SingleProcess, Strategy

T = TypeVar("T")

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
PREFIX, PART = "step-", ".part-"
RNG = "rng"
"""Name of the state of the random number generator among the tensors of the optimizer."""
ROWS = "rows"
"""Metadata key in the header of a file that has some rows of a tensor: whole shape and first row, by tensor name."""


MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that tell that a file of a checkpoint is not there. Others (the disk, permissions) may pass."""


class Damaged(UserError):
    """A checkpoint lacks a file, or has a wrong one."""


@dataclass(frozen=True)
class State:
    """The state of a run except its tensors. The position in the data follows from the step."""

    step: int
    """Steps done."""
    architecture: str
    metrics_bytes: int
    """Length of metrics.jsonl; what comes after it belongs to steps that will be repeated."""
    seconds: float
    """Time spent training so far."""
    val_loss: float | None
    """Loss of the last evaluation."""
    data_fingerprint: str
    tokenizer_fingerprint: str | None
    sha256: dict[str, str]
    """Checksums of the tensor files."""
    config: TrainConfig
    """Settings of the run."""
    validation_fingerprint: str | None = None
    """None where no run of this package has trained the model."""

    def __post_init__(self) -> None:
        check_settings(self, "0 or more", lambda value: 0 <= value < math.inf, "step", "metrics_bytes", "seconds")
        check_settings(self, "finite", math.isfinite, "val_loss")
        for name in self.sha256:
            check_name(name)

    @property
    def fingerprint(self) -> str:
        """Tells checkpoints apart by their parameters."""
        return self.sha256.get(MODEL) or hashlib.sha256(json.dumps(self.sha256, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Rows:
    """Which rows of a tensor a file has."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first_row: int


class Writer(AbstractContextManager["Writer"]):
    """Writes the checkpoints of all ranks in a background thread; its `with` block ends when they are complete."""

    def __init__(self, strategy: Strategy, folder: Path, keep: int) -> None:
        """`keep`: how many of the newest checkpoints stay."""
        self.strategy, self.folder, self.keep = strategy, folder, keep
        self.thread: threading.Thread | None = None
        self.error: UserError | None = None
        self.buffers: dict[str, Tensor] = {}
        """Host memory by tensor name, page-locked for tensors on a GPU."""

    def save(self, tensors: Mapping[str, Shard], state: State) -> None:
        """Begin a checkpoint; the tensors may change when this returns. `state` counts on rank 0 only."""
        self.finish()
        copies = {name: replace(s, rows=self._copy(name, s.rows)) for name, s in tensors.items() if s.primary}
        self.thread = threading.Thread(target=self._write, args=(copies, state), name="checkpoint", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint is written; raise the error that prevented it."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.finish()
        else:  # raised instead of an error of the writer, because it came first
            with suppress(UserError):
                self.finish()

    def _copy(self, name: str, rows: Tensor) -> Tensor:
        if name not in self.buffers:
            self.buffers[name] = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        return self.buffers[name].copy_(rows)  # waits for the GPU

    def _write(self, tensors: Mapping[str, Shard], state: State) -> None:
        rank, main, writers = self.strategy.rank, self.strategy.main, self.strategy.writers
        part, target = (self.folder / f"{prefix}{state.step:09d}" for prefix in (PART, PREFIX))
        try:
            self._on_all(lambda: begin(part) if main else None)
            written = self._on_all(lambda: write_files(part, tensors, rank, writers))
            sums = {name: digest for of_rank in written for name, digest in of_rank.items()}
            self._on_all(lambda: complete(part, target, replace(state, sha256=sums), self.keep) if main else None)
        except Exception as error:  # a file could not be written, or the connection to another rank is lost
            self.error = UserError(f"{target}: the checkpoint could not be written: {error}")
            if main:
                shutil.rmtree(part, ignore_errors=True)
                try:
                    good = newest(self.folder)
                    last = f"The last good one is {good.name}" if good else "There is no earlier one"
                except UserError as unreadable:
                    last = str(unreadable)
                self.error = UserError(f"{self.error}. {last}; fix the cause and continue with --resume")

    def _on_all(self, act: Callable[[], T]) -> list[T]:
        """What `act` returns on each rank; an error on all ranks if it fails on any."""
        result: tuple[Any, str]
        try:
            result = act(), ""
        except Exception as error:
            result = None, "the disk is full" if "No space left" in str(error) else str(error) or repr(error)
        answers: list[tuple[Any, str]] = self.strategy.exchange(result)
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise RuntimeError(f"rank {rank}: {problem}" if len(answers) > 1 else problem)
        return [answer for answer, _ in answers]


def save(folder: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: State, keep: int) -> Path:
    """Write a checkpoint of whole tensors below `folder`, and remove all but the newest `keep`."""
    strategy = SingleProcess()
    with Writer(strategy, folder, keep) as writer:
        writer.save({name: strategy.shard(t) for name, t in {**model, **optimizer}.items()}, state)
    return found(folder)[-1]


def begin(part: Path) -> None:
    """Make an empty folder for a checkpoint, which does not count until it is complete."""
    for path in part.parent.glob(f"{PART}*"):
        remove(path)
    part.mkdir(parents=True)


def write_files(part: Path, tensors: Mapping[str, Shard], rank: int = 0, writers: int = 1) -> dict[str, str]:
    """Write the files of one of several ranks to the disk; return their checksums by name."""
    sums = {}
    for file, of_optimizer in ((MODEL, False), (OPTIMIZER, True)):
        chosen = {name: shard for name, shard in tensors.items() if _of_optimizer(name) == of_optimizer}
        if writers > 1:
            file = file.replace(".", f"-{rank + 1:05d}-of-{writers:05d}.")
        if chosen or rank == 0:
            rows = {name: asdict(Rows(s.shape, s.first_row)) for name, s in chosen.items() if s.split}
            metadata = {ROWS: json.dumps(rows)} if rows else None
            save_file({name: shard.rows for name, shard in chosen.items()}, part / file, metadata)
            sync(part / file)
            sums[file] = file_sha256(part / file)
    return sums


def complete(part: Path, target: Path, state: State, keep: int) -> None:
    """Write the state of a checkpoint, give it its name, and remove all but the newest `keep`."""
    write_atomically(part / STATE, sealed_json(state, finite=False))  # the clip of gradients may be infinite
    sync(part)
    old = part.with_name(f"{part.name}-old")
    if os.path.lexists(target):  # a damaged one, or the run would have continued from it
        target.rename(old)
    part.rename(target)
    sync(target.parent)
    ahead = [path for path in found(target.parent) if path.name > target.name]  # damaged, too
    for path in [*found(target.parent)[: -keep - len(ahead)], *ahead, old]:
        remove(path)


def found(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first; an error if it cannot be listed, since they may be there."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.startswith(PREFIX) and path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:  # to start from step 0 would replace them
        raise UserError(f"{folder}: checkpoints cannot be listed ({error.strerror}); try again") from error


def newest(folder: Path) -> Path | None:
    """The newest checkpoint whose checksums are right; warns of damaged ones and skips them, not those unreadable."""
    for path in reversed(found(folder)):
        try:
            read_state(path)
            return path
        except Damaged as error:
            warnings.warn(f"skipping a damaged checkpoint: {error}", stacklevel=2)
    return None


def read_state(path: Path, verify: bool = True) -> State:
    """The state of a checkpoint; `verify`: its tensor files are compared with their checksums."""
    try:
        state = from_dict(State, unseal(json_values(path / STATE)))
        for name, expected in state.sha256.items() if verify else ():
            if file_sha256(path / name) != expected:
                raise UserError(f"the checksum of {name} is wrong")
    except (OSError, ValueError, UserError) as error:
        cause = error.__cause__ if isinstance(error, UserError) else error
        if isinstance(cause, OSError) and not isinstance(cause, MISSING):  # to go on from an earlier one replaces it
            raise UserError(f"{path}: the checkpoint cannot be read ({error}); try again") from error
        raise Damaged(f"{path}: the checkpoint is damaged ({error})") from error
    return state


def check_config(path: Path, state: State, config: TrainConfig) -> None:
    """Raise an error if the configuration of a run is not that of its checkpoint at `path`, except RESUME_SETTINGS."""
    if changed := differences(config, state.config, RESUME_SETTINGS):
        words = ", ".join(f"{name} = {here}, not {there}" for name, (here, there) in changed.items())
        raise UserError(
            f"{path.parents[1] / 'config.toml'}: differs from what {path.name} was trained with ({words}); restore it, "
            "or start a new run from this file with --config"
        )


class Reader:
    """Reads any rows of any tensor of a checkpoint, from one file or several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: dict[str, list[tuple[int, Any]]] = {}
        """For each tensor, from each file that has rows of it: the first row, and these rows to be sliced."""
        for each in sorted(path.glob("*.safetensors")):
            try:
                file: Any = safe_open(each, framework="pt")
                first_rows = _first_rows(file.metadata() or {})
            except (OSError, SafetensorError, UserError) as error:
                raise UserError(f"{each}: the checkpoint is damaged ({error})") from error
            for name in file.keys():  # noqa: SIM118
                self.pieces.setdefault(name, []).append((first_rows.get(name, 0), file.get_slice(name)))
        for pieces in self.pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        first_row, last = self.pieces[name][-1]
        rows, *rest = last.get_shape() or (None,)
        return () if rows is None else (first_row + rows, *rest)

    def read(self, name: str, first_row: int = 0, rows: int | None = None) -> Tensor:
        """`rows` rows of a tensor from `first_row` on; the whole tensor unless given."""
        if rows is None and len(self.pieces[name]) == 1:
            whole: Tensor = self.pieces[name][0][1][...]
            return whole
        end = self.shape(name)[0] if rows is None else first_row + rows
        parts = [piece[max(first_row - start, 0) : max(end - start, 0)] for start, piece in self.pieces[name]]
        read = torch.cat(parts)
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


def _first_rows(metadata: Mapping[str, str]) -> dict[str, int]:
    """The first row of each tensor of which a file has some rows, by the header of the file."""
    rows = typed(dict[str, Rows], parse_json(metadata.get(ROWS, "{}")), ROWS)
    return {name: entry.first_row for name, entry in rows.items()}


def load_model(path: Path) -> dict[str, Tensor]:
    """The parameters of a checkpoint by name, whole, whichever number of processes wrote it."""
    reader = Reader(path)
    return {name: reader.read(name) for name in reader.pieces if not _of_optimizer(name)}


def _of_optimizer(name: str) -> bool:
    return "/" in name or name == RNG
