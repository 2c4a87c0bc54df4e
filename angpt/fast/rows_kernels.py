"""A decode step of many rows on a GPU: seven kernels per layer, whose products run on tensor cores.

With many rows the input of a block is too large for every program of a product to recompute it, as decode_kernels.py
does for a few. So the residual update, which ends a block, is a kernel of its own; it also norms the input of the next
block and rounds it. It sums what several programs have computed for the same rows of a matrix (split over its columns),
so that a product has enough programs to use the whole bandwidth.

| kernel | reads | computes |
|---|---|---|
| `_product` | W_qkv | q, k, v, in parts |
| `_attend_whole` | keys, values | their sum, rotation and norm of q and k, the new slot of the cache, attention |
| `_product` | W_p | the output map, in parts |
| `_advance` | | their sum, the residual update, the input of the MLP |
| `_product` | W_uz | u · SiLU(z) |
| `_product` | W_d | the MLP's output, in parts |
| `_advance` | | their sum, the residual update, the input of the next layer or of the head |

If there are so few rows that attention is split over the slots, too, it is `_attend`, and `_combine` puts its parts
together. Kernels overlap as in decode_kernels.py: before a product waits for its input, it loads the first columns of
its part of the matrix to registers (HELD), and if there are more, has the L2 cache load all columns of the part.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from angpt.fast import tuning
from angpt.fast.attention_kernels import _attend_whole, _await, _combine
from angpt.fast.decode_kernels import Steps, _row_scales, by_head
from angpt.models.folded import Cache, Folded, Layer

LINE_BYTES = 128
"""Bytes that the L2 cache loads at once."""
SHRINK = 256
"""Divisor of the inputs of a matrix in e4m3 before they are converted to fp16, which ends at 65,504, in models whose
weights are not bounded: those with RMSNorm before each block. With bounded weights u · SiLU(z) is so small (rms 1e-4 in
the 0.5B anGPT at the start of training) that fp16 must keep it as it is."""


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
def _added(y, x, w, IN_FP16: tl.constexpr, SHRINK: tl.constexpr):
    """y + x w, with a matrix of 8 bits converted exactly. To bf16 that takes several slow instructions per number of
    e4m3, to fp16 one for two: IN_FP16 computes y + (x / SHRINK) w in fp16."""
    if IN_FP16:
        return tl.dot((x.to(tl.float32) / SHRINK).to(tl.float16), w.to(tl.float16), y)
    return tl.dot(x, w.to(x.dtype), y)


@triton.jit
def _product(
    x_ptr, w_ptr, scale_ptr, y_ptr, batch, n, k,
    SCALED: tl.constexpr, SHRINK: tl.constexpr, SWIGLU: tl.constexpr, HELD: tl.constexpr, DEPTH: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[part] = x Wᵀ over DEPTH columns; with SWIGLU, W has 2 n rows, and y = u · SiLU(z)."""
    part = tl.program_id(1)
    members = tl.program_id(2) * BATCH + tl.arange(0, BATCH)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), part * DEPTH + tl.arange(0, COLS)
    x_at = x_ptr + members[:, None] * k + cols[None, :]
    w_at = w_ptr + rows.to(tl.int64)[None, :] * k + cols[:, None]
    z_at = w_at + n.to(tl.int64) * k
    known, wanted = (members < batch)[:, None], (rows < n)[None, :]
    inside = wanted & (cols < k)[:, None]
    if HELD:
        w = tl.load(w_at, inside, 0.0)
        if SWIGLU:
            w_z = tl.load(z_at, inside, 0.0)
    if OVERLAP and DEPTH > HELD * COLS:
        _load_to_cache(w_ptr, rows, part * DEPTH, n, k, DEPTH, LINE, LINES)
        if SWIGLU:
            _load_to_cache(w_ptr + n.to(tl.int64) * k, rows, part * DEPTH, n, k, DEPTH, LINE, LINES)
    _await(OVERLAP)
    IN_FP16: tl.constexpr = w_ptr.dtype.element_ty == tl.float8e4nv and x_ptr.dtype.element_ty == tl.bfloat16
    y = tl.zeros((BATCH, ROWS), tl.float32)
    z = tl.zeros((BATCH, ROWS), tl.float32)
    if HELD:
        x = tl.load(x_at, known & (cols < k)[None, :], 0.0)
        y = _added(y, x, w, IN_FP16, SHRINK)
        if SWIGLU:
            z = _added(z, x, w_z, IN_FP16, SHRINK)
    for start in range(HELD * COLS, DEPTH, COLS):
        x = tl.load(x_at + start, known & (cols + start < k)[None, :], 0.0)
        inside = wanted & (cols + start < k)[:, None]
        y = _added(y, x, tl.load(w_at + start, inside, 0.0), IN_FP16, SHRINK)
        if SWIGLU:
            z = _added(z, x, tl.load(z_at + start, inside, 0.0), IN_FP16, SHRINK)
    if IN_FP16:
        y, z = y * SHRINK, z * SHRINK
    y = _row_scales(y, scale_ptr, rows, n, SCALED)
    if SWIGLU:
        z = _row_scales(z, scale_ptr, n + rows, 2 * n, SCALED)
        y = y * z * tl.sigmoid(z)
    at = (part * batch + members)[:, None].to(tl.int64) * n + rows[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), known & wanted)


