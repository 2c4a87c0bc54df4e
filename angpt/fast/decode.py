"""The fast form of a decode step: Triton kernels for a small batch of a folded model in bf16 on an NVIDIA GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from angpt.fast import tuning
from angpt.models.folded import Cache, Folded, decode_step


def supports(model: Folded) -> bool:
    """True if the kernels support the operations, dimensions and dtype of a model."""
    return (
        model.design.input != "tanh"
        and model.cfg.d_head in (16, 32, 64, 128, 256)
        and model.dtype in (torch.bfloat16, torch.float16)
    )


def by_kernels(model: Folded, tokens: Tensor, positions: Tensor, caches: Sequence[Cache], capacity: int) -> Tensor:
    from angpt.fast import decode_kernels

    return decode_kernels.decode(model, tokens, positions, caches, capacity)


def few_rows(model: Folded, tokens: Tensor, positions: Tensor, caches: Sequence[Cache], capacity: int) -> bool:
    """True if the kernels apply and the batch is so small that they are faster than matrix products."""
    return tokens.is_cuda and supports(model) and len(tokens) <= tuning.DECODE_ROWS


decode_step.accelerate(by_kernels, few_rows)
