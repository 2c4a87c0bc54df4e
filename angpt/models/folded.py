"""The model for inference: matrices, norms and at most two vectors per residual update.

One class serves all architectures: what else differs between them is constant and folded into the weights (see
fold.py). The only norm is rms without a gain. The stream of nGPT and anGPT is √d_m times as long as in training, which
turns their unit norms into rms; the matrices that read the stream are divided by √d_m.

Matrices may be bf16. The residual stream and the vectors stay fp32: they are a few kilobytes per token, and bf16 would
round (1 − α) ν to 1. Matrices may also have 8 bits (quantize.py): W_q with a scale per row, W x = (W_q x) · scale.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from angpt.config import ModelConfig, Weights
from angpt.errors import UserError
from angpt.models.design import Design
from angpt.models.primitives import EPS, Context, check_tokens, make_context, rotary_angles, rotate
from angpt.operations import operation

EIGHT_BITS: dict[Weights, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""The dtype of 8-bit matrices."""


def rms(x: Tensor, eps: float = EPS) -> Tensor:
    """x / sqrt(mean(x²)) along the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def long_norm(x: Tensor) -> Tensor:
    """√d · norm(x): rms(x) with the ε of `norm`, so that they agree near zero too."""
    return rms(x, EPS / x.shape[-1])


class Cache(NamedTuple):
    """Keys and values of one layer, (B, H, S, d_h). Slot s holds the token at position s, or with a sliding window s
    plus a multiple of S."""

    keys: Tensor
    values: Tensor


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def matrix(rows: int, columns: int, weights: Weights) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A matrix, and the scales of its rows if it has 8 bits."""
    eight_bits = EIGHT_BITS.get(weights)
    return parameter(rows, columns, dtype=eight_bits), None if eight_bits is None else parameter(rows)


def product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """W x, in the dtype of x. A matrix of 8 bits is converted first, which is exact also in bf16."""
    if scale is None:
        return F.linear(x, weight)
    return (F.linear(x, weight.to(x.dtype)) * scale).to(x.dtype)


class Layer(nn.Module):
    """Attention, residual update, MLP, residual update."""

    def __init__(self, cfg: ModelConfig, design: Design, weights: Weights) -> None:
        super().__init__()
        self.d_head, self.design = cfg.d_head, design
        self.dtype = torch.get_default_dtype()
        self.W_qkv, self.W_qkv_scale = matrix(3 * cfg.d_model, cfg.d_model, weights)
        self.W_p, self.W_p_scale = matrix(cfg.d_model, cfg.d_model, weights)
        self.W_uz, self.W_uz_scale = matrix(2 * cfg.d_mlp, cfg.d_model, weights)
        self.W_d, self.W_d_scale = matrix(cfg.d_model, cfg.d_mlp, weights)
        # The attention scale, which multiplies q: one number, or in nGPT one per dimension.
        shape = {"g": (1, 1, 1), "s_qk": (cfg.n_heads, 1, cfg.d_head), "plain": None}[design.qk]
        self.gain = None if shape is None else parameter(*shape)
        vectors = (parameter(cfg.d_model) if design.weighted_update else None for _ in range(4))
        self.keep_a, self.add_a, self.keep_m, self.add_m = vectors
        self.slope_a, self.slope_m = (parameter(1) if design.input == "tanh" else None for _ in range(2))

    def forward(
        self, h: Tensor, ctx: Context, cache: Cache | None, slots: Tensor | None = None, by_hand: bool = False
    ) -> Tensor:
        """The residual stream after this layer, for whole sequences; or, given the slots (B) of the cache to write to,
        for one new token per row.

        `by_hand` computes attention to the cache as products and a softmax, which compile to kernels that use the
        whole GPU for a single row; otherwise it is one fused kernel.
        """
        h = self.update(h, self.attention(enter(h, self.design, self.slope_a), ctx, cache, slots, by_hand), "a")
        x = enter(h, self.design, self.slope_m).to(self.dtype)
        u, z = product(x, self.W_uz, self.W_uz_scale).chunk(2, dim=-1)
        return self.update(h, product(u * F.silu(z), self.W_d, self.W_d_scale), "m")

    def attention(self, x: Tensor, ctx: Context, cache: Cache | None, slots: Tensor | None, by_hand: bool) -> Tensor:
        qkv = product(x.to(self.dtype), self.W_qkv, self.W_qkv_scale).view(*x.shape[:2], 3, -1, self.d_head)
        qk, v = qkv[:, :, :2].flatten(2, 3).transpose(1, 2), qkv[:, :, 2].transpose(1, 2)
        qk = rotate(qk, ctx.cos, ctx.sin)  # all heads of q and k at once
        if self.gain is not None:
            qk = long_norm(qk)
        q, k = qk.chunk(2, dim=1)
        q, k = (q if self.gain is None else q * self.gain).to(v.dtype), k.to(v.dtype)
        if slots is None:
            if cache is not None:
                cache.keys[:, :, : k.shape[2]] = k
                cache.values[:, :, : v.shape[2]] = v
            out = F.scaled_dot_product_attention(q, k, v, ctx.mask, is_causal=ctx.mask is None, scale=1.0)
        else:
            assert cache is not None
            assert ctx.mask is not None
            rows = torch.arange(k.shape[0], device=k.device)
            cache.keys[rows, :, slots] = k[:, :, 0]
            cache.values[rows, :, slots] = v[:, :, 0]
            fused = F.scaled_dot_product_attention
            out = attend_by_hand(q, cache, ctx.mask) if by_hand else fused(q, *cache, attn_mask=ctx.mask, scale=1.0)
        return product(out.transpose(1, 2).flatten(2), self.W_p, self.W_p_scale)

    def update(self, h: Tensor, x: Tensor, which: str) -> Tensor:
        keep, add = (self.keep_a, self.add_a) if which == "a" else (self.keep_m, self.add_m)
        x = x.to(h.dtype)
        if self.design.output_norm:
            x = long_norm(x)
        h = h + x if keep is None or add is None else keep * h + add * x
        return rms(h) if self.design.update_norm else h


