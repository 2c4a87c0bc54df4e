"""How the processes of a run share its work: one process, DDP or FSDP, with one interface for trainer and engine.

A launcher (torchrun, or a SLURM job) gives each process its rank in environment variables; without them there is one
process. With FSDP, matrices are gathered block by block to compute, and every rank has all vectors, in fp32.
"""

import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from angpt.config import Parallel
from angpt.constraints import is_matrix
from angpt.errors import UserError
from angpt.fast.precision import low_precision, stream_dtype
from angpt.float8 import E4M3
from angpt.models.decoder import Decoder
from angpt.models.float8 import use_float8
from angpt.optim.states import Shards
from angpt.training.gathering import GatheredInE4M3, gather_in_e4m3
from angpt.training.ranks import join, launched_rank, launched_ranks, network_error
from angpt.training.reducer import GradientReducer
from angpt.training.watchdog import Watchdog

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """The rows of a tensor that this rank holds."""

    rows: Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first_row: int
    primary: bool
    """True on the rank that writes these rows to checkpoints, one of those that hold them."""
    split: bool = False
    """True if other ranks hold the other rows."""

    def with_rows(self, rows: Tensor) -> "Shard":
        """The same rows of another tensor with as many rows, sharded in the same way."""
        return replace(self, rows=rows, shape=(*self.shape[:1], *rows.shape[1:]))


class Strategy(Shards, AbstractContextManager["Strategy"]):
    """How processes share the work of a run. Used in a `with` block; default methods are those of one process."""

    rank, size = 0, 1
    writers = 1
    """Number of ranks that write files of a checkpoint: the first ones."""
    can_record = False
    """True if a pass may be recorded as a CUDA graph."""

    @property
    def main(self) -> bool:
        """True on the rank that writes the files of the run."""
        return self.rank == 0

    @abstractmethod
    def prepare(self, model: Decoder, dtype: torch.dtype, wide_reduce: bool) -> Decoder:
        """Move a model to the device and shard it; return the model that computes, with matrices in `dtype`.

        `wide_reduce`: sum bf16 gradients over ranks in fp32.
        """

    def begin_pass(self, last: bool, passes: int) -> None:
        """Call before each pass of a step; gradients are averaged over ranks in the last one."""

    def finish_passes(self) -> None:
        """Wait until the gradients are averages over all ranks."""

    def shard(self, parameter: Tensor) -> Shard:
        """The rows of a parameter that this rank holds."""
        return Shard(parameter.detach(), tuple(parameter.shape), 0, self.main)

    def whole(self, shard: Shard) -> Tensor:
        """The tensor with the rows of all ranks. Collective: every rank must call it."""
        return shard.rows

    def release(self) -> None:
        """Drop matrices that a forward pass has gathered, perhaps in lower precision."""

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        return value

    def agree_to_stop(self, wanted: bool, now: bool) -> bool:
        """True if any rank wants to stop; several ranks agree only when `now` is true."""
        return wanted

    def share(self, make: Callable[[], T]) -> T:
        """The result of `make()` on rank 0, or its `UserError`, on all ranks."""
        return make()

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks. Uses a process group of its own: the thread that writes checkpoints calls it."""
        return [value]

    def compare_replicas(self, tensors: Mapping[str, Shard]) -> None:
        """Raise an error that names the rank if ranks that hold the same rows (fp32) differ in a bit."""

    def environment(self) -> dict[str, str]:
        """Entries about the ranks in the summary of a run."""
        return {}

    def beat(self, step: int) -> None:
        """Heartbeat: the loop of this rank has reached a step."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """End the connection with the other ranks."""


class SingleProcess(Strategy):
    """A single process, started without a launcher."""

    can_record = True

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: the device to train on; that of the model unless given."""
        self.device = device

    def prepare(self, model: Decoder, dtype: torch.dtype, wide_reduce: bool) -> Decoder:
        model.to(self.device or next(model.parameters()).device)
        return low_precision(model, dtype)


