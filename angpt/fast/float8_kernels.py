"""Triton kernels of `angpt.models.float8`: a matrix in e4m3 and its transpose, in one pass over memory.

Tensor cores read both operands of a product in e4m3 along the dimension that is summed over, so gradients need the
transposes of inputs, output gradients and matrices.

The kernels of SwiGLU and of the heads' gradient have the numbers in registers that the next product reads. They have
forms here that write them in e4m3 only, with the transpose; `float8_fusion` puts these in place of a kernel and the
conversion of its result. All round to the precision of their inputs first, so that a result is that of both kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from angpt.fast import tuning
from angpt.fast.head_kernels import _angles, _norm_rotated_backward, _partner
from angpt.float8 import E4M3, LARGEST
from angpt.models.primitives import EPS

TILE, WARPS = tuning.FLOAT8_TILE, tuning.FLOAT8_WARPS
SWIGLU, SWIGLU_BACKWARD, HEADS = tuning.FLOAT8_SWIGLU, tuning.FLOAT8_SWIGLU_BACKWARD, tuning.FLOAT8_HEADS


@triton.jit
def _write(x, scale, y_ptr, t_ptr, row, col, n_rows, n_cols, stride, LARGEST: tl.constexpr):
    """Store a tile of x · scale in e4m3, and its transpose, at a row and column of matrices with that many rows and, of
    these columns, that many; `stride`: all columns of the matrix."""
    scaled = x.to(tl.float32) * scale
    y = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    rows, cols, inside = _inside(row, col, n_rows, n_cols, x.shape[0], x.shape[1])
    tl.store(y_ptr + row * stride + col + rows * stride + cols, y, inside)
    _write_transpose(y, t_ptr, row, col, n_rows, n_cols)


@triton.jit
def _write_transpose(y, t_ptr, row, col, n_rows, n_cols):
    cols, rows, inside = _inside(col, row, n_cols, n_rows, y.shape[1], y.shape[0])
    tl.store(t_ptr + col * n_rows + row + cols * n_rows + rows, tl.trans(y), inside)


@triton.jit
def _inside(row, col, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows and columns of a tile from its own first, in 32 bits, which saves registers; and whether they exist."""
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    return rows, cols, (rows < (n_rows - row).to(tl.int32)) & (cols < (n_cols - col).to(tl.int32))


@triton.jit
def _quantize(
    x_ptr, scale_ptr, y_ptr, t_ptr, n_rows, n_cols,
    CONVERT: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of x · scale, and its transpose; without CONVERT, x is in e4m3 and only the transpose is written."""
    row, col = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64) * TILE
    rows, cols, inside = _inside(row, col, n_rows, n_cols, TILE, TILE)
    x = tl.load(x_ptr + row * n_cols + col + rows * n_cols + cols, inside)
    if CONVERT:
        _write(x, tl.load(scale_ptr), y_ptr, t_ptr, row, col, n_rows, n_cols, n_cols, LARGEST)
    else:
        _write_transpose(x, t_ptr, row, col, n_rows, n_cols)


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], TILE), triton.cdiv(x.shape[1], TILE)


def _both(rows: int, cols: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3 and its transpose, to be written."""
    y, t = (torch.empty(shape, dtype=E4M3, device=like.device) for shape in ((rows, cols), (cols, rows)))
    return y, t


@triton_op("angpt::quantize", mutates_args={})
def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """float8.quantize of a contiguous matrix."""
    y, t = _both(x.shape[0], x.shape[1], x)
    wrap_triton(_quantize)[_grid(x)](
        x, scale, y, t, *x.shape, CONVERT=True, LARGEST=LARGEST, TILE=TILE, num_warps=WARPS
    )
    return y, t


@triton_op("angpt::transpose", mutates_args={})
def transpose(x: Tensor) -> Tensor:
    """float8.transpose of a contiguous matrix."""
    t = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    wrap_triton(_quantize)[_grid(x)](x, x, x, t, *x.shape, CONVERT=False, LARGEST=LARGEST, TILE=TILE, num_warps=WARPS)
    return t


def _fused(schema: str, results: Callable[..., Any], launch: Callable[..., None]) -> None:
    """Define an operation of the compiler: `results` allocates its tensors, of which the first two are a matrix in e4m3
    and its transpose; `launch` writes them."""

    def run(*arguments: Any) -> Any:
        # Not all releases of the compiler keep tensors contiguous that were contiguous when traced.
        arguments = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in arguments)
        found = results(*arguments)
        launch(*arguments, *found)
        return found

    name = f"angpt::{schema.split('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, results)


