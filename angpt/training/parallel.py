"""Many processes that train one model: who they are, how they share the work, and what they tell each other.

The launcher (torchrun, or a SLURM job) gives each process its rank in environment variables. Without them there is one
process, `ALONE`, which communicates with nobody.

ddp: every rank has the whole model; gradients are summed while the backward pass goes on. fsdp: the rows of each matrix
are shared out over the ranks, with their gradients and moments, and gathered block by block to compute (`fully_shard`).
Vectors are few; every rank has them all, in fp32.
"""

import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from angpt.errors import UserError
from angpt.training.watchdog import Watchdog, listed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh

    from angpt.models.decoder import Decoder
    from angpt.training.sharded import Writer

T = TypeVar("T")

Strategy = Literal["ddp", "fsdp"]
BUCKET_BYTES = 25 * 2**20
"""Gradients that are summed over ranks in one message: enough to use the links well, few enough to start early."""
MARGIN_SECONDS = 60.0
"""By how much a collective outlives the watchdog, which can say more than the collective could."""


def launched_ranks() -> int:
    """How many processes the launcher has started for this run; 1 without a launcher."""
    if "RANK" not in os.environ:
        return 1
    try:
        return int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise UserError("RANK is set, but WORLD_SIZE is no number; start with torchrun, or unset RANK") from error


def launched_rank() -> int:
    """Which of them this is; 0 without a launcher."""
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError as error:
        raise UserError(f"RANK = {os.environ['RANK']!r} is no number; start with torchrun, or unset it") from error


