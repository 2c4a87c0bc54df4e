"""A forward and backward pass as a CUDA graph: the GPU launches its kernels by itself, without Python.

Kernels, their order and the results are those of the recorded pass. The graph keeps the memory of a pass, so passes are
recorded only where that saves time.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from angpt.data.loader import Batch
from angpt.fast import tuning


class Recorded:
    """A pass over a batch of one shape."""

    def __init__(self, loss: Callable[[Batch], Tensor], model: nn.Module, batch: Batch) -> None:
        """`loss` has been called before, and its backward pass as well: nothing is left to be compiled."""
        self.batch = batch.map(torch.clone)
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once as it will be recorded: libraries keep a workspace for each stream
            torch.autograd.backward(loss(self.batch))
        model.zero_grad()
        # Other threads may do as they please meanwhile: the one that prepares batches allocates pinned memory.
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            value = loss(self.batch)
            torch.autograd.backward(value)
        self.loss = value.detach()
        found = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        self.matrices = [(p, g) for p, g in found if p.ndim == 2]
        self.vectors, self.terms = zip(*((p, g) for p, g in found if p.ndim < 2), strict=True)
        model.zero_grad()

    def fits(self, batch: Batch) -> bool:
        return batch.inputs.shape == self.batch.inputs.shape and batch.documents is None

    def __call__(self, batch: Batch) -> Tensor:
        """The loss, good until the next call, as are the gradients of matrices; those of vectors add up."""
        self.batch.inputs.copy_(batch.inputs)
        self.batch.targets.copy_(batch.targets)
        self.graph.replay()
        for p, g in self.matrices:
            p.grad = g
        if self.vectors[0].grad is None:
            for p, g in zip(self.vectors, torch._foreach_mul(self.terms, 1.0), strict=True):
                p.grad = g
        else:
            torch._foreach_add_([p.grad for p in self.vectors], self.terms)
        return self.loss


def launch_bound(run: Callable[[], Tensor], model: nn.Module) -> bool:
    """True if launching takes more than half of the time of a pass. Gradients are dropped."""
    parts = []
    for _ in range(3):
        model.zero_grad()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        parts.append((launched - start) / (time.perf_counter() - start))
    model.zero_grad()
    return statistics.median(parts) > tuning.GRAPH_LAUNCH_SHARE
