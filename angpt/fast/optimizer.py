"""Registers the kernels of the optimizer as fast forms of its operations."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from angpt.fast import tuning
from angpt.optim.adam import adam_
from angpt.optim.muon import descend_, momentum_, symmetric_polynomial, symmetric_product
from angpt.optim.optimizer import square_sum
from angpt.optim.states import ALIGNMENT, ParameterState

DTYPES = (torch.float32, torch.bfloat16)
"""What the kernels read."""


def _adam(states: Sequence[ParameterState], gradients: Sequence[Tensor], clip: Tensor, **options: Any) -> None:
    from angpt.fast import optimizer_kernels  # imports Triton

    optimizer_kernels.adam_(states, gradients, clip, **options)


def _square_sum(tensors: Sequence[Tensor]) -> Tensor:
    from angpt.fast import optimizer_kernels

    dtypes = dict.fromkeys(x.dtype for x in tensors)
    sums = [optimizer_kernels.square_sum([x for x in tensors if x.dtype == dtype]) for dtype in dtypes]
    return functools.reduce(operator.add, sums)


def _momentum(
    states: Sequence[ParameterState],
    gradients: Sequence[Tensor],
    updates: Sequence[Tensor],
    clip: Tensor,
    momentum: float,
) -> None:
    from angpt.fast import muon_kernels

    muon_kernels.momentum_(states, gradients, updates, clip, momentum)


def _descend(states: Sequence[ParameterState], updates: Sequence[Tensor], lr: float, scale: float) -> None:
    from angpt.fast import optimizer_kernels

    optimizer_kernels.descend_(states, updates, lr, scale)


def _symmetric_product(x: Tensor, y: Tensor) -> Tensor:
    from angpt.fast import muon_kernels

    return muon_kernels.symmetric_product(x, y)


def _symmetric_polynomial(x: Tensor, a: float, b: float, c: float, squares: Tensor | None = None) -> Tensor:
    from angpt.fast import muon_kernels

    return muon_kernels.symmetric_polynomial(x, a, b, c, squares)


def _is_matrix_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.ndim == 2 and x.numel() > 0  # a rank may have no row of a small matrix


def _adam_applies(states: Sequence[ParameterState], gradients: Sequence[Tensor] = (), *_: object, **__: object) -> bool:
    on_gpu = all(_is_matrix_on_gpu(s.weight) and s.weight.dtype == torch.float32 for s in states)
    fit = on_gpu and all(s.weight.shape[1] <= tuning.ADAM_WIDEST for s in states)
    return fit and all(map(_readable, (*(t for s in states for t in (s.weight, s.exp_avg)), *gradients)))


def _square_sum_applies(tensors: Sequence[Tensor]) -> bool:
    return all(_is_matrix_on_gpu(x) and x.dtype in DTYPES for x in tensors)


def _momentum_applies(
    states: Sequence[ParameterState], gradients: Sequence[Tensor], updates: Sequence[Tensor], *_: object
) -> bool:
    return _adam_applies(states, (*gradients, *updates))


def _descend_applies(states: Sequence[ParameterState], updates: Sequence[Tensor], *_: object) -> bool:
    return _adam_applies(states, updates)


def _readable(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def _bf16_on_gpu(x: Tensor, *_: object) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and x.numel() > 0


adam_.accelerate(_adam, _adam_applies)
momentum_.accelerate(_momentum, _momentum_applies)
descend_.accelerate(_descend, _descend_applies)
symmetric_product.accelerate(_symmetric_product, _bf16_on_gpu)
symmetric_polynomial.accelerate(_symmetric_polynomial, _bf16_on_gpu)
square_sum.accelerate(_square_sum, _square_sum_applies)
