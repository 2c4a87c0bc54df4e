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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from angpt.inference.folded import Folded
from angpt.inference.graph import Graph, read_graph
from angpt.models.decoder import Decoder
from angpt.models.primitives import nu_lerp


@torch.no_grad()
def fold(model: Decoder) -> Folded:
    """The inference graph of a model, with the same logits, in its dtype and on its device. The model stays as it is.

    An architecture with an operation that is not known here is refused with an error that names it.
    """
    graph = read_graph(model)
    weight = model.W_h.weight
    with torch.device(weight.device):
        folded = Folded(replace(model.cfg), graph).to(weight.dtype).eval()
    source: Any = model
    stream = math.sqrt(model.cfg.d_model) if graph.output_norm else 1.0
    scale = exact(source.embed_scale()) if graph.embed_scale else 1.0
    folded.W_e.copy_(exact(model.W_e.weight) * stream * scale)
    for i, (layer, block) in enumerate(zip(folded.layers, model.blocks, strict=True)):
        fold_block(layer, block, graph, graph.input_factors[i], stream)
    rows = exact(source.s_z())[:, None] if graph.s_z else 1.0
    folded.W_h.copy_(rows * exact(weight) * columns(getattr(model, "norm_h", None), 1.0, stream))
    if folded.slope_h is not None:
        folded.slope_h.copy_(source.norm_h.a)
    return folded


def fold_block(layer: Any, block: Any, graph: Graph, factor: float, stream: float) -> None:
    """Fill one layer. `factor` stands behind its input norms, `stream` is how much longer the stream is."""
    rows = torch.ones_like(layer.W_qkv[:, :1], dtype=torch.float64)
    if graph.qk == "plain":
        rows[: len(rows) // 3] /= math.sqrt(layer.d_head)
    layer.W_qkv.copy_(rows * exact(block.W_qkv.weight) * columns(getattr(block, "norm_a", None), factor, stream))
    layer.W_p.copy_(exact(block.W_p.weight) * graph.nu_p)
    rows = torch.full_like(layer.W_uz[:, :1], graph.nu_uz, dtype=torch.float64)
    if graph.s_uz:
        rows *= exact(block.s_uz())[:, None]
        rows[len(rows) // 2 :] *= block.sqrt_d
    layer.W_uz.copy_(rows * exact(block.W_uz.weight) * columns(getattr(block, "norm_m", None), factor, stream))
    layer.W_d.copy_(exact(block.W_d.weight) * graph.nu_d)
    # Two rms in place of two unit norms make q·k larger by d_h.
    if graph.qk == "g":
        layer.gain.copy_(exact(block.g()) / layer.d_head)
    elif graph.qk == "s_qk":
        layer.gain.copy_((exact(block.s_qk()).square() * (block.sqrt_d_k / layer.d_head)).view_as(layer.gain))
    if graph.lerp:
        layer.keep_a.data, layer.add_a.data = two_vectors(block.alpha_a(), graph)
        layer.keep_m.data, layer.add_m.data = two_vectors(block.alpha_m(), graph)
    if layer.slope_a is not None:
        layer.slope_a.copy_(block.norm_a.a)
        layer.slope_m.copy_(block.norm_m.a)


def two_vectors(alpha: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
    """What multiplies the stream and what multiplies the block's output in a residual update."""
    wide = exact(alpha)
    nu = graph.update_factor * (nu_lerp(wide) if graph.nu_alpha else 1.0)
    return ((1 - wide) * nu).to(alpha.dtype), (wide * nu).to(alpha.dtype)


def columns(norm: nn.Module | None, factor: float, stream: float) -> Tensor | float:
    """What multiplies the columns of a matrix that reads the stream through this norm."""
    return (1.0 if norm is None else exact(norm.gamma) * factor) / stream  # type: ignore[arg-type]


def exact(x: Tensor) -> Tensor:
    return x.double()
