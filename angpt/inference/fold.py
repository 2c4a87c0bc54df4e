"""Folding: everything that is constant at inference goes into the weights, once, in float64.

| what | where it goes |
|---|---|
| γ of GPT+'s norms (with 1/sqrt(l) of LN scaling, γ of DyT) | columns of W_qkv, W_uz, W_h |
| ν_uz; ν_qkv ν_p; ν_acf ν_d of anGPT | W_uz; W_p; W_d |
| s_uz and √d_m of nGPT | rows of W_uz |
| s_z | rows of W_h |
| g, or s_qk and √d_k of nGPT | the attention scale: q·k is a sum over products, so s_q and s_k are one vector on q |
| α, ν(α) | keep = (1 − α) ν(α) and add = α ν(α), two vectors per residual update |
| √d_m, by which a unit norm differs from rms | the stream, that long: in W_e, and out of W_qkv, W_uz, W_h |
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from angpt.errors import UserError
from angpt.models.decoder import Decoder
from angpt.models.design import Design
from angpt.models.folded import Folded
from angpt.models.primitives import nu_lerp

PROBE_TOKENS = 8
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative difference between the logits of a model and of its folded form: some roundings of each dtype."""


@torch.no_grad()
def fold(model: Decoder) -> Folded:
    """The model for inference, with the same logits, in its dtype and on its device. The model stays as it is.

    Reads the model's `design`. A model that does not compute what its design says is refused.
    """
    design = model.design()
    weight = model.W_h.weight
    with torch.device(weight.device):
        folded = Folded(replace(model.cfg), design).to(weight.dtype).eval()
    source: Any = model
    stream = math.sqrt(model.cfg.d_model) if design.output_norm else 1.0
    scale = exact(source.embed_scale()) if design.embed_scale else 1.0
    folded.W_e.copy_(exact(model.W_e.weight) * stream * scale)
    for i, (layer, block) in enumerate(zip(folded.layers, model.blocks, strict=True)):
        fold_block(layer, block, design, design.input_factors[i], stream)
    rows = exact(source.s_z())[:, None] if design.s_z else 1.0
    folded.W_h.copy_(rows * exact(weight) * columns(getattr(model, "norm_h", None), 1.0, stream))
    if folded.slope_h is not None:
        folded.slope_h.copy_(source.norm_h.a)
    check_equal(model, folded)
    return folded


def check_equal(model: Decoder, folded: Folded) -> None:
    """Refuse a folded model whose logits for a few tokens are not those of the model."""
    rng = torch.Generator().manual_seed(0)
    shape = (1, min(PROBE_TOKENS, model.cfg.context))
    tokens = torch.randint(model.cfg.vocab_size, shape, generator=rng).to(folded.device)
    expected = model(tokens).to(folded.wide)
    difference = (folded(tokens) - expected).norm() / expected.norm()
    if difference > TOLERANCE[folded.dtype]:  # false where the model itself gives no finite logits
        raise UserError(
            f"{model.cfg.architecture}: it does not compute what its design() declares (the logits of the folded model "
            f"differ by {difference:.1e}), so it can be neither folded nor exported; declare its operations"
        )


def fold_block(layer: Any, block: Any, design: Design, factor: float, stream: float) -> None:
    """Fill one layer. `factor` stands behind its input norms, `stream` is how much longer the stream is."""
    rows = torch.ones_like(layer.W_qkv[:, :1], dtype=torch.float64)
    if design.qk == "plain":
        rows[: len(rows) // 3] /= math.sqrt(layer.d_head)
    layer.W_qkv.copy_(rows * exact(block.W_qkv.weight) * columns(getattr(block, "norm_a", None), factor, stream))
    layer.W_p.copy_(exact(block.W_p.weight) * design.nu_p)
    rows = torch.full_like(layer.W_uz[:, :1], design.nu_uz, dtype=torch.float64)
    if design.s_uz:
        rows *= exact(block.s_uz())[:, None]
        rows[len(rows) // 2 :] *= block.sqrt_d
    layer.W_uz.copy_(rows * exact(block.W_uz.weight) * columns(getattr(block, "norm_m", None), factor, stream))
    layer.W_d.copy_(exact(block.W_d.weight) * design.nu_d)
    # Two rms in place of two unit norms make q·k larger by d_h.
    if design.qk == "g":
        layer.gain.copy_(exact(block.g()) / layer.d_head)
    elif design.qk == "s_qk":
        layer.gain.copy_((exact(block.s_qk()).square() * (block.sqrt_d_k / layer.d_head)).view_as(layer.gain))
    if design.lerp:
        layer.keep_a.data, layer.add_a.data = two_vectors(block.alpha_a(), design)
        layer.keep_m.data, layer.add_m.data = two_vectors(block.alpha_m(), design)
    if layer.slope_a is not None:
        layer.slope_a.copy_(block.norm_a.a)
        layer.slope_m.copy_(block.norm_m.a)


def two_vectors(alpha: Tensor, design: Design) -> tuple[Tensor, Tensor]:
    """What multiplies the stream and what multiplies the block's output in a residual update."""
    wide = exact(alpha)
    nu = design.update_factor * (nu_lerp(wide) if design.nu_alpha else 1.0)
    return ((1 - wide) * nu).to(alpha.dtype), (wide * nu).to(alpha.dtype)


def columns(norm: nn.Module | None, factor: float, stream: float) -> Tensor | float:
    """What multiplies the columns of a matrix that reads the stream through this norm."""
    return (1.0 if norm is None else exact(norm.gamma) * factor) / stream  # type: ignore[arg-type]


def exact(x: Tensor) -> Tensor:
    return x.double()


@dataclass(frozen=True)
class Operations:
    """What is left of one layer when every constant has been folded: the rows of the table of `angpt fold --table`."""

    residual: str
    norms: int
    vectors: int
    """Products with a vector of the width of the residual stream; with the attention scale, where it is a vector."""
    tanh: int
    norms_at_head: int


def operations(design: Design) -> Operations:
    """What is left of one layer of this design; a test counts the operations in a running model."""
    normed = {"none": 0, "tanh": 0, "rms": 2}[design.input]
    qk_norms = 0 if design.qk == "plain" else 2
    update = "keep·h + add·x" if design.lerp else "h + x"
    return Operations(
        residual=f"rms({update})" if design.update_norm else update,
        norms=normed + qk_norms + 2 * design.output_norm + 2 * design.update_norm,
        vectors=4 * design.lerp + (design.qk == "s_qk"),
        tanh=2 if design.input == "tanh" else 0,
        norms_at_head=int(design.input == "rms"),
    )
