"""A decode step of many rows on a GPU: seven kernels per layer, whose products run on tensor cores.

With many rows the input of a block is too large for every program of a product to recompute it, as decode_kernels.py
does for a few. So the residual update, which ends a block, is a kernel of its own; it also norms the input of the next
block and rounds it. It sums what several programs have computed for the same rows of a matrix (split over its columns),
so that a product has enough programs to use the whole bandwidth.

| kernel | reads | computes |
|---|---|---|
| `_product` | W_qkv | q, k, v, in parts |
| `_attend` | keys, values | their sum, rotation and norm of q and k, the new slot of the cache, attention |
| `_product` | W_p | the output map, in parts |
| `_advance` | | their sum, the residual update, the input of the MLP |
| `_product` | W_uz | u · SiLU(z) |
| `_product` | W_d | the MLP's output, in parts |
| `_advance` | | their sum, the residual update, the input of the next layer or of the head |

If there are so few rows that attention is split over the slots, too, `_combine` puts its parts together. Kernels
overlap as in decode_kernels.py: before a product waits for its input, it has the L2 cache load its part of the matrix.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from angpt.fast import tuning
from angpt.fast.decode_kernels import MAX_SPLITS, TILE, Steps, _attend, _await, _combined, _row_scales
from angpt.models.folded import Cache, Folded, Layer

LINE_BYTES = 128
"""Bytes that the L2 cache loads at once."""


@triton.jit
def _load_to_cache(w_ptr, rows, first, n, k, DEPTH: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr):
    """Have the L2 cache load `rows` of a matrix, DEPTH columns from `first` on: at most LINES lines of LINE columns."""
    cols = tl.arange(0, LINES) * LINE
    inside = (rows < n)[:, None] & ((cols < DEPTH) & (first + cols < k))[None, :]
    at = w_ptr + tl.where(inside, rows.to(tl.int64)[:, None] * k + first + cols[None, :], 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _product(
    x_ptr, w_ptr, scale_ptr, y_ptr, batch, n, k,
    SCALED: tl.constexpr, SWIGLU: tl.constexpr, DEPTH: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    BATCH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[part] = x Wᵀ over DEPTH columns; with SWIGLU, W has 2 n rows, and y = u · SiLU(z)."""
    part = tl.program_id(1)
    members = tl.program_id(2) * BATCH + tl.arange(0, BATCH)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), part * DEPTH + tl.arange(0, COLS)
    if OVERLAP:
        _load_to_cache(w_ptr, rows, part * DEPTH, n, k, DEPTH, LINE, LINES)
        if SWIGLU:
            _load_to_cache(w_ptr + n.to(tl.int64) * k, rows, part * DEPTH, n, k, DEPTH, LINE, LINES)
    _await(OVERLAP)
    x_at = x_ptr + members[:, None] * k + cols[None, :]
    w_at = w_ptr + rows.to(tl.int64)[None, :] * k + cols[:, None]
    known, wanted = (members < batch)[:, None], (rows < n)[None, :]
    y = tl.zeros((BATCH, ROWS), tl.float32)
    z = tl.zeros((BATCH, ROWS), tl.float32)
    for start in range(0, DEPTH, COLS):
        x = tl.load(x_at + start, known & (cols + start < k)[None, :], 0.0)
        inside = wanted & (cols + start < k)[:, None]
        y = tl.dot(x, tl.load(w_at + start, inside, 0.0).to(x.dtype), y)
        if SWIGLU:
            w_z = tl.load(w_at + n.to(tl.int64) * k + start, inside, 0.0)
            z = tl.dot(x, w_z.to(x.dtype), z)
    y = _row_scales(y, scale_ptr, rows, n, SCALED)
    if SWIGLU:
        z = _row_scales(z, scale_ptr, n + rows, 2 * n, SCALED)
        y = y * z * tl.sigmoid(z)
    at = (part * batch + members)[:, None].to(tl.int64) * n + rows[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), known & wanted)


