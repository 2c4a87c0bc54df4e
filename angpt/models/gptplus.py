"""GPT+: the strong baseline. Pre-RMSNorm GPT with SwiGLU, rotary positions and QK norm. First column of Table 1."""

import math

import torch
from torch import Tensor, nn

from angpt.config import ModelConfig
from angpt.models.decoder import Block, Decoder
from angpt.models.design import Design
from angpt.models.primitives import Context, LearnedScale, RMSNorm, swiglu


class GPTPlusBlock(Block):
    computes = Design(input="rms")

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__(cfg, layer)
        self.norm_a = self.make_norm(cfg.d_model)
        self.norm_m = self.make_norm(cfg.d_model)
        self.g = LearnedScale(1, init=cfg.g_start, scale=cfg.g_start)

    def make_norm(self, size: int) -> nn.Module:
        return RMSNorm(size)

    def attention(self, h: Tensor, ctx: Context) -> Tensor:
        h_a = self.norm_a(h)  # h_a ← rms(h) · γ_a
        qkv = self.W_qkv(h_a)  # q, k, v ← W_qkv h_a
        q, k, v = self.normed_heads(qkv, ctx)  # k, q ← norm(k), norm(q)
        Av = self.attend(q, k, v, ctx, self.g())  # A ← softmax(q kᵀ · g)
        return self.W_p(Av)  # h_a ← W_p (A v)

    def mlp(self, h: Tensor) -> Tensor:
        h_m = self.norm_m(h)  # h_m ← rms(h) · γ_m
        uz = self.W_uz(h_m)  # u, z ← W_uz h_m
        h_m = swiglu(uz)  # h_m ← u · SiLU(z)
        return self.W_d(h_m)  # h_m ← W_d h_m

    def forward(self, h: Tensor, ctx: Context) -> Tensor:
        h = h + self.attention(h, ctx)  # h ← h + h_a
        return h + self.mlp(h)  # h ← h + h_m


class GPTPlus(Decoder):
    """GPT with RMSNorm before each block, SwiGLU, rotary positions and QK norm."""

    Block = GPTPlusBlock

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.norm_h = self.make_norm(cfg.d_model)

    def make_norm(self, size: int) -> nn.Module:
        return RMSNorm(size)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.W_e(tokens)  # h ← W_e x_in

    def head(self, h: Tensor) -> Tensor:
        h = self.norm_h(h)  # h ← rms(h) · γ_h
        return self.W_h(h)  # logits ← W_h h

    def init_matrices(self, generator: torch.Generator | None) -> None:
        """Normal of 0.02; the two maps of each block that write to the residual stream divided by sqrt(2 L)."""
        for name, weight in self.matrices().items():
            writes = name.endswith(("W_p.weight", "W_d.weight"))
            weight.normal_(std=0.02 / math.sqrt(2 * self.cfg.n_layers) if writes else 0.02, generator=generator)