class Distributed(Strategy):
    """One rank of several: what DDP and FSDP have in common."""

    reducer: GradientReducer

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.device, self.rank, self.size = device, launched_rank(), launched_ranks()
        store, self.checkpoint_group = join(device, timeout)
        try:
            self.watchdog = Watchdog(PrefixStore("beats", store), self.rank, self.size, timeout)
        except RuntimeError as error:
            raise self._lost(error) or error from error

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            try:
                dist.barrier(self.checkpoint_group)
            except RuntimeError as lost:
                error = lost
        dist.destroy_process_group()
        self.watchdog.stop()  # last, because ending the connection may hang
        if (told := self._lost(error)) is not None:
            raise told from error

    def _lost(self, error: BaseException | None) -> UserError | None:
        """The error to show instead of a network error."""
        if (words := network_error(error)) is None:
            return None
        return UserError(
            f"rank {self.rank} of {self.size}: lost another rank ({words}). "
            "See the log of the rank that ended first, and continue from the last checkpoint with --resume"
        )

    def begin_pass(self, last: bool, passes: int) -> None:
        self.reducer.begin_pass(last, passes)

    def finish_passes(self) -> None:
        self.reducer.finish()

    def sum(self, value: Tensor) -> Tensor:
        return all_reduced(value)

    def agree_to_stop(self, wanted: bool, now: bool) -> bool:
        return now and bool(self.sum(torch.tensor(int(wanted))).item())

    def share(self, make: Callable[[], T]) -> T:
        result: list[Any] = [None]
        if self.main:
            try:
                result = [make()]
            except UserError as error:  # for all ranks, which wait for the result
                result = [error]
        dist.broadcast_object_list(result, device=torch.device("cpu"))
        if isinstance(result[0], UserError):
            raise result[0]
        return result[0]

    def exchange(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.checkpoint_group)
        return values

    def compare_replicas(self, tensors: Mapping[str, Shard]) -> None:
        bits = (shard.rows.contiguous().view(torch.int32) for shard in tensors.values())
        sums = torch.stack([b.sum(dtype=torch.int64) for b in bits]).cpu()  # change with every single bit
        found = torch.stack((sums, torch.tensor([shard.first_row for shard in tensors.values()])), dim=1)
        gathered = [torch.empty_like(found) for _ in range(self.size)]
        dist.all_gather(gathered, found)
        for name, of_ranks in zip(tensors, torch.stack(gathered, dim=1).tolist(), strict=True):
            for row in dict.fromkeys(first_row for _, first_row in of_ranks):
                digests = {rank: digest for rank, (digest, first_row) in enumerate(of_ranks) if first_row == row}
                (expected, _), *others = Counter(digests.values()).most_common()  # in a tie, that of the lowest rank
                if others:
                    right, wrong = (next(r for r, d in digests.items() if d == x) for x in (expected, others[0][0]))
                    raise UserError(
                        f"rank {wrong} differs from rank {right} in {name}, which must be equal on both: its memory or "
                        "its GPU has made an error; exclude its machine and continue with --resume"
                    )

    def environment(self) -> dict[str, str]:
        return {"ranks": str(self.size), "parallel": type(self).__name__.lower()}

    def beat(self, step: int) -> None:
        self.watchdog.beat(step)


class DDP(Distributed):
    """Every rank has the whole model; gradients are averaged during the backward pass."""

    def prepare(self, model: Decoder, dtype: torch.dtype, wide_reduce: bool) -> Decoder:
        compute = low_precision(model.to(self.device), dtype)
        pairs = zip(model.parameters(), compute.parameters(), strict=True)
        masters: dict[Tensor, Tensor] = {c: p for p, c in pairs if p is not c}
        self.reducer = GradientReducer(compute.parameters(), masters, self.size, wide_reduce)
        return compute

    @property
    def workers(self) -> int:  # type: ignore[override]
        return self.size

    def take_share(self, batch: Tensor, rows: int) -> Tensor:
        return batch.chunk(self.size)[self.rank]

    def return_shares(self, share: Tensor) -> Tensor:
        batch = share.new_empty((self.size * len(share), *share.shape[1:]))
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the new name since PyTorch 2.13
        gather(batch, share)
        return batch


