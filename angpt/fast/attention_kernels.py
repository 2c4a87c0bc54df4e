"""Attention of a decode step on a GPU: every row has one new token, which attends to the slots of its cache.

Where heads and rows alone do not occupy the GPU, the slots of a head are split over programs (`_attend`), and
`_combined` puts the splits together. Otherwise a program has all slots of a head (`_attend_whole`). Both first rotate
and norm q and k, and write the new slot.

`_await` and `_summed` serve the other kernels of a step, too.
"""

import triton
import triton.language as tl

NEVER = -1e30
"""Score of a masked slot: below all others, with finite differences."""


@triton.jit
def _await(OVERLAP: tl.constexpr):
    """Let the next kernel start, and wait until the previous one has ended."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _summed(ptr, inside, stride, PARTS: tl.constexpr):
    """The sum of values whose parts are `stride` apart, in fp32."""
    x = tl.load(ptr, inside, 0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(ptr + part * stride, inside, 0.0)
    return x


@triton.jit
def _rotation(positions_ptr, cos_ptr, sin_ptr, STEP: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Cosines and sines of the rotary angles of one position, position · 2^(pair · STEP), computed in float64."""
    row, pair = tl.program_id(0), tl.arange(0, PAIRS)
    frequency = tl.exp2(pair.to(tl.float64) * tl.full((PAIRS,), STEP, tl.float64))
    angle = tl.load(positions_ptr + row).to(tl.float64) * frequency
    tl.store(cos_ptr + row * HALF + pair, tl.cos(angle).to(tl.float32), pair < HALF)
    tl.store(sin_ptr + row * HALF + pair, tl.sin(angle).to(tl.float32), pair < HALF)


@triton.jit
def _rotated(
    ptr, dims, partner, cos, sin, stride,
    PARTS: tl.constexpr, QK_NORM: tl.constexpr, EPS: tl.constexpr, D_HEAD: tl.constexpr,
):  # fmt: skip
    """A head of q or k, rotated and normed."""
    inside = dims < D_HEAD
    x = _summed(ptr + dims, inside, stride, PARTS) * cos + _summed(ptr + partner, inside, stride, PARTS) * sin
    if QK_NORM:
        x = x * tl.rsqrt((tl.sum(x * x, axis=0) + EPS) / D_HEAD)
    return x


@triton.jit
def _turns(cos_ptr, sin_ptr, row, dims, HALF: tl.constexpr):
    """For each dimension of a head: the other one of its pair, and what both are multiplied by in a rotation."""
    partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    angle, rotated = row * HALF + tl.where(dims < HALF, dims, dims - HALF), dims < 2 * HALF
    cos = tl.load(cos_ptr + angle, rotated, 1.0)
    sin = tl.load(sin_ptr + angle, rotated, 0.0) * tl.where(dims < HALF, -1.0, 1.0)
    return partner, cos, sin


@triton.jit
def _slots(k_ptr, v_ptr, first, last, slot, dims, D_HEAD: tl.constexpr, TILE: tl.constexpr):
    """Keys and values of a tile of slots, and which of them count: not those from `last` on, nor `slot`, which is being
    written. The others are zero."""
    slots = first + tl.arange(0, TILE)
    at, seen = slots[:, None] * D_HEAD + dims[None, :], (slots < last) & (slots != slot)
    return tl.load(k_ptr + at, seen[:, None], 0.0), tl.load(v_ptr + at, seen[:, None], 0.0), seen


@triton.jit
def _new_token(
    qkv_ptr, gain_ptr, k_ptr, v_ptr, row, head, d, dims, partner, cos, sin,
    PARTS: tl.constexpr, QK_NORM: tl.constexpr, GAINS: tl.constexpr, EPS: tl.constexpr, D_HEAD: tl.constexpr,
):  # fmt: skip
    """q, k and v of one head of the new token of a row, from sums of PARTS; k and v as the cache stores them."""
    start, stride = qkv_ptr + row * 3 * d + head * D_HEAD, tl.num_programs(2) * 3 * d
    q = _rotated(start, dims, partner, cos, sin, stride, PARTS, QK_NORM, EPS, D_HEAD)
    k = _rotated(start + d, dims, partner, cos, sin, stride, PARTS, QK_NORM, EPS, D_HEAD).to(k_ptr.dtype.element_ty)
    v = _summed(start + 2 * d + dims, dims < D_HEAD, stride, PARTS).to(v_ptr.dtype.element_ty)
    if GAINS == 1:
        q = q * tl.load(gain_ptr)
    elif GAINS > 1:
        q = q * tl.load(gain_ptr + head * D_HEAD + dims)
    return q, k, v


