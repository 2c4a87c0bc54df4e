"""nGPT: every representation and every weight vector along the residual dimension on the unit sphere. Second column
of Table 1."""

import math

import torch
from torch import Tensor

from angpt.config import ModelConfig
from angpt.constraints import Constraint
from angpt.models import decoder
from angpt.models.primitives import Context, LearnedScale, PositiveScale, swiglu, update


def stored_scale(cfg: ModelConfig) -> float:
    return 1 / math.sqrt(cfg.d_model) if cfg.stored_scale is None else cfg.stored_scale


class Block(decoder.Block):
    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        self.sqrt_d = math.sqrt(cfg.d_model)
        self.sqrt_d_k = math.sqrt(cfg.d_head)
        self.s_qk = LearnedScale(cfg.d_model, init=1.0, scale=stored_scale(cfg))
        self.s_uz = LearnedScale(2 * cfg.d_mlp, init=1.0, scale=1.0)
        self.alpha_a = PositiveScale(cfg.d_model, init=cfg.alpha_init, scale=stored_scale(cfg))
        self.alpha_m = PositiveScale(cfg.d_model, init=cfg.alpha_init, scale=stored_scale(cfg))

    def attention(self, h: Tensor, ctx: Context) -> Tensor:
        s_k = self.s_qk().view(-1, 1, self.d_head)
        s_q = s_k * self.sqrt_d_k
        qkv = self.W_qkv(h)  # q, k, v ← W_qkv h
        q, k, v = self.normed_heads(qkv, ctx, s_q, s_k)  # k, q ← norm(k) · s_k, norm(q) · s_q, and the √d_k of the next
        h_a = self.attend(q, k, v, ctx)  # A ← softmax(q kᵀ · √d_k)
        return self.W_p(h_a)  # h_a ← W_p (A v)

    def mlp(self, h: Tensor) -> Tensor:
        s_u, s_z = self.s_uz().chunk(2)
        rows = (
            s_u,  # u ← u · s_u
            s_z * self.sqrt_d,  # z ← z · s_z · √d
        )
        uz = self.W_uz(h, torch.cat(rows))  # u, z ← W_uz h
        h_m = swiglu(uz)  # h_m ← u · SiLU(z)
        return self.W_d(h_m)  # h_m ← W_d h_m

    def update(self, h: Tensor, x: Tensor, alpha: Tensor) -> Tensor:
        return update(h, x, alpha, normed=True)

    def forward(self, h: Tensor, ctx: Context) -> Tensor:
        h = self.update(h, self.attention(h, ctx), self.alpha_a())  # h ← norm(h + α_a (norm(h_a) − h))
        return self.update(h, self.mlp(h), self.alpha_m())  # h ← norm(h + α_m (norm(h_m) − h))


class NGPT(decoder.Decoder):
    """Representations and weights on the unit sphere: a norm after each block and after each update."""

    Block = Block

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.s_z = LearnedScale(cfg.vocab_size, init=1.0, scale=stored_scale(cfg))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.W_e(tokens)  # h ← W_e x_in

    def head(self, h: Tensor) -> Tensor:
        return self.W_h(h, self.s_z())  # logits ← s_Z · (W_h h)

    def init_matrices(self, generator: torch.Generator | None) -> None:
        self.init_normalized(generator)

    def constraints(self) -> dict[str, Constraint]:
        """Unit length along the residual dimension: the columns of the maps that write to it, the rows elsewhere."""
        return {
            name: Constraint("unit", dim=0 if name.endswith(("W_p.weight", "W_d.weight")) else 1)
            for name in self.matrices()
        }
