"""Muon on a GPU: the momentum of many matrices in one launch; symmetric products, of which one triangle is computed.

`optim.muon` has the plain forms.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from angpt.fast import tuning
from angpt.fast.optimizer_kernels import KINDS, address, make_programs, make_table, place, pointer
from angpt.optim.states import ParameterState

BLOCK = tuning.MOMENTUM_BLOCK


@triton.jit
def _momentum(
    table_ptr, programs_ptr, clip_ptr, beta,
    KIND: tl.constexpr, OUT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A segment of a matrix. A line of the table: first moment, gradient, update, number of elements."""
    matrix, first = place(programs_ptr, BLOCK)
    line_ptr = table_ptr + 4 * matrix
    m_ptr, g_ptr, u_ptr = pointer(line_ptr, tl.float32), pointer(line_ptr + 1, KIND), pointer(line_ptr + 2, OUT)
    size = tl.load(line_ptr + 3)
    if EVEN:  # vectorised loads do not cross the end
        size = tl.multiple_of(size, 16)
    at = first + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(g_ptr + at, inside, 0.0).to(tl.float32) * tl.load(clip_ptr)
    m = beta * tl.load(m_ptr + at, inside, 0.0) + (1 - beta) * g
    tl.store(m_ptr + at, m, inside)
    tl.store(u_ptr + at, (beta * m + (1 - beta) * g).to(OUT), inside)


def momentum_(
    states: Sequence[ParameterState], gradients: Sequence[Tensor], updates: Sequence[Tensor], clip: Tensor,
    momentum: float,
) -> None:  # fmt: skip
    """`optim.muon.momentum_`, in one launch per dtype."""
    by_dtypes: dict[tuple[Any, Any], list[tuple[int, int, int, int]]] = {}
    for state, g, u in zip(states, gradients, updates, strict=True):
        line = address(state.exp_avg), address(g), address(u), g.numel()
        by_dtypes.setdefault((KINDS[g.dtype], KINDS[u.dtype]), []).append(line)
    for (kind, out), lines in by_dtypes.items():
        sizes = tuple(line[-1] for line in lines)
        programs, table = make_programs(sizes, BLOCK, clip.device), make_table(lines, clip.device)
        even = all(size % 16 == 0 for size in sizes)
        with torch.cuda.device(clip.device):
            _momentum[(len(programs),)](
                table, programs, clip, momentum, KIND=kind, OUT=out, EVEN=even, BLOCK=BLOCK, num_warps=8
            )


@triton.jit
def _symmetric(
    x_ptr, y_ptr, out_ptr, squares_ptr, size, depth, x_batch, x_row, x_column, y_batch, y_row, y_column, a, b, c,
    POLYNOMIAL: tl.constexpr, DIVIDED: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of the lower triangle of x yᵀ, and its mirror image. With `POLYNOMIAL`, x = y is symmetric and the
    result is a + b x + c x²; with `DIVIDED` that of x / squares, divided by √squares. `EVEN`: tiles fill the matrix."""
    number, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = ((tl.sqrt(8.0 * number + 1.0) - 1.0) / 2.0).to(tl.int32)  # tile row: the number of tiles above it is i(i+1)/2
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    j = number - i * (i + 1) // 2
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    ks = tl.arange(0, DEPTH)
    x_ptr += matrix * x_batch
    left = x_ptr + rows[:, None] * x_row + ks[None, :] * x_column
    right = y_ptr + matrix * y_batch + ks[:, None] * y_column + columns[None, :] * y_row
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, depth, DEPTH):
        if EVEN:
            x, y = tl.load(left), tl.load(right)
        else:
            inside = k + ks < depth
            x = tl.load(left, (rows < size)[:, None] & inside[None, :], 0.0)
            y = tl.load(right, inside[:, None] & (columns < size)[None, :], 0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
        left += DEPTH * x_column
        right += DEPTH * y_column
    at = matrix * size * size + rows[:, None] * size + columns[None, :]
    inside = (rows < size)[:, None] & (columns < size)[None, :]
    if POLYNOMIAL:
        own = tl.load(x_ptr + rows[:, None] * x_row + columns[None, :] * x_column, inside, 0.0).to(tl.float32)
        if DIVIDED:
            inverse = 1 / tl.load(squares_ptr + matrix)
            a *= tl.sqrt(inverse)
            b *= inverse * tl.sqrt(inverse)
            c *= inverse * inverse * tl.sqrt(inverse)
        total = c * total + b * own + tl.where(rows[:, None] == columns[None, :], a, 0.0)
    value = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, value, inside)
    if i != j:
        mirrored = matrix * size * size + columns[:, None] * size + rows[None, :]
        tl.store(out_ptr + mirrored, tl.trans(value), (columns < size)[:, None] & (rows < size)[None, :])


def symmetric_product(x: Tensor, y: Tensor) -> Tensor:
    """`optim.muon.symmetric_product`: half the work of a general product."""
    return _launch(x, y)


def symmetric_polynomial(x: Tensor, a: float, b: float, c: float, squares: Tensor | None = None) -> Tensor:
    """`optim.muon.symmetric_polynomial` in one pass, with half the work of a general product."""
    return _launch(x, x, (a, b, c), squares)


def _launch(
    x: Tensor, y: Tensor, coefficients: tuple[float, float, float] | None = None, squares: Tensor | None = None
) -> Tensor:
    count, size, depth = x.shape
    out = torch.empty(count, size, size, dtype=x.dtype, device=x.device)
    tile = tuning.SYMMETRIC_TILE if size > tuning.SYMMETRIC_SMALL else tuning.SYMMETRIC_SMALL_TILE
    tiles = triton.cdiv(size, tile)
    with torch.cuda.device(x.device):
        _symmetric[(tiles * (tiles + 1) // 2, count)](
            x, y, out, squares, size, depth, *x.stride(), *y.stride(), *(coefficients or (0.0, 0.0, 1.0)),
            POLYNOMIAL=coefficients is not None, DIVIDED=squares is not None,
            EVEN=size % tile == 0 and depth % tuning.SYMMETRIC_DEPTH == 0, TILE=tile, DEPTH=tuning.SYMMETRIC_DEPTH,
            num_warps=tuning.SYMMETRIC_WARPS, num_stages=tuning.SYMMETRIC_STAGES,
        )  # fmt: skip
    return out
