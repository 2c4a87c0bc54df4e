"""Triton kernels of the heads: rotate and norm q and k of a packed W_qkv h in one pass; gradients, packed, in another.

`models.primitives.normed_heads` is the plain form. Rotation and norm commute, so a program loads each vector twice, as
it is and with the two halves of its rotated part exchanged. A tile has all heads of its tokens, which share the angles.
As in `block_kernels`, tokens are processed from last to first.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from angpt.fast import tuning
from angpt.fast.block_kernels import _inverse_root
from angpt.models.primitives import EPS

# Numbers are compile-time constants of the kernels: Inductor would pass them as float64 and promote the arithmetic.
TILE, WARPS = tuning.HEADS_TILE, tuning.HEADS_WARPS
TILE_BACK, WARPS_BACK = tuning.HEADS_BACKWARD_TILE, tuning.HEADS_BACKWARD_WARPS
STAGES, PROGRAMS = tuning.HEADS_BACKWARD_STAGES, tuning.HEADS_BACKWARD_PROGRAMS


@triton.jit
def _partner(cols, HALF: tl.constexpr):
    """The column that rotation mixes with each column; itself if it is not rotated."""
    return tl.where(cols < HALF, cols + HALF, tl.where(cols < 2 * HALF, cols - HALF, cols))


@triton.jit
def _angles(cos_ptr, sin_ptr, tokens, cols, period, HALF: tl.constexpr):
    """Cosine, and sine with the sign of its term, for each column; 1 and 0 if it is not rotated."""
    at, rotated = (tokens % period) * HALF + cols % HALF, cols < 2 * HALF
    sign = tl.where(cols < HALF, -1.0, 1.0)
    return tl.load(cos_ptr + at, rotated, 1.0), tl.load(sin_ptr + at, rotated, 0.0) * sign


@triton.jit
def _norm_rotated(x_ptr, partner_ptr, y_ptr, gain_ptr, cos, sin, inside, GAIN: tl.constexpr, EPS: tl.constexpr):
    """Store norm(rotate(x)) · gain; all pointers are blocks of pointers."""
    x = tl.load(x_ptr, inside, 0.0).to(tl.float32)
    exchanged = tl.load(partner_ptr, inside, 0.0).to(tl.float32)
    y = (x * cos + exchanged * sin) * _inverse_root(tl.sum(x * x, axis=2, keep_dims=True), EPS)
    if GAIN:
        y *= tl.load(gain_ptr)
    tl.store(y_ptr, y, inside)


@triton.jit
def _heads(
    qkv_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, n_tokens, heads, period,
    Q_GAIN: tl.constexpr, K_GAIN: tl.constexpr, EPS: tl.constexpr,
    HALF: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head, cols = tl.arange(0, HEADS)[None, :, None], tl.arange(0, D)[None, None, :]
    inside, width = (tokens < n_tokens) & (head < heads), heads * D
    row, out = tokens * 3 * width + head * D, tokens * width + head * D + cols
    partner, gain = _partner(cols, HALF), tl.where(head < heads, head, 0) * D + cols
    cos, sin = _angles(cos_ptr, sin_ptr, tokens, cols, period, HALF)
    _norm_rotated(
        qkv_ptr + row + cols, qkv_ptr + row + partner, q_ptr + out, q_gain_ptr + gain, cos, sin, inside, Q_GAIN, EPS
    )
    _norm_rotated(
        qkv_ptr + row + width + cols, qkv_ptr + row + width + partner, k_ptr + out, k_gain_ptr + gain, cos, sin, inside,
        K_GAIN, EPS,
    )  # fmt: skip


@triton.jit
def _norm_rotated_backward(
    x_ptr, dy_ptr, gain_ptr, row, dy_row, gain_row, cols, partner, cos, sin, inside,
    GAIN: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The gradient of q or k, and the terms of the gradient of the gain."""
    x = tl.load(x_ptr + row + cols, inside, 0.0).to(tl.float32)
    dy = tl.load(dy_ptr + dy_row + cols, inside, 0.0).to(tl.float32)
    dy_exchanged = tl.load(dy_ptr + dy_row + partner, inside, 0.0).to(tl.float32)
    inverse = _inverse_root(tl.sum(x * x, axis=2, keep_dims=True), EPS)
    unit = x * inverse
    terms = unit
    if GAIN:
        exchanged = tl.load(x_ptr + row + partner, inside, 0.0).to(tl.float32)
        terms = dy * (x * cos + exchanged * sin) * inverse
        dy *= tl.load(gain_ptr + gain_row + cols)
        dy_exchanged *= tl.load(gain_ptr + gain_row + partner)
    d_unit = dy * cos - dy_exchanged * sin  # rotated back
    return (d_unit - unit * tl.sum(unit * d_unit, axis=2, keep_dims=True)) * inverse, terms


