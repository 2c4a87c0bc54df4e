"""The inference graph: matrices, norms and at most two vectors per residual update. No other factor is left.

One class serves all architectures, since what differs between them is constant and in the weights (see fold.py). The
only norm is rms without a gain: the stream of nGPT and anGPT is carried √d_m times as long as in training, which turns
each of their unit norms into it, and the matrices that read the stream are divided by √d_m once.

Matrices may be bf16. The residual stream and the vectors stay fp32: they are a few kilobytes per token, and
(1 − α) ν is so close to 1 that bf16 would round it away.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from angpt.config import ModelConfig
from angpt.errors import UserError
from angpt.models.design import Design
from angpt.models.primitives import EPS, Context, rotate
from angpt.operations import operation


def rms(x: Tensor, eps: float = EPS) -> Tensor:
    """x / sqrt(mean(x²)) along the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def long_norm(x: Tensor) -> Tensor:
    """√d · norm(x), which is rms(x), for a zero vector and its neighbourhood as well."""
    return rms(x, EPS / x.shape[-1])


class Cache(NamedTuple):
    """Keys and values of one layer, (B, H, S, d_h): slot s holds a token whose position is s, or s plus a multiple of
    S where the window slides."""

    keys: Tensor
    values: Tensor


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Layer(nn.Module):
    """Attention, residual update, MLP, residual update."""

    def __init__(self, cfg: ModelConfig, design: Design) -> None:
        super().__init__()
        self.d_head, self.design = cfg.d_head, design
        self.W_qkv = parameter(3 * cfg.d_model, cfg.d_model)
        self.W_p = parameter(cfg.d_model, cfg.d_model)
        self.W_uz = parameter(2 * cfg.d_mlp, cfg.d_model)
        self.W_d = parameter(cfg.d_model, cfg.d_mlp)
        # The attention scale: one number, or in nGPT a number per dimension. q alone carries it.
        gains = {"g": (1, 1, 1), "s_qk": (cfg.n_heads, 1, cfg.d_head), "plain": None}[design.qk]
        self.gain = None if gains is None else parameter(*gains)
        vector = (cfg.d_model,) if design.lerp else None
        self.keep_a, self.add_a = (None if vector is None else parameter(*vector) for _ in range(2))
        self.keep_m, self.add_m = (None if vector is None else parameter(*vector) for _ in range(2))
        self.slope_a, self.slope_m = (parameter(1) if design.input == "tanh" else None for _ in range(2))

    def forward(
        self, h: Tensor, ctx: Context, cache: Cache | None, slots: Tensor | None = None, by_hand: bool = False
    ) -> Tensor:
        """The residual stream after this layer: of whole sequences, or, given the slots (B) of the cache that take them
        in, of one new token per row.

        `by_hand` writes attention to the cache as products and a softmax, which compiles to kernels that use the whole
        GPU for a single row; otherwise it is one fused kernel.
        """
        h = self.update(h, self.attention(enter(h, self.design, self.slope_a), ctx, cache, slots, by_hand), "a")
        u, z = F.linear(enter(h, self.design, self.slope_m).to(self.W_uz.dtype), self.W_uz).chunk(2, dim=-1)
        return self.update(h, F.linear(u * F.silu(z), self.W_d), "m")

    def attention(self, x: Tensor, ctx: Context, cache: Cache | None, slots: Tensor | None, by_hand: bool) -> Tensor:
        qkv = F.linear(x.to(self.W_qkv.dtype), self.W_qkv).view(*x.shape[:2], 3, -1, self.d_head)
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
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        else:
            assert cache is not None
            assert ctx.mask is not None
            rows = torch.arange(k.shape[0], device=k.device)
            cache.keys[rows, :, slots] = k[:, :, 0]
            cache.values[rows, :, slots] = v[:, :, 0]
            out = (attend_by_hand if by_hand else attend_fused)(q, cache, ctx.mask)
        return F.linear(out.transpose(1, 2).flatten(2), self.W_p)

    def update(self, h: Tensor, x: Tensor, which: str) -> Tensor:
        keep, add = (self.keep_a, self.add_a) if which == "a" else (self.keep_m, self.add_m)
        x = x.to(h.dtype)
        if self.design.output_norm:
            x = long_norm(x)
        h = h + x if keep is None or add is None else keep * h + add * x
        return rms(h) if self.design.update_norm else h


def enter(h: Tensor, design: Design, slope: Tensor | None) -> Tensor:
    """What a block or the head sees of the stream."""
    if slope is not None:
        return torch.tanh(slope * h)
    return rms(h) if design.input == "rms" else h


