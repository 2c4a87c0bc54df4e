"""The operations that Table 1 is written in: norm, rms, lerp, rotation, attention, SwiGLU, learned scales.

Reductions are done in fp32, or in float64 if the input is float64. An `@operation` is the plain form of a function that
may have a faster form in `angpt.fast`, whose compiler passes also fuse `norm`, `lerp` and `attend` with their
neighbours.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from angpt.errors import UserError
from angpt.operations import operation

# Added under the root of norm and rms, so that a tiny vector does not become long. Negligible in float64 comparisons
# (relative error 1e-14 for a vector of length 1e-3), and a normal fp32 number.
EPS = 1e-20


def wide(x: Tensor) -> Tensor:
    """x in at least fp32."""
    if not x.is_floating_point():
        raise UserError(f"norms are those of floating-point numbers, not of {str(x.dtype).removeprefix('torch.')}")
    return x if x.dtype == torch.float64 else x.float()


def inverse_root(square: Tensor) -> Tensor:
    """1 / sqrt(square), and 1 for 0, so that a zero vector is passed on, and its gradient too. 1 / sqrt(EPS) would
    multiply that by 1e10 in each layer; 0 would keep a matrix that starts at zero there."""
    return torch.where(square > 0, torch.rsqrt(square + EPS), 1.0)


def norm(x: Tensor) -> Tensor:
    """x / ‖x‖₂ along the last dimension; zero for a zero vector, with the gradient of the identity."""
    w = wide(x)
    return (w * inverse_root(w.square().sum(-1, keepdim=True))).to(x.dtype)


def rms(x: Tensor) -> Tensor:
    """x / sqrt(mean(x²)) along the last dimension; zero for a zero vector, with the gradient of the identity."""
    w = wide(x)
    return (w * inverse_root(w.square().mean(-1, keepdim=True))).to(x.dtype)


def lerp(h: Tensor, x: Tensor, alpha: Tensor, nu: Tensor | float = 1.0) -> Tensor:
    """(h + α (x − h)) · ν, as h and x each times one vector, so that α and ν are combined once for all tokens."""
    return ((1 - alpha) * nu * h + alpha * nu * x).to(h.dtype)


def nu_lerp(alpha: Tensor) -> Tensor:
    """ν(α) = 1 / sqrt(α² + (1−α)²), the factor of the interpolation h + α (x − h), elementwise."""
    return torch.rsqrt(alpha.square() + (1 - alpha).square())


@operation
def residual_update(
    h: Tensor, x: Tensor, alpha: Tensor, nu_of_alpha: bool = True, times: float = 1.0, normed: bool = False
) -> Tensor:
    """lerp(h, norm(x), α, ν · times) with ν = ν(α) or 1; `normed`: the norm of that.

    The models write out its parts; a compiler pass of `angpt.fast` replaces them by this operation.
    """
    y = lerp(h, norm(x), alpha, nu_lerp(alpha) * times if nu_of_alpha else times)
    return norm(y) if normed else y


@operation
def swiglu(uz: Tensor, factor: float = 1.0) -> Tensor:
    """u · SiLU(z) · factor of the two halves u, z of the last dimension."""
    u, z = uz.chunk(2, dim=-1)
    h = u * F.silu(z)
    return h if factor == 1.0 else h * factor


@operation
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (N, V), which may be overwritten; targets of −100 are ignored."""
    return F.cross_entropy(wide(logits), targets)


@operation
def scaled_rms(x: Tensor, gain: Tensor) -> Tensor:
    """rms(x) times a vector."""
    return (rms(wide(x)) * gain).to(x.dtype)


@operation
def linear_with_row_gains(x: Tensor, weight: Tensor, gains: Tensor) -> Tensor:
    """W x with the rows of W multiplied by a vector; neither it nor its gradient needs a pass over the tokens."""
    return F.linear(x, (weight * gains[:, None]).to(weight.dtype))


class ConstantFactor(torch.autograd.Function):
    """W x · c, with the constant as alpha of the matrix products, forward and backward: it costs nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, factor: float) -> Tensor:
        return product(x.reshape(-1, x.shape[-1]), weight.t(), factor).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        x, weight, ctx.factor = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = gradients[0].reshape(-1, weight.shape[0])  # in the dtype of autocast, if the forward pass ran under it
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, weight.to(dy.dtype), ctx.factor).view(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = product(dy.t(), x.reshape(-1, x.shape[-1]).to(dy.dtype), ctx.factor).to(weight.dtype)
        return dx, dw, None


def product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """The matrix product a b · factor."""
    unread = b[0] if len(b) else b.new_zeros(b.shape[1])  # with beta = 0
    return torch.addmm(unread, a, b, beta=0, alpha=factor)


class Resettable(nn.Module):
    """A module with learned scalars or vectors, which `reset` initialises."""

    def reset(self) -> None:
        raise NotImplementedError


class LearnedScale(Resettable):
    """A learned vector s = (init / scale) · ŝ, where the stored ŝ starts at `scale` and s therefore at `init`.

    Adam's steps do not depend on the size of the gradient, so s changes init / scale times as fast as if it were stored
    directly.
    """

    def __init__(self, size: int, init: float, scale: float) -> None:
        super().__init__()
        if not init or not scale:  # s would stay 0
            raise UserError(f"a learned scale needs numbers other than 0, not init = {init} and scale = {scale}")
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
    """The absolute value of a learned vector."""

    def forward(self) -> Tensor:
        return super().forward().abs()


class Linear(nn.Linear):
    """W x without bias, times a constant, or times a learned vector with an entry per output."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def forward(self, x: Tensor, factor: float | Tensor = 1.0) -> Tensor:
        if isinstance(factor, Tensor):
            return linear_with_row_gains(x, self.weight, factor)
        if factor == 1.0:
            return F.linear(x, self.weight)
        y: Tensor = ConstantFactor.apply(x, self.weight, factor)  # type: ignore[no-untyped-call]
        return y

    def reset_parameters(self) -> None:
        """Does nothing: the model initialises all its matrices in one place."""