def enter(h: Tensor, design: Design, slope: Tensor | None) -> Tensor:
    """The input of a block or of the head: the stream, its rms, or tanh(slope · stream)."""
    if slope is not None:
        return torch.tanh(slope * h)
    return rms(h) if design.input == "rms" else h


def attend_by_hand(q: Tensor, cache: Cache, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, cache.keys.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return torch.matmul(weights.to(q.dtype), cache.values)


class Folded(nn.Module):
    """A model for inference, made from a trained one by `fold`."""

    def __init__(self, cfg: ModelConfig, design: Design, weights: Weights = "full") -> None:
        super().__init__()
        self.cfg, self.design, self.weights = cfg, design, weights
        self.dtype = torch.get_default_dtype()
        """The dtype of matrix products, of the cache, and of matrices that do not have 8 bits."""
        self.W_e, self.W_e_scale = matrix(cfg.vocab_size, cfg.d_model, weights)
        self.layers = nn.ModuleList(Layer(cfg, design, weights) for _ in range(cfg.n_layers))
        self.slope_h = parameter(1) if design.input == "tanh" else None
        self.W_h, self.W_h_scale = matrix(cfg.vocab_size, cfg.d_model, weights)
        self.engine: Any = None
        """The engine of the last call of `generate`, kept for the next."""

    def prepare(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Move to a device, and compute products in a dtype. Matrices are converted to it unless they have 8 bits;
        vectors stay in at least fp32."""
        if self.weights != "full" and dtype == torch.float16:
            raise UserError(f"products of {self.weights} weights may overflow in fp16; use bf16 or fp32")
        self.engine = None
        for part in (self, *self.layers):
            part.dtype = dtype
        for p in self.parameters():
            if p.dtype in EIGHT_BITS.values():
                p.data = p.data.to(device)
            else:
                p.data = p.data.to(device, dtype if p.ndim == 2 else torch.promote_types(dtype, torch.float32))
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda`, `half` and the like do; another precision as by `prepare`."""
        self.engine = None
        one, two = (fn(torch.empty(0, dtype=dtype, device=self.device)) for dtype in (torch.float32, torch.float64))
        if one.dtype == two.dtype:  # it converts
            return self.prepare(one.device, one.dtype)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: everything but the engine, whose graphs belong to this process."""
        return self.__dict__ | {"engine": None}

    @property
    def device(self) -> torch.device:
        return self.W_h.device

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the residual stream and the logits."""
        return torch.promote_types(self.dtype, torch.float32)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of whole sequences."""
        return self.head(self.stream(tokens))

    def prefill(self, tokens: Tensor, lengths: Tensor, caches: Sequence[Cache], layer: Any = Layer.__call__) -> Tensor:
        """Logits (B, V) after the last token of each row; fills the caches. Shorter rows are padded on the right:
        causal attention does not see the padding, and decoding overwrites it in the cache before it is seen."""
        h = self.stream(tokens, caches, layer)
        return self.head(h[torch.arange(len(h), device=h.device), lengths - 1])

    def decode(
        self, tokens: Tensor, positions: Tensor, caches: Sequence[Cache], capacity: int, layer: Any = Layer.__call__
    ) -> Tensor:
        """Logits (B, V) after one more token (B) of each row, at its position (B); adds it to the caches. `caches` may
        be views of the first slots of caches with `capacity` slots."""
        cos, sin = self.angles(positions)
        seen = torch.arange(caches[0].keys.shape[2], device=positions.device) <= positions[:, None]
        ctx = Context(cos[:, None, None], sin[:, None, None], positions, seen[:, None, None])
        h, slots = self.embed(tokens[:, None]), positions % capacity
        for part, cache in zip(self.layers, caches, strict=True):
            h = layer(part, h, ctx, cache, slots)
        return self.head(h[:, 0])

    def stream(
        self,
        tokens: Tensor,
        caches: Sequence[Cache] | None = None,
        layer: Any = Layer.__call__,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after the last layer, (B, T, d_m).

        `documents` (B, T) is the number of each token's document; attention then stays inside the document.
        """
        check_tokens(tokens, self.cfg.context, documents=documents)
        h = self.embed(tokens)
        ctx = make_context(h, self.cfg.rotary_dim, self.cfg.rotary_base, documents)
        for i, part in enumerate(self.layers):
            h = layer(part, h, ctx, None if caches is None else caches[i])
        return h

    def embed(self, tokens: Tensor) -> Tensor:
        if self.W_e_scale is None:
            return F.embedding(tokens, self.W_e).to(self.wide)
        rows = F.embedding(tokens, self.W_e.view(torch.uint8)).view(self.W_e.dtype)  # not all devices index fp8
        return rows.to(self.wide) * F.embedding(tokens, self.W_e_scale[:, None])

    def head(self, h: Tensor) -> Tensor:
        x = enter(h, self.design, self.slope_h).to(self.dtype)
        return product(x, self.W_h, self.W_h_scale).to(self.wide)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles, (…, r/2)."""
        angles = rotary_angles(positions, self.cfg.rotary_dim, self.cfg.rotary_base)
        return angles.cos().to(self.wide), angles.sin().to(self.wide)

    def make_caches(self, batch: int, slots: int) -> list[Cache]:
        """Caches of zeros: masked slots must hold finite numbers."""
        shape = (batch, self.cfg.n_heads, slots, self.cfg.d_head)
        zeros = partial(torch.zeros, shape, device=self.device, dtype=self.dtype)
        return [Cache(zeros(), zeros()) for _ in self.layers]


@operation
def decode_step(model: Folded, tokens: Tensor, positions: Tensor, caches: Sequence[Cache], capacity: int) -> Tensor:
    """Logits (B, V) after one more token of each row; see `Folded.decode`."""
    return model.decode(tokens, positions, caches, capacity)


@operation
def read_prompts(model: Folded, tokens: Tensor, lengths: Tensor, caches: Sequence[Cache]) -> Tensor:
    """Logits (B, V) after the last token of each row; fills the caches. See `Folded.prefill`."""
    return model.prefill(tokens, lengths, caches)
