"""Fast forms of the operations of `angpt.models`: bf16 and e4m3 on an NVIDIA GPU, by Triton kernels and cuBLAS."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from angpt.fast import tuning
from angpt.float8 import E4M3
from angpt.models import float8, primitives

P = ParamSpec("P")
R = TypeVar("R")

HEAD_SIZES = (16, 32, 64, 128, 256)
"""Dimensions of a head for which there are kernels."""


def bf16_on_gpu(x: Tensor) -> bool:
    """True if a tensor is bf16 on a GPU, where the kernels apply."""
    return x.is_cuda and x.dtype == torch.bfloat16


def residual_update(
    h: Tensor, x: Tensor, alpha: Tensor, nu_of_alpha: bool = True, times: float = 1.0, normed: bool = False
) -> Tensor:
    from angpt.fast import block_kernels

    return block_kernels.update(h.contiguous(), x.contiguous(), alpha.contiguous(), nu_of_alpha, times, normed)


def swiglu(uz: Tensor, factor: float = 1.0) -> Tensor:
    from angpt.fast import block_kernels

    return block_kernels.swiglu(uz.contiguous(), factor)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    from angpt.fast import loss_kernels

    return loss_kernels.cross_entropy_(logits.contiguous(), targets.contiguous())


def scaled_rms(x: Tensor, gain: Tensor) -> Tensor:
    from angpt.fast import block_kernels

    return block_kernels.scaled_rms(x.contiguous(), gain)


def linear_with_row_gains(x: Tensor, weight: Tensor, gains: Tensor) -> Tensor:
    from angpt.fast import block_kernels

    return block_kernels.scaled_linear(x, weight, gains)


def normed_heads(
    qkv: Tensor, d_head: int, cos: Tensor, sin: Tensor, q_gain: Tensor | None = None, k_gain: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    from angpt.fast import head_kernels

    packed = qkv.view(*qkv.shape[:2], 3, -1, d_head)
    q_full, k_full = (
        None if gain is None else gain.reshape(-1, gain.shape[-1]).expand(packed.shape[-2:]).contiguous()
        for gain in (q_gain, k_gain)
    )
    q, k, v = head_kernels.normed_heads(packed, cos, sin, q_full, k_full)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    from angpt.fast import float8_kernels

    return float8_kernels.quantize(x.contiguous(), scale)


def transpose(x: Tensor) -> Tensor:
    from angpt.fast import float8_kernels

    return float8_kernels.transpose(x.contiguous())


def float8_product(a: Tensor, b: Tensor, factor: float, a_inverse: Tensor, b_inverse: Tensor) -> Tensor:
    factors = a_inverse if factor == 1.0 else a_inverse * factor, b_inverse
    outputs, terms = b.shape
    fast = terms <= tuning.FLOAT8_FAST_TERMS and outputs <= tuning.FLOAT8_FAST_OUTPUTS
    return torch._scaled_mm(a.contiguous(), b.contiguous().t(), *factors, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _one_alpha_per_column(
    h: Tensor, x: Tensor, alpha: Tensor, nu_of_alpha: bool = True, times: float = 1.0, normed: bool = False
) -> bool:
    alike = x.shape == h.shape and x.dtype == h.dtype
    return bf16_on_gpu(h) and alike and alpha.shape == h.shape[-1:] and alpha.dtype == torch.float32


def _known_head(
    qkv: Tensor, d_head: int, cos: Tensor, sin: Tensor, q_gain: Tensor | None = None, k_gain: Tensor | None = None
) -> bool:
    return bf16_on_gpu(qkv) and d_head in HEAD_SIZES and cos.shape[-1] > 0


def _e4m3_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == E4M3


def _tensor_cores_fit(a: Tensor, b: Tensor, factor: float, a_inverse: Tensor, b_inverse: Tensor) -> bool:
    return _e4m3_on_gpu(a) and all(size % 16 == 0 for size in (*a.shape, *b.shape))


def on_its_device(fast: Callable[P, R]) -> Callable[P, R]:
    """The function with the GPU of its first argument as the current one, on which Triton launches. Compiled code takes
    care of that itself."""

    @functools.wraps(fast)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return fast(*args, **kwargs)
        with torch.cuda.device_of(next(iter((*args, *kwargs.values())))):  # type: ignore[no-untyped-call]
            return fast(*args, **kwargs)

    return call


# Each predicate has the parameters of its operation, which may be called with keywords.
primitives.residual_update.accelerate(on_its_device(residual_update), _one_alpha_per_column)
primitives.swiglu.accelerate(on_its_device(swiglu), lambda uz, factor=1.0: bf16_on_gpu(uz))
primitives.cross_entropy.accelerate(on_its_device(cross_entropy), lambda logits, targets: bf16_on_gpu(logits))
primitives.scaled_rms.accelerate(on_its_device(scaled_rms), lambda x, gain: bf16_on_gpu(x))
primitives.linear_with_row_gains.accelerate(
    on_its_device(linear_with_row_gains), lambda x, weight, gains: bf16_on_gpu(weight) and x.dtype == weight.dtype
)
primitives.normed_heads.accelerate(on_its_device(normed_heads), _known_head)
float8.quantize.accelerate(on_its_device(quantize), lambda x, scale: bf16_on_gpu(x))
float8.transpose.accelerate(on_its_device(transpose), lambda x: _e4m3_on_gpu(x))
float8.float8_product.accelerate(float8_product, _tensor_cores_fit)
