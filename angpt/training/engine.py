"""What computes a training step, fast: the model in low precision, compiled block by block, and its optimizer.

Parameters stay in fp32. For bf16 the matrices have copies, which the optimizer writes in the same pass in which it
updates the parameters: nothing is cast in the forward pass. Gradients of the copies go straight to the optimizer, or,
where a step takes several passes, are summed in fp32. Vectors (learned scales, γ) are few and are shared.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from angpt.config import OptimizerConfig
from angpt.data.loader import Batch
from angpt.fast.graphs import Recorded, launch_bound
from angpt.models.decoder import Decoder
from angpt.models.primitives import LearnedScale
from angpt.optim.adam import Adam
from angpt.training.parallel import Ranks, Reducer

# cuDNN's kernels are the fastest on recent GPUs; where they do not apply, the next of the list does.
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Engine:
    """A model with its optimizer on a device. `model` holds the parameters; `compute` is what runs."""

    def __init__(
        self,
        model: Decoder,
        config: OptimizerConfig,
        dtype: torch.dtype,
        compiled: bool,
        *,
        recompute: bool = False,
        ranks: Ranks | None = None,
        wide_reduce: bool = False,
    ) -> None:
        """`recompute`: keep no activations inside of blocks. `wide_reduce`: sum gradients over ranks in fp32, also
        those that are in bf16."""
        self.model = model
        self.ranks, self.sharded = ranks, ranks is not None and ranks.strategy == "fsdp"
        self.compute = model if dtype == torch.float32 or self.sharded else low_precision(model, dtype)
        if ranks is not None and self.sharded:
            ranks.shard(model, dtype, torch.float32 if wide_reduce else dtype)
        pairs = zip(model.parameters(), self.compute.parameters(), strict=True)
        self.copies: dict[Tensor, Tensor] = {p: c for p, c in pairs if p is not c}
        self.optimizer = Adam(model, config, self.copies, ranks.sum_shards if ranks and self.sharded else None)
        self.reducer: Reducer | None = None
        if ranks is not None:  # with fsdp, matrices take care of themselves
            reduced = [p for p in self.compute.parameters() if not (self.sharded and p.ndim == 2)]
            self.reducer = Reducer(reduced, {c: p for p, c in self.copies.items()}, ranks.size, wide_reduce)
        self.passes = 1
        self.recorded: Recorded | None = None
        self.device = next(model.parameters()).device
        self.recordable = (
            self.device.type == "cuda" and compiled and bool(self.copies) and not recompute and ranks is None
        )
        if recompute:  # on its device by now, which decides how it is compiled
            recompute_blocks(self.compute, compiled)
        if compiled:
            compile_parts(self.compute, blocks=not recompute)

    def backward(self, batch: Batch, micro_batch: int) -> Tensor:
        """The gradient of a batch in passes of `micro_batch` rows, summed over them; the mean loss."""
        passes, rest = divmod(len(batch.inputs), micro_batch)
        if rest or not passes:
            raise ValueError(f"{len(batch.inputs)} rows are no multiple of a micro-batch of {micro_batch}")
        total = torch.zeros((), device=self.device)
        with attention_backends():
            for i in range(passes):
                self.synchronize(last=i == passes - 1, passes=passes)
                total += self.run(batch.rows(i * micro_batch, (i + 1) * micro_batch))
                if passes > 1:
                    self.gather()
        if self.reducer is not None:
            self.reducer.finish()
        self.passes = passes
        return total / passes

    def run(self, batch: Batch) -> Tensor:
        """The loss of one pass, whose gradients are left for `gather` or the optimizer, to be taken before the next."""
        if self.recorded is not None and self.recorded.fits(batch):
            return self.recorded(batch)
        loss = self.compute(*batch)
        torch.autograd.backward(loss)
        return loss.detach()

    def held_up(self, batch: Batch) -> bool:
        """Whether launching takes more than half of the time of a pass over such a batch, so that a CUDA graph pays. A
        pass has been made before; gradients are dropped. Masks of documents have not been tried in graphs: never."""
        if not self.recordable or batch.documents is not None:
            return False
        with torch.cuda.device(self.device), attention_backends():
            return launch_bound(lambda: self.run(batch), self.compute)

    def record(self, batch: Batch) -> None:
        """Make a CUDA graph of a pass over such a batch; gradients are dropped."""
        try:
            with torch.cuda.device(self.device), attention_backends():
                self.recorded = Recorded(lambda batch: self.compute(*batch), self.compute, batch)
        except RuntimeError as error:  # no memory, or something that cannot be recorded: slower, no worse
            warnings.warn(f"training goes on without a CUDA graph: {error}", stacklevel=2)
            self.compute.zero_grad()
            torch.cuda.empty_cache()

    def environment(self) -> dict[str, str]:
        return {"cuda_graph": "no" if self.recorded is None else "yes"} if self.device.type == "cuda" else {}

    def synchronize(self, last: bool, passes: int) -> None:
        """Ranks sum their gradients in the last pass of a step only."""
        if self.reducer is not None:
            self.reducer.begin(last, passes)
        if self.sharded:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]

    @torch.no_grad()
    def gather(self) -> None:
        """Add the gradients of the copies to those of the parameters, where sums do not round in bf16."""
        fresh = [(p, c) for p, c in self.copies.items() if p.grad is None and c.grad is not None]
        rest = [(p.grad, c.grad) for p, c in self.copies.items() if p.grad is not None and c.grad is not None]
        if rest:
            sums, terms = zip(*rest, strict=True)
            torch._foreach_add_(sums, terms)
        for p, c in fresh:
            p.grad = c.grad.float() if c.grad is not None else None
        for c in self.copies.values():
            c.grad = None

    @torch.no_grad()
    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a batch, in one pass."""
        with attention_backends():
            return self.compute(*batch)

    def step(self, number: int, lr: float) -> Tensor:
        """The optimizer step `number` (from 1); the norm of the gradient."""
        return self.optimizer.step(number, lr, self.passes)


def low_precision(model: Decoder, dtype: torch.dtype) -> Decoder:
    """A copy of the model with matrices in `dtype`, and with the vectors of the model itself."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to(dtype)) if p.ndim == 2 else p for p in model.parameters()}
    return copy.deepcopy(model, memo)


def recompute_blocks(model: Decoder, compiled: bool) -> None:
    """Keep only what enters a block, and compute the rest again in the backward pass. Compiled is what is computed
    again: the compiler does not look into `checkpoint` from outside."""
    for block in model.blocks:
        forward = torch.compile(block.forward, **compiler_options(model)) if compiled else block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def compile_parts(model: Decoder, blocks: bool) -> None:
    """Compile the block, once for all layers, and the norm before the head where there is one: ready in a fraction of
    the time that the whole takes. Embedding and head are a product each, and stay as they are."""
    options = compiler_options(model)
    for part in (*(model.blocks if blocks else ()), *model.children()):
        if not isinstance(part, nn.Embedding | nn.Linear | nn.ModuleList | LearnedScale):
            part.compile(**options)


def compiler_options(model: Decoder) -> dict[str, Any]:
    options: dict[str, Any] = {"dynamic": False}
    if next(model.parameters()).is_cuda:
        from angpt.fast import fusion

        options["options"] = fusion.OPTIONS
    return options


@contextmanager
def attention_backends() -> Iterator[None]:
    with sdpa_kernel(BACKENDS, set_priority=True):
        yield