def restarted() -> bool:
    """Whether this is a further attempt: torchrun started all ranks again, or SLURM put the job back into its queue."""
    return any(
        os.environ.get(name, "0") not in ("", "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds; a tensor that is not shared out is all here."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the rows of all ranks, each of which must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(parameter: Tensor, rows: Tensor) -> Tensor:
    """Rows that this rank holds of something with the shape of a parameter, as part of the whole."""
    if not hasattr(parameter, "to_local"):
        return rows
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    mesh, placements, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


class Alone:
    """One process without a launcher."""

    rank, size = 0, 1
    strategy: Strategy | None = None
    main = True
    """Whether this rank writes the files of the run."""

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        return value

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag

    def share(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on all ranks."""
        return make()

    def environment(self) -> dict[str, str]:
        """What a summary says of the ranks."""
        return {}

    def beat(self, step: int) -> None:
        """Called now and then by the loop: this rank has come so far."""


ALONE = Alone()


class Ranks(Alone):
    """All processes of a launch, as one of them sees them."""

    def __init__(self, device: torch.device, strategy: Strategy, shard_ranks: int | None, timeout: float) -> None:
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous

        self.rank, self.size, self.strategy = launched_rank(), launched_ranks(), strategy
        self.main = self.rank == 0
        self.device = device
        if shard_ranks is not None and self.size % shard_ranks:
            raise UserError(f"shard_ranks = {shard_ranks} does not divide the {self.size} ranks")
        self.shard_ranks = min(shard_ranks or self.size, self.size)
        if device.type == "cuda":
            here = int(os.environ.get("LOCAL_RANK", "0"))
            if here >= torch.cuda.device_count():
                raise UserError(
                    f"rank {self.rank} is number {here} on its machine, which has {torch.cuda.device_count()} GPUs; "
                    "start as many processes per machine as it has GPUs"
                )
            torch.cuda.set_device(here)
        wait = timedelta(seconds=timeout + MARGIN_SECONDS)
        store, _, _ = next(rendezvous("env://", timeout=wait))
        store = PrefixStore(agree(store, self.rank, self.size, timeout), store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("ranks", store),
            rank=self.rank,
            world_size=self.size,
            timeout=wait,
            device_id=torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None,
        )
        self.files: ProcessGroup = dist.new_group(backend="gloo", timeout=wait)
        """For the thread that writes checkpoints, whose messages must not mix with those of the loop."""
        self.watchdog = Watchdog(PrefixStore("beats", store), self.rank, self.size, timeout)

    def close(self) -> None:
        import torch.distributed as dist

        self.watchdog.stop()
        dist.destroy_process_group()

    def sum(self, value: Tensor) -> Tensor:
        import torch.distributed as dist

        total = value.clone()
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor(int(flag))).item())

    def share(self, make: Callable[[], T]) -> T:
        import torch.distributed as dist

        box: list[Any] = [make() if self.main else None]
        dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def environment(self) -> dict[str, str]:
        return {"ranks": str(self.size), "parallel": str(self.strategy)}

    def beat(self, step: int) -> None:
        self.watchdog.beat(step)

    def writer(self, checkpoints: Path, keep: int) -> "Writer":
        """Of checkpoints that all ranks write together."""
        try:
            from angpt.training.sharded import Writer
        except ImportError as error:
            raise UserError(
                f"PyTorch {torch.__version__} cannot write checkpoints of several processes as safetensors ({error}); "
                "install a newer one (tested with 2.13)"
            ) from error
        return Writer(self, checkpoints, keep)

    def shard(self, model: "Decoder", dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        """Share out the rows of every matrix of a model, which may still be on the CPU."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        if self.shard_ranks == self.size:
            self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("shard",))
        else:  # the innermost ranks, those of one machine, share a copy; copies are kept equal between machines
            shape = (self.size // self.shard_ranks, self.shard_ranks)
            self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        low = dtype != torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if low else None, reduce_dtype=reduce_dtype if low else None, cast_forward_inputs=False
        )
        vectors = {p for p in model.parameters() if p.ndim != 2}
        for part in (*model.blocks, model):  # one block at a time, so that the whole never has to fit on the device
            part.to(self.device)
            fully_shard(part, mesh=self.mesh, mp_policy=policy, ignored_params=vectors)
        register_fsdp_forward_method(model, "input_lengths")

    def sum_shards(self, value: Tensor) -> Tensor:
        """The sum over the ranks that share one copy of the parameters."""
        import torch.distributed as dist

        total = value.clone()
        dist.all_reduce(total, group=self.mesh.get_group("shard"))
        return total


def agree(store: Any, rank: int, size: int, timeout: float) -> str:
    """A name for this attempt that all ranks know and no earlier attempt had.

    torchrun keeps its store when it starts ranks again, and with it what those of the last attempt have written: their
    addresses among other things, to which nobody answers any more. So every rank asks under a name of its own until
    rank 0 has answered that one.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"ask/{rank}", name)
        store.wait([f"answer/{name}"], timedelta(seconds=timeout))
        chosen: str = store.get(f"answer/{name}").decode()
        store.set(f"thank/{chosen}/{rank}", "")
        return chosen
    waiting, deadline = set(range(1, size)), time.monotonic() + timeout
    while waiting:
        for other in list(waiting):
            if store.check([f"thank/{name}/{other}"]):
                waiting.remove(other)
            elif store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", name)
        if time.monotonic() > deadline:
            raise UserError(f"rank {listed(sorted(waiting))} did not come within {timeout:.0f} s")
        time.sleep(0.01)
    return name


@contextmanager
def connect(
    device: torch.device, strategy: Literal["auto", "ddp", "fsdp"], shard_ranks: int | None, timeout: float
) -> Iterator[Alone]:
    """The ranks of this launch, connected; `ALONE` without a launcher."""
    if "RANK" not in os.environ:
        yield ALONE
        return
    try:
        ranks = Ranks(device, "fsdp" if strategy == "fsdp" else "ddp", shard_ranks, timeout)
    except (RuntimeError, KeyError, ValueError) as error:  # KeyError: a variable of the environment is missing
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {launched_rank()}: the other ranks were not found at {where} ({error}); start them with torchrun"
        ) from error
    try:
        yield ranks
    except RuntimeError as error:
        if not _is_of_the_network(error):
            raise
        raise UserError(
            f"rank {ranks.rank} of {ranks.size}: lost another rank ({_words_of(error)}). "
            "The last good checkpoint is whole; see the log of the rank that ended first, and go on with --resume"
        ) from error
    finally:
        ranks.close()


@contextmanager
def log_apart(path: Path) -> Iterator[None]:
    """What this process says goes to a file, to the end of what is there; afterwards to where it went before."""
    path.parent.mkdir(exist_ok=True)
    before = [os.dup(number) for number in (1, 2)]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for number in (1, 2):
            os.dup2(log, number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, handle in enumerate(before, start=1):
            os.dup2(handle, number)
            os.close(handle)
        os.close(log)


def _words_of(error: RuntimeError) -> str:
    """The message without the place in the source, and without advice on other programs."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error).splitlines()[0]).partition(". This is typically")[0]


def _is_of_the_network(error: RuntimeError) -> bool:
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Socket", "TCPStore")
    return any(word in str(error) for word in words)


class Reducer:
    """Averages gradients over all ranks while the backward pass goes on: in buckets, each on its way as soon as it is
    full. `copies` are parameters in low precision whose gradients of several passes are gathered in fp32."""

    def __init__(self, parameters: Iterable[nn.Parameter], masters: Mapping[Tensor, Tensor], size: int, wide: bool):
        self.masters, self.size, self.wide = masters, size, wide
        self.waiting: dict[torch.dtype, list[Tensor]] = {}
        self.sent: list[tuple[Work, Tensor, list[Tensor]]] = []
        self.active = self.gathering = False
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def begin(self, last: bool, passes: int) -> None:
        """Before the backward pass: whether it is the last of a step, whose end is the whole gradient."""
        self.active, self.gathering = last, passes > 1

    def _ready(self, parameter: Tensor) -> None:
        if not self.active:
            return
        holder, gradient = parameter, parameter.grad
        assert gradient is not None
        if parameter in self.masters and (self.gathering or self.wide):
            holder = self.masters[parameter]
            holder.grad = gradient.float() if holder.grad is None else holder.grad.add_(gradient)
            parameter.grad, gradient = None, holder.grad
        bucket = self.waiting.setdefault(gradient.dtype, [])
        bucket.append(holder)
        if sum(p.numel() for p in bucket) * gradient.element_size() >= BUCKET_BYTES:
            self._send(gradient.dtype)

    def _send(self, dtype: torch.dtype) -> None:
        import torch.distributed as dist

        bucket = self.waiting.pop(dtype)
        flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self.sent.append((work, flat, bucket))

    def finish(self) -> None:
        """After the last pass: wait for all of them."""
        for dtype in list(self.waiting):
            self._send(dtype)
        for work, flat, bucket in self.sent:
            work.wait()
            flat.div_(self.size)
            for p, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                p.grad = part.view_as(p)
        self.sent.clear()
