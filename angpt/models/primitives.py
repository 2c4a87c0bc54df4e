"""The operations that Table 1 is written in: norm, rms, rotation, attention, learned scales, interpolation.

Reductions are done in fp32 whatever the dtype of the input (float64 stays float64).
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Inside the root of norm and rms, so that a zero vector gives zero. Small enough to vanish in float64 comparisons
# (relative error 1e-14 for a vector of length 1e-3), large enough to be a normal fp32 number.
EPS = 1e-20


def use_kernels(x: Tensor) -> bool:
    """Whether the hand-written kernels apply: in bf16 on a GPU."""
    return x.is_cuda and x.dtype == torch.bfloat16


def wide(x: Tensor) -> Tensor:
    """x in at least fp32."""
    return x if x.dtype == torch.float64 else x.float()


def norm(x: Tensor) -> Tensor:
    """x / ‖x‖₂ along the last dimension; zero for a zero vector."""
    w = wide(x)
    return (w * torch.rsqrt(w.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def rms(x: Tensor) -> Tensor:
    """x / sqrt(mean(x²)) along the last dimension; zero for a zero vector."""
    w = wide(x)
    return (w * torch.rsqrt(w.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def lerp(h: Tensor, x: Tensor, alpha: Tensor, nu: Tensor | float = 1.0) -> Tensor:
    """(h + α (x − h)) · ν, written as one product with each of two vectors, so that α and ν cost nothing per token."""
    return ((1 - alpha) * nu * h + alpha * nu * x).to(h.dtype)


def nu_lerp(alpha: Tensor) -> Tensor:
    """ν(α) = 1 / sqrt(α² + (1−α)²), the factor of the interpolation h + α (x − h), element by element."""
    return torch.rsqrt(alpha.square() + (1 - alpha).square())


class LerpFactor(NamedTuple):
    """The factor of the residual update: ν(α) or 1, times a constant."""

    of_alpha: bool = True
    times: float = 1.0

    def __call__(self, alpha: Tensor) -> Tensor | float:
        return nu_lerp(alpha) * self.times if self.of_alpha else self.times


NO_FACTOR = LerpFactor(of_alpha=False)


def update(
    h: Tensor, x: Tensor, alpha: Tensor, nu: LerpFactor = NO_FACTOR, *, scale: float = 1.0, normed: bool = False
) -> Tensor:
    """The residual update lerp(h, norm(x · scale), α, ν(α)), or the norm of that."""
    if use_kernels(h):
        from angpt.fast import block_kernels as kernels

        return kernels.update(
            h.contiguous(), x.to(h.dtype).contiguous(), alpha.contiguous(), nu.of_alpha, nu.times, scale, normed
        )
    y = lerp(h, norm(x if scale == 1.0 else x * scale), alpha, nu(alpha))
    return norm(y) if normed else y


def swiglu(uz: Tensor, scale: float = 1.0) -> Tensor:
    """u · SiLU(z) of u, z = uz · scale."""
    if use_kernels(uz):
        from angpt.fast import block_kernels as kernels

        return kernels.swiglu(uz.contiguous(), scale)
    u, z = (uz if scale == 1.0 else uz * scale).chunk(2, dim=-1)
    return u * F.silu(z)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of logits (N, V), which must not be used any more; targets of −100 are not counted."""
    if use_kernels(logits):
        from angpt.fast import loss_kernels

        return loss_kernels.cross_entropy_(logits.contiguous(), targets.contiguous())
    return F.cross_entropy(wide(logits), targets)


@runtime_checkable
class Resettable(Protocol):
    """A module with learned scalars or vectors, which `reset` brings back to their start."""

    def reset(self) -> None: ...


class LearnedScale(nn.Module):
    """A learned vector s = (init / scale) · ŝ, where the stored ŝ starts at `scale` and s therefore at `init`.

    Under Adam, whose steps do not depend on the size of the gradient, s moves init / scale times as fast as it would
    if it were stored itself.
    """

    def __init__(self, size: int, init: float, scale: float) -> None:
        super().__init__()
        self.init, self.scale = init, scale
        self.stored = nn.Parameter(torch.full((size,), scale))

    def forward(self) -> Tensor:
        return self.stored * (self.init / self.scale)

    @torch.no_grad()
    def reset(self) -> None:
        self.stored.fill_(self.scale)

    def extra_repr(self) -> str:
        return f"{self.stored.numel()}, init={self.init:g}, scale={self.scale:g}"


class PositiveScale(LearnedScale):
    """A learned vector of which the absolute value counts."""

    def forward(self) -> Tensor:
        return super().forward().abs()


