"""The ranks of a launch: their numbers, which the launcher sets in the environment, and how they connect."""

import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from angpt.errors import UserError
from angpt.system import open_to_append
from angpt.training.watchdog import listed

MARGIN_SECONDS = 60.0
"""How much longer collectives wait than the watchdog, whose message says more."""


def launched_ranks() -> int:
    """The number of processes of this launch; 1 without a launcher."""
    return _launched()[1]


def launched_rank() -> int:
    """The rank of this process; 0 without a launcher."""
    return _launched()[0]


def _launched() -> tuple[int, int]:
    """Rank and number of ranks, from the environment."""
    if "RANK" not in os.environ:
        return 0, 1
    texts = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    for name, value in texts.items():
        if not re.fullmatch("[0-9]{1,9}", value):
            raise UserError(f"RANK is set, but {name} = {value!r} is no number; start with torchrun, or unset RANK")
    rank, ranks = map(int, texts.values())
    if rank >= ranks:
        raise UserError(f"RANK = {rank} must be below WORLD_SIZE = {ranks}; start with torchrun, or unset RANK")
    return rank, ranks


def restarted() -> bool:
    """True if torchrun has restarted the ranks, or SLURM has requeued the job."""
    counts = (os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts)


def join(device: torch.device, timeout: float) -> tuple[Any, Any]:
    """Connect this process with the others of the launch; an error if another one lets it wait for `timeout` seconds.

    Returns a store that only this attempt uses, and a group of all ranks besides the default one.
    """
    options: dict[str, Any] = {"backend": "gloo"}
    rank, size = launched_rank(), launched_ranks()
    if device.type == "cuda":
        here = int(os.environ.get("LOCAL_RANK", "0"))
        if here >= torch.cuda.device_count():
            raise UserError(
                f"rank {rank} is number {here} on its machine, which has {torch.cuda.device_count()} GPUs; "
                "start as many processes per machine as it has GPUs"
            )
        torch.cuda.set_device(here)
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", here)}
    wait = timedelta(seconds=timeout)
    try:
        if rank > 0:
            wait_for_port(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout)
        store, _, _ = next(rendezvous("env://", timeout=wait))
        store = PrefixStore(name_attempt(store, rank, size, timeout), store)
        options |= {"store": PrefixStore("ranks", store), "rank": rank, "world_size": size, "timeout": wait}
        dist.init_process_group(**options)
        second = dist.new_group(backend="gloo", timeout=wait)
    except (RuntimeError, OSError, KeyError, ValueError) as error:  # KeyError: an environment variable is missing
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {rank}: the other ranks were not found at {where} ({error}); start them with torchrun"
        ) from error
    for group in (None, second):
        _set_pg_timeout(wait + timedelta(seconds=MARGIN_SECONDS), group)
    return store, second


def wait_for_port(host: str, port: int, timeout: float) -> None:
    """Return when a server listens at the port; an OSError after `timeout` seconds, which PyTorch exceeds twofold."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), max(deadline - time.monotonic(), 0.1)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def name_attempt(store: Any, rank: int, size: int, timeout: float) -> str:
    """A name for this attempt that all ranks agree on and no earlier attempt had.

    torchrun keeps its store when it restarts ranks, with what earlier attempts wrote, such as addresses that are gone.
    So every rank asks under a random name until rank 0 has answered exactly that name.
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
            raise UserError(f"rank {listed(sorted(waiting))} did not connect within {timeout:.0f} s")
        time.sleep(0.01)
    return name


def network_error(error: BaseException | None) -> str | None:
    """The message of a network error without its position in the source; None for other errors."""
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Socket", "TCPStore")
    if not isinstance(error, RuntimeError):
        return None
    if not isinstance(error, dist.DistError) and not any(word in str(error) for word in words):
        return None
    return re.sub(r"^\[[^\]]*\] *", "", str(error).splitlines()[0]).partition(". This is typically")[0]


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Append the output of this process, also that of libraries, to a file."""
    path.parent.mkdir(exist_ok=True)
    before = [os.dup(number) for number in (1, 2)]
    try:
        log = open_to_append(path)
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, handle in enumerate(before, start=1):
            os.dup2(handle, number)
            os.close(handle)