# u · SiLU(z) · factor, and its gradient.


@triton.jit
def _place(width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """First row and column of a program, from the last rows to the first; consecutive programs share rows."""
    across = tl.cdiv(width, COLS)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    return (program // across).to(tl.int64) * ROWS, (program % across).to(tl.int64) * COLS


@triton.jit
def _swiglu_e4m3(
    uz_ptr, scale_ptr, y_ptr, t_ptr, n_rows, width,
    FACTOR: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col = _place(width, ROWS, COLS)
    rows, cols, inside = _inside(row, col, n_rows, width, ROWS, COLS)
    uz = uz_ptr + row * 2 * width + col + rows * 2 * width + cols
    u, z = tl.load(uz, inside, 0.0).to(tl.float32), tl.load(uz + width, inside, 0.0).to(tl.float32)
    h = (u * z * tl.sigmoid(z) * FACTOR).to(uz_ptr.dtype.element_ty)
    _write(h, tl.load(scale_ptr), y_ptr, t_ptr, row, col, n_rows, width, width, LARGEST)


@triton.jit
def _swiglu_backward_e4m3(
    uz_ptr, dh_ptr, scale_ptr, y_ptr, t_ptr, n_rows, width,
    FACTOR: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col = _place(width, ROWS, COLS)
    rows, cols, inside = _inside(row, col, n_rows, width, ROWS, COLS)
    uz = uz_ptr + row * 2 * width + col + rows * 2 * width + cols
    u, z = tl.load(uz, inside, 0.0).to(tl.float32), tl.load(uz + width, inside, 0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row * width + col + rows * width + cols, inside, 0.0).to(tl.float32) * FACTOR
    s, scale = tl.sigmoid(z), tl.load(scale_ptr)
    du = (dh * z * s).to(uz_ptr.dtype.element_ty)
    _write(du, scale, y_ptr, t_ptr, row, col, n_rows, width, 2 * width, LARGEST)
    dz = (dh * u * s * (1 + z * (1 - s))).to(uz_ptr.dtype.element_ty)
    past = t_ptr + n_rows.to(tl.int64) * width
    _write(dz, scale, y_ptr + width, past, row, col, n_rows, width, 2 * width, LARGEST)


def _swiglu_shape(uz: Tensor, tile: dict[str, int]) -> tuple[int, int, tuple[int]]:
    rows, width = uz.numel() // uz.shape[-1], uz.shape[-1] // 2
    return rows, width, (triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(width, tile["COLS"]),)


def _launch_swiglu(uz: Tensor, factor: float, scale: Tensor, y: Tensor, t: Tensor) -> None:
    rows, width, grid = _swiglu_shape(uz, SWIGLU)
    _swiglu_e4m3[grid](uz, scale, y, t, rows, width, FACTOR=factor, LARGEST=LARGEST, **SWIGLU)


def _launch_swiglu_backward(uz: Tensor, dh: Tensor, factor: float, scale: Tensor, y: Tensor, t: Tensor) -> None:
    rows, width, grid = _swiglu_shape(uz, SWIGLU_BACKWARD)
    _swiglu_backward_e4m3[grid](uz, dh, scale, y, t, rows, width, FACTOR=factor, LARGEST=LARGEST, **SWIGLU_BACKWARD)


_fused(
    "swiglu_e4m3(Tensor uz, float factor, Tensor scale) -> (Tensor, Tensor)",
    lambda uz, factor, scale: _both(uz.numel() // uz.shape[-1], uz.shape[-1] // 2, uz),
    _launch_swiglu,
)
_fused(
    "swiglu_backward_e4m3(Tensor uz, Tensor dh, float factor, Tensor scale) -> (Tensor, Tensor)",
    lambda uz, dh, factor, scale: _both(uz.numel() // uz.shape[-1], uz.shape[-1], uz),
    _launch_swiglu_backward,
)


# The gradient of a packed W_qkv h. A program has several heads of its tokens, one after the other.


@triton.jit
def _heads_backward_e4m3(
    qkv_ptr, dq_ptr, dk_ptr, dv_ptr, scale_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr,
    y_ptr, t_ptr, q_terms_ptr, k_terms_ptr, n_tokens, period, heads: tl.constexpr,
    Q_GAIN: tl.constexpr, K_GAIN: tl.constexpr, EPS: tl.constexpr, LARGEST: tl.constexpr,
    HALF: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = (heads + HEADS - 1) // HEADS
    width: tl.constexpr = heads * D
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, first = program // groups, program % groups * HEADS
    token = tile.to(tl.int64) * TOKENS
    index, along = tl.arange(0, TOKENS)[:, None, None], tl.arange(0, D)[None, None, :]
    inside, partner, scale = index < (n_tokens - token).to(tl.int32), _partner(along, HALF), tl.load(scale_ptr)
    cos, sin = _angles(cos_ptr, sin_ptr, token % period + index, along, period, HALF)
    qkv_ptr += token * 3 * width
    dq_ptr, dk_ptr, dv_ptr = dq_ptr + token * width, dk_ptr + token * width, dv_ptr + token * width
    past = n_tokens.to(tl.int64) * width
    for head in range(first, tl.minimum(first + HEADS, heads)):
        at, dy_row = index * 3 * width + head * D, index * width + head * D
        y, t, out = y_ptr + head * D, t_ptr + n_tokens.to(tl.int64) * (head * D), tile * width + head * D + along
        dx, terms = _norm_rotated_backward(
            qkv_ptr, dq_ptr, q_gain_ptr, at, dy_row, head * D, along, partner, cos, sin, inside, Q_GAIN, EPS
        )
        dx = tl.reshape(dx.to(qkv_ptr.dtype.element_ty), (TOKENS, D))
        _write(dx, scale, y, t, token, token * 0, n_tokens, D, 3 * width, LARGEST)
        if Q_GAIN:
            tl.store(q_terms_ptr + out, tl.sum(terms, axis=0, keep_dims=True))
        dx, terms = _norm_rotated_backward(
            qkv_ptr, dk_ptr, k_gain_ptr, at + width, dy_row, head * D, along, partner, cos, sin, inside, K_GAIN, EPS
        )
        dx = tl.reshape(dx.to(qkv_ptr.dtype.element_ty), (TOKENS, D))
        _write(dx, scale, y + width, t + past, token, token * 0, n_tokens, D, 3 * width, LARGEST)
        if K_GAIN:
            tl.store(k_terms_ptr + out, tl.sum(terms, axis=0, keep_dims=True))
        dv = tl.reshape(tl.load(dv_ptr + dy_row + along, inside, 0.0), (TOKENS, D))
        _write(dv, scale, y + 2 * width, t + 2 * past, token, token * 0, n_tokens, D, 3 * width, LARGEST)


def _heads_tile(d: int) -> dict[str, int]:
    tokens = max(16, min(128, HEADS["ELEMENTS"] // d))
    rest = {name: value for name, value in HEADS.items() if name != "ELEMENTS"}
    return rest | {"TOKENS": tokens, "D": d, "maxnreg": tuning.FLOAT8_REGISTERS}


def _heads_results(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, scale: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    b, t, _, heads, d = qkv.shape
    tiles = triton.cdiv(b * t, _heads_tile(d)["TOKENS"])
    terms = (
        torch.empty(0 if gain is None else tiles, heads, d, dtype=torch.float32, device=qkv.device)
        for gain in (q_gain, k_gain)
    )
    return *_both(b * t, 3 * heads * d, qkv), *terms


def _launch_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, scale: Tensor, y: Tensor, t: Tensor, q_terms: Tensor, k_terms: Tensor,
) -> None:  # fmt: skip
    n, heads, tile = len(y), qkv.shape[3], _heads_tile(qkv.shape[4])
    grid = (triton.cdiv(n, tile["TOKENS"]) * triton.cdiv(heads, tile["HEADS"]),)
    _heads_backward_e4m3[grid](
        qkv, dq, dk, dv, scale, cos, sin, qkv if q_gain is None else q_gain, qkv if k_gain is None else k_gain,
        y, t, q_terms, k_terms, n, cos.numel() // cos.shape[-1], heads,
        Q_GAIN=q_gain is not None, K_GAIN=k_gain is not None, EPS=EPS, LARGEST=LARGEST, HALF=cos.shape[-1], **tile,
    )  # fmt: skip


_fused(
    "heads_backward_e4m3(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_gain, Tensor? k_gain, Tensor dq, Tensor dk,"
    " Tensor dv, Tensor scale) -> (Tensor, Tensor, Tensor, Tensor)",
    _heads_results,
    _launch_heads,
)
