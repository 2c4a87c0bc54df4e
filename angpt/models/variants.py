"""The ablations of the paper by name, each as a subclass of the architecture that it varies."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from angpt.config import ModelConfig
from angpt.constraints import Constraint
from angpt.errors import UserError, nearest
from angpt.models import factors
from angpt.models.angpt import AnGPT, AnGPTBlock
from angpt.models.decoder import Decoder
from angpt.models.design import Design
from angpt.models.factors import LerpFactor
from angpt.models.gptplus import GPTPlus, GPTPlusBlock
from angpt.models.ngpt import NGPT, NGPTBlock
from angpt.models.primitives import (
    Context,
    LearnedScale,
    Resettable,
    RMSNorm,
    lerp,
    nu_lerp,
    rotate,
    split_heads,
    swiglu,
)

D = TypeVar("D", bound=type[Decoder])

ARCHITECTURES: dict[str, type[Decoder]] = {"gpt+": GPTPlus, "ngpt": NGPT, "angpt": AnGPT}
"""The columns of Table 1; `@variant` adds the ablations."""


def architecture(name: str) -> type[Decoder]:
    """The model class of this name."""
    if name not in ARCHITECTURES:
        raise UserError(f"unknown architecture {name!r}: {nearest(name, ARCHITECTURES)}")
    return ARCHITECTURES[name]


def build(cfg: ModelConfig, seed: int = 0) -> Decoder:
    """A model, initialised from the seed. It is made on the CPU, or on the device of a surrounding `with
    torch.device(…)`, where the same seed gives other numbers. On "meta" it has no storage until `to_empty`, followed by
    `init_weights` or `load_state_dict`, or `load_state_dict(…, assign=True)`."""
    model = architecture(cfg.architecture)(cfg)
    device = model.W_h.weight.device
    if device.type != "meta":
        model.init_weights(torch.Generator(device).manual_seed(seed))
    return model


def variant(name: str) -> Callable[[D], D]:
    """Decorator that registers an architecture under this name."""

    def register(cls: D) -> D:
        ARCHITECTURES[name] = cls
        return cls

    return register


@variant("gpt+/no-qk-norm")
class NoQKNorm(GPTPlus):
    """Plain scaled dot products: no norm of q and k, 1/sqrt(d_h) instead of g."""

    class Block(GPTPlusBlock):
        computes = replace(GPTPlusBlock.computes, qk="plain")

        def __init__(self, cfg: ModelConfig, layer: int) -> None:
            super().__init__(cfg, layer)
            del self.g

        def attention(self, h: Tensor, ctx: Context) -> Tensor:
            q, k, v = split_heads(self.W_qkv(self.norm_a(h)), self.d_head)
            q, k = rotate(q, ctx.cos, ctx.sin), rotate(k, ctx.cos, ctx.sin)
            return self.W_p(self.attend(q, k, v, ctx, 1 / math.sqrt(self.d_head)))


@variant("gpt+/ln-scaling")
class LNScaling(GPTPlus):
    """The norms of layer l scaled by 1/sqrt(l) (Sun et al., 2025)."""

    class Block(GPTPlusBlock):
        def make_norm(self, size: int) -> nn.Module:
            return RMSNorm(size, factor=1 / math.sqrt(self.layer))

        def design(self) -> Design:
            return replace(super().design(), input_factors=(self.norm_a.constant,))  # type: ignore[arg-type]


class DynamicTanh(Resettable):
    """tanh(a · x) · γ instead of a norm (Zhu et al., 2025), with a learned scalar a and vector γ."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.gamma = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.a * x) * self.gamma).to(x.dtype)

    @torch.no_grad()
    def reset(self) -> None:
        self.a.fill_(1.0)
        self.gamma.fill_(1.0)


@variant("gpt+/dyt")
class DyT(GPTPlus):
    """Every norm but that of q and k replaced by DynamicTanh, and the embedding scaled by a learned scalar, initially
    sqrt(d_m), as its authors do for language models."""

    class Block(GPTPlusBlock):
        computes = replace(GPTPlusBlock.computes, input="tanh")

        def make_norm(self, size: int) -> nn.Module:
            return DynamicTanh(size)

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        start = math.sqrt(cfg.d_model)
        self.embed_scale = LearnedScale(1, init=start, scale=start)

    def make_norm(self, size: int) -> nn.Module:
        return DynamicTanh(size)

    def embed(self, tokens: Tensor) -> Tensor:
        h = super().embed(tokens)
        return (h * self.embed_scale()).to(h.dtype)


@variant("ngpt/lerp-factor")
class NGPTLerpFactor(NGPT):
    """The norm after each residual update replaced by ν(α)."""

    class Block(NGPTBlock):
        computes = replace(NGPTBlock.computes, nu_alpha=True, update_norm=False)

        def forward(self, h: Tensor, ctx: Context) -> Tensor:
            h_a, alpha = self.attention(h, ctx), self.alpha_a()
            h = lerp(h, h_a, alpha, nu_lerp(alpha))
            h_m, alpha = self.mlp(h), self.alpha_m()
            return lerp(h, h_m, alpha, nu_lerp(alpha))