@triton.jit
def _heads_backward(
    qkv_ptr, dq_ptr, dk_ptr, dv_ptr, dqkv_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, q_terms_ptr, k_terms_ptr,
    n_tokens, heads, period,
    Q_GAIN: tl.constexpr, K_GAIN: tl.constexpr, EPS: tl.constexpr,
    HALF: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, cols = tl.arange(0, HEADS)[None, :, None], tl.arange(0, D)[None, None, :]
    partner, width = _partner(cols, HALF), heads * D
    gain_row = tl.where(head < heads, head, 0) * D
    q_terms = tl.zeros((TOKENS, HEADS, D), tl.float32)
    k_terms = tl.zeros((TOKENS, HEADS, D), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_tokens, TOKENS), tl.num_programs(0), num_stages=STAGES):
        tokens = (tl.cdiv(n_tokens, TOKENS) - 1 - tile) * TOKENS + tl.arange(0, TOKENS)[:, None, None].to(tl.int64)
        inside = (tokens < n_tokens) & (head < heads)
        row, dy_row = tokens * 3 * width + head * D, tokens * width + head * D
        cos, sin = _angles(cos_ptr, sin_ptr, tokens, cols, period, HALF)
        dx, terms = _norm_rotated_backward(
            qkv_ptr, dq_ptr, q_gain_ptr, row, dy_row, gain_row, cols, partner, cos, sin, inside, Q_GAIN, EPS
        )
        tl.store(dqkv_ptr + row + cols, dx, inside)
        if Q_GAIN:
            q_terms += terms
        dx, terms = _norm_rotated_backward(
            qkv_ptr, dk_ptr, k_gain_ptr, row + width, dy_row, gain_row, cols, partner, cos, sin, inside, K_GAIN, EPS
        )
        tl.store(dqkv_ptr + row + width + cols, dx, inside)
        if K_GAIN:
            k_terms += terms
        dv = tl.load(dv_ptr + dy_row + cols, inside, 0.0)
        tl.store(dqkv_ptr + row + 2 * width + cols, dv, inside)
    out = tl.program_id(0) * width + head * D + cols
    if Q_GAIN:
        tl.store(q_terms_ptr + out, tl.sum(q_terms, axis=0, keep_dims=True), head < heads)
    if K_GAIN:
        tl.store(k_terms_ptr + out, tl.sum(k_terms, axis=0, keep_dims=True), head < heads)


def _shape(heads: int, d: int, tile: int, warps: int) -> dict[str, int]:
    padded = triton.next_power_of_2(heads)
    tokens, warps = max(1, tile // (padded * d)), min(16, warps * max(1, padded * d // tile))
    return {"D": d, "HEADS": padded, "TOKENS": tokens, "num_warps": warps}


def _shape_back(heads: int, d: int) -> dict[str, int]:
    shape = _shape(heads, d, TILE_BACK, WARPS_BACK)
    return shape | {"STAGES": STAGES if shape["HEADS"] * d <= TILE_BACK else 1}


@triton_op("angpt::heads", mutates_args={})
def rotated_heads(qkv: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None) -> list[Tensor]:
    """q and k (B, T, H, D) of a contiguous (B, T, 3, H, D), with gains (H, D)."""
    b, t, _, heads, d = qkv.shape
    shape = _shape(heads, d, TILE, WARPS)
    q, k = (torch.empty(b, t, heads, d, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
    wrap_triton(_heads)[(triton.cdiv(b * t, shape["TOKENS"]),)](
        qkv, q, k, cos, sin, qkv if q_gain is None else q_gain, qkv if k_gain is None else k_gain,
        b * t, heads, cos.numel() // cos.shape[-1],
        Q_GAIN=q_gain is not None, K_GAIN=k_gain is not None, EPS=EPS, HALF=cos.shape[-1], **shape,
    )  # fmt: skip
    return [q, k]


@triton_op("angpt::heads_backward", mutates_args={})
def heads_backward(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of qkv and of both gains; those of the gains as one term per program, to be summed."""
    b, t, _, heads, d = qkv.shape
    shape = _shape_back(heads, d)
    programs = min(PROGRAMS, triton.cdiv(b * t, shape["TOKENS"]))
    dqkv = torch.empty_like(qkv)
    q_terms, k_terms = (
        torch.empty(0 if gain is None else programs, heads, d, dtype=torch.float32, device=qkv.device)
        for gain in (q_gain, k_gain)
    )
    wrap_triton(_heads_backward)[(programs,)](
        qkv, dq, dk, dv, dqkv, cos, sin, qkv if q_gain is None else q_gain, qkv if k_gain is None else k_gain,
        q_terms, k_terms, b * t, heads, cos.numel() // cos.shape[-1],
        Q_GAIN=q_gain is not None, K_GAIN=k_gain is not None, EPS=EPS, HALF=cos.shape[-1], **shape,
    )  # fmt: skip
    return [dqkv, q_terms, k_terms]


class Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, cos, sin, q_gain, k_gain)
        q, k = rotated_heads(qkv, cos, sin, q_gain, k_gain)
        return q, k, qkv[:, :, 2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, _, _, q_gain, k_gain = ctx.saved_tensors
        dqkv, q_terms, k_terms = heads_backward(*ctx.saved_tensors, *(dy.contiguous() for dy in gradients))
        return dqkv, None, None, None if q_gain is None else q_terms.sum(0), None if k_gain is None else k_terms.sum(0)


def normed_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, T, H, D) of (B, T, 3, H, D); gains are (H, D)."""
    q, k, v = Heads.apply(qkv.contiguous(), cos, sin, q_gain, k_gain)  # type: ignore[no-untyped-call]
    return q, k, v