def attend_fused(q: Tensor, cache: Cache, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, *cache, attn_mask=mask, scale=1.0)


def attend_by_hand(q: Tensor, cache: Cache, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, cache.keys.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return torch.matmul(weights.to(q.dtype), cache.values)


class Folded(nn.Module):
    """A model for inference. `fold` makes it from a trained one."""

    def __init__(self, cfg: ModelConfig, design: Design) -> None:
        super().__init__()
        self.cfg, self.design = cfg, design
        self.W_e = parameter(cfg.vocab_size, cfg.d_model)
        self.layers = nn.ModuleList(Layer(cfg, design) for _ in range(cfg.n_layers))
        self.slope_h = parameter(1) if design.input == "tanh" else None
        self.W_h = parameter(cfg.vocab_size, cfg.d_model)
        self.engine: Any = None
        """Of the last generation, for the next one."""

    def prepare(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Move to a device, the matrices to a dtype; vectors stay in at least fp32."""
        self.engine = None
        for p in self.parameters():
            p.data = p.data.to(device, dtype if p.ndim == 2 else torch.promote_types(dtype, torch.float32))
        return self

    @property
    def device(self) -> torch.device:
        return self.W_h.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices and the cache."""
        return self.W_h.dtype

    @property
    def wide(self) -> torch.dtype:
        """Of the residual stream and the logits."""
        return torch.promote_types(self.dtype, torch.float32)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of whole sequences."""
        return self.head(self.stream(tokens))

    def prefill(self, tokens: Tensor, lengths: Tensor, caches: Sequence[Cache]) -> Tensor:
        """Logits (B, V) behind the last token of each row, the caches filled. Rows shorter than the longest are filled
        up on the right: no token sees what comes after it, and the cache overwrites the rest before it is seen."""
        h = self.stream(tokens, caches)
        return self.head(h[torch.arange(len(h), device=h.device), lengths - 1])

    def decode(
        self, tokens: Tensor, positions: Tensor, caches: Sequence[Cache], capacity: int, layer: Any = Layer.__call__
    ) -> Tensor:
        """Logits (B, V) behind one more token of each row, (B), which stands at its position and is added to the
        caches. Of a cache of `capacity` slots only those that `caches` shows are looked at."""
        cos, sin = self.angles(positions)
        seen = torch.arange(caches[0].keys.shape[2], device=positions.device) <= positions[:, None]
        ctx = Context(cos[:, None, None], sin[:, None, None], positions, seen[:, None, None])
        h, slots = self.embed(tokens[:, None]), positions % capacity
        for part, cache in zip(self.layers, caches, strict=True):
            h = layer(part, h, ctx, cache, slots)
        return self.head(h[:, 0])

    def stream(self, tokens: Tensor, caches: Sequence[Cache] | None = None) -> Tensor:
        """The residual stream at the top, (B, T, d_m)."""
        if tokens.shape[1] > self.cfg.context:
            raise UserError(f"sequence of {tokens.shape[1]} tokens, but the model's context is {self.cfg.context}")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        ctx = Context(*self.angles(positions), positions, mask=None)
        h = self.embed(tokens)
        for i, part in enumerate(self.layers):
            h = part(h, ctx, None if caches is None else caches[i])
        return h

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.W_e).to(self.wide)

    def head(self, h: Tensor) -> Tensor:
        return F.linear(enter(h, self.design, self.slope_h).to(self.dtype), self.W_h).to(self.wide)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles, (…, r/2). In float64, as in training; MPS has none."""
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        r = self.cfg.rotary_dim
        frequencies = self.cfg.rotary_base ** (-torch.arange(0, r, 2, device=positions.device, dtype=exact) / r)
        angles = positions.to(exact)[..., None] * frequencies
        return angles.cos().to(self.wide), angles.sin().to(self.wide)

    def make_caches(self, batch: int, slots: int) -> list[Cache]:
        """Empty caches, of zeros: what is masked must still be a number."""
        shape = (batch, self.cfg.n_heads, slots, self.cfg.d_head)
        return [
            Cache(*(torch.zeros(shape, device=self.device, dtype=self.dtype) for _ in range(2))) for _ in self.layers
        ]


@operation
def decode_step(model: Folded, tokens: Tensor, positions: Tensor, caches: Sequence[Cache], capacity: int) -> Tensor:
    """Logits (B, V) behind one more token of each row: see `Folded.decode`."""
    return model.decode(tokens, positions, caches, capacity)
