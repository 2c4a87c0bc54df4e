"""Checkpoints that are whole or not there: safetensors and JSON in a folder that gets its name when it is complete."""

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from angpt.config import from_dict
from angpt.errors import UserError

Moments = Mapping[Tensor, Mapping[str, Tensor]]
"""What an optimizer keeps of each parameter."""

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
PREFIX, PART = "step-", ".part-"
RNG = "rng"
"""Name of the state of the random number generator among the tensors of the optimizer."""


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


def save(folder: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: State, keep: int) -> Path:
    """Write a checkpoint below `folder` and remove all but the newest `keep`."""
    part = begin(folder, state.step)
    try:
        sums = {}
        for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
            save_file({k: t.detach().contiguous() for k, t in tensors.items()}, part / name)
            sums[name] = digest_and_sync(part / name)
        return complete(folder, replace(state, sha256=sums), keep)
    except (OSError, SafetensorError) as error:
        raise failure(folder, state.step, error) from error


def begin(folder: Path, step: int) -> Path:
    """An empty folder for the files of a checkpoint, which is none until `complete`."""
    part = folder / f"{PART}{step:09d}"
    _clear_parts(folder)
    part.mkdir(parents=True)
    return part


def complete(folder: Path, state: State, keep: int) -> Path:
    """Give a checkpoint its state and its name, and remove all but the newest `keep`."""
    target, part = folder / f"{PREFIX}{state.step:09d}", folder / f"{PART}{state.step:09d}"
    (part / STATE).write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    digest_and_sync(part / STATE)
    _sync_folder(part)
    if target.exists():  # a damaged one, which the run passed again
        target.rename(folder / f"{PART}{state.step:09d}-old")
    part.rename(target)
    _sync_folder(folder)
    # What lies behind this step was damaged, or the run would have gone on from it.
    ahead = [path for path in found(folder) if path.name > target.name]
    for path in [*found(folder)[: -keep - len(ahead)], *ahead]:
        shutil.rmtree(path)
    _clear_parts(folder)
    return target


def failure(folder: Path, step: int, error: BaseException) -> UserError:
    """What to tell of a checkpoint that could not be written; what there is of it is removed."""
    shutil.rmtree(folder / f"{PART}{step:09d}", ignore_errors=True)
    full = getattr(error, "errno", None) == errno.ENOSPC or re.search("os error 28|errno 28", str(error).lower())
    cause = "the disk is full" if full else str(error)
    good = newest(folder)
    return UserError(
        f"{folder / f'{PREFIX}{step:09d}'}: the checkpoint could not be written: {cause}. "
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
            if digest_and_sync(path / name, sync=False) != expected:
                raise UserError(f"the checksum of {name} is wrong")
    except (OSError, ValueError, TypeError, UserError) as error:
        raise UserError(f"{path}: the checkpoint is damaged ({error})") from error
    return state


def load_model(path: Path) -> dict[str, Tensor]:
    """The parameters by name, whole, from a checkpoint of one process or of many."""
    if (path / MODEL).exists():
        return load_file(path / MODEL)
    from angpt.training import sharded

    return sharded.load_whole(path, lambda name: not _of_optimizer(name))


def load_optimizer(path: Path) -> dict[str, Tensor]:
    """The moments by name, as `optimizer_tensors` has them, and the state of the random number generator."""
    if (path / OPTIMIZER).exists():
        return load_file(path / OPTIMIZER)
    from angpt.training import sharded

    return sharded.load_whole(path, _of_optimizer)


def optimizer_tensors(state: Moments, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The state of an optimizer as named tensors: `exp_avg/blocks.0.W_p.weight` and so on."""
    return {f"{key}/{names[p]}": value for p, entries in state.items() for key, value in entries.items()}


def load_optimizer_tensors(state: Moments, tensors: Mapping[str, Tensor], names: Mapping[Tensor, str]) -> None:
    """Put named tensors back into the state of an optimizer."""
    for name, value in optimizer_tensors(state, names).items():
        value.copy_(tensors[name])


def digest_and_sync(path: Path, sync: bool = True) -> str:
    """SHA-256 of a file, which is on the disk afterwards."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clear_parts(folder: Path) -> None:
    """What an earlier process left unfinished."""
    for path in folder.glob(f"{PART}*"):
        shutil.rmtree(path)


def _of_optimizer(name: str) -> bool:
    return "/" in name or name == RNG