def tile_rows(batch: int) -> int:
    """Rows of the batch in a tile of a product: a power of two for which there are tiles of the matrix."""
    return min(max(tuning.DECODE_TILES), max(min(tuning.DECODE_TILES), triton.next_power_of_2(batch)))


def parts_of(n: int, k: int, rows: int) -> int:
    """Number of parts into which the columns of an (n, k) matrix are divided, if programs have this many rows of it."""
    wanted = min(tuning.DECODE_PROGRAMS // triton.cdiv(n, rows), k // tuning.DECODE_LEAST_DEPTH)
    return 1 << max(0, wanted.bit_length() - 1)


def held(tile: int, depth: int, cols: int, swiglu: bool) -> int:
    """Number of iterations of a product whose columns are loaded before it waits for its input: 0 or 1."""
    return int(depth == cols or (swiglu and tile <= tuning.DECODE_HELD_ROWS))


def pipeline(shown: int, d_head: int) -> dict[str, int]:
    """Slots in a tile, pipeline depth and warps of `_attend_whole`. Tiles of larger heads have fewer slots, because
    shared memory holds several of them."""
    tile, warps, stages = tuning.DECODE_WHOLE_SHORT if shown <= tuning.DECODE_SHORT else tuning.DECODE_WHOLE
    return {"TILE": max(16, tile // max(1, d_head // 64)), "STAGES": stages, "num_warps": by_head(warps, d_head)}


class ManySteps(Steps):
    """The kernels of one model for many rows, called layer by layer."""

    update_warps = tuning.DECODE_ADVANCE_WARPS

    def __init__(self, model: Folded, batch: int) -> None:
        super().__init__(model)
        self.batch, self.dtype = batch, model.dtype
        self.shrink = SHRINK if model.design.input == "rms" else 1

    def product(self, x: Tensor, weight: Tensor, scale: Any, swiglu: bool = False, whole: bool = False) -> Tensor:
        """The product of a matrix with the input x of its block, in parts (parts, B, n) unless `whole` or `swiglu`."""
        n, k = weight.shape[0] // 2 if swiglu else weight.shape[0], weight.shape[1]
        tile = tile_rows(self.batch)
        rows, cols, warps, stages = (tuning.DECODE_SWIGLU_TILES if swiglu else tuning.DECODE_TILES)[tile]
        parts = 1 if swiglu or whole else parts_of(n, k, rows)
        y = torch.empty(parts, self.batch, n, dtype=self.dtype if swiglu else torch.float32, device=x.device)
        depth, line = triton.cdiv(triton.cdiv(k, parts), cols) * cols, LINE_BYTES // weight.element_size()
        _product[triton.cdiv(n, rows), parts, triton.cdiv(self.batch, tile)](
            x, weight, scale, y, self.batch, n, k,
            SHRINK=self.shrink, SWIGLU=swiglu, HELD=held(tile, depth, cols, swiglu), DEPTH=depth, LINE=line,
            LINES=triton.next_power_of_2(triton.cdiv(depth, line)), BATCH=tile, ROWS=rows, COLS=cols,
            num_warps=warps, num_stages=stages, **self.scaled, **self.launch,
        )  # fmt: skip
        return y[0] if swiglu or whole else y

    def attention(
        self, qkv: Tensor, layer: Layer, cache: Cache, angles: Any, positions: Tensor, capacity: int
    ) -> Tensor:
        """Attention of all rows to their slots, given q, k and v in parts."""
        call = self.heads_and_slots(qkv, layer, cache, angles, positions, capacity)
        splits = self.splits(call.shown, tuning.DECODE_PROGRAMS // (self.heads * self.batch))
        out = torch.empty(self.batch, self.d, dtype=self.dtype, device=qkv.device)
        if splits > 1:
            _combine[(self.batch,)](
                *self.attend(call, splits), out, self.d, self.heads, HEADS=triton.next_power_of_2(self.heads),
                D_HEAD=self.head["D_HEAD"], SPLITS=splits, **self.launch,
            )  # fmt: skip
            return out
        _attend_whole[self.heads, 1, self.batch](
            *call.tensors, out, *call.sizes, **pipeline(call.shown, self.d // self.heads), **call.constants
        )
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
