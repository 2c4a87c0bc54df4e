"""Registers the kernels of the optimizer as fast forms of its operations."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from angpt.optim.adam import ParameterState, adam_, square_sum


def _adam(states: Sequence[ParameterState], gradients: Sequence[Tensor], clip: Tensor, **options: Any) -> None:
    from angpt.fast import optimizer_kernels  # imports Triton

    optimizer_kernels.adam_(states, gradients, clip, **options)


def _square_sum(tensors: Sequence[Tensor]) -> Tensor:
    from angpt.fast import optimizer_kernels

    dtypes = dict.fromkeys(x.dtype for x in tensors)
    sums = [optimizer_kernels.square_sum([x for x in tensors if x.dtype == dtype]) for dtype in dtypes]
    return functools.reduce(operator.add, sums)


def _is_matrix_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.ndim == 2 and x.numel() > 0  # a rank may have no row of a small matrix


def _adam_applies(states: Sequence[ParameterState], *_: object, **__: object) -> bool:
    return all(_is_matrix_on_gpu(s.weight) and s.weight.dtype == torch.float32 for s in states)


def _square_sum_applies(tensors: Sequence[Tensor]) -> bool:
    return all(map(_is_matrix_on_gpu, tensors))


adam_.accelerate(_adam, _adam_applies)
square_sum.accelerate(_square_sum, _square_sum_applies)
