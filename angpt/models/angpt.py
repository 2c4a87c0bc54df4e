"""anGPT: normalization by constant factors ν, every weight row bounded by 1. Third column of Table 1."""

import torch
from torch import Tensor

from angpt.config import ModelConfig
from angpt.constraints import Constraint
from angpt.models import decoder, factors
from angpt.models.primitives import Context, LearnedScale, LerpFactor, swiglu, update


def stored_scale(cfg: ModelConfig) -> float:
    return 0.01 if cfg.stored_scale is None else cfg.stored_scale


class Block(decoder.Block):
    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        self.nu, self.nu_lerp = self.constants(cfg), self.residual_factor()
        self.g = LearnedScale(1, init=cfg.g_start, scale=cfg.g_start)
        self.alpha_a = LearnedScale(cfg.d_model, init=cfg.alpha_init, scale=stored_scale(cfg))
        self.alpha_m = LearnedScale(cfg.d_model, init=cfg.alpha_init, scale=stored_scale(cfg))

    def constants(self, cfg: ModelConfig) -> factors.Factors:
        return factors.constants(cfg)

    def residual_factor(self) -> LerpFactor:
        return LerpFactor()

    def attention(self, h: Tensor, ctx: Context) -> Tensor:
        qkv = self.W_qkv(h)  # q, k, v ← W_qkv h · ν_qkv, the factor with the update
        q, k, v = self.normed_heads(qkv, ctx, self.g())  # k, q ← norm(k), norm(q), and the g of the next
        h_a = self.attend(q, k, v, ctx)  # A ← softmax(q kᵀ · g)
        return self.W_p(h_a)  # h_a ← W_p (A v) · ν_p, the factor with the update

    def mlp(self, h: Tensor) -> Tensor:
        uz = self.W_uz(h)  # u, z ← W_uz h · ν_uz, the factor with the next
        h_m = swiglu(uz, self.nu.uz)  # h_m ← u · SiLU(z) · ν_acf, the factor with the update
        return self.W_d(h_m)  # h_m ← W_d h_m · ν_d, the factor with the update

    def update(self, h: Tensor, x: Tensor, alpha: Tensor, scale: float) -> Tensor:
        return update(h, x, alpha, self.nu_lerp, scale=scale)

    def forward(self, h: Tensor, ctx: Context) -> Tensor:
        nu = self.nu
        h_a = self.attention(h, ctx)
        h = self.update(h, h_a, self.alpha_a(), nu.qkv * nu.p)  # h ← (h + α_a (norm(h_a) − h)) · ν(α_a)
        return self.update(h, self.mlp(h), self.alpha_m(), nu.acf * nu.d)  # h ← (h + α_m (norm(h_m) − h)) · ν(α_m)


class AnGPT(decoder.Decoder):
    """Constant factors in place of norms, a learned interpolation for the residual update, weight rows bounded by 1."""

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
        """Each token's vector of embedding and head, and each neuron of every map, has at most length 1."""
        return {name: Constraint("bound", dim=1) for name in self.matrices()}
