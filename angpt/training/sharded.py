"""Checkpoints of many ranks, through torch.distributed.checkpoint: each writes what it holds, while training goes on.

The files are safetensors whose headers say which rows they have, so that any number of ranks can read them, one process
among them, and nothing is unpickled. The folder becomes a checkpoint by one rename, after all files of all ranks are on
the disk and their checksums are in its state.
"""

import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import async_save

from angpt.errors import UserError
from angpt.training import checkpoint
from angpt.training.checkpoint import State
from angpt.training.parallel import Ranks


class Writer:
    """Writes checkpoints below a folder that all ranks see, one at a time."""

    def __init__(self, ranks: Ranks, folder: Path, keep: int) -> None:
        self.ranks, self.folder, self.keep = ranks, folder, keep
        self.thread: threading.Thread | None = None
        self.error: UserError | None = None

    def save(self, tensors: Mapping[str, Tensor], state: State) -> None:
        """Begin a checkpoint; tensors may be changed again when this returns. The state is that of rank 0."""
        self.finish()
        part = self.ranks.share(lambda: str(checkpoint.begin(self.folder, state.step)))
        storage = HuggingFaceStorageWriter(part, save_distributed=True)
        written = async_save(dict(tensors), storage_writer=storage, process_group=self.ranks.files)
        assert isinstance(written, Future)
        self.thread = threading.Thread(target=self._complete, args=(written, Path(part), state), daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Wait for the checkpoint that is on its way."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error

    def _complete(self, written: Future[object], part: Path, state: State) -> None:
        try:
            written.result()
            ours = sorted(part.glob(f"shard-{self.ranks.rank + 1:05d}-*.safetensors"))
            sums = {path.name: checkpoint.digest_and_sync(path) for path in ours}
            every: list[dict[str, str]] = [{} for _ in range(self.ranks.size)]
            dist.all_gather_object(every, sums, group=self.ranks.files)
            if self.ranks.main:
                together = {name: digest for sums in every for name, digest in sums.items()}
                checkpoint.complete(self.folder, replace(state, sha256=together), self.keep)
            dist.barrier(group=self.ranks.files)
        except (Exception, CheckpointException) as error:  # which is no Exception; raised where the loop waits
            self.error = self._explain(error, state.step)

    def _explain(self, error: BaseException, step: int) -> UserError:
        failures = getattr(error, "failures", None)  # which rank failed and why
        if failures:
            rank, (cause, _) = next(iter(failures.items()))
            error = OSError(f"rank {rank}: {cause}")
        if self.ranks.main:
            return checkpoint.failure(self.folder, step, error)
        return UserError(f"{self.folder}: the checkpoint of step {step:,} could not be written ({error})")


@torch.no_grad()
def load(path: Path, tensors: Mapping[str, Tensor], ranks: Ranks | None) -> None:
    """Fill tensors, or the rows of them that this rank holds, from a checkpoint of one process or of many."""
    reader, group = HuggingFaceStorageReader(str(path)), None if ranks is None else ranks.files
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # by intent
            read(dict(tensors), storage_reader=reader, process_group=group, no_dist=ranks is None)
    except (CheckpointException, KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: the checkpoint does not fit the model of config.toml") from error


def load_whole(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, each put together of its parts."""
    found = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    if not found:
        raise UserError(f"{path}: the checkpoint has no tensors")
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata) and wanted(name)
    }
    load(path, tensors, None)
    return tensors