class Linear(nn.Linear):
    """W x without bias, times a learned vector with an entry per output where one is given.

    The vector multiplies the rows of W: the same map, and neither it nor its gradient costs a pass over all tokens.
    """

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is None:
            return F.linear(x, self.weight)
        if use_kernels(self.weight) and x.dtype == self.weight.dtype:
            from angpt.fast import block_kernels as kernels

            return kernels.scaled_linear(x, self.weight, scale)
        return F.linear(x, (self.weight * scale[:, None]).to(self.weight.dtype))

    def reset_parameters(self) -> None:
        """Left to the model, which initialises all its matrices in one place."""


class RMSNorm(nn.Module):
    """rms(x) · γ, times a constant."""

    factor: Tensor

    def __init__(self, size: int, factor: float = 1.0) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))
        # A tensor, because compiled code is made anew for each value of a Python number, that is for each layer.
        self.register_buffer("factor", torch.tensor(factor), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gamma * self.factor
        if use_kernels(x):
            from angpt.fast import block_kernels as kernels

            return kernels.scaled_rms(x.contiguous(), gain)
        return (rms(wide(x)) * gain).to(x.dtype)

    @torch.no_grad()
    def reset(self) -> None:
        self.gamma.fill_(1.0)


class Context(NamedTuple):
    """What a block must know about the sequence beside its vectors."""

    cos: Tensor
    """(…, T, r/2): cosines of the rotary angles of the first r dimensions of a head."""
    sin: Tensor
    positions: Tensor
    """(T) or (B, T): position of each token, counted from the start of its document where documents are masked."""
    mask: Tensor | None
    """(B, 1, T, T), true where a token may attend; None for plain causal attention."""

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the pairs (i, i + r/2) of the first r dimensions of each head by the angle of their position."""
        half = self.cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos, rest.to(self.cos.dtype)), dim=-1)


def normed_heads(
    qkv: Tensor, d_head: int, ctx: Context, q_gain: Tensor | None = None, k_gain: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, 3·d) → q, k, v (B, H, T, d_h) with norm(rotate(·)) of q and k, times a gain per head and dimension, or one
    for all."""
    if use_kernels(qkv) and d_head in (16, 32, 64, 128, 256) and ctx.cos.shape[-1] > 0:
        from angpt.fast import head_kernels

        packed = qkv.view(*qkv.shape[:2], 3, -1, d_head)
        q_full, k_full = (
            None if gain is None else gain.reshape(-1, gain.shape[-1]).expand(packed.shape[-2:]).contiguous()
            for gain in (q_gain, k_gain)
        )
        q, k, v = head_kernels.normed_heads(packed, ctx.cos, ctx.sin, q_full, k_full)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    q, k, v = split_heads(qkv, d_head)
    q, k = norm(ctx.rotate(q)), norm(ctx.rotate(k))
    return q if q_gain is None else q * q_gain, k if k_gain is None else k * k_gain, v


def make_context(h: Tensor, rotary_dim: int, rotary_base: float, documents: Tensor | None = None) -> Context:
    """The context of embedded tokens h (B, T, d).

    `documents` (B, T) numbers the document that each token belongs to; attention then stays inside of it.
    """
    index = torch.arange(h.shape[1], device=h.device)
    if documents is None:
        positions, mask = index, None
    else:
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        positions = index - torch.where(starts, index, 0).cummax(dim=1).values
        mask = (documents[:, None, :, None] == documents[:, None, None, :]) & (index[:, None] >= index)
    # Angles in float64: in fp32 the angle of position 2,000 is off by 1e-4. MPS has no float64.
    exact = torch.float32 if h.device.type == "mps" else torch.float64
    frequencies = rotary_base ** (-torch.arange(0, rotary_dim, 2, device=h.device, dtype=exact) / rotary_dim)
    angles = positions.to(exact)[..., None] * frequencies
    if angles.ndim == 3:
        angles = angles[:, None]  # one table per row of the batch, shared by the heads
    dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
    return Context(angles.cos().to(dtype), angles.sin().to(dtype), positions, mask)


def attend(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """softmax(q kᵀ) v per head, causal; any scale is already in q. (B, H, T, d_h) → (B, T, H·d_h)."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=ctx.mask, is_causal=ctx.mask is None, scale=1.0)
    return out.transpose(1, 2).flatten(2)


def split_heads(qkv: Tensor, d_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, 3·d) → three of (B, H, T, d_h)."""
    b, t, _ = qkv.shape
    q, k, v = qkv.view(b, t, 3, -1, d_head).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v
