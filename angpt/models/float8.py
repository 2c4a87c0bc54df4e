"""Matrix products of blocks in 8 bits (e4m3), forward and backward; docs/fp8.md derives the scales.

What a design bounds has a constant scale: matrices with vectors of at most length 1, the residual stream, A·v. Where a
norm follows each block, u · SiLU(z) has one too, and the gradient one that follows from s_z. All else is measured.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from angpt.float8 import E4M3, HALF_STEP, WEIGHT_SCALE, measured_scale, power_of_two, scale_of_bound, to_e4m3
from angpt.models.decoder import Block, Decoder
from angpt.models.factors import ONES
from angpt.models.primitives import LearnedScale, Linear, product
from angpt.operations import operation

ROUNDING, E4M3_ROUNDING = 1 + 2**-8, 1 + 2**-4
"""Largest factors by which rounding to bf16, and to e4m3 from 2⁻⁶ on, lengthen a number."""
GRADIENT_SCALE = 256.0
"""Scale of gradients, times the tokens of a pass, over the rms of s_z."""
GAIN_MARGIN = 4.0
"""Factor by which the learned gains of u and z, together, may grow from 1 before u · SiLU(z) could saturate."""


class Scale(NamedTuple):
    """A power of two and its inverse, on the device, so that no kernel computes the inverse in every layer."""

    value: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, value: Tensor) -> "Scale":
        return cls(value, value.reciprocal())


@operation
def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x · scale (rows, columns) in e4m3, and its transpose, both row-major in the fast form."""
    values = to_e4m3(x, scale)
    return values, values.t()


@operation
def transpose(x: Tensor) -> Tensor:
    """The transpose of a matrix in e4m3, row-major in the fast form."""
    return x.t()


@operation
def float8_product(a: Tensor, b: Tensor, factor: float, a_inverse: Tensor, b_inverse: Tensor) -> Tensor:
    """a bᵀ · factor in bf16, of matrices in e4m3, times the inverses of their scales."""
    scaled = product(a.to(torch.bfloat16), b.t().to(torch.bfloat16), factor)
    return (scaled * a_inverse * b_inverse).to(torch.bfloat16)  # powers of two


class Float8Product(torch.autograd.Function):
    """W x · factor and its gradients, each a product of two matrices in e4m3."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, values: Tensor | None, factor: float,
        x_scale: Tensor | None, x_inverse: Tensor | None, w_scale: Tensor | None, w_inverse: Tensor | None,
        dy_scale: Tensor | None, dy_inverse: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """`values`: the matrix in e4m3; without it, `weight` is converted in both passes, so that no copy is kept from
        one to the other. Scales of None are measured.

        `dy_scale` is read in the backward pass: if another forward pass comes in between, it is that of the later one.
        """
        rows = x.reshape(-1, x.shape[-1])
        x_scale, x_inverse = _scale(x_scale, x_inverse, rows)
        w_scale, w_inverse = _scale(w_scale, w_inverse, weight)
        x8, x8_t = quantize(rows, x_scale)
        w8 = to_e4m3(weight, w_scale) if values is None else values
        ctx.save_for_backward(x8_t, weight if values is None else values, x_inverse, w_scale, w_inverse)
        ctx.dy_scale, ctx.dy_inverse = dy_scale, dy_inverse  # not saved, because each forward pass overwrites them
        ctx.shape, ctx.factor = x.shape, factor
        return float8_product(x8, w8, factor, x_inverse, w_inverse).view(*x.shape[:-1], len(w8))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x8_t, weight, x_inverse, w_scale, w_inverse = ctx.saved_tensors
        dy = gradients[0].reshape(-1, len(weight))
        dy_scale, dy_inverse = _scale(ctx.dy_scale, ctx.dy_inverse, dy)
        dy8, dy8_t = quantize(dy, dy_scale)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            w8_t = transpose(weight) if weight.dtype == E4M3 else quantize(weight, w_scale)[1]
            dx = float8_product(dy8, w8_t, ctx.factor, dy_inverse, w_inverse).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            dw = float8_product(dy8_t, x8_t, ctx.factor, dy_inverse, x_inverse)
        return dx, dw, *[None] * 8


def _scale(value: Tensor | None, inverse: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale and its inverse; those of x are measured if they are not given."""
    if value is None or inverse is None:
        return Scale.of(measured_scale(x))
    return value, inverse


NOT_KNOWN = (None, None)
"""In place of a scale and its inverse: they are measured."""


class Float8Linear(Linear):
    """W x in 8 bits. Its class replaces that of a `Linear` in a model that computes. A scale of None is measured."""

    x_scale: Scale | None
    w_scale: Scale | None
    dy_scale: Scale | None
    """Scale of the gradient of the output, which follows the parameters and the tokens of each forward pass."""
    values: Tensor | None
    """The matrix in e4m3, which the optimizer writes, or FSDP; then `weight` has no storage and only receives the
    gradient."""

    observer: Callable[[Tensor, Tensor], None] | None
    """Called in the forward pass, where it is not compiled, with the input and the output before a learned factor."""

    def forward(self, x: Tensor, factor: float | Tensor = 1.0) -> Tensor:
        constant = 1.0 if isinstance(factor, Tensor) else factor
        scales = (*(self.x_scale or NOT_KNOWN), *(self.w_scale or NOT_KNOWN), *(self.dy_scale or NOT_KNOWN))
        y: Tensor = Float8Product.apply(x, self.weight, self.values, constant, *scales)  # type: ignore[no-untyped-call]
        if self.observer is not None:
            self.observer(x, y)
        return (y * factor).to(y.dtype) if isinstance(factor, Tensor) else y


