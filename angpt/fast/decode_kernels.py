"""A decode step of a few rows on a GPU: five kernels per layer, each limited by the bandwidth of reading its matrix.

At one row the products are reductions. What lies between them (norms, residual update, rotation, softmax) is so small
that every program recomputes it, which is cheaper than a separate kernel.

From Hopper on, kernels overlap by programmatic dependent launch (OVERLAP): a kernel starts while the previous one runs,
prefetches what no overlapping kernel has written in this step (matrix, vectors, angles, positions, slots of earlier
tokens), and then waits for the previous kernel, and thereby for all before it. Angles and positions are written before
the embedding, a kernel of PyTorch, which does not overlap and runs before the first of these.

| kernel | reads | computes |
|---|---|---|
| `_read` | W_qkv | the residual update of the previous layer, the input norm, q, k, v |
| `_attend` | keys, values | rotation and norm of q and k, the new slot of the cache, attention to one split |
| `_project` | W_p | attention combined over the splits, the output map |
| `_read` | W_uz | the residual update, the input norm, u · SiLU(z) |
| `_down` | W_d | the MLP's output |

Before the first layer `_rotation` computes the angles, and after the last `_down` the head. 8-bit matrices are read as
they are; the scales of their rows multiply the products (SCALED).

`Folded.decode` is the plain form.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from angpt.fast import tuning
from angpt.fast.attention_kernels import NEVER, _attend, _await, _combined, _rotation, _summed
from angpt.models.folded import Cache, Folded, Layer
from angpt.models.primitives import EPS

READ_ROWS, DOWN_ROWS = tuning.DECODE_READ_ROWS, tuning.DECODE_DOWN_ROWS
TILE, MAX_SPLITS = tuning.DECODE_TILE, tuning.DECODE_SPLITS


@triton.jit
def _row_scales(y, scale_ptr, rows, n, SCALED: tl.constexpr):
    """Products (…, rows) times the scales of the rows of their matrix."""
    if SCALED:
        y = y * tl.load(scale_ptr + rows, rows < n, 0.0)
    return y


@triton.jit
def _block_input(
    h_ptr, x_ptr, keep_ptr, add_ptr, row, d, stride,
    UPDATE: tl.constexpr, PARTS: tl.constexpr, LERP: tl.constexpr, OUTPUT_NORM: tl.constexpr,
    UPDATE_NORM: tl.constexpr, INPUT_NORM: tl.constexpr, EPS: tl.constexpr, D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The stream after the pending residual update, and the same normed, the input of a block. What the block before
    has computed is the sum of its PARTS, each `stride` after the other."""
    cols = tl.arange(0, D)
    inside = cols < d
    if UPDATE and LERP:
        keep, add = tl.load(keep_ptr + cols, inside, 0.0), tl.load(add_ptr + cols, inside, 0.0)
    _await(OVERLAP)
    h = tl.load(h_ptr + row * d + cols, inside, 0.0)
    if UPDATE:
        x = _summed(x_ptr + row * d + cols, inside, stride, PARTS)
        if OUTPUT_NORM:
            x = x * tl.rsqrt((tl.sum(x * x, axis=0) + EPS) / d)
        h = keep * h + add * x if LERP else h + x
        if UPDATE_NORM:
            h = h * tl.rsqrt(tl.sum(h * h, axis=0) / d + EPS)
    normed = h
    if INPUT_NORM:
        normed = h * tl.rsqrt(tl.sum(h * h, axis=0) / d + EPS)
    return h, normed


