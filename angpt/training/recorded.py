"""A pass forward and backward as a CUDA graph: the GPU launches its kernels by itself, without Python.

The kernels and their order are those of the pass that is recorded, and so are the results. Memory that a pass uses
belongs to the graph from then on, which is why passes are recorded only where that saves time.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from angpt.data.loader import Batch

BUSY = 0.5
"""A graph is made where launching takes more than this part of the time of a pass: with less Python cannot be in the
way, with more it sometimes is, because its speed varies."""


class Recorded:
    """A pass over a batch of one shape."""

    def __init__(self, loss: Callable[[Batch], Tensor], model: nn.Module, batch: Batch) -> None:
        """`loss` has been called before, and its backward pass as well: nothing is left to be compiled."""
        self.batch = batch.map(torch.clone)
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once as it will be recorded: libraries keep a workspace for each stream
            torch.autograd.backward(loss(self.batch))
        clear(model)
        # Other threads may do as they please meanwhile: the one that prepares batches allocates pinned memory.
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            value = loss(self.batch)
            torch.autograd.backward(value)
        self.loss = value.detach()
        found = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        self.matrices = [(p, g) for p, g in found if p.ndim == 2]
        self.vectors, self.terms = zip(*((p, g) for p, g in found if p.ndim < 2), strict=True)
        clear(model)

    def fits(self, batch: Batch) -> bool:
        return [x.shape for x in batch if x is not None] == [x.shape for x in self.batch if x is not None]

    def __call__(self, batch: Batch) -> Tensor:
        """The loss, good until the next call, as are the gradients of matrices; those of vectors add up."""
        for ours, theirs in zip(self.batch, batch, strict=True):
            if ours is not None and theirs is not None:
                ours.copy_(theirs, non_blocking=True)
        self.graph.replay()
        for p, g in self.matrices:
            p.grad = g
        if self.vectors[0].grad is None:
            for p, g in zip(self.vectors, torch._foreach_mul(self.terms, 1.0), strict=True):
                p.grad = g
        else:
            torch._foreach_add_([p.grad for p in self.vectors], self.terms)
        return self.loss


def clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def held_up_by_python(run: Callable[[], Tensor], model: nn.Module) -> bool:
    """Whether launching takes more than half of the time of a pass. Gradients are dropped."""
    parts = []
    for _ in range(3):
        clear(model)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        parts.append((launched - start) / (time.perf_counter() - start))
    clear(model)
    return statistics.median(parts) > BUSY
