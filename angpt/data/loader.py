"""Batches as a pure function of (data, context, batch size, seed, step, rank, world size).

The stream of tokens is cut into windows of `context` inputs and their targets. Each epoch visits every window once, in
its own random order. No state is kept between steps: a run resumes at any step, on any number of ranks.
"""

import math
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from angpt.data.shards import TokenData
from angpt.errors import UserError

ROUNDS = 6
"""Rounds of the Feistel network in `permute`."""


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: a bijection of 64-bit words in which each output bit depends on all input bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=8)
def round_keys(seed: int, epoch: int) -> tuple[NDArray[np.uint64], ...]:
    """One key per round of the permutation of an epoch."""
    keys = mix(np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    for word in (seed, epoch):
        keys = mix(keys + np.uint64(word % 2**64))
    return tuple(keys[:, None])


def permute(items: NDArray[np.int64], n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The images of `items` under a random permutation of [0, n), without a table of n entries.

    A Feistel network on pairs (left, right) of a grid a × b ≥ n, with sums modulo a and b instead of the usual xor.
    The grid has at most a ≈ sqrt(n) cells too many, so results outside [0, n) are rare; they pass through the network
    again until they are inside (cycle walking), which keeps the map one-to-one.
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
    """Number of windows of `context` inputs in the data; the last target of one is the first input of the next."""
    windows = (data.tokens - 1) // context
    if windows < 1:
        raise UserError(
            f"{data.path}: {data.tokens:,} tokens in {data.split} are too few for one window of {context:,} + 1; "
            "prepare more text or lower the context"
        )
    return windows


class Loader:
    """Windows in random order, epoch after epoch. A step takes the next `batch` windows, over all ranks."""

    def __init__(self, data: TokenData, context: int, batch: int, seed: int) -> None:
        self.data, self.context, self.batch_size, self.seed = data, context, batch, seed
        self.windows = count_windows(data, context)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """(batch / world, context + 1) tokens: the rank's slice of the global batch of a step."""
        if self.batch_size % world:
            raise UserError(f"a batch of {self.batch_size} windows cannot be divided evenly among {world} ranks")
        size = self.batch_size // world
        first = step * self.batch_size + rank * size
        chosen = np.empty(size, np.int64)
        for epoch in range(first // self.windows, (first + size - 1) // self.windows + 1):
            start, stop = (min(max(first, (epoch + i) * self.windows), first + size) for i in (0, 1))
            items = np.arange(start, stop, dtype=np.int64) - epoch * self.windows
            chosen[start - first : stop - first] = permute(items, self.windows, self.seed, epoch)
        return self.data.gather(chosen * self.context, self.context + 1)


def validation_starts(data: TokenData, context: int, max_windows: int | None = None) -> NDArray[np.int64]:
    """Where `max_windows` windows begin that are spread evenly over the data (all of them if None), in order.

    Spread, because the first documents of a validation split need not be typical.
    """
    windows = count_windows(data, context)
    chosen = windows if max_windows is None else min(windows, max_windows)
    return np.arange(chosen, dtype=np.int64) * windows // chosen * context


def validation_batches(
    data: TokenData, context: int, batch_size: int, max_windows: int | None = None
) -> Iterator[NDArray[np.int64]]:
    """The windows of `validation_starts`, in order; the last batch may be smaller."""
    starts = validation_starts(data, context, max_windows)
    for i in range(0, len(starts), batch_size):
        yield data.gather(starts[i : i + batch_size], context + 1)


IGNORED = -100
"""Target that the loss ignores."""


class Batch(NamedTuple):
    """A rank's share of a step, on the device; each tensor is (batch / world, context)."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None
    """Number of the document of each input, counted from 0 in each window."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        documents = None if self.documents is None else change(self.documents)
        return Batch(change(self.inputs), change(self.targets), documents)

    def rows(self, start: int, stop: int) -> "Batch":
        return self.map(lambda x: x[start:stop])

    def padded(self, rows: int) -> "Batch":
        """The batch padded to `rows` with its last row, ignored by the loss: compiled code needs one shape."""
        count = len(self.inputs)
        if count >= rows:
            return self
        batch = self.map(lambda x: torch.cat((x, x[-1:].expand(rows - count, -1))))
        batch.targets[count:] = IGNORED
        return batch


def document_numbers(inputs: Tensor, eot: int) -> Tensor:
    """Number of the document of each token; an end-of-text token belongs to the document that it ends."""
    ends = (inputs == eot).long()
    return ends.cumsum(dim=1) - ends


DEPTH = 3
"""Batches that are prepared ahead."""


class Prefetcher:
    """Iterates over the batches of a loader from step `start` on; a thread prepares them while the device computes.

    A context manager; the iterator is endless. An error in the thread is raised by `next`.
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
    ) -> None:
        self.loader, self.rank, self.world = loader, rank, world
        self.device = torch.empty(0, device=device).device  # resolves "cuda" to the current GPU
        self.eot = end_of_text(loader.data) if documents else None
        self._ready: queue.Queue[Batch | Exception] = queue.Queue(DEPTH)
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
        # Copies from pinned memory on the consumer's stream need no further synchronisation.
        return batch.map(lambda x: x.to(self.device, non_blocking=True))

    def close(self) -> None:
        """Stop the thread and drop the batches that are ready."""
        self._stop.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):  # the thread may be waiting for room in the queue
                self._ready.get(timeout=0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self, step: int) -> None:
        # Otherwise pinning memory would create a CUDA context on the first GPU, in every rank.
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
    """Id of the end-of-text token; an error for raw files."""
    if data.eot is None:
        raise UserError(f"{data.path}: raw tokens do not say where documents end; use a prepared folder")
    return data.eot