@triton.jit
def _combine(
    acc_ptr, top_ptr, sum_ptr, out_ptr, d, heads,
    HEADS: tl.constexpr, D_HEAD: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of a row, from its splits."""
    row, cols = tl.program_id(0), tl.arange(0, HEADS * D_HEAD)
    _await(OVERLAP)
    out = _combined(acc_ptr, top_ptr, sum_ptr, row, d, heads, HEADS, D_HEAD, SPLITS)
    tl.store(out_ptr + row * d + cols, out.to(out_ptr.dtype.element_ty), cols < d)


def tile_rows(batch: int) -> int:
    """Rows of the batch in a tile of a product: a power of two for which there are tiles of the matrix."""
    return min(max(tuning.DECODE_TILES), max(min(tuning.DECODE_TILES), triton.next_power_of_2(batch)))


def parts_of(n: int, k: int, rows: int) -> int:
    """Number of parts into which the columns of an (n, k) matrix are divided, if programs have this many rows of it."""
    wanted = min(tuning.DECODE_PROGRAMS // triton.cdiv(n, rows), k // tuning.DECODE_LEAST_DEPTH)
    return 1 << max(0, wanted.bit_length() - 1)


class ManySteps(Steps):
    """The kernels of one model for many rows, called layer by layer."""

    update_warps = tuning.DECODE_ADVANCE_WARPS

    def __init__(self, model: Folded, batch: int) -> None:
        super().__init__(model)
        self.batch, self.dtype = batch, model.dtype

    def product(self, x: Tensor, weight: Tensor, scale: Any, swiglu: bool = False, whole: bool = False) -> Tensor:
        """The product of a matrix with the input x of its block, in parts (parts, B, n) unless `whole` or `swiglu`."""
        n, k = weight.shape[0] // 2 if swiglu else weight.shape[0], weight.shape[1]
        tile = tile_rows(self.batch)
        rows, cols, warps, stages = tuning.DECODE_TILES[tile]
        rows //= 2 if swiglu else 1
        parts = 1 if swiglu or whole else parts_of(n, k, rows)
        y = torch.empty(parts, self.batch, n, dtype=self.dtype if swiglu else torch.float32, device=x.device)
        depth, line = triton.cdiv(triton.cdiv(k, parts), cols) * cols, LINE_BYTES // weight.element_size()
        _product[triton.cdiv(n, rows), parts, triton.cdiv(self.batch, tile)](
            x, weight, scale, y, self.batch, n, k, SWIGLU=swiglu, DEPTH=depth, LINE=line,
            LINES=triton.next_power_of_2(triton.cdiv(depth, line)), BATCH=tile, ROWS=rows, COLS=cols,
            num_warps=warps, num_stages=stages, **self.scaled, **self.launch,
        )  # fmt: skip
        return y[0] if swiglu or whole else y

    def attention(
        self, qkv: Tensor, layer: Layer, cache: Cache, angles: Any, positions: Tensor, capacity: int
    ) -> Tensor:
        """Attention of all rows to their slots, given q, k and v in parts."""
        shown, programs = cache.keys.shape[2], self.heads * self.batch
        splits = min(triton.next_power_of_2(triton.cdiv(shown, TILE)), tuning.DECODE_PROGRAMS // programs, MAX_SPLITS)
        splits = 1 << max(0, splits.bit_length() - 1)
        out = torch.empty(self.batch, self.d, dtype=self.dtype, device=qkv.device)
        acc, top, total = out, qkv, qkv
        if splits > 1:
            acc = torch.empty(self.batch, splits, self.d, device=qkv.device)
            top, total = (torch.empty(self.batch, splits, self.heads, device=qkv.device) for _ in range(2))
        _attend[self.heads, splits, self.batch](
            qkv, *angles, qkv if layer.gain is None else layer.gain, positions, cache.keys, cache.values, acc, top,
            total, self.heads, capacity, shown, cache.keys.stride(0), cache.keys.stride(1), PARTS=len(qkv),
            WHOLE=splits == 1, **self.qk(layer), **self.split(shown, splits),
        )  # fmt: skip
        if splits > 1:
            _combine[(self.batch,)](
                acc, top, total, out, self.d, self.heads, HEADS=triton.next_power_of_2(self.heads),
                D_HEAD=self.head["D_HEAD"], SPLITS=splits, **self.launch,
            )  # fmt: skip
        return out


def decode(model: Folded, tokens: Tensor, positions: Tensor, caches: Sequence[Cache], capacity: int) -> Tensor:
    """`Folded.decode`, computed by the kernels for many rows."""
    steps = ManySteps(model, len(tokens))
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]
        angles = steps.angles(positions)
        h, x = steps.advance(model.embed(tokens), None, model.dtype)
        for layer, cache in zip(model.layers, caches, strict=True):
            assert isinstance(layer, Layer)
            qkv = steps.product(x, layer.W_qkv, layer.W_qkv_scale)
            out = steps.attention(qkv, layer, cache, angles, positions, capacity)
            update_a = steps.product(out, layer.W_p, layer.W_p_scale), layer.keep_a, layer.add_a
            h, x = steps.advance(h, update_a, model.dtype)
            y = steps.product(x, layer.W_uz, layer.W_uz_scale, swiglu=True)
            update_m = steps.product(y, layer.W_d, layer.W_d_scale), layer.keep_m, layer.add_m
            h, x = steps.advance(h, update_m, model.dtype)
        if model.W_h_scale is not None:
            return steps.product(x, model.W_h, model.W_h_scale, whole=True)
        return F.linear(x, model.W_h).to(model.wide)
