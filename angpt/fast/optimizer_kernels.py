"""The optimizer step of matrices on a GPU: update, constraint and low-precision copy in one pass over memory.

The update is Adam's, or one that was computed before (Muon). The plain forms, `optim.adam.adam_` and
`optim.muon.descend_`, read and write each parameter up to six times per step.

One launch updates many matrices. A table has a line of addresses for each matrix; a list has, for each program, the
number of its matrix and the position where it starts.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from angpt.constraints import TINY, Constraint
from angpt.fast import tuning
from angpt.float8 import E4M3, WEIGHT_SCALE
from angpt.optim.states import ALIGNMENT, ParameterState

TILE, COLUMNS, DOWN = tuning.ADAM_TILE, tuning.ADAM_COLUMNS, tuning.ADAM_COLUMN_ROWS
BLOCK, BLOCKS = tuning.SQUARES_BLOCK, tuning.SQUARES_TILES
KINDS: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
LOW: dict[torch.dtype, tuple[Any, float]] = {torch.bfloat16: (tl.bfloat16, 1.0), E4M3: (tl.float8e4nv, WEIGHT_SCALE)}
"""The precisions of copies, and the scales of weights in them."""


@triton.jit
def place(programs_ptr, EACH: tl.constexpr):
    """The matrix of this program and its start there, a multiple of the size that each program processes."""
    program = tl.program_id(0)
    return tl.load(programs_ptr + 2 * program), tl.multiple_of(tl.load(programs_ptr + 2 * program + 1), EACH)


@triton.jit
def pointer(entry_ptr, KIND: tl.constexpr):
    """The pointer in an entry of a table; 16 is ALIGNMENT."""
    return tl.multiple_of(tl.load(entry_ptr).to(tl.pointer_type(KIND)), 16)


@triton.jit
def _matrix(line_ptr, KIND: tl.constexpr, LOW: tl.constexpr):
    """A line of the table: parameter, copy, two moments, gradient, number of rows."""
    return (
        pointer(line_ptr, tl.float32), pointer(line_ptr + 1, LOW), pointer(line_ptr + 2, tl.float32),
        pointer(line_ptr + 3, tl.float32), pointer(line_ptr + 4, KIND), tl.load(line_ptr + 5),
    )  # fmt: skip


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
def _updated(
    p_ptr, m_ptr, v_ptr, g_ptr, at, inside, clip_ptr, lr_decay, beta1, beta2, eps, step_size, inverse_bias2,
    ADAM: tl.constexpr,
):  # fmt: skip
    """The new values of a tile, not stored yet. With Adam, the moments are stored; without, g is the update."""
    p, g = tl.load(p_ptr + at, inside, 0.0), tl.load(g_ptr + at, inside, 0.0)
    if ADAM:
        m, v = tl.load(m_ptr + at, inside, 0.0), tl.load(v_ptr + at, inside, 0.0)
        p, m, v = _adam(p, m, v, g, tl.load(clip_ptr), lr_decay, beta1, beta2, eps, step_size, inverse_bias2)
        tl.store(m_ptr + at, m, inside)
        tl.store(v_ptr + at, v, inside)
    else:
        p = p * (1 - lr_decay) - step_size * g.to(tl.float32)
    return p


@triton.jit
def _step_rows(
    table_ptr, programs_ptr, clip_ptr, lr_decay, beta1, beta2, eps, step_size, inverse_bias2, n_cols,
    ADAM: tl.constexpr, CONSTRAINED: tl.constexpr, UNIT: tl.constexpr, LOW: tl.constexpr, LOW_SCALE: tl.constexpr,
    COPY: tl.constexpr, TINY: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Update a tile of whole rows: reads and writes everything once."""
    matrix, first = place(programs_ptr, ROWS)
    p_ptr, copy_ptr, m_ptr, v_ptr, g_ptr, n_rows = _matrix(table_ptr + 6 * matrix, KIND, LOW)
    rows = first + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    at, inside = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
    p = _updated(
        p_ptr, m_ptr, v_ptr, g_ptr, at, inside, clip_ptr, lr_decay, beta1, beta2, eps, step_size, inverse_bias2, ADAM
    )
    if CONSTRAINED:
        p = p * _scale(tl.sum(p * p, axis=1, keep_dims=True), UNIT, TINY)
    tl.store(p_ptr + at, p, inside)
    if COPY:
        tl.store(copy_ptr + at, (p * LOW_SCALE).to(LOW), inside)