@variant("ngpt/bounded")
class NGPTBounded(NGPTLerpFactor):
    """The norm after each residual update replaced by ν(α), and weights bounded by 1 instead of held at 1."""

    def constraints(self) -> dict[str, Constraint]:
        return {name: Constraint("bound", c.dim) for name, c in super().constraints().items()}


class ScaledBlock(AnGPTBlock):
    """The block of anGPT with its constant factors multiplied by `const` and ν(α) by `residual`."""

    const, residual = 1.0, 1.0

    def constants(self, cfg: ModelConfig) -> factors.Factors:
        return super().constants(cfg).times(self.const)

    def residual_factor(self) -> LerpFactor:
        return LerpFactor(times=self.residual)


@variant("angpt/const-x0.5")
class ConstHalf(AnGPT):
    """Constant factors × 0.5, ν(α) × 1."""

    class Block(ScaledBlock):
        const = 0.5


@variant("angpt/const-x2")
class ConstDouble(AnGPT):
    """Constant factors × 2, ν(α) × 1."""

    class Block(ScaledBlock):
        const = 2.0


@variant("angpt/all-x0.5")
class AllHalf(AnGPT):
    """Constant factors × 0.5, ν(α) × 0.5."""

    class Block(ScaledBlock):
        const, residual = 0.5, 0.5


@variant("angpt/all-x2")
class AllDouble(AnGPT):
    """Constant factors × 2, ν(α) × 2."""

    class Block(ScaledBlock):
        const, residual = 2.0, 2.0


class NoConstBlock(AnGPTBlock):
    def constants(self, cfg: ModelConfig) -> factors.Factors:
        return factors.ONES


class NoResidualFactorBlock(AnGPTBlock):
    def residual_factor(self) -> LerpFactor:
        return LerpFactor(of_alpha=False)


@variant("angpt/no-const")
class NoConst(AnGPT):
    """Every constant factor 1; ν(α) stays."""

    Block = NoConstBlock


@variant("angpt/no-residual-factor")
class NoResidualFactor(AnGPT):
    """ν(α) = 1; the constants stay."""

    Block = NoResidualFactorBlock


@variant("angpt/no-factors")
class NoFactors(AnGPT):
    """Every constant factor 1, and ν(α) = 1."""

    class Block(NoConstBlock, NoResidualFactorBlock):
        pass


class NoLerpBlock(AnGPTBlock):
    computes = replace(AnGPTBlock.computes, lerp=False)

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        del self.alpha_a, self.alpha_m

    def residual_factor(self) -> LerpFactor:
        return LerpFactor(of_alpha=False)

    def forward(self, h: Tensor, ctx: Context) -> Tensor:
        h = h + self.attention(h, ctx)
        return h + self.mlp(h)


@variant("angpt/no-lerp")
class NoLerp(AnGPT):
    """The plain residual sum, h + x, without α and without a factor, so that the stream grows; the paper does not say
    whether its ablation has the factor (see angpt/no-lerp-with-factor)."""

    Block = NoLerpBlock


@variant("angpt/no-lerp-with-factor")
class NoLerpWithFactor(AnGPT):
    """The residual sum times 1/sqrt(2), (h + x) / sqrt(2), without α: the length of the stream stays 1 if h and x are
    independent."""

    class Block(NoLerpBlock):
        def residual_factor(self) -> LerpFactor:
            return LerpFactor(of_alpha=False, times=1 / math.sqrt(2))

        def forward(self, h: Tensor, ctx: Context) -> Tensor:
            h = (h + self.attention(h, ctx)) * self.nu_lerp.times
            return (h + self.mlp(h)) * self.nu_lerp.times


class NoOutputNormBlock(AnGPTBlock):
    computes = replace(AnGPTBlock.computes, output_norm=False)

    def attention(self, h: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.normed_heads(self.W_qkv(h, self.nu.qkv), ctx)
        return self.W_p(self.attend(q, k, v, ctx, self.g()), self.nu.p)

    def mlp(self, h: Tensor) -> Tensor:
        return self.W_d(swiglu(self.W_uz(h, self.nu.uz), self.nu.acf), self.nu.d)


@variant("angpt/no-output-norm")
class NoOutputNorm(AnGPT):
    """No norm after the blocks, so that every constant factor changes the function; q and k are normed."""

    Block = NoOutputNormBlock


@variant("angpt/no-output-norm-no-const")
class NoOutputNormNoConst(AnGPT):
    """No norm after the blocks, and every constant factor 1."""

    class Block(NoOutputNormBlock, NoConstBlock):
        pass


@variant("angpt/scale-before-head")
class ScaleBeforeHead(AnGPT):
    """The learned scale of the logits, s_z, replaced by one of the residual stream before the head: W_h (s_h · h)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        del self.s_z
        self.s_h = LearnedScale(cfg.d_model, init=1.0, scale=cfg.stored_start)

    def head(self, h: Tensor) -> Tensor:
        return self.W_h((h * self.s_h()).to(h.dtype))


@variant("angpt/attention-factor")
class AttentionFactor(AnGPT):
    """Row r of the causal attention matrix multiplied by sqrt(r): a row of length 1 if attention is uniform."""

    class Block(AnGPTBlock):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context, gain: Tensor | float) -> Tensor:
            return super().attend(q, k, v, ctx, gain) * (ctx.positions + 1).sqrt()[..., None].to(v.dtype)