@triton.jit
def _attend(
    qkv_ptr, cos_ptr, sin_ptr, gain_ptr, positions_ptr, k_ptr, v_ptr, acc_ptr, top_ptr, sum_ptr,
    heads, capacity, shown, stride_row, stride_head,
    PARTS: tl.constexpr, PER_SPLIT: tl.constexpr, QK_NORM: tl.constexpr, GAINS: tl.constexpr, EPS: tl.constexpr,
    HALF: tl.constexpr, D_HEAD: tl.constexpr, TILE: tl.constexpr, NEVER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of one head of one row to a split of the slots. All splits skip the slot of the new token, which
    another program may be writing; the first split takes the token from registers."""
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, dims = heads * D_HEAD, tl.arange(0, D_HEAD)
    partner, cos, sin = _turns(cos_ptr, sin_ptr, row, dims, HALF)
    position = tl.load(positions_ptr + row).to(tl.int32)
    slot = position % capacity
    cache = row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    first = split * PER_SPLIT
    last = tl.minimum(tl.minimum(first + PER_SPLIT, position), shown)
    keys, values, seen = _slots(k_ptr + cache, v_ptr + cache, first, last, slot, dims, D_HEAD, TILE)
    _await(OVERLAP)
    q, k, v = _new_token(
        qkv_ptr, gain_ptr, k_ptr, v_ptr, row, head, d, dims, partner, cos, sin, PARTS, QK_NORM, GAINS, EPS, D_HEAD
    )
    if split == 0:
        tl.store(k_ptr + cache + slot * D_HEAD + dims, k)
        tl.store(v_ptr + cache + slot * D_HEAD + dims, v)
    score = tl.sum(q * k.to(tl.float32), axis=0)
    total = (split == 0).to(tl.float32)
    top = score * total + NEVER * (1 - total)
    acc = v.to(tl.float32) * total
    for tile in range(first, last, TILE):
        scores = tl.where(seen, tl.sum(keys.to(tl.float32) * q[None, :], axis=1), NEVER)
        higher = tl.maximum(top, tl.max(scores, axis=0))
        weights = tl.where(seen, tl.exp(scores - higher), 0.0)
        shrink = tl.exp(top - higher)
        acc = acc * shrink + tl.sum(values.to(tl.float32) * weights[:, None], axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        top = higher
        keys, values, seen = _slots(k_ptr + cache, v_ptr + cache, tile + TILE, last, slot, dims, D_HEAD, TILE)
    part = row * tl.num_programs(1) + split
    tl.store(acc_ptr + part * d + head * D_HEAD + dims, acc)
    tl.store(top_ptr + part * heads + head, top)
    tl.store(sum_ptr + part * heads + head, total)


@triton.jit
def _more_slots(q, keys, values, seen, acc, top, total, NEVER: tl.constexpr):
    """Sums, largest scores and sums of exponentials of the rows of q, with a tile of slots added."""
    scores = tl.where(seen[None, :], tl.dot(q, tl.trans(keys)), NEVER)
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
    shrink = tl.exp(top - higher)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
    return acc, higher, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def _attend_whole(
    qkv_ptr, cos_ptr, sin_ptr, gain_ptr, positions_ptr, k_ptr, v_ptr, out_ptr,
    heads, capacity, shown, stride_row, stride_head,
    PARTS: tl.constexpr, QK_NORM: tl.constexpr, GAINS: tl.constexpr, EPS: tl.constexpr, HALF: tl.constexpr,
    D_HEAD: tl.constexpr, TILE: tl.constexpr, NEVER: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of one head of one row to all slots, on tensor cores. They multiply at least 16 rows: all have the same
    q, and the first is the result. The first tile of slots is in registers before the wait, the others come through
    shared memory, STAGES − 1 of them at a time."""
    head, row = tl.program_id(0), tl.program_id(2)
    d, dims, same = heads * D_HEAD, tl.arange(0, D_HEAD), tl.arange(0, 16)
    partner, cos, sin = _turns(cos_ptr, sin_ptr, row, dims, HALF)
    position = tl.load(positions_ptr + row).to(tl.int32)
    slot, last = position % capacity, tl.minimum(position, shown)
    cache = row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    keys, values, seen = _slots(k_ptr + cache, v_ptr + cache, 0, last, slot, dims, D_HEAD, TILE)
    _await(OVERLAP)
    q, k, v = _new_token(
        qkv_ptr, gain_ptr, k_ptr, v_ptr, row, head, d, dims, partner, cos, sin, PARTS, QK_NORM, GAINS, EPS, D_HEAD
    )
    tl.store(k_ptr + cache + slot * D_HEAD + dims, k)
    tl.store(v_ptr + cache + slot * D_HEAD + dims, v)
    q = q.to(k.dtype)
    top = tl.zeros((16,), tl.float32) + tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=0)
    total = tl.full((16,), 1.0, tl.float32)
    acc = tl.broadcast_to(v.to(tl.float32)[None, :], (16, D_HEAD))
    q = tl.broadcast_to(q[None, :], (16, D_HEAD))
    acc, top, total = _more_slots(q, keys, values, seen, acc, top, total, NEVER)
    for tile in tl.range(TILE, last, TILE, num_stages=STAGES):
        keys, values, seen = _slots(k_ptr + cache, v_ptr + cache, tile, last, slot, dims, D_HEAD, TILE)
        acc, top, total = _more_slots(q, keys, values, seen, acc, top, total, NEVER)
    out = tl.sum(tl.where((same == 0)[:, None], acc / total[:, None], 0.0), axis=0)
    tl.store(out_ptr + row * d + head * D_HEAD + dims, out.to(out_ptr.dtype.element_ty))


@triton.jit
def _combined(
    acc_ptr, top_ptr, sum_ptr, row, d, heads, HEADS: tl.constexpr, D_HEAD: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Attention of a row, combined over the splits by their sums of exponentials."""
    head, dims = tl.arange(0, HEADS), tl.arange(0, D_HEAD)
    at, known, part = head[:, None] * D_HEAD + dims[None, :], head < heads, row * SPLITS
    top = tl.load(top_ptr + part * heads + head, known, 0.0)
    for split in tl.static_range(1, SPLITS):
        top = tl.maximum(top, tl.load(top_ptr + (part + split) * heads + head, known, 0.0))
    out, total = tl.zeros((HEADS, D_HEAD), tl.float32), tl.zeros((HEADS,), tl.float32)
    for split in tl.static_range(0, SPLITS):
        weight = tl.exp(tl.load(top_ptr + (part + split) * heads + head, known, 0.0) - top)
        out += weight[:, None] * tl.load(acc_ptr + (part + split) * d + at, known[:, None], 0.0)
        total += weight * tl.load(sum_ptr + (part + split) * heads + head, known, 1.0)
    return tl.reshape(out / total[:, None], (HEADS * D_HEAD,))


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
