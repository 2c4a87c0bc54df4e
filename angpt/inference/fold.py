"""Folding: everything that is constant at inference is multiplied into the weights, once, in float64.

| what | where it goes |
|---|---|
| γ of GPT+'s norms (with 1/sqrt(l) of LN scaling, γ of DyT) | columns of W_qkv, W_uz, W_h |
| ν_uz; ν_qkv ν_p; ν_acf ν_d of anGPT | W_uz; W_p; W_d |
| s_uz and √d_m of nGPT | rows of W_uz |
| s_z; s_h | rows of W_h; its columns |
| g, or s_qk and √d_k of nGPT | the attention scale: q·k is a sum over products, so s_q and s_k are one vector on q |
| α, ν(α) | keep = (1 − α) ν(α) and add = α ν(α), two vectors per residual update; both c for a sum times c |
| √d_m, the ratio of rms and unit norm | the residual stream: W_e times √d_m; W_qkv, W_uz, W_h divided by it |
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from angpt.errors import UserError
from angpt.models.decoder import Decoder
from angpt.models.design import Design
from angpt.models.folded import Folded
from angpt.models.primitives import make_context, nu_lerp

PROBE_TOKENS = 128
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest relative difference between a layer and its folded form: a few roundings."""


@torch.no_grad()
def fold(model: Decoder) -> Folded:
    """The model for inference, with the same logits, dtype and device. The model itself is not changed.

    Reads the model's `design`; a model that does not compute what its design declares is an error.
    """
    design = model.design()
    weight = model.W_h.weight
    with torch.device(weight.device):
        folded = Folded(replace(model.cfg), design).prepare(weight.device, weight.dtype).eval()
    source: Any = model
    stream = math.sqrt(model.cfg.d_model) if design.output_norm else 1.0
    scale = source.embed_scale().double() if design.embed_scale else 1.0
    folded.W_e.copy_(model.W_e.weight.double() * stream * scale)
    for i, (layer, block) in enumerate(zip(folded.layers, model.blocks, strict=True)):
        fold_block(layer, block, design, design.input_factors[i], stream)
    rows = source.s_z().double()[:, None] if design.s_z else 1.0
    scale = source.s_h().double() if design.s_h else 1.0
    folded.W_h.copy_(rows * weight.double() * scale * columns(getattr(model, "norm_h", None), 1.0, stream))
    if folded.slope_h is not None:
        folded.slope_h.copy_(source.norm_h.a)
    check_equal(model, folded, stream)
    return folded


def check_equal(model: Decoder, folded: Folded, stream: float) -> None:
    """Raise an error if a folded layer, or the head, differs from that of the model, given the same input."""
    rng = torch.Generator().manual_seed(0)
    shape = (1, min(PROBE_TOKENS, model.cfg.context))
    tokens = torch.randint(model.cfg.vocab_size, shape, generator=rng, device="cpu").to(folded.device)
    h, ctx = model.start(tokens)
    ours = make_context(h.to(folded.wide), model.cfg.rotary_dim, model.cfg.rotary_base)

    def compare(part: str, found: Tensor, expected: Tensor) -> None:
        expected = expected.to(folded.wide)
        close = (found - expected).norm() <= TOLERANCE[folded.dtype] * expected.norm()
        if expected.isfinite().all() and not close:
            raise UserError(
                f"{model.cfg.architecture}: its {part} does not compute what its design() declares, or the design is a "
                "combination that cannot be folded; it can be neither folded nor exported"
            )

    compare("embedding", folded.embed(tokens), h * stream)
    for number, (layer, block) in enumerate(zip(folded.layers, model.blocks, strict=True), start=1):
        after = block(h, ctx)
        compare(f"layer {number}", layer(h.to(folded.wide) * stream, ours, None), after * stream)
        h = after
    compare("head", folded.head(h.to(folded.wide) * stream), model.head(h))


def fold_block(layer: Any, block: Any, design: Design, factor: float, stream: float) -> None:
    """Fill one layer. `factor` multiplies its input norms, `stream` the folded residual stream."""
    rows = torch.ones_like(layer.W_qkv[:, :1], dtype=torch.float64)
    if design.qk == "plain":
        rows[: len(rows) // 3] /= math.sqrt(layer.d_head)
    layer.W_qkv.copy_(rows * block.W_qkv.weight.double() * columns(getattr(block, "norm_a", None), factor, stream))
    layer.W_p.copy_(block.W_p.weight.double() * design.nu_p)
    rows = torch.full_like(layer.W_uz[:, :1], design.nu_uz, dtype=torch.float64)
    if design.s_uz:
        rows *= block.s_uz().double()[:, None]
        rows[len(rows) // 2 :] *= block.sqrt_d
    layer.W_uz.copy_(rows * block.W_uz.weight.double() * columns(getattr(block, "norm_m", None), factor, stream))
    layer.W_d.copy_(block.W_d.weight.double() * design.nu_d)
    # rms instead of unit norms makes q·k larger by d_h.
    if design.qk == "g":
        layer.gain.copy_(block.g().double() / layer.d_head)
    elif design.qk == "s_qk":
        layer.gain.copy_((block.s_qk().double().square() * (block.sqrt_d_k / layer.d_head)).view_as(layer.gain))
    if design.lerp:
        for which, alpha in (("a", block.alpha_a()), ("m", block.alpha_m())):
            keep, add = two_vectors(alpha.double(), design)
            getattr(layer, f"keep_{which}").copy_(keep)
            getattr(layer, f"add_{which}").copy_(add)
    elif design.weighted_update:
        for vector in (layer.keep_a, layer.add_a, layer.keep_m, layer.add_m):
            vector.fill_(design.update_factor)
    if layer.slope_a is not None:
        layer.slope_a.copy_(block.norm_a.a)
        layer.slope_m.copy_(block.norm_m.a)


def two_vectors(alpha: Tensor, design: Design) -> tuple[Tensor, Tensor]:
    """`keep` and `add`, which multiply the stream and the block's output in a residual update."""
    nu = design.update_factor * (nu_lerp(alpha) if design.nu_alpha else 1.0)
    return (1 - alpha) * nu, alpha * nu


def columns(norm: Any, factor: float, stream: float) -> Tensor | float:
    """The factor of the columns of a matrix that reads the stream through this norm."""
    return (1.0 if norm is None else norm.gamma.double() * factor) / stream


@dataclass(frozen=True)
class Operations:
    """The operations of one folded layer besides its matrices: a row of `angpt fold --table`."""

    residual: str
    norms: int
    vectors: int
    """Products with a vector of the width of the residual stream, and with the attention scale if it is a vector."""
    tanh: int
    norms_at_head: int


def operations(design: Design) -> Operations:
    """The operations of one folded layer of this design."""
    norms = (design.input == "rms") + (design.qk != "plain") + design.output_norm + design.update_norm
    update = "keep·h + add·x" if design.weighted_update else "h + x"
    return Operations(
        residual=f"rms({update})" if design.update_norm else update,
        norms=2 * norms,  # of attention and MLP, or of q and k
        vectors=4 * design.weighted_update + (design.qk == "s_qk"),
        tanh=2 * (design.input == "tanh"),
        norms_at_head=int(design.input == "rms"),
    )
