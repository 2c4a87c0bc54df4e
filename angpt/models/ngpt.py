"""nGPT: every representation and every weight vector along the residual dimension on the unit sphere. Second column
of Table 1."""

import math

import torch
from torch import Tensor

from angpt.config import ModelConfig
from angpt.constraints import Constraint
from angpt.models.decoder import Block, NormalizedDecoder
from angpt.models.design import Design
from angpt.models.primitives import Context, LearnedScale, PositiveScale, lerp, norm, swiglu


class NGPTBlock(Block):
    computes = Design(qk="s_qk", s_uz=True, output_norm=True, lerp=True, positive_alpha=True, update_norm=True)

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        self.sqrt_d = math.sqrt(cfg.d_model)
        self.sqrt_d_k = math.sqrt(cfg.d_head)
        self.s_qk = LearnedScale(cfg.d_model, init=1.0, scale=cfg.stored_start)
        self.s_uz = LearnedScale(2 * cfg.d_mlp, init=1.0, scale=1.0)
        self.alpha_a = PositiveScale(cfg.d_model, init=cfg.alpha_init, scale=cfg.stored_start)
        self.alpha_m = PositiveScale(cfg.d_model, init=cfg.alpha_init, scale=cfg.stored_start)

    def attention(self, h: Tensor, ctx: Context) -> Tensor:
        s_q = s_k = self.s_qk().view(-1, 1, self.d_head)
        qkv = self.W_qkv(h)  # q, k, v ← W_qkv h
        q, k, v = self.normed_heads(qkv, ctx, s_q, s_k)  # k, q ← norm(k) · s_k, norm(q) · s_q
        Av = self.attend(q, k, v, ctx, self.sqrt_d_k)  # A ← softmax(q kᵀ · √d_k)
        h_a = self.W_p(Av)  # h_a ← W_p (A v)
        return norm(h_a)  # h_a ← norm(h_a)

    def mlp(self, h: Tensor) -> Tensor:
        s_u, s_z = self.s_uz().chunk(2)
        rows = (
            s_u,  # u ← u · s_u
            s_z * self.sqrt_d,  # z ← z · s_z · √d
        )
        uz = self.W_uz(h, torch.cat(rows))  # u, z ← W_uz h
        h_m = swiglu(uz)  # h_m ← u · SiLU(z)
        h_m = self.W_d(h_m)  # h_m ← W_d h_m
        return norm(h_m)  # h_m ← norm(h_m)

    def forward(self, h: Tensor, ctx: Context) -> Tensor:
        h_a = self.attention(h, ctx)
        h = norm(lerp(h, h_a, self.alpha_a()))  # h ← norm(h + α_a (h_a − h))
        h_m = self.mlp(h)
        return norm(lerp(h, h_m, self.alpha_m()))  # h ← norm(h + α_m (h_m − h))


class NGPT(NormalizedDecoder):
    """Representations and weights on the unit sphere: a norm after each block and after each update."""

    Block = NGPTBlock

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg, cfg.stored_start)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.W_e(tokens)  # h ← W_e x_in

    def head(self, h: Tensor) -> Tensor:
        return self.W_h(h, self.s_z())  # logits ← s_Z · (W_h h)

    def constraints(self) -> dict[str, Constraint]:
        """Unit length along the residual dimension: the columns of the maps that write to it, the rows elsewhere."""
        return {
            name: Constraint("unit", dim=0 if name.endswith(("W_p.weight", "W_d.weight")) else 1)
            for name in self.matrices()
        }
