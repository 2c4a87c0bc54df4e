"""Computes training steps: the model in low precision, compiled block by block, and its optimizer.

Parameters stay in fp32. For bf16 and fp8 the matrices have copies, which the optimizer writes when it updates the
parameters: nothing is cast in the forward pass. Gradients of the copies go straight to the optimizer or, if a step
takes several passes, are summed in fp32. Vectors (learned scales, γ) have no copies.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import angpt.fast  # noqa: F401  (registers the fast forms of operations)
from angpt.config import OptimizerConfig
from angpt.data.loader import Batch
from angpt.fast.graphs import Recorded, launch_bound
from angpt.fast.precision import stream_dtype
from angpt.models.decoder import Decoder
from angpt.models.float8 import float8_linears
from angpt.models.primitives import LearnedScale
from angpt.operations import kernels_enabled
from angpt.optim.optimizer import Optimizer
from angpt.training.strategy import Shard, SingleProcess, Strategy

# The first that applies is used; cuDNN's kernels are the fastest on recent GPUs.
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
attention_backends = partial(sdpa_kernel, BACKENDS, set_priority=True)
SINGLE_PROCESS = SingleProcess()


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
        strategy: Strategy = SINGLE_PROCESS,
        wide_reduce: bool = False,
    ) -> None:
        """`recompute`: keep no activations inside blocks. `wide_reduce`: sum bf16 gradients over ranks in fp32."""
        self.model, self.strategy = model, strategy
        self.compute = strategy.prepare(model, dtype, wide_reduce)
        pairs = zip(model.parameters(), self.compute.parameters(), strict=True)
        self.copies: dict[Tensor, Tensor] = {p: c for p, c in pairs if p is not c}
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        """Parameters by name; sharded ones also while FSDP replaces those of the model by gathered ones."""
        values = {part.weight: part.values for _, part in float8_linears(self.compute) if part.values is not None}
        rules = model.constraints(), config, self.copies, strategy, model.hidden_matrices(), stream_dtype(dtype), values
        self.optimizer = Optimizer(self.parameters, *rules)
        self.passes = 1
        self.recorded: Recorded | None = None
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda" and kernels_enabled()
        self.recordable = on_gpu and compiled and bool(self.copies) and not recompute and strategy.can_record
        if recompute:  # after the model is on its device, which decides how it is compiled
            recompute_blocks(self.compute, compiled)
        if compiled:
            compile_parts(self.compute, blocks=not recompute)

    def backward(self, batch: Batch, micro_batch: int) -> Tensor:
        """Compute the gradient of a batch, summed over passes of `micro_batch` rows; return the mean loss."""
        passes, rest = divmod(len(batch.inputs), micro_batch)
        if rest or not passes:
            raise ValueError(f"{len(batch.inputs)} rows are no multiple of a micro-batch of {micro_batch}")
        total = torch.zeros((), device=self.device)
        with attention_backends():
            for i in range(passes):
                self.strategy.begin_pass(last=i == passes - 1, passes=passes)
                total += self.run(batch.rows(i * micro_batch, (i + 1) * micro_batch))
                if passes > 1:
                    self.gather()
        self.strategy.finish_passes()
        self.passes = passes
        return total / passes

    def run(self, batch: Batch) -> Tensor:
        """Run one pass and return its loss. Leaves gradients in `.grad`; consume them before the next call."""
        if self.recorded is not None and self.recorded.fits(batch):
            return self.recorded(batch)
        loss = self.compute(*batch)
        torch.autograd.backward(loss)
        return loss.detach()

    def launch_bound(self, batch: Batch) -> bool:
        """True if passes over this batch are launch-bound, so that a CUDA graph pays. Runs three; drops gradients."""
        if not self.recordable or batch.documents is not None:  # document masks are untested in graphs
            return False
        with torch.cuda.device(self.device), attention_backends():
            return launch_bound(lambda: self.run(batch), self.compute)

    def record(self, batch: Batch) -> None:
        """Record a pass over a batch of this shape as a CUDA graph; gradients are dropped."""
        try:
            with torch.cuda.device(self.device), attention_backends():
                self.recorded = Recorded(lambda batch: self.compute(*batch), self.compute, batch)
        except RuntimeError as error:  # too little memory, or an operation that cannot be recorded
            warnings.warn(f"training continues without a CUDA graph: {error}", stacklevel=2)
            self.compute.zero_grad()
            torch.cuda.empty_cache()

    def environment(self) -> dict[str, str]:
        """Entries about CUDA graphs in the summary of a run."""
        return {"cuda_graph": "no" if self.recorded is None else "yes"} if self.device.type == "cuda" else {}

    @torch.no_grad()
    def gather(self) -> None:
        """Add the gradients of the copies to those of the parameters, in fp32."""
        found = [(p, c.grad) for p, c in self.copies.items() if c.grad is not None]
        if sums := [(p.grad, g) for p, g in found if p.grad is not None]:
            torch._foreach_add_(*zip(*sums, strict=True))
        for p, g in found:
            p.grad = g.float() if p.grad is None else p.grad
        for c in self.copies.values():
            c.grad = None

    @torch.no_grad()
    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a batch, in one pass."""
        with attention_backends():
            return self.compute(*batch)

    def step(self, number: int, lr: float) -> Tensor:
        """Take the optimizer step `number` (from 1); return the norm of the gradient."""
        return self.optimizer.step(number, lr, self.passes)

    def tensors(self) -> dict[str, Shard]:
        """This rank's shards of all parameters, and of their moments as `exp_avg/NAME` and `exp_avg_sq/NAME`."""
        shards = {name: self.strategy.shard(p) for name, p in self.parameters.items()}
        moments = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            for (name, shard), state in zip(shards.items(), self.optimizer.states, strict=True):
                if (rows := getattr(state, moment)) is not None:
                    moments[f"{moment}/{name}"] = shard.with_rows(rows)
        return shards | moments

    def first_moments(self) -> dict[str, Shard]:
        """The first moment of each matrix, by the name of the matrix."""
        tensors = self.tensors()
        return {name: tensors[f"exp_avg/{name}"] for name in self.model.matrices()}


def recompute_blocks(model: Decoder, compiled: bool) -> None:
    """Keep only the input of each block, and compute the rest again in the backward pass."""
    for block in model.blocks:  # compiled inside `checkpoint`, because the compiler does not look into it
        forward = torch.compile(block.forward, **compiler_options(model)) if compiled else block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def compile_parts(model: Decoder, blocks: bool) -> None:
    """Compile one block for all layers, and the norm before the head: faster than compiling the whole model."""
    options = compiler_options(model)
    for part in (*(model.blocks if blocks else ()), *model.children()):
        if not isinstance(part, nn.Embedding | nn.Linear | nn.ModuleList | LearnedScale):  # one product each
            part.compile(**options)


def compiler_options(model: Decoder) -> dict[str, Any]:
    """Arguments of torch.compile: fixed shapes and, on a GPU, the compiler passes of `angpt.fast`."""
    if not (next(model.parameters()).is_cuda and kernels_enabled()):
        return {"dynamic": False}
    from angpt.fast import fusion

    return {"dynamic": False, "options": fusion.OPTIONS}