def use_float8(model: Decoder, copied: bool) -> None:
    """Let the matrices of blocks compute in 8 bits, in place. `copied`: bounded ones are kept in e4m3 only. Otherwise
    FSDP sets their `values`."""
    device, bounded = model.W_h.weight.device, set(model.constraints())
    x_scales = input_scales(model)
    known = {x: Scale.of(torch.tensor(x, device=device)) for x in set(x_scales.values()) if x is not None}
    w_scale, dy_scale = Scale.of(torch.tensor(WEIGHT_SCALE, device=device)), None
    if x_scales["W_qkv"] is not None and isinstance(s_z := getattr(model, "s_z", None), LearnedScale):
        dy_scale = Scale.of(gradient_scale(s_z(), tokens=1))
        model.register_forward_pre_hook(partial(_follow, dy_scale, s_z), with_kwargs=True)
    for name, part in model.blocks.named_modules():
        if not isinstance(part, Linear):
            continue
        part.__class__ = Float8Linear
        assert isinstance(part, Float8Linear)
        constant = f"blocks.{name}.weight" in bounded
        x_scale = x_scales[name.split(".")[-1]]
        part.x_scale, part.dy_scale = None if x_scale is None else known[x_scale], dy_scale
        part.w_scale, part.values, part.observer = w_scale if constant else None, None, None
        if copied and constant:
            part.values = to_e4m3(part.weight.detach(), WEIGHT_SCALE)
            part.weight = nn.Parameter(part.weight.detach().new_zeros(()).expand(part.weight.shape))


def _follow(dy_scale: Scale, s_z: LearnedScale, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Before a pass over tokens, its first argument: the scale of its gradients."""
    tokens: Tensor = args[0] if args else kwargs["tokens"]
    for ours, found in zip(dy_scale, Scale.of(gradient_scale(s_z(), tokens.numel())), strict=True):
        ours.copy_(found)


def float8_linears(model: nn.Module) -> Iterator[tuple[str, Float8Linear]]:
    """The matrices that compute in 8 bits, by name."""
    yield from ((name, part) for name, part in model.named_modules() if isinstance(part, Float8Linear))


def input_scales(model: Decoder) -> dict[str, float | None]:
    """The constant scale of the input of each matrix of a block, by its name; None if the design does not bound it."""
    design, cfg = model.design(), model.cfg
    updates, nu = 2 * cfg.n_layers, getattr(model.blocks[0], "nu", ONES)
    unit_start = design.input == "none" and not design.embed_scale and _rows_are_bounded(model)
    unit_updates = design.lerp and design.output_norm and design.update_factor == 1.0
    if not (unit_start and unit_updates and (design.nu_alpha or design.update_norm)):
        return dict.fromkeys(("W_qkv", "W_p", "W_uz", "W_d"))
    h = ROUNDING if design.update_norm else math.sqrt(1 + updates) * ROUNDING ** (1 + updates)
    scale = scale_of_bound(h)
    rounded = (length_in_e4m3(*of, cfg.d_model) for of in ((1.0, WEIGHT_SCALE), (h, scale)))
    v = nu.qkv * math.prod(rounded) * ROUNDING**3  # v, A and A·v in bf16
    own_attention = model.Block.attend is not Block.attend
    hidden = nu.acf * nu.uz**2 * (math.sqrt(cfg.d_model) * GAIN_MARGIN if design.s_uz else 1.0)
    return {
        "W_qkv": scale,
        "W_p": None if own_attention else scale_of_bound(v),
        "W_uz": scale,
        "W_d": scale_of_bound(hidden),
    }


def _rows_are_bounded(model: Decoder) -> bool:
    """True if rows have at most length 1 in the matrices from which the bounds are derived."""
    bounded = {name for name, constraint in model.constraints().items() if constraint.dims == (1,)}
    needed = {f"{name}.weight" for name, _ in model.named_modules() if name.endswith(("W_e", "W_qkv", "W_uz"))}
    return needed <= bounded


def length_in_e4m3(length: float, scale: float, size: int) -> float:
    """Largest length that a vector of `size` entries has after its conversion to e4m3 at a scale."""
    return length * E4M3_ROUNDING + math.sqrt(size) * HALF_STEP / scale


def gradient_scale(s_z: Tensor, tokens: int) -> Tensor:
    """Scale of gradients in blocks for a pass over that many tokens."""
    return power_of_two(GRADIENT_SCALE * tokens / s_z.detach().float().square().mean().sqrt().clamp(min=1e-30))
