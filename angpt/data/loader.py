"""Batches as a pure function of (data, context, batch size, seed, step, rank, world).

The stream of tokens is cut into windows of `context` inputs and their targets. Each epoch visits every window once, in
an order of its own; nothing is kept between steps, so that a run resumes at any step, on any number of ranks.
"""

import math
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angpt.data.shards import TokenData
from angpt.errors import UserError

ROUNDS = 6


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: a bijection of 64-bit words after which every bit depends on every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=8)
def round_keys(seed: int, epoch: int) -> tuple[NDArray[np.uint64], ...]:
    """A key for each round of the permutation of an epoch."""
    keys = mix(np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    for word in (seed, epoch):
        keys = mix(keys + np.uint64(word % 2**64))
    return tuple(keys[:, None])


def permute(items: NDArray[np.int64], n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where a random permutation of [0, n) sends `items`, without a table of n entries.

    A Feistel network on pairs (left, right) of a grid a × b ≥ n, with sums modulo a and b in place of the usual xor:
    the grid has less than a ≈ sqrt(n) cells too many, so that a result outside of [0, n) is rare. It is sent through
    the network again until it is inside, which keeps the map one-to-one.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    keys = round_keys(seed, epoch)

    def network(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x // np.uint64(b), x % np.uint64(b)
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            left = (left + mix(right ^ first) % np.uint64(a)) % np.uint64(a)
            right = (right + mix(left ^ second) % np.uint64(b)) % np.uint64(b)
        return left * np.uint64(b) + right

    x = network(items.astype(np.uint64))
    while (outside := x >= np.uint64(n)).any():
        x[outside] = network(x[outside])
    return x.astype(np.int64)


def count_windows(data: TokenData, context: int) -> int:
    """Windows of `context` inputs in the data; the last token of each is the first of the next."""
    windows = (data.tokens - 1) // context
    if windows < 1:
        raise UserError(
            f"{data.path}: {data.tokens:,} tokens in {data.split} are too few for one window of {context:,} + 1; "
            "prepare more text or lower the context"
        )
    return windows


class Loader:
    """Windows in random order, epoch after epoch; a step takes the next `batch` of them, over all ranks."""

    def __init__(self, data: TokenData, context: int, batch: int, seed: int) -> None:
        self.data, self.context, self.batch_size, self.seed = data, context, batch, seed
        self.windows = count_windows(data, context)

    def epoch(self, step: int) -> int:
        """The epoch in which step `step` starts, from 0."""
        return step * self.batch_size // self.windows

    def batch(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """(batch / world, context + 1) tokens: the rank's slice of the global batch of a step."""
        if self.batch_size % world:
            raise UserError(f"a batch of {self.batch_size} windows cannot be shared evenly by {world} ranks")
        size = self.batch_size // world
        positions = step * self.batch_size + rank * size + np.arange(size, dtype=np.int64)
        epochs, items = np.divmod(positions, self.windows)
        chosen = np.empty(size, np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            chosen[here] = permute(items[here], self.windows, self.seed, epoch)
        return self.data.gather(chosen * self.context, self.context + 1)


def validation_batches(
    data: TokenData, context: int, batch_size: int, max_windows: int | None = None
) -> Iterator[NDArray[np.int64]]:
    """`max_windows` windows spread evenly over the data (all of them if None), in order; the last batch may be smaller.

    Spread, because a validation split is a list of documents, and its first ones are not typical.
    """
    windows = count_windows(data, context)
    chosen = windows if max_windows is None else min(windows, max_windows)
    starts = np.arange(chosen, dtype=np.int64) * windows // chosen * context
    for i in range(0, len(starts), batch_size):
        yield data.gather(starts[i : i + batch_size], context + 1)


IGNORED = -100
"""A target that a loss does not count."""


class Batch(NamedTuple):
    """A rank's part of a step, on the device, each (batch / world, context)."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None
    """Number of the document that each input belongs to, counted from 0 in each window."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        documents = None if self.documents is None else change(self.documents)
        return Batch(change(self.inputs), change(self.targets), documents)

    def rows(self, start: int, stop: int) -> "Batch":
        return self.map(lambda x: x[start:stop])

    def padded(self, rows: int) -> "Batch":
        """With the last row repeated up to `rows`, not counted in a loss: compiled code is made for one shape."""
        count = len(self.inputs)
        if count >= rows:
            return self
        batch = self.map(lambda x: torch.cat((x, x[-1:].expand(rows - count, -1))))
        batch.targets[count:] = IGNORED
        return batch


def document_numbers(inputs: Tensor, eot: int) -> Tensor:
    """End-of-text tokens before each token: one belongs to the document that it ends."""
    ends = (inputs == eot).long()
    return ends.cumsum(dim=1) - ends


class Prefetcher:
    """The batches of a loader from step `start` on, prepared by a thread while the device computes.

    A context manager and an endless iterator. An error in the thread is raised where the batch is asked for.
    """

    def __init__(
        self,
        loader: Loader,
        start: int,
        device: torch.device | str = "cpu",
        *,
        rank: int = 0,
        world: int = 1,
        documents: bool = False,
        depth: int = 3,
    ) -> None:
        self.loader, self.rank, self.world = loader, rank, world
        self.device = torch.empty(0, device=device).device  # "cuda" becomes the current one, which the thread must know
        self.eot = end_of_text(loader.data) if documents else None
        self._ready: queue.Queue[Batch | Exception] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(start,), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise StopIteration
        batch = self._ready.get()
        if isinstance(batch, Exception):
            self.close()
            raise batch
        # From pinned memory and on the stream of the consumer, which needs no further synchronisation.
        return batch.map(lambda x: x.to(self.device, non_blocking=True))

    def close(self) -> None:
        """Stop the thread; batches that are ready are dropped."""
        self._stop.set()
        while self._thread.is_alive():
            try:  # make room for a thread that waits with a full queue
                self._ready.get(timeout=0.01)
            except queue.Empty:
                continue

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _produce(self, step: int) -> None:
        # Else pinning memory would open a context on the first device, in every rank.
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        try:
            with on_device:
                while not self._stop.is_set():
                    self._ready.put(self._prepare(step))
                    step += 1
        except Exception as error:
            self._ready.put(error)

    def _prepare(self, step: int) -> Batch:
        tokens = torch.from_numpy(self.loader.batch(step, self.rank, self.world))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        documents = None if self.eot is None else document_numbers(inputs, self.eot)
        batch = Batch(inputs, targets, documents)
        return batch.map(Tensor.pin_memory) if self.device.type == "cuda" else batch


def end_of_text(data: TokenData) -> int:
    if data.eot is None:
        raise UserError(f"{data.path}: raw tokens do not say where documents end; use a folder that was prepared")
    return data.eot
