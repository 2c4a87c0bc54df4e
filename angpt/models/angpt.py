"""anGPT: normalization by constant factors ν, every weight row bounded by 1. Third column of Table 1."""

from dataclasses import replace

from torch import Tensor

from angpt.config import ModelConfig
from angpt.constraints import Constraint
from angpt.models import factors
from angpt.models.decoder import Block, NormalizedDecoder
from angpt.models.design import Design
from angpt.models.factors import LerpFactor
from angpt.models.primitives import Context, LearnedScale, lerp, norm, swiglu


class AnGPTBlock(Block):
    computes = Design(output_norm=True, lerp=True)

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        self.nu, self.nu_lerp = self.constants(cfg), self.residual_factor()
        self.g = LearnedScale(1, init=cfg.g_start, scale=cfg.g_start)
        self.alpha_a = LearnedScale(cfg.d_model, init=cfg.alpha_init, scale=cfg.stored_start)
        self.alpha_m = LearnedScale(cfg.d_model, init=cfg.alpha_init, scale=cfg.stored_start)

    def constants(self, cfg: ModelConfig) -> factors.Factors:
        return factors.constants(cfg)

    def residual_factor(self) -> LerpFactor:
        return LerpFactor()

    def design(self) -> Design:
        nu = self.nu
        constant = replace(super().design(), nu_p=nu.qkv * nu.p, nu_uz=nu.uz, nu_d=nu.acf * nu.d)
        return replace(constant, nu_alpha=self.nu_lerp.of_alpha, update_factor=self.nu_lerp.times)

    def attention(self, h: Tensor, ctx: Context) -> Tensor:
        qkv = self.W_qkv(h, self.nu.qkv)  # q, k, v ← W_qkv h · ν_qkv
        q, k, v = self.normed_heads(qkv, ctx)  # k, q ← norm(k), norm(q)
        Av = self.attend(q, k, v, ctx, self.g())  # A ← softmax(q kᵀ · g)
        h_a = self.W_p(Av, self.nu.p)  # h_a ← W_p (A v) · ν_p
        return norm(h_a)  # h_a ← norm(h_a)

    def mlp(self, h: Tensor) -> Tensor:
        uz = self.W_uz(h, self.nu.uz)  # u, z ← W_uz h · ν_uz
        h_m = swiglu(uz, self.nu.acf)  # h_m ← u · SiLU(z) · ν_acf
        h_m = self.W_d(h_m, self.nu.d)  # h_m ← W_d h_m · ν_d
        return norm(h_m)  # h_m ← norm(h_m)

    def forward(self, h: Tensor, ctx: Context) -> Tensor:
        h_a, alpha = self.attention(h, ctx), self.alpha_a()
        h = lerp(h, h_a, alpha, self.nu_lerp(alpha))  # h ← (h + α_a (h_a − h)) · ν(α_a)
        h_m, alpha = self.mlp(h), self.alpha_m()
        return lerp(h, h_m, alpha, self.nu_lerp(alpha))  # h ← (h + α_m (h_m − h)) · ν(α_m)


class AnGPT(NormalizedDecoder):
    """Constant factors in place of norms, a learned interpolation for the residual update, weight rows bounded by 1."""

    Block = AnGPTBlock

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg, cfg.stored_start)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.W_e(tokens)  # h ← W_e x_in

    def head(self, h: Tensor) -> Tensor:
        return self.W_h(h, self.s_z())  # logits ← s_Z · (W_h h)

    def constraints(self) -> dict[str, Constraint]:
        """Each token's vector of embedding and head, and each neuron of every map, has at most length 1."""
        return {name: Constraint("bound", dim=1) for name in self.matrices()}
