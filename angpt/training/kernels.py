"""The optimizer step of a matrix on a GPU: Adam, the constraint and the low-precision copy in one pass over memory.

`optimizer.adam_` is the same in plain PyTorch. It would read and write each parameter up to six times per step.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from angpt.models.constraints import TINY, Constraint

TILE = 4096
"""Elements that one program holds in registers, where a row has not more."""
STRETCH = 8 * TILE
"""Elements that one program sums."""
COLUMNS = 16
"""Columns per program where columns are constrained: 64 bytes of each row, two sectors of memory."""


@triton.jit
def _adam(p, m, v, g, clip, lr_decay, beta1, beta2, eps, step_size, inverse_bias2):
    """One Adam step on values in registers."""
    g = g.to(tl.float32) * clip
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p * (1 - lr_decay) - step_size * m / (tl.sqrt(v) * inverse_bias2 + eps)
    return p, m, v


@triton.jit
def _scale(squares, UNIT: tl.constexpr, TINY: tl.constexpr):
    scale = 1 / tl.maximum(tl.sqrt(squares), TINY)
    if not UNIT:
        scale = tl.minimum(scale, 1.0)
    return scale


@triton.jit
def _rows(
    p_ptr, copy_ptr, m_ptr, v_ptr, g_ptr, clip_ptr,
    lr_decay, beta1, beta2, eps, step_size, inverse_bias2, n_rows, n_cols,
    CONSTRAINED: tl.constexpr, UNIT: tl.constexpr, COPY: tl.constexpr, TINY: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows: one read and one write of everything."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    at, inside = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
    p, m, v, g = (
        tl.load(p_ptr + at, inside, 0.0), tl.load(m_ptr + at, inside, 0.0),
        tl.load(v_ptr + at, inside, 0.0), tl.load(g_ptr + at, inside, 0.0),
    )  # fmt: skip
    p, m, v = _adam(p, m, v, g, tl.load(clip_ptr), lr_decay, beta1, beta2, eps, step_size, inverse_bias2)
    if CONSTRAINED:
        p = p * _scale(tl.sum(p * p, axis=1, keep_dims=True), UNIT, TINY)
    tl.store(p_ptr + at, p, inside)
    tl.store(m_ptr + at, m, inside)
    tl.store(v_ptr + at, v, inside)
    if COPY:
        tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), inside)


@triton.jit
def _columns(
    p_ptr, copy_ptr, m_ptr, v_ptr, g_ptr, clip_ptr,
    lr_decay, beta1, beta2, eps, step_size, inverse_bias2, n_rows, n_cols,
    UNIT: tl.constexpr, COPY: tl.constexpr, TINY: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A strip of whole columns: down once for Adam and the lengths, once more, out of the cache, to scale."""
    cols = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    squares = tl.zeros((1, COLS), tl.float32)
    clip = tl.load(clip_ptr)
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        at, inside = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
        p, m, v, g = (
            tl.load(p_ptr + at, inside, 0.0), tl.load(m_ptr + at, inside, 0.0),
            tl.load(v_ptr + at, inside, 0.0), tl.load(g_ptr + at, inside, 0.0),
        )  # fmt: skip
        p, m, v = _adam(p, m, v, g, clip, lr_decay, beta1, beta2, eps, step_size, inverse_bias2)
        squares += tl.sum(p * p, axis=0, keep_dims=True)
        tl.store(p_ptr + at, p, inside)
        tl.store(m_ptr + at, m, inside)
        tl.store(v_ptr + at, v, inside)
    scale = _scale(squares, UNIT, TINY)
    tl.debug_barrier()  # warps read below what others have written above
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        at, inside = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
        p = tl.load(p_ptr + at, inside, 0.0) * scale
        tl.store(p_ptr + at, p, inside)
        if COPY:
            tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), inside)


@triton.jit
def _squares(table_ptr, sums_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """The sum of squares of one stretch of one tensor: the table has its address and length for each program."""
    program = tl.program_id(0)
    x_ptr = tl.multiple_of(tl.load(table_ptr + 2 * program).to(tl.pointer_type(DTYPE)), 16)
    size = tl.load(table_ptr + 2 * program + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(TILES):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, at < size, 0.0).to(tl.float32)
        total += x * x
    tl.store(sums_ptr + program, tl.sum(total))


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements of tensors of one dtype, in fp32 and in one launch."""
    device, dtype = tensors[0].device, tensors[0].dtype
    if dtype not in (torch.bfloat16, torch.float32) or any(x.dtype != dtype or x.data_ptr() % 16 for x in tensors):
        raise ValueError("all tensors must be bf16, or all fp32, and begin at a multiple of 16 bytes")
    which, first, sizes = _stretches(tuple(x.numel() for x in tensors))
    addresses = np.array([x.data_ptr() for x in tensors])[which] + first * tensors[0].element_size()
    # Pinned and not waited for: a step must not stop the device.
    table = torch.from_numpy(np.stack((addresses, sizes), axis=1)).pin_memory().to(device, non_blocking=True)
    sums = torch.empty(len(sizes), device=device)
    kind = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    with torch.cuda.device(device):
        _squares[(len(sizes),)](table, sums, DTYPE=kind, BLOCK=TILE, TILES=STRETCH // TILE, num_warps=8)
    return sums.sum()


@cache
def _stretches(numels: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """For each program: the number of its tensor, its first element and how many it has."""
    rows = [(i, first, min(STRETCH, n - first)) for i, n in enumerate(numels) for first in range(0, n, STRETCH)]
    which, first, sizes = np.array(rows, dtype=np.int64).T
    return which, first, sizes


def adam_(
    p: Tensor, copy: Tensor | None, m: Tensor, v: Tensor, g: Tensor, clip: Tensor, *,
    lr: float, decay: float, betas: tuple[float, float], eps: float, step: int, constraint: Constraint | None,
) -> None:  # fmt: skip
    """One step of one matrix, in place; see `optimizer.adam_`."""
    n_rows, n_cols = p.shape
    scalars = (
        lr * decay, *betas, eps, lr / (1 - betas[0] ** step), (1 - betas[1] ** step) ** -0.5, n_rows, n_cols,
    )  # fmt: skip
    tensors = (p, p if copy is None else copy, m, v, g, clip)
    common = {"COPY": copy is not None, "UNIT": constraint is not None and constraint.kind == "unit", "TINY": TINY}
    with torch.cuda.device(p.device):
        if constraint is not None and constraint.dim == 0:
            rows = TILE // COLUMNS
            _columns[(triton.cdiv(n_cols, COLUMNS),)](
                *tensors, *scalars, **common, ROWS=rows, COLS=COLUMNS, num_warps=8
            )
        else:
            cols = triton.next_power_of_2(n_cols)
            rows = max(1, TILE // cols)
            grid = (triton.cdiv(n_rows, rows),)
            constrained = constraint is not None
            _rows[grid](*tensors, *scalars, CONSTRAINED=constrained, **common, ROWS=rows, COLS=cols, num_warps=8)
