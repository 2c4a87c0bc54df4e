"""What the columns of Table 1 share: the stack of blocks, the loss, counts of parameters and FLOPs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from angpt.config import ModelConfig
from angpt.constraints import Constraint, is_matrix, project_
from angpt.models.design import Design
from angpt.models.primitives import (
    Context,
    LearnedScale,
    Linear,
    Resettable,
    attend,
    check_tokens,
    cross_entropy,
    make_context,
    normed_heads,
    wide,
)

STACKED = {"W_qkv": 3, "W_uz": 2}
"""Number of linear maps in the matrices that stack several."""


class Block(nn.Module, ABC):
    """One layer: attention, residual update, MLP, residual update. `layer` counts from 1."""

    computes: ClassVar[Design]
    """What the class computes; `design` adds what depends on the configuration."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.d_head, self.layer = cfg.d_head, layer
        self.W_qkv = Linear(cfg.d_model, 3 * cfg.d_model)
        self.W_p = Linear(cfg.d_model, cfg.d_model)
        self.W_uz = Linear(cfg.d_model, 2 * cfg.d_mlp)
        self.W_d = Linear(cfg.d_mlp, cfg.d_model)

    def design(self) -> Design:
        """What this block computes, as data."""
        return self.computes

    def normed_heads(
        self, qkv: Tensor, ctx: Context, q_gain: Tensor | None = None, k_gain: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v per head, with norm(rotate(·)) of q and k, each times a gain."""
        return normed_heads(qkv, self.d_head, ctx.cos, ctx.sin, q_gain, k_gain)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context, gain: Tensor | float) -> Tensor:
        """softmax(q kᵀ · gain) v, with the heads concatenated."""
        return attend(q, k, v, ctx.mask, gain)

    @abstractmethod
    def attention(self, h: Tensor, ctx: Context) -> Tensor:
        """The output of attention, which is added to the residual stream or interpolated with it."""

    @abstractmethod
    def mlp(self, h: Tensor) -> Tensor:
        """The output of the MLP, which is added to the residual stream or interpolated with it."""

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
        """The residual stream before the first layer, (B, T, d_m)."""

    @abstractmethod
    def head(self, h: Tensor) -> Tensor:
        """The logits, (B, T, V)."""

    @abstractmethod
    def init_matrices(self, generator: torch.Generator | None) -> None:
        """Initialise every matrix at random."""

    def constraints(self) -> Mapping[str, Constraint]:
        """The constraints that are applied after every optimiser step, by the name of the matrix."""
        return {}

    def design(self) -> Design:
        """What the model computes, as data."""
        blocks = [block.design() for block in self.blocks]  # type: ignore[operator]
        layers = tuple(factor for design in blocks for factor in design.input_factors or (1.0,))
        scales = dict(self.named_children())
        learned = {name: name in scales for name in ("s_z", "s_h", "embed_scale")}
        return replace(blocks[0], input_factors=layers, **learned)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits (B, T, V), or the mean cross-entropy if targets (B, T) are given (−100: ignored).

        `documents` (B, T) is the number of each token's document; attention then stays inside the document.
        """
        check_tokens(tokens, self.cfg.context, targets=targets)
        h, ctx = self.start(tokens, documents)
        for block in self.blocks:
            h = block(h, ctx)
        return self.head(h) if targets is None else self.loss(h, targets)

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the targets, given the residual stream after the last layer."""
        return cross_entropy(self.head(h).flatten(0, 1), targets.flatten())

    def streams(self, tokens: Tensor, documents: Tensor | None = None) -> Iterator[Tensor]:
        """The residual stream (B, T, d_m) before each layer and after the last, one after the other."""
        h, ctx = self.start(tokens, documents)
        yield h
        for block in self.blocks:
            yield (h := block(h, ctx))

    def hidden_states(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """The residual stream before each layer and after the last: (L + 1, B, T, d_m)."""
        return torch.stack(list(self.streams(tokens, documents)))

    def input_lengths(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Mean length of the residual stream before each layer and after the last: (L + 1)."""
        return torch.stack([wide(h).norm(dim=-1).mean() for h in self.streams(tokens, documents)])

    def start(self, tokens: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Context]:
        """The residual stream and the context that the first block receives."""
        check_tokens(tokens, self.cfg.context, documents=documents)
        h = self.embed(tokens)
        return h, make_context(h, self.cfg.rotary_dim, self.cfg.rotary_base, documents)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initialise all parameters."""
        for part in self.modules():
            if isinstance(part, Resettable):
                part.reset()
        self.init_matrices(generator)

    def matrices(self) -> dict[str, nn.Parameter]:
        """The weight matrices by name."""
        return {name: p for name, p in self.named_parameters() if is_matrix(p)}

    def hidden_matrices(self) -> dict[str, int]:
        """The names of the matrices of blocks, each with the number of linear maps that are stacked in it."""
        return {name: STACKED.get(name.split(".")[-2], 1) for name in self.matrices() if name.startswith("blocks.")}

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int | None = None) -> int:
        """Training FLOPs per token at a sequence length (the context unless given).

        Six per entry of a matrix (two forward, four backward), except the embedding, which is a look-up. Vectors are
        not counted.
        """
        length = self.cfg.context if length is None else length
        multiplied = sum(p.numel() for p in self.matrices().values()) - self.W_e.weight.numel()
        return 6 * multiplied + attention_flops(self.cfg, length)


def attention_flops(cfg: ModelConfig, length: int) -> int:
    """Training FLOPs of attention per token, without its matrices.

    q·k and A·v take 4·d_m forward for each token attended to, half of them under a causal mask; with the backward pass
    three times that.
    """
    return 3 * cfg.n_layers * 4 * cfg.d_model * length // 2


class NormalizedDecoder(Decoder):
    """What nGPT and anGPT share: matrices initialised with vectors of length 1, and a learned scale of the logits.

    That scale, `s_z`, is s_Z of Table 1. The s_z of Table 1, which scales z in the MLP of nGPT, is a half of `s_uz`.
    """

    def __init__(self, cfg: ModelConfig, stored_scale: float) -> None:
        super().__init__(cfg)
        self.s_z = LearnedScale(cfg.vocab_size, init=1.0, scale=stored_scale)

    def init_matrices(self, generator: torch.Generator | None) -> None:
        """Draw from a normal distribution, then scale to length 1 along the constrained dimension."""
        declared = self.constraints()
        for name, weight in self.matrices().items():
            project_(weight.normal_(generator=generator), Constraint("unit", declared[name].dim))
