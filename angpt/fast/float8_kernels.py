"""Triton kernels of `angpt.models.float8`: a matrix in e4m3 and its transpose, in one pass over memory.

Tensor cores read both operands of a product in e4m3 along the dimension that is summed over, so gradients need the
transposes of inputs, output gradients and matrices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from angpt.fast import tuning
from angpt.float8 import E4M3, LARGEST

TILE, WARPS = tuning.FLOAT8_TILE, tuning.FLOAT8_WARPS


@triton.jit
def _quantize(
    x_ptr, scale_ptr, y_ptr, t_ptr, n_rows, n_cols,
    CONVERT: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of x · scale, and its transpose; without CONVERT, x is in e4m3 and only the transpose is written."""
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    cols = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    at, inside = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
    y = tl.load(x_ptr + at, inside)
    if CONVERT:
        scaled = y.to(tl.float32) * tl.load(scale_ptr)
        y = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
        tl.store(y_ptr + at, y, inside)
    across = tl.trans(cols) * n_rows + tl.trans(rows)
    tl.store(t_ptr + across, tl.trans(y), (tl.trans(rows) < n_rows) & (tl.trans(cols) < n_cols))


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], TILE), triton.cdiv(x.shape[1], TILE)


@triton_op("angpt::quantize", mutates_args={})
def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """float8.quantize of a contiguous matrix."""
    y, t = (torch.empty(shape, dtype=E4M3, device=x.device) for shape in (x.shape, x.shape[::-1]))
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