class FSDP(Distributed):
    """The rows of matrices, with their gradients and moments, are sharded over groups of ranks."""

    mesh: DeviceMesh
    model: Decoder

    def __init__(self, device: torch.device, timeout: float, shard_ranks: int | None) -> None:
        """`shard_ranks`: number of ranks that together hold one copy of the matrices; all unless given."""
        size = launched_ranks()
        if shard_ranks is not None and size % shard_ranks:
            raise UserError(f"shard_ranks = {shard_ranks} does not divide the {size} ranks")
        super().__init__(device, timeout)
        self.shard_ranks = self.writers = min(shard_ranks or size, size)

    def prepare(self, model: Decoder, dtype: torch.dtype, wide_reduce: bool) -> Decoder:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        # The ranks of a copy are neighbours.
        dims = {"replicate": self.size // self.shard_ranks, "shard": self.shard_ranks}
        if self.shard_ranks == self.size:
            del dims["replicate"]
        self.mesh = init_device_mesh(self.device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        gathered = stream_dtype(dtype)
        reduce_dtype = torch.float32 if wide_reduce else gathered
        policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        vectors = [p for p in model.parameters() if not is_matrix(p)]
        bounded = set(model.constraints())
        for number, block in enumerate(model.blocks):  # one at a time: the whole model need not fit on the device
            block.to(self.device)
            if dtype == E4M3:
                gather_in_e4m3(block, {name.removeprefix(f"blocks.{number}.") for name in bounded})
            fully_shard(block, mesh=self.mesh, mp_policy=policy, ignored_params=set(vectors))
        fully_shard(model.to(self.device), mesh=self.mesh, mp_policy=policy, ignored_params=set(vectors))
        if dtype == E4M3:
            use_float8(model, copied=False)
        # At its first use FSDP may reallocate padded shards; after this, the optimizer can hold references to them.
        for part in (*model.blocks, model):
            part.unshard()
            part.reshard()
        register_fsdp_forward_method(model, "input_lengths")
        self.model = model
        self.reducer = GradientReducer(vectors, {}, self.size, wide_reduce)
        return model

    def begin_pass(self, last: bool, passes: int) -> None:
        super().begin_pass(last, passes)
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def local(self, tensor: Tensor) -> Tensor:
        rows = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return rows.rows if isinstance(rows, GatheredInE4M3) else rows

    def shard(self, parameter: Tensor) -> Shard:
        if not hasattr(parameter, "to_local"):  # a vector, or a matrix that is gathered now
            return super().shard(parameter)
        first_row = min(len(parameter), self.rows_each(len(parameter)) * (self.rank % self.shard_ranks))
        shape, primary = tuple(parameter.shape), self.rank < self.shard_ranks
        return Shard(self.local(parameter.detach()), shape, first_row, primary, split=self.shard_ranks > 1)

    @torch.no_grad()
    def whole(self, shard: Shard) -> Tensor:
        from torch.distributed import tensor

        if not shard.split:
            return shard.rows
        placements = [*[tensor.Replicate()] * (self.mesh.ndim - 1), tensor.Shard(0)]
        stride = torch.empty(shard.shape, device="meta").stride()
        rows, shape = shard.rows, torch.Size(shard.shape)
        spread = tensor.DTensor.from_local(rows, self.mesh, placements, run_check=False, shape=shape, stride=stride)
        return spread.full_tensor()

    def release(self) -> None:
        self.model.reshard()  # type: ignore[operator]

    def sum_shards(self, value: Tensor) -> Tensor:
        return all_reduced(value, self.mesh.get_group("shard"))

    @property
    def workers(self) -> int:  # type: ignore[override]
        return self.shard_ranks

    def rows_each(self, rows: int) -> int:
        return -(-rows // self.shard_ranks)

    def take_share(self, batch: Tensor, rows: int) -> Tensor:
        received = self._exchanged(batch)  # from each rank, its rows of our matrices
        return received.view(self.shard_ranks, -1, *batch.shape[1:]).transpose(0, 1).flatten(1, 2)[:, :rows]

    def return_shares(self, share: Tensor) -> Tensor:
        count, rows, columns = share.shape
        each = self.rows_each(rows)
        padded = nn.functional.pad(share, (0, 0, 0, self.shard_ranks * each - rows))
        return self._exchanged(padded.view(count, self.shard_ranks, each, columns).transpose(0, 1).flatten(0, 1))

    def _exchanged(self, batch: Tensor) -> Tensor:
        """What the ranks of a copy send to this one if each sends an equal part of its batch to every rank."""
        received = torch.empty_like(batch)
        dist.all_to_all_single(received, batch.contiguous(), group=self.mesh.get_group("shard"))
        return received


def all_reduced(value: Tensor, group: Any = None) -> Tensor:
    """The sum over the ranks of a group; over all ranks unless given."""
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total


def choose_strategy(device: torch.device, parallel: Parallel, shard_ranks: int | None, timeout: float) -> Strategy:
    """The strategy for the processes of this launch, connected; `SingleProcess` without a launcher."""
    if "RANK" not in os.environ:
        return SingleProcess(device)
    return FSDP(device, timeout, shard_ranks) if parallel == "fsdp" else DDP(device, timeout)
