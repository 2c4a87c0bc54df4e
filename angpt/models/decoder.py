"""What the columns of Table 1 share: the stack of blocks around which they differ, the loss, counting."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from angpt.config import ModelConfig
from angpt.constraints import Constraint, is_matrix, project_
from angpt.errors import UserError
from angpt.models.primitives import (
    Context,
    Linear,
    Resettable,
    attend,
    cross_entropy,
    make_context,
    normed_heads,
    wide,
)


class Block(nn.Module, ABC):
    """One layer: attention, residual update, MLP, residual update. `layer` counts from 1."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.d_head, self.layer = cfg.d_head, layer
        self.W_qkv = Linear(cfg.d_model, 3 * cfg.d_model)
        self.W_p = Linear(cfg.d_model, cfg.d_model)
        self.W_uz = Linear(cfg.d_model, 2 * cfg.d_mlp)
        self.W_d = Linear(cfg.d_mlp, cfg.d_model)

    def normed_heads(
        self, qkv: Tensor, ctx: Context, q_gain: Tensor | None = None, k_gain: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return normed_heads(qkv, self.d_head, ctx, q_gain, k_gain)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        return attend(q, k, v, ctx)

    @abstractmethod
    def attention(self, h: Tensor, ctx: Context) -> Tensor:
        """What the attention makes of the residual stream, before the update norms, scales and adds it."""

    @abstractmethod
    def mlp(self, h: Tensor) -> Tensor:
        """What the MLP makes of the residual stream, before the update norms, scales and adds it."""

    @abstractmethod
    def forward(self, h: Tensor, ctx: Context) -> Tensor:
        """The residual stream after this layer."""


class Decoder(nn.Module, ABC):
    """Embedding, blocks, head. A column of Table 1 is a subclass with its own Block."""

    Block: ClassVar[type[Block]]

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_e = nn.Embedding(cfg.vocab_size, cfg.d_model, _weight=torch.empty(cfg.vocab_size, cfg.d_model))
        self.blocks = nn.ModuleList(self.Block(cfg, layer) for layer in range(1, cfg.n_layers + 1))
        self.W_h = Linear(cfg.d_model, cfg.vocab_size)

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream at the bottom, (B, T, d_m)."""

    @abstractmethod
    def head(self, h: Tensor) -> Tensor:
        """The logits, (B, T, V)."""

    @abstractmethod
    def init_matrices(self, generator: torch.Generator | None) -> None:
        """Draw the start of every matrix."""

    def constraints(self) -> Mapping[str, Constraint]:
        """Which matrices are constrained after every optimiser step, and how."""
        return {}

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); or the mean cross-entropy, where targets (B, T) are given (−100: not counted).

        `documents` (B, T) numbers the document of each token and keeps attention inside of it.
        """
        h, ctx = self.start(tokens, documents)
        for block in self.blocks:
            h = block(h, ctx)
        return self.head(h) if targets is None else self.loss(h, targets)

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the targets, given the residual stream at the top."""
        return cross_entropy(self.head(h).flatten(0, 1), targets.flatten())

    def hidden_states(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """The residual stream as it enters each layer, and after the last: (L + 1, B, T, d_m)."""
        h, ctx = self.start(tokens, documents)
        states = [h]
        for block in self.blocks:
            states.append(h := block(h, ctx))
        return torch.stack(states)

    def input_lengths(self, tokens: Tensor) -> Tensor:
        """Mean length of the residual stream as it enters each layer, and after the last: (L + 1)."""
        h, ctx = self.start(tokens)
        lengths = [wide(h).norm(dim=-1).mean()]
        for block in self.blocks:
            h = block(h, ctx)
            lengths.append(wide(h).norm(dim=-1).mean())
        return torch.stack(lengths)

    def start(self, tokens: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Context]:
        """What the first block receives."""
        if tokens.shape[1] > self.cfg.context:
            raise UserError(f"sequence of {tokens.shape[1]} tokens, but the model's context is {self.cfg.context}")
        h = self.embed(tokens)
        return h, make_context(h, self.cfg.rotary_dim, self.cfg.rotary_base, documents)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Bring the whole model to its start."""
        for part in self.modules():
            if isinstance(part, Resettable):
                part.reset()
        self.init_matrices(generator)

    def matrices(self) -> dict[str, nn.Parameter]:
        """The weight matrices by name: what is constrained, or decayed."""
        return {name: p for name, p in self.named_parameters() if is_matrix(p)}

    def init_normalized(self, generator: torch.Generator | None) -> None:
        """Normal, then of length exactly 1 along the constrained dimension."""
        declared = self.constraints()
        for name, weight in self.matrices().items():
            project_(weight.normal_(generator=generator), Constraint("unit", declared[name].dim))

    def generate(self, prompts: Any, new_tokens: int, **options: Any) -> list[list[int]]:
        """New tokens behind each prompt, from a folded copy: see `angpt.inference.generate.generate`."""
        from angpt.inference.generate import generate

        return generate(self, prompts, new_tokens, **options)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int | None = None) -> int:
        """Training FLOPs per token at a sequence length (the context unless given).

        Six per entry of a matrix that multiplies (two forward, four backward); the embedding is a look-up and vectors
        are left out.
        """
        length = self.cfg.context if length is None else length
        multiplied = sum(p.numel() for p in self.matrices().values()) - self.W_e.weight.numel()
        return 6 * multiplied + attention_flops(self.cfg, length)


def attention_flops(cfg: ModelConfig, length: int) -> int:
    """Training FLOPs of attention per token, without its matrices.

    q·k and A·v take 4·d_m forward for each token attended to, of which causality leaves half; three times that with
    the backward pass.
    """
    return 3 * cfg.n_layers * 4 * cfg.d_model * length // 2
