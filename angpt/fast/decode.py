"""The fast forms of a decode step and of reading prompts: Triton kernels for folded models in bf16 or fp16 on NVIDIA
GPUs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from angpt.fast import tuning
from angpt.fast.models import HEAD_SIZES
from angpt.float8 import has_e4m3
from angpt.models.folded import Cache, Folded, decode_step, read_prompts


def supports(model: Folded) -> bool:
    """True if the kernels support the operations, dimensions, dtype and weights of a model on its device."""
    return (
        model.design.input != "tanh"
        and model.cfg.d_head in HEAD_SIZES
        and model.dtype in (torch.bfloat16, torch.float16)
        and (model.weights != "fp8" or has_e4m3(model.device))
    )


def by_kernels(model: Folded, tokens: Tensor, positions: Tensor, caches: Sequence[Cache], capacity: int) -> Tensor:
    """A decode step by the kernels for a few rows, or by those for many."""
    from angpt.fast import decode_kernels, rows_kernels

    kernels = decode_kernels if len(tokens) <= tuning.DECODE_ROWS else rows_kernels
    return kernels.decode(model, tokens, positions, caches, capacity)


def kernels_apply(model: Folded, tokens: Tensor, *rest: object) -> bool:
    """True if the kernels apply to a model and its tokens."""
    return tokens.is_cuda and supports(model)


def prompts_by_kernels(model: Folded, tokens: Tensor, lengths: Tensor, caches: Sequence[Cache]) -> Tensor:
    from angpt.fast import prompt_kernels

    return prompt_kernels.prefill(model, tokens, lengths, caches)


decode_step.accelerate(by_kernels, kernels_apply)
read_prompts.accelerate(prompts_by_kernels, kernels_apply)