class RMSNorm(Resettable):
    """rms(x) · γ, times a constant."""

    factor: Tensor

    def __init__(self, size: int, factor: float = 1.0) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))
        self.constant = torch.tensor(factor, device="cpu").item()  # rounded as the tensor is
        # A tensor: torch.compile would recompile for each value of a Python number, that is for each layer.
        self.register_buffer("factor", torch.tensor(factor), persistent=False)
        self.register_load_state_dict_post_hook(RMSNorm.fill_factor)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        return scaled_rms(x, self.gamma * self.factor)

    @torch.no_grad()
    def reset(self) -> None:
        self.gamma.fill_(1.0)
        self.fill_factor()

    def fill_factor(self, *_: object) -> None:
        """Set the factor, which no state dict holds and which a model made on the meta device lacks."""
        if self.factor.is_meta:
            self.factor = torch.empty_like(self.factor, device=self.gamma.device)
        self.factor.fill_(self.constant)


class Context(NamedTuple):
    """What a block needs to know about the sequence besides the residual stream."""

    cos: Tensor
    """(…, T, r/2): cosines of the rotary angles of the first r dimensions of a head."""
    sin: Tensor
    positions: Tensor
    """(T) or (B, T): position of each token, from the start of its document if documents are masked."""
    mask: Tensor | None
    """(B, 1, T, T), True where a token may attend; None for causal attention."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + r/2) of the first r dimensions of each head by the angle of their position."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest.to(cos.dtype)), dim=-1)


@operation
def normed_heads(
    qkv: Tensor, d_head: int, cos: Tensor, sin: Tensor, q_gain: Tensor | None = None, k_gain: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, 3·d) → q, k, v (B, H, T, d_h) with norm(rotate(·)) of q and k, each times an optional gain, per head and
    dimension or one for all."""
    q, k, v = split_heads(qkv, d_head)
    q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
    return q if q_gain is None else q * q_gain, k if k_gain is None else k * k_gain, v


def check_tokens(tokens: Tensor, context: int, **others: Tensor | None) -> None:
    """Raise an error unless tokens are (B, T), not empty, and fit the context, and the others have their shape."""
    shape = tuple(tokens.shape)
    if len(shape) != 2:
        hint = "; tokens[None] is a batch of one sequence" if len(shape) == 1 else ""
        raise UserError(f"tokens have shape {shape}, but a model takes (B, T){hint}")
    if 0 in shape:
        raise UserError(f"tokens have shape {shape}: an empty batch has neither logits nor a loss")
    if shape[1] > context:
        raise UserError(f"sequence of {shape[1]} tokens, but the model's context is {context}")
    for name, x in others.items():
        if x is not None and x.shape != tokens.shape:
            raise UserError(f"{name} have shape {tuple(x.shape)}, but the tokens {shape}: each token needs one entry")


def make_context(h: Tensor, rotary_dim: int, rotary_base: float, documents: Tensor | None = None) -> Context:
    """The context of embedded tokens h (B, T, d).

    `documents` (B, T) is the number of each token's document; attention then stays inside the document.
    """
    index = torch.arange(h.shape[1], device=h.device)
    if documents is None:
        positions, mask = index, None
    else:
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        positions = index - torch.where(starts, index, 0).cummax(dim=1).values
        mask = (documents[:, None, :, None] == documents[:, None, None, :]) & (index[:, None] >= index)
    angles = rotary_angles(positions, rotary_dim, rotary_base)
    if angles.ndim == 3:
        angles = angles[:, None]  # one table per row, shared by its heads
    dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
    return Context(angles.cos().to(dtype), angles.sin().to(dtype), positions, mask)


def rotary_angles(positions: Tensor, rotary_dim: int, rotary_base: float) -> Tensor:
    """Rotary angles (…, r/2) of positions, in float64: in fp32 the angle of position 2,000 is off by 1e-4."""
    exact = torch.float32 if positions.device.type == "mps" else torch.float64  # MPS has no float64
    indices = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=exact)
    return positions.to(exact)[..., None] * rotary_base ** (-indices / rotary_dim)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gain: Tensor | float = 1.0) -> Tensor:
    """softmax(q kᵀ · gain) v per head, causal if there is no mask. (B, H, T, d_h) → (B, T, H·d_h)."""
    if isinstance(gain, Tensor):
        q, gain = q * gain, 1.0
    q, k = q.to(v.dtype), k.to(v.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=gain)
    return out.transpose(1, 2).flatten(2)


def split_heads(qkv: Tensor, d_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, 3·d) → q, k, v, each (B, H, T, d_h)."""
    b, t, _ = qkv.shape
    q, k, v = qkv.view(b, t, 3, -1, d_head).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v
