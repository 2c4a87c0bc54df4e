"""Reading prompts on a GPU: matrix products and attention by PyTorch, and the rest by kernels.

| kernel | computes |
|---|---|
| `_prompt_heads` | rotation and norm of q and k; keys and values into the cache |
| `_advance` | a residual update and the input of the next block |
| `_swiglu` of block_kernels.py | u · SiLU(z) |
| `_scale_rows` of block_kernels.py | matrices of 8 bits, times the scales of their rows, in the dtype of the products |

Before the first layer `_rotation` of attention_kernels.py computes the angles. A layer has nine launches (the last, of
which only what follows the last token of each prompt is computed, a few more; with 8 bits four more), where plain
operations have about thirty. `Folded.prefill` is the plain form.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from angpt.fast.attention_kernels import _turns
from angpt.fast.block_kernels import scale_rows
from angpt.fast.decode_kernels import Steps
from angpt.models.folded import Cache, Folded, Layer
from angpt.models.primitives import check_tokens, swiglu


@triton.jit
def _rotated_heads(
    ptr, at, partner, cos, sin, known, QK_NORM: tl.constexpr, EPS: tl.constexpr, D_HEAD: tl.constexpr
):  # fmt: skip
    """All heads of q or k, rotated and normed."""
    x = tl.load(ptr + at, known, 0.0).to(tl.float32) * cos + tl.load(ptr + partner, known, 0.0).to(tl.float32) * sin
    if QK_NORM:
        x = x * tl.rsqrt((tl.sum(x * x, axis=1) + EPS) / D_HEAD)[:, None]
    return x


@triton.jit
def _prompt_heads(
    qkv_ptr, cos_ptr, sin_ptr, gain_ptr, q_ptr, k_ptr, v_ptr, heads, length, stride_row, stride_head,
    QK_NORM: tl.constexpr, GAINS: tl.constexpr, EPS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    D_HEAD: tl.constexpr,
):  # fmt: skip
    """q of one token of one row, and its keys and values in the cache."""
    token, row = tl.program_id(0), tl.program_id(1)
    d = heads * D_HEAD
    head, dims = tl.arange(0, HEADS), tl.arange(0, D_HEAD)
    known = (head < heads)[:, None]
    partner, cos, sin = _turns(cos_ptr, sin_ptr, token, dims, HALF)
    cos, sin = cos[None, :], sin[None, :]
    start = qkv_ptr + (row.to(tl.int64) * length + token) * 3 * d
    at, other = head[:, None] * D_HEAD + dims[None, :], head[:, None] * D_HEAD + partner[None, :]
    q = _rotated_heads(start, at, other, cos, sin, known, QK_NORM, EPS, D_HEAD)
    k = _rotated_heads(start + d, at, other, cos, sin, known, QK_NORM, EPS, D_HEAD)
    v = tl.load(start + 2 * d + at, known, 0.0)
    if GAINS == 1:
        q = q * tl.load(gain_ptr)
    elif GAINS > 1:
        q = q * tl.load(gain_ptr + at, known, 0.0)
    tl.store(q_ptr + (row.to(tl.int64) * length + token) * d + at, q.to(q_ptr.dtype.element_ty), known)
    slot = row.to(tl.int64) * stride_row + head.to(tl.int64)[:, None] * stride_head + token * D_HEAD + dims[None, :]
    tl.store(k_ptr + slot, k.to(k_ptr.dtype.element_ty), known)
    tl.store(v_ptr + slot, v, known)


class PromptSteps(Steps):
    """The kernels of one model for prompts, called layer by layer."""

    def __init__(self, model: Folded) -> None:
        super().__init__(model)
        self.launch = {"OVERLAP": False}  # products and attention in between do not overlap

    def heads_of(
        self, qkv: Tensor, layer: Layer, cache: Cache, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, H, d_h) of whole prompts (B, T, 3 d), and their keys and values, with which the cache is filled."""
        rows, length, _ = qkv.shape
        # On a GPU PyTorch gives the output of attention the layout of q: all heads of a token are adjacent, no copy.
        q = torch.empty(rows, length, self.heads, self.d // self.heads, dtype=qkv.dtype, device=qkv.device)
        _prompt_heads[length, rows](
            qkv, *angles, qkv if layer.gain is None else layer.gain, q, cache.keys, cache.values, self.heads, length,
            cache.keys.stride(0), cache.keys.stride(1), HEADS=triton.next_power_of_2(self.heads), **self.qk(layer),
        )  # fmt: skip
        return q, cache.keys[:, :, :length], cache.values[:, :, :length]


def scaled_product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """W x. Scales of the rows of W multiply W when it is converted: the output, which may be larger, needs no pass."""
    return F.linear(x, weight if scale is None else scale_rows(weight, scale, x.dtype))


def attend_prompt(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """Attention of q (B, T, H, d_h) to the keys and values that are seen, or to those of earlier tokens; (B, T, d)."""
    q, causal = q.transpose(1, 2), seen is None
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, is_causal=causal, scale=1.0)
    return out.transpose(1, 2).flatten(2)


def prefill(model: Folded, tokens: Tensor, lengths: Tensor, caches: Sequence[Cache]) -> Tensor:
    """`Folded.prefill`, computed with the kernels. Of the last layer only what follows the keys and values of the last
    token of each prompt is computed: nothing else of it is read."""
    check_tokens(tokens, model.cfg.context)
    steps = PromptSteps(model)
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        last, seen = (torch.arange(len(tokens), device=tokens.device), lengths - 1), None
        angles = steps.angles(positions)
        h, x = steps.advance(model.embed(tokens), None, model.dtype)
        for layer, cache in zip(model.layers, caches, strict=True):
            assert isinstance(layer, Layer)
            q, keys, values = steps.heads_of(scaled_product(x, layer.W_qkv, layer.W_qkv_scale), layer, cache, angles)
            if layer is model.layers[-1]:
                q, h, seen = q[last][:, None], h[last][:, None], (positions < lengths[:, None])[:, None, None]
            update_a = (
                scaled_product(attend_prompt(q, keys, values, seen), layer.W_p, layer.W_p_scale),
                layer.keep_a,
                layer.add_a,
            )
            h, x = steps.advance(h, update_a, model.dtype)
            y = swiglu(scaled_product(x, layer.W_uz, layer.W_uz_scale))
            update_m = scaled_product(y, layer.W_d, layer.W_d_scale), layer.keep_m, layer.add_m
            h, x = steps.advance(h, update_m, model.dtype)
        return model.head(h[:, 0])
