"""A forward and backward pass as a CUDA graph: its kernels are launched without Python.

Kernels, their order and the results are those of the captured pass. The graph keeps the memory of a pass, so passes are
captured only if that saves time.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from angpt.data.loader import Batch
from angpt.fast import tuning


class Recorded:
    """The captured pass over batches of one shape."""

    def __init__(self, loss: Callable[[Batch], Tensor], model: nn.Module, batch: Batch) -> None:
        """`loss` and its backward pass must have run before, so that they are compiled."""
        self.batch = batch.map(torch.clone)
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm-up: libraries allocate a workspace per stream
            torch.autograd.backward(loss(self.batch))
        model.zero_grad()
        # thread_local, because the thread that prepares batches allocates pinned memory meanwhile.
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
        """The loss. It and the gradients of matrices are overwritten by the next call; those of vectors accumulate."""
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
    """True if the median of three passes is launch-bound (see tuning.GRAPH_LAUNCH_SHARE). Drops gradients."""
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