@triton.jit
def _step_columns(
    table_ptr, programs_ptr, clip_ptr, lr_decay, beta1, beta2, eps, step_size, inverse_bias2, n_cols,
    ADAM: tl.constexpr, CONSTRAINED: tl.constexpr, UNIT: tl.constexpr, LOW: tl.constexpr, LOW_SCALE: tl.constexpr,
    COPY: tl.constexpr, TINY: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Update a strip of whole columns: one pass for update and lengths, a second one, from the cache, to scale."""
    matrix, first = place(programs_ptr, COLS)
    p_ptr, copy_ptr, m_ptr, v_ptr, g_ptr, n_rows = _matrix(table_ptr + 6 * matrix, KIND, LOW)
    cols = first.to(tl.int32) + tl.arange(0, COLS)[None, :]
    squares = tl.zeros((1, COLS), tl.float32)
    for top in range(0, n_rows.to(tl.int32), ROWS):
        rows = top + tl.arange(0, ROWS)[:, None].to(tl.int64)
        at, inside = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
        p = _updated(
            p_ptr, m_ptr, v_ptr, g_ptr, at, inside, clip_ptr, lr_decay, beta1, beta2, eps, step_size, inverse_bias2,
            ADAM,
        )  # fmt: skip
        squares += tl.sum(p * p, axis=0, keep_dims=True)
        tl.store(p_ptr + at, p, inside)
    scale = _scale(squares, UNIT, TINY)
    tl.debug_barrier()  # the next loop reads what other warps have written
    for top in range(0, n_rows.to(tl.int32), ROWS):
        rows = top + tl.arange(0, ROWS)[:, None].to(tl.int64)
        at, inside = rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)
        p = tl.load(p_ptr + at, inside, 0.0) * scale
        tl.store(p_ptr + at, p, inside)
        if COPY:
            tl.store(copy_ptr + at, (p * LOW_SCALE).to(LOW), inside)


@triton.jit
def _squares(
    table_ptr, programs_ptr, sums_ptr,
    KIND: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sum of squares of one segment of a tensor; a line of the table is the address and the size of a tensor."""
    tensor, first = place(programs_ptr, BLOCK)
    x_ptr, size = pointer(table_ptr + 2 * tensor, KIND), tl.load(table_ptr + 2 * tensor + 1)
    if EVEN:  # vectorised loads do not cross the end
        size = tl.multiple_of(size, 16)
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(TILES):
        at = first + tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, at < size, 0.0).to(tl.float32)
        total += x * x
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


@cache
def make_programs(lengths: tuple[int, ...], each: int, device: torch.device) -> Tensor:
    """(programs, 2): the number of each program's matrix and its start there; a program processes `each` elements."""
    starts = [np.arange(0, length, each) for length in lengths]
    numbers = np.repeat(np.arange(len(lengths)), [len(s) for s in starts])
    return torch.from_numpy(np.stack((numbers, np.concatenate(starts)), axis=1)).to(device)