@triton.jit
def _read(
    w_ptr, scale_ptr, h_ptr, x_ptr, keep_ptr, add_ptr, out_ptr, y_ptr, n, d,
    SCALED: tl.constexpr, UPDATE: tl.constexpr, LERP: tl.constexpr, OUTPUT_NORM: tl.constexpr,
    UPDATE_NORM: tl.constexpr, INPUT_NORM: tl.constexpr, SWIGLU: tl.constexpr, EPS: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y = W · input of the block; with SWIGLU, W has 2 n rows, and y = u · SiLU(z). The first program writes the stream
    after the pending residual update."""
    row = tl.program_id(1)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    at = rows.to(tl.int64)[:, None] * d + cols[None, :]
    inside = (rows < n)[:, None] & (cols < d)[None, :]
    w = tl.load(w_ptr + at, inside, 0.0)  # loads while the input is computed
    if SWIGLU:
        w_z = tl.load(w_ptr + n.to(tl.int64) * d + at, inside, 0.0)
    stream, h = _block_input(
        h_ptr, x_ptr, keep_ptr, add_ptr, row, d, 0,
        UPDATE, 1, LERP, OUTPUT_NORM, UPDATE_NORM, INPUT_NORM, EPS, D, OVERLAP,
    )  # fmt: skip
    if UPDATE:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(out_ptr + row * d + cols, stream, cols < d)
    y = _row_scales(tl.sum(w.to(tl.float32) * h[None, :], axis=1), scale_ptr, rows, n, SCALED)
    if SWIGLU:
        z = _row_scales(tl.sum(w_z.to(tl.float32) * h[None, :], axis=1), scale_ptr, n + rows, 2 * n, SCALED)
        y = y * z * tl.sigmoid(z)
    tl.store(y_ptr + row * n + rows, y, rows < n)


@triton.jit
def _advance(
    h_ptr, x_ptr, keep_ptr, add_ptr, out_ptr, y_ptr, d, stride,
    UPDATE: tl.constexpr, PARTS: tl.constexpr, LERP: tl.constexpr, OUTPUT_NORM: tl.constexpr,
    UPDATE_NORM: tl.constexpr, INPUT_NORM: tl.constexpr, EPS: tl.constexpr, D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = stream of a row after the pending residual update; y = input of the next block or of the head."""
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    stream, h = _block_input(
        h_ptr, x_ptr, keep_ptr, add_ptr, row, d, stride,
        UPDATE, PARTS, LERP, OUTPUT_NORM, UPDATE_NORM, INPUT_NORM, EPS, D, OVERLAP,
    )  # fmt: skip
    if UPDATE:
        tl.store(out_ptr + row * d + cols, stream, cols < d)
    tl.store(y_ptr + row * d + cols, h.to(y_ptr.dtype.element_ty), cols < d)


@triton.jit
def _project(
    w_ptr, scale_ptr, acc_ptr, top_ptr, sum_ptr, x_ptr, n, d, heads,
    SCALED: tl.constexpr, HEADS: tl.constexpr, D_HEAD: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """x = W · attention."""
    row = tl.program_id(1)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HEADS * D_HEAD)
    inside = (rows < n)[:, None] & (cols < d)[None, :]
    w = tl.load(w_ptr + rows.to(tl.int64)[:, None] * d + cols[None, :], inside, 0.0)
    _await(OVERLAP)
    out = _combined(acc_ptr, top_ptr, sum_ptr, row, d, heads, HEADS, D_HEAD, SPLITS)
    x = _row_scales(tl.sum(w.to(tl.float32) * out[None, :], axis=1), scale_ptr, rows, n, SCALED)
    tl.store(x_ptr + row * n + rows, x, rows < n)


@triton.jit
def _down(
    w_ptr, scale_ptr, y_ptr, x_ptr, n, width, batch,
    SCALED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x = W · y. Programs with the same rows of W are neighbours: with several y, the cache serves all but one."""
    row, part = tl.program_id(0) % batch, tl.program_id(0) // batch
    rows, cols = part * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (rows < n)[:, None] & (cols < width)[None, :]
    w = tl.load(w_ptr + rows.to(tl.int64)[:, None] * width + cols[None, :], inside, 0.0)
    _await(OVERLAP)
    y = tl.load(y_ptr + row * width + cols, cols < width, 0.0)
    x = _row_scales(tl.sum(w.to(tl.float32) * y[None, :], axis=1), scale_ptr, rows, n, SCALED)
    tl.store(x_ptr + row * n + rows, x, rows < n)


def overlaps(device: torch.device) -> bool:
    """True if kernels can overlap by programmatic dependent launch: from Hopper and Triton 3.4 on."""
    known = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return known and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def warps(width: int) -> int:
    """Number of warps of a program with eight rows of this width, so that they fit into the registers."""
    return min(16, max(4, width // 256))


def by_head(warps: int, d_head: int) -> int:
    """Number of warps of attention, given that for heads of 64 dimensions: larger heads need more registers."""
    return warps * max(1, d_head // 64)


class HeadsAndSlots(NamedTuple):
    """Arguments that all kernels of attention have."""

    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    batch: int
    shown: int
    """Slots of the cache that are read."""


class Steps:
    """The kernels of one model, called layer by layer."""

    update_warps = 4
    """Warps of `_advance`; the default of Triton."""

    def __init__(self, model: Folded) -> None:
        cfg, design = model.cfg, model.design
        self.d, self.heads = cfg.d_model, cfg.n_heads
        self.padded = triton.next_power_of_2(cfg.d_model)
        self.constants = {
            "LERP": design.weighted_update,
            "OUTPUT_NORM": design.output_norm,
            "UPDATE_NORM": design.update_norm,
            "INPUT_NORM": design.input == "rms",
            "EPS": EPS,
            "D": self.padded,
        }
        self.half, self.rotary_base = cfg.rotary_dim // 2, cfg.rotary_base
        self.head = {"D_HEAD": cfg.d_head, "HALF": self.half, "EPS": EPS}
        self.qk_norm = design.qk != "plain"
        self.warps = warps(self.padded)
        overlap = overlaps(model.device)
        self.launch = {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}
        self.scaled = {"SCALED": model.weights != "full"}

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles of positions, each (B, r/2)."""
        cos, sin = (torch.empty(len(positions), self.half, device=positions.device) for _ in range(2))
        if self.half:
            step, pairs = -math.log2(self.rotary_base) / self.half, triton.next_power_of_2(self.half)
            _rotation[(len(positions),)](positions, cos, sin, STEP=step, HALF=self.half, PAIRS=pairs, num_warps=1)
        return cos, sin

    def read(self, weight: Tensor, scale: Any, h: Tensor, pending: Any, swiglu: bool) -> tuple[Tensor, Tensor]:
        """The product of a matrix with the input of its block, and the stream after the pending update."""
        n = weight.shape[0] // 2 if swiglu else weight.shape[0]
        y = torch.empty(len(h), n, device=h.device)
        x, keep, add = (h, h, h) if pending is None else pending
        out = h if pending is None else torch.empty_like(h)
        _read[triton.cdiv(n, READ_ROWS), len(h)](
            weight, scale, h, x, h if keep is None else keep, h if add is None else add, out, y, n, self.d,
            UPDATE=pending is not None, SWIGLU=swiglu, ROWS=READ_ROWS, num_warps=self.warps,
            **self.constants, **self.scaled, **self.launch,
        )  # fmt: skip
        return y, out

    def splits(self, shown: int, most: int = MAX_SPLITS) -> int:
        """Number of splits of the slots of a head, a power of two."""
        return 1 << max(0, min(most, MAX_SPLITS, triton.next_power_of_2(triton.cdiv(shown, TILE))).bit_length() - 1)

    def heads_and_slots(
        self, qkv: Tensor, layer: Layer, cache: Cache, angles: Any, positions: Tensor, capacity: int
    ) -> HeadsAndSlots:
        """Arguments of the attention kernels, from q, k and v in parts."""
        gain = qkv if layer.gain is None else layer.gain
        shown, strides = cache.keys.shape[2], cache.keys.stride()[:2]
        constants = self.qk(layer) | {"PARTS": len(qkv), "NEVER": NEVER} | self.launch
        tensors, sizes = (qkv, *angles, gain, positions, *cache), (self.heads, capacity, shown, *strides)
        return HeadsAndSlots(tensors, sizes, constants, len(positions), shown)

    def attend(self, call: HeadsAndSlots, splits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Attention to each split of the slots, with the maximum and the sum of its exponentials."""
        batch, device = call.batch, call.tensors[0].device
        acc = torch.empty(batch, splits, self.d, device=device)
        top, total = (torch.empty(batch, splits, self.heads, device=device) for _ in range(2))
        _attend[self.heads, splits, batch](
            *call.tensors, acc, top, total, *call.sizes, PER_SPLIT=triton.cdiv(call.shown, splits), TILE=TILE,
            num_warps=by_head(tuning.DECODE_ATTEND_WARPS, self.d // self.heads), **call.constants,
        )  # fmt: skip
        return acc, top, total

    def qk(self, layer: Layer) -> dict[str, Any]:
        """What becomes of q and k, as constants of kernels."""
        return self.head | {"QK_NORM": self.qk_norm, "GAINS": 0 if layer.gain is None else layer.gain.numel()}

    def project(self, weight: Tensor, scale: Any, parts: Any) -> Tensor:
        """The product of a matrix with the output of attention, given the parts of `attend`."""
        batch, splits, _ = parts[0].shape
        x = torch.empty(batch, self.d, device=weight.device)
        _project[triton.cdiv(self.d, READ_ROWS), batch](
            weight, scale, *parts, x, self.d, self.d, self.heads,
            HEADS=triton.next_power_of_2(self.heads), D_HEAD=self.head["D_HEAD"], SPLITS=splits, ROWS=READ_ROWS,
            num_warps=self.warps,
            **self.scaled, **self.launch,
        )  # fmt: skip
        return x

    def down(self, weight: Tensor, scale: Any, y: Tensor, rows: int) -> Tensor:
        """The product of a matrix with y; each program computes some rows of it."""
        n, width = weight.shape
        x, padded = torch.empty(len(y), n, device=y.device), triton.next_power_of_2(width)
        _down[(len(y) * triton.cdiv(n, rows),)](  # in one dimension: others end at 65,535 programs
            weight, scale, y, x, n, width, len(y), ROWS=rows, WIDTH=padded, num_warps=warps(padded * rows // 16),
            **self.scaled, **self.launch,
        )  # fmt: skip
        return x

    def advance(self, h: Tensor, pending: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The stream (…, d) after the pending update, and the input of the next block or of the head in a dtype."""
        (x, keep, add), out = pending or (h, None, None), h if pending is None else torch.empty_like(h)
        y = torch.empty(h.shape, dtype=dtype, device=h.device)
        _advance[(h.numel() // self.d,)](
            h, x, h if keep is None else keep, h if add is None else add, out, y, self.d, h.numel(),
            UPDATE=pending is not None, PARTS=x.numel() // h.numel(), num_warps=self.update_warps,
            **self.constants, **self.launch,
        )  # fmt: skip
        return out, y


def decode(model: Folded, tokens: Tensor, positions: Tensor, caches: Sequence[Cache], capacity: int) -> Tensor:
    """`Folded.decode`, computed by the kernels."""
    steps = Steps(model)
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]
        angles = steps.angles(positions)
        h, pending = model.embed(tokens), None
        for layer, cache in zip(model.layers, caches, strict=True):
            assert isinstance(layer, Layer)
            qkv, h = steps.read(layer.W_qkv, layer.W_qkv_scale, h, pending, swiglu=False)
            call = steps.heads_and_slots(qkv[None], layer, cache, angles, positions, capacity)
            parts = steps.attend(call, steps.splits(call.shown))
            update_a = steps.project(layer.W_p, layer.W_p_scale, parts), layer.keep_a, layer.add_a
            y, h = steps.read(layer.W_uz, layer.W_uz_scale, h, update_a, swiglu=True)
            pending = steps.down(layer.W_d, layer.W_d_scale, y, DOWN_ROWS), layer.keep_m, layer.add_m
        _, seen = steps.advance(h, pending, torch.float32)
        return steps.down(model.W_h, model.W_h_scale, seen, READ_ROWS)
