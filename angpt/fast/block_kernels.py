"""Triton kernels of a block, for operations where compiled PyTorch moves two to five times the necessary bytes.

`models.primitives` has the plain forms. docs/performance.md says what each kernel saves.

All process the rows from last to first: the preceding matrix product wrote the last rows last, so they may still be in
the L2 cache, and the next product starts with the first rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from angpt.fast import tuning
from angpt.models.primitives import EPS
from angpt.models.primitives import scaled_rms as plain_scaled_rms

# Numbers are compile-time constants of the kernels: Inductor would pass them as float64 and promote the arithmetic.
BLOCK, TILE, WARPS = tuning.POINTWISE_BLOCK, tuning.UPDATE_TILE, tuning.UPDATE_WARPS
TILE_BACK, WARPS_BACK = tuning.UPDATE_BACKWARD_TILE, tuning.UPDATE_BACKWARD_WARPS
STAGES, PROGRAMS = tuning.UPDATE_BACKWARD_STAGES, tuning.UPDATE_BACKWARD_PROGRAMS


@triton.jit
def _inverse_root(squares, EPS: tl.constexpr):
    """primitives.inverse_root."""
    return tl.where(squares > 0, tl.rsqrt(squares + EPS), 1.0)


# u · SiLU(z) · factor, u and z being the halves of one tensor.


@triton.jit
def _place(width, BLOCK: tl.constexpr):
    """Row and columns of a program; consecutive programs share a row."""
    blocks = tl.cdiv(width, BLOCK)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    return (program // blocks).to(tl.int64), program % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _swiglu(uz_ptr, h_ptr, width, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    row, col = _place(width, BLOCK)
    inside = col < width
    u = tl.load(uz_ptr + row * 2 * width + col, inside, 0.0).to(tl.float32)
    z = tl.load(uz_ptr + row * 2 * width + width + col, inside, 0.0).to(tl.float32)
    tl.store(h_ptr + row * width + col, u * z * tl.sigmoid(z) * FACTOR, inside)


@triton.jit
def _swiglu_backward(uz_ptr, dh_ptr, duz_ptr, width, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    row, col = _place(width, BLOCK)
    inside = col < width
    u = tl.load(uz_ptr + row * 2 * width + col, inside, 0.0).to(tl.float32)
    z = tl.load(uz_ptr + row * 2 * width + width + col, inside, 0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row * width + col, inside, 0.0).to(tl.float32) * FACTOR
    s = tl.sigmoid(z)
    tl.store(duz_ptr + row * 2 * width + col, dh * z * s, inside)
    tl.store(duz_ptr + row * 2 * width + width + col, dh * u * s * (1 + z * (1 - s)), inside)


@triton_op("angpt::swiglu", mutates_args={})
def swiglu(uz: Tensor, factor: float) -> Tensor:
    """primitives.swiglu on (…, 2 f), contiguous."""
    width = uz.shape[-1] // 2
    h = torch.empty(*uz.shape[:-1], width, dtype=uz.dtype, device=uz.device)
    grid = (uz.numel() // (2 * width) * triton.cdiv(width, BLOCK),)
    wrap_triton(_swiglu)[grid](uz, h, width, FACTOR=factor, BLOCK=BLOCK)
    return h


@triton_op("angpt::swiglu_backward", mutates_args={})
def swiglu_backward(uz: Tensor, dh: Tensor, factor: float) -> Tensor:
    width = uz.shape[-1] // 2
    duz = torch.empty_like(uz)
    grid = (uz.numel() // (2 * width) * triton.cdiv(width, BLOCK),)
    wrap_triton(_swiglu_backward)[grid](uz, dh, duz, width, FACTOR=factor, BLOCK=BLOCK)
    return duz


def _save_swiglu(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


swiglu.register_autograd(
    lambda ctx, dh: (swiglu_backward(ctx.saved_tensors[0], dh.contiguous(), ctx.factor), None),
    setup_context=_save_swiglu,
)


# The residual update a · h + b · norm(x) with a = (1−α) ν and b = α ν, or the norm of that.


@triton.jit
def _coefficients(alpha_ptr, cols, inside, NU: tl.constexpr, TIMES: tl.constexpr):
    """a and b, and their derivatives by α."""
    alpha = tl.load(alpha_ptr + cols, inside, 0.0)
    nu = alpha * 0 + TIMES
    slope = alpha * 0
    if NU:
        nu = tl.rsqrt(alpha * alpha + (1 - alpha) * (1 - alpha))
        slope = (1 - 2 * alpha) * nu * nu * nu * TIMES
        nu *= TIMES
    return (1 - alpha) * nu, alpha * nu, (1 - alpha) * slope - nu, alpha * slope + nu


@triton.jit
def _update(
    h_ptr, x_ptr, alpha_ptr, y_ptr, n_rows, width,
    NU: tl.constexpr, TIMES: tl.constexpr, NORMED: tl.constexpr, EPS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    at, inside = rows * width + cols, (rows < n_rows) & (cols < width)
    h = tl.load(h_ptr + at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)  # keep y in the cache instead
    x = tl.load(x_ptr + at, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
    a, b, _, _ = _coefficients(alpha_ptr, cols, cols < width, NU, TIMES)
    y = a * h + b * x * _inverse_root(tl.sum(x * x, axis=1, keep_dims=True), EPS)
    if NORMED:
        y *= _inverse_root(tl.sum(y * y, axis=1, keep_dims=True), EPS)
    tl.store(y_ptr + at, y, inside)


@triton.jit
def _update_backward(
    h_ptr, x_ptr, alpha_ptr, dy_ptr, dh_ptr, dx_ptr, terms_ptr, n_rows, width,
    NU: tl.constexpr, TIMES: tl.constexpr, NORMED: tl.constexpr, EPS: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, COLS)[None, :]
    a, b, slope_a, slope_b = _coefficients(alpha_ptr, cols, cols < width, NU, TIMES)
    along_h = tl.zeros(
        (ROWS, COLS), tl.float32
    )  # summed over rows once, at the end, because that synchronises the warps
    along_x = tl.zeros((ROWS, COLS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (tl.cdiv(n_rows, ROWS) - 1 - tile) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        at, inside = rows * width + cols, (rows < n_rows) & (cols < width)
        h = tl.load(h_ptr + at, inside, 0.0).to(tl.float32)
        x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, inside, 0.0).to(tl.float32)
        inverse = _inverse_root(tl.sum(x * x, axis=1, keep_dims=True), EPS)
        unit = x * inverse
        if NORMED:
            y = a * h + b * unit
            inverse_y = _inverse_root(tl.sum(y * y, axis=1, keep_dims=True), EPS)
            y *= inverse_y
            dy = (dy - y * tl.sum(y * dy, axis=1, keep_dims=True)) * inverse_y
        tl.store(dh_ptr + at, a * dy, inside)
        along_h += dy * h
        along_x += dy * unit
        d_unit = b * dy
        parallel = tl.sum(x * d_unit, axis=1, keep_dims=True) * inverse  # x, not unit: does not depend on the other sum
        tl.store(dx_ptr + at, (d_unit - unit * parallel) * inverse, inside)
    terms = tl.sum(along_h, axis=0, keep_dims=True) * slope_a + tl.sum(along_x, axis=0, keep_dims=True) * slope_b
    tl.store(terms_ptr + tl.program_id(0) * width + cols, terms, cols < width)


def _tile(width: int, tile: int, warps: int) -> dict[str, int]:
    cols = triton.next_power_of_2(width)
    return {"ROWS": max(1, tile // cols), "COLS": cols, "num_warps": min(16, warps * max(1, cols // tile))}


def _tile_back(width: int) -> dict[str, int]:
    tile = _tile(width, TILE_BACK, WARPS_BACK)
    return tile | {"STAGES": STAGES if tile["COLS"] <= 4 * TILE_BACK else 1}


@triton_op("angpt::update", mutates_args={})
def update(h: Tensor, x: Tensor, alpha: Tensor, nu: bool, times: float, normed: bool) -> Tensor:
    """primitives.residual_update on (…, d), contiguous."""
    width, y, tile = h.shape[-1], torch.empty_like(h), _tile(h.shape[-1], TILE, WARPS)
    n = h.numel() // width
    wrap_triton(_update)[(triton.cdiv(n, tile["ROWS"]),)](
        h, x, alpha, y, n, width, NU=nu, TIMES=times, NORMED=normed, EPS=EPS, **tile
    )
    return y


@triton_op("angpt::update_backward", mutates_args={})
def update_backward(
    h: Tensor, x: Tensor, alpha: Tensor, dy: Tensor, nu: bool, times: float, normed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, x and α; that of α as one term per program, to be summed."""
    width, tile = h.shape[-1], _tile_back(h.shape[-1])
    n = h.numel() // width
    programs = min(PROGRAMS, triton.cdiv(n, tile["ROWS"]))
    dh, dx = torch.empty_like(h), torch.empty_like(x)
    terms = torch.empty(programs, width, dtype=torch.float32, device=h.device)
    wrap_triton(_update_backward)[(programs,)](
        h, x, alpha, dy, dh, dx, terms, n, width,
        NU=nu, TIMES=times, NORMED=normed, EPS=EPS, **tile,
    )  # fmt: skip
    return dh, dx, terms


