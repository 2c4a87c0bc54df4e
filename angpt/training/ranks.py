"""The ranks of a launch: what the launcher says of them in the environment, and how they find each other."""

import os
import re
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from angpt.errors import UserError
from angpt.training.watchdog import listed

MARGIN_SECONDS = 60.0
"""Time by which a collective outlives the watchdog, whose message says more than the collective's."""


def launched_ranks() -> int:
    """The number of processes that the launcher has started for this run; 1 without a launcher."""
    if "RANK" not in os.environ:
        return 1
    try:
        return int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise UserError("RANK is set, but WORLD_SIZE is no number; start with torchrun, or unset RANK") from error


def launched_rank() -> int:
    """The rank of this process; 0 without a launcher."""
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError as error:
        raise UserError(f"RANK = {os.environ['RANK']!r} is no number; start with torchrun, or unset it") from error


def restarted() -> bool:
    """True in a further attempt: torchrun has started all ranks again, or SLURM has requeued the job."""
    return any(
        os.environ.get(name, "0") not in ("", "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )


def join(device: torch.device, timeout: float) -> Any:
    """Connect this process with all others of the launch; return a store that only this attempt uses."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    rank, size = launched_rank(), launched_ranks()
    if device.type == "cuda":
        here = int(os.environ.get("LOCAL_RANK", "0"))
        if here >= torch.cuda.device_count():
            raise UserError(
                f"rank {rank} is number {here} on its machine, which has {torch.cuda.device_count()} GPUs; "
                "start as many processes per machine as it has GPUs"
            )
        torch.cuda.set_device(here)
    wait = timedelta(seconds=timeout + MARGIN_SECONDS)
    try:
        store, _, _ = next(rendezvous("env://", timeout=wait))
        store = PrefixStore(name_attempt(store, rank, size, timeout), store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("ranks", store),
            rank=rank,
            world_size=size,
            timeout=wait,
            device_id=torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None,
        )
    except (RuntimeError, KeyError, ValueError) as error:  # KeyError: a variable of the environment is missing
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {rank}: the other ranks were not found at {where} ({error}); start them with torchrun"
        ) from error
    return store


def name_attempt(store: Any, rank: int, size: int, timeout: float) -> str:
    """A name for this attempt that all ranks know and no earlier attempt had.

    torchrun keeps its store when it starts ranks again, with what those of the last attempt have written: among other
    things addresses at which nobody listens any more. So every rank asks under a name of its own until rank 0 has
    answered that one.
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


def lost_rank(error: BaseException | None) -> str | None:
    """What an error of the network says, without its place in the source; None for any other error."""
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Socket", "TCPStore")
    if not isinstance(error, RuntimeError) or not any(word in str(error) for word in words):
        return None
    return re.sub(r"^\[[^\]]*\] *", "", str(error).splitlines()[0]).partition(". This is typically")[0]


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Append what this process prints to a file."""
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