def make_table(lines: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """A table on the device, copied asynchronously from pinned memory: a step must not wait for the device."""
    return torch.tensor(lines, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


def address(x: Tensor) -> int:
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        raise ValueError(f"tensors must be contiguous and aligned to {ALIGNMENT} bytes")
    return x.data_ptr()


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements of tensors of one dtype, in fp32 and in one launch."""
    device, kind = tensors[0].device, KINDS[tensors[0].dtype]
    if any(x.dtype != tensors[0].dtype for x in tensors):
        raise ValueError("all tensors must have one dtype")
    table = make_table([(address(x), x.numel()) for x in tensors], device)
    programs = make_programs(tuple(x.numel() for x in tensors), BLOCK * BLOCKS, device)
    sums = torch.empty(len(programs), device=device)
    even = all(x.numel() % 16 == 0 for x in tensors)
    with torch.cuda.device(device):
        _squares[(len(programs),)](table, programs, sums, KIND=kind, EVEN=even, BLOCK=BLOCK, TILES=BLOCKS, num_warps=8)
    return sums.sum()


def adam_(
    states: Sequence[ParameterState], gradients: Sequence[Tensor], clip: Tensor, *,
    lr: float, betas: tuple[float, float], eps: float, step: int,
) -> None:  # fmt: skip
    """`optim.adam.adam_` of matrices, in one launch per width, constraint, weight decay and dtype."""
    scalars = (*betas, eps, lr / (1 - betas[0] ** step), (1 - betas[1] ** step) ** -0.5)
    for alike, chosen in _alike(states, gradients):
        _launch(chosen, alike, clip, (lr * alike.decay, *scalars), adam=True)


def descend_(states: Sequence[ParameterState], updates: Sequence[Tensor], lr: float, scale: float) -> None:
    """`optim.muon.descend_`, in one launch per width, constraint, weight decay and dtype."""
    for alike, chosen in _alike(states, updates):
        _launch(chosen, alike, updates[0], (lr * alike.decay, 0.0, 0.0, 0.0, lr * scale, 0.0), adam=False)


class _Alike(NamedTuple):
    """What the matrices of one launch have in common."""

    decay: float
    width: int
    constraint: Constraint | None
    copied: torch.dtype | None
    gradient: torch.dtype


Pairs = list[tuple[ParameterState, Tensor]]


def _alike(states: Sequence[ParameterState], gradients: Sequence[Tensor]) -> Iterator[tuple[_Alike, Pairs]]:
    """The matrices that one launch can update."""
    launches: dict[_Alike, Pairs] = {}
    for state, g in zip(states, gradients, strict=True):
        copied = None if state.copy is None else state.copy.dtype
        key = _Alike(state.decay, state.weight.shape[1], state.constraint, copied, g.dtype)
        launches.setdefault(key, []).append((state, g))
    yield from launches.items()


def _launch(chosen: Pairs, alike: _Alike, clip: Tensor, scalars: tuple[float, ...], adam: bool) -> None:
    device, lines, (_, width, constraint, copied, dtype) = clip.device, [], alike
    for state, g in chosen:
        copy = state.weight if state.copy is None else state.copy
        second = state.exp_avg if state.exp_avg_sq is None else state.exp_avg_sq
        tensors = (state.weight, copy, state.exp_avg, second, g)
        if copied not in (None, *LOW):
            raise ValueError(f"copies must be bf16 or e4m3, not {copied}")
        lines.append([*map(address, tensors), state.weight.shape[0]])
    low, low_scale = LOW[copied or torch.bfloat16]
    down = constraint is not None and constraint.dim == 0
    cols = COLUMNS if down else triton.next_power_of_2(width)
    rows = DOWN if down else max(1, TILE // cols)
    lengths = [width] * len(lines) if down else [line[-1] for line in lines]
    programs = make_programs(tuple(lengths), cols if down else rows, device)
    with torch.cuda.device(device):
        (_step_columns if down else _step_rows)[(len(programs),)](
            make_table(lines, device), programs, clip, *scalars, width,
            ADAM=adam, CONSTRAINED=constraint is not None, UNIT=constraint is not None and constraint.kind == "unit",
            COPY=copied is not None, LOW=low, LOW_SCALE=low_scale, TINY=TINY, KIND=KINDS[dtype], ROWS=rows, COLS=cols,
            num_warps=8,
        )  # fmt: skip