def _save_update(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool, float, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _update_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    h, x, alpha = ctx.saved_tensors
    dh, dx, terms = update_backward(h, x, alpha, dy.contiguous(), *ctx.options)
    return dh, dx, terms.sum(0), None, None, None


update.register_autograd(_update_gradient, setup_context=_save_update)


# The gradient of rms(x) · gain, added to another gradient of x if there is one (`fusion` finds it).


@triton.jit
def _rms_backward(
    x_ptr, gain_ptr, dy_ptr, total_ptr, dx_ptr, terms_ptr, n_rows, width,
    ADD: tl.constexpr, EPS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, COLS)[None, :]
    gain = tl.load(gain_ptr + cols, cols < width, 0.0)
    along = tl.zeros((ROWS, COLS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (tl.cdiv(n_rows, ROWS) - 1 - tile) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        at, inside = rows * width + cols, (rows < n_rows) & (cols < width)
        x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, inside, 0.0).to(tl.float32)
        inverse = _inverse_root(tl.sum(x * x, axis=1, keep_dims=True) / width, EPS)
        unit = x * inverse
        along += dy * unit
        d_unit = dy * gain
        parallel = tl.sum(x * d_unit, axis=1, keep_dims=True) * inverse / width
        dx = (d_unit - unit * parallel) * inverse
        if ADD:
            dx += tl.load(total_ptr + at, inside, 0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx, inside)
    tl.store(terms_ptr + tl.program_id(0) * width + cols, tl.sum(along, axis=0, keep_dims=True), cols < width)


def _rms_results(x: Tensor) -> tuple[Tensor, Tensor]:
    programs = min(PROGRAMS, triton.cdiv(x.numel() // x.shape[-1], _tile_back(x.shape[-1])["ROWS"]))
    terms = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), terms


def rms_backward(x: Tensor, gain: Tensor, dy: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradient of x, plus `total` if given, and of the gain; the latter as one term per program, to be summed."""
    # Not all releases of the compiler keep tensors contiguous that were contiguous when traced.
    x, gain, dy = x.contiguous(), gain.contiguous(), dy.contiguous()
    width, (dx, terms) = x.shape[-1], _rms_results(x)
    _rms_backward[(len(terms),)](
        x, gain, dy, x if total is None else total.contiguous(), dx, terms, x.numel() // width, width,
        ADD=total is not None, EPS=EPS, **_tile_back(width),
    )  # fmt: skip
    return dx, terms


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError("second derivatives of norms need fp32, float64 or ANGPT_KERNELS=off")


# Not a triton_op, which the compiler would replace by its kernel, so that `fusion` could not recognise it.
torch.library.define("angpt::rms_backward", "(Tensor x, Tensor gain, Tensor dy, Tensor? total) -> (Tensor, Tensor)")
torch.library.impl("angpt::rms_backward", "CompositeExplicitAutograd", rms_backward)
torch.library.register_fake("angpt::rms_backward", lambda x, gain, dy, total: _rms_results(x))
torch.library.register_autograd("angpt::rms_backward", _refuse)


class ScaledRms(torch.autograd.Function):
    """rms(x) · gain: plain PyTorch forward, which moves only the necessary bytes when compiled; a kernel backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        # The cast to bf16 makes a new tensor: torch 2.11 would compile away the gradient of a result with an alias.
        return plain_scaled_rms.plain(x, gain)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        dx, terms = torch.ops.angpt.rms_backward(*ctx.saved_tensors, gradients[0], None)
        return dx, terms.sum(0)


def scaled_rms(x: Tensor, gain: Tensor) -> Tensor:
    """primitives.scaled_rms on (…, d), contiguous."""
    result: Tensor = ScaledRms.apply(x, gain)  # type: ignore[no-untyped-call]
    return result


# W x with the rows of W scaled. The backward pass recomputes the scaled matrix, and converts its gradient to that of W
# in place.


@triton.jit
def _scale_rows(w_ptr, scale_ptr, y_ptr, width, BLOCK: tl.constexpr):
    row, col = _place(width, BLOCK)
    inside = col < width
    w = tl.load(w_ptr + row * width + col, inside, 0.0).to(tl.float32)
    tl.store(y_ptr + row * width + col, w * tl.load(scale_ptr + row), inside)


@triton.jit
def _scale_rows_backward(g_ptr, w_ptr, scale_ptr, dscale_ptr, width, BLOCK: tl.constexpr):
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    scale = tl.load(scale_ptr + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        col = first + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + row * width + col, col < width, 0.0).to(tl.float32)
        total += g * tl.load(w_ptr + row * width + col, col < width, 0.0).to(tl.float32)
        tl.store(g_ptr + row * width + col, g * scale, col < width)
    tl.store(dscale_ptr + row, tl.sum(total))


def scale_rows_block(bytes_per_entry: int) -> int:
    """Entries per program: at least 16 bytes per thread."""
    return BLOCK * max(1, 2 // bytes_per_entry)


@triton_op("angpt::scale_rows", mutates_args={})
def scale_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A matrix with each row multiplied by an entry of a vector, in a dtype, its own unless given."""
    rows, width = weight.shape
    y, block = torch.empty_like(weight, dtype=dtype), scale_rows_block(weight.element_size())
    wrap_triton(_scale_rows)[(rows * triton.cdiv(width, block),)](weight, scale, y, width, BLOCK=block)
    return y


@triton_op("angpt::scale_rows_backward_", mutates_args={"gradient"})
def scale_rows_backward_(gradient: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Gradient of the scales; converts the gradient of the scaled matrix to that of the matrix, in place."""
    rows, width = weight.shape
    dscale = torch.empty(rows, dtype=torch.float32, device=weight.device)
    wrap_triton(_scale_rows_backward)[(rows,)](gradient, weight, scale, dscale, width, BLOCK=BLOCK)
    return dscale


class ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        return F.linear(x, scale_rows(weight, scale))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        dy = gradients[0]
        dx = dy @ scale_rows(weight, scale)
        dw = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        return dx, dw, scale_rows_backward_(dw, weight, scale)


def scaled_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """primitives.linear_with_row_gains."""
    result: Tensor = ScaledLinear.apply(x, weight.contiguous(), scale.contiguous())  # type: ignore[no-untyped-call]
    return result
