"""Part 1, norms through the network: the residual stream, the blocks, γ, and the rows of the weights.

"Output over input" of a block can be read in three ways, and all are measured, as ratios of mean lengths:

- `maps`: what comes out of the block's last linear map over what goes into its first. The reading under which the
  paper's numbers for GPT+ are possible: between the two lies neither the norm in front of the block nor one behind it.
- `relative_update`: what the block hands to the residual stream over the stream that enters it.
- `growth`: the residual stream after the update over the stream before it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from angpt.analysis.history import History
from angpt.analysis.probe import Lengths, Probe, Stats, length, ratio
from angpt.constraints import norms as lengths_along
from angpt.models.decoder import Block, Decoder
from angpt.training.moments import matrix_group

ON_BOUND = 1e-3
"""A vector sits on the bound if its length is within this of 1: the last step may have moved it a little inwards."""


@dataclass(frozen=True)
class BlockNorms:
    """Mean lengths at the attention or the MLP of a layer, and their ratios."""

    stream: float | None
    """The residual stream that enters."""
    input: float | None
    """What the first linear map sees: in GPT+ the normed stream, elsewhere the stream itself."""
    output: float | None
    """What the last linear map makes of it, with its factors, in front of any norm."""
    update: float | None
    """What the residual stream receives."""
    after: float | None
    """The residual stream after the update."""

    maps: float | None
    """output / input."""
    relative_update: float | None
    """update / stream."""
    growth: float | None
    """after / stream."""

    @classmethod
    def of(
        cls,
        stream: float | None,
        input: float | None,
        output: float | None,
        update: float | None,
        after: float | None,
    ) -> "BlockNorms":
        ratios = ratio(output, input), ratio(update, stream), ratio(after, stream)
        return cls(stream, input, output, update, after, *ratios)


@dataclass(frozen=True)
class RowNorms:
    """The lengths of the rows of one matrix, and how many of its constrained vectors sit on the bound."""

    group: str
    layer: int | None
    """Number of the layer, from 1; None for what the model has once."""
    mean: float
    std: float
    low: float
    high: float
    constraint: str | None
    """`bound`, `unit`, or None where nothing is constrained."""
    on_bound: float | None
    """Part of the constrained vectors (columns, where nGPT constrains those) whose length is 1."""
    vectors: int


@dataclass(frozen=True)
class Norms:
    stream: tuple[Stats, ...]
    """The residual stream as it enters each layer, and after the last."""
    attention: tuple[BlockNorms, ...]
    mlp: tuple[BlockNorms, ...]
    gamma: dict[str, tuple[float, ...]]
    """Length of each γ: of the norms of each layer, or the one of the head."""
    rows: tuple[RowNorms, ...]
    history: History
    """Input norms, row norms and γ through training, as the run recorded them."""


class NormProbe(Probe):
    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.found: dict[tuple[str, str, int], Lengths] = {}

    def note(self, part: str, what: str, layer: int, x: Tensor) -> None:
        self.found.setdefault((part, what, layer), Lengths()).add(length(x))

    def attention(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        self.note("attention", "stream", layer, h)
        self.note("attention", "update", layer, x)

    def mlp(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        self.note("attention", "after", layer, h)
        self.note("mlp", "stream", layer, h)
        self.note("mlp", "update", layer, x)

    def output(self, layer: int, h: Tensor) -> None:
        self.note("mlp", "after", layer, h)

    def linear(self, layer: int, block: Block, name: str, x: Tensor, scale: Tensor | float, y: Tensor) -> None:
        match name:
            case "W_qkv":
                self.note("attention", "input", layer, x)
            case "W_p":
                self.note("attention", "output", layer, y)
            case "W_uz":
                self.note("mlp", "input", layer, x)
            case "W_d":
                self.note("mlp", "output", layer, y)

    def stream(self) -> tuple[Stats, ...]:
        entering = [self.found["attention", "stream", layer] for layer in range(self.layers)]
        return tuple(found.stats() for found in [*entering, self.found["mlp", "after", self.layers - 1]])

    def blocks(self, part: str) -> tuple[BlockNorms, ...]:
        names = ("stream", "input", "output", "update", "after")
        return tuple(
            BlockNorms.of(*(self.found[part, name, layer].stats().mean for name in names))
            for layer in range(self.layers)
        )


def collect(model: Decoder, probe: NormProbe, history: History) -> Norms:
    return Norms(
        stream=probe.stream(),
        attention=probe.blocks("attention"),
        mlp=probe.blocks("mlp"),
        gamma=gamma_norms(model),
        rows=row_norms(model),
        history=history.only("input_norm", "W_", "norm_"),
    )


@torch.no_grad()
def gamma_norms(model: Decoder) -> dict[str, tuple[float, ...]]:
    """‖γ‖ of every norm that has one, with the constant that it is multiplied by."""
    found: dict[str, list[float]] = {}
    for owner in [*model.blocks, model]:
        for name, part in owner.named_children():
            if isinstance(gamma := getattr(part, "gamma", None), Tensor):
                found.setdefault(name, []).append((gamma * getattr(part, "factor", 1.0)).norm().item())
    return {name: tuple(values) for name, values in found.items()}


@torch.no_grad()
def row_norms(model: Decoder) -> tuple[RowNorms, ...]:
    """The row norms of every matrix, in the order of the model."""
    declared = model.constraints()
    found = []
    for name, weight in model.matrices().items():
        group, layer = matrix_group(name)
        rows = lengths_along(weight, 1).double()
        constraint = declared.get(name)
        vectors = None if constraint is None else lengths_along(weight, constraint.dim).double()
        found.append(
            RowNorms(
                group=group,
                layer=None if layer is None else layer + 1,
                mean=rows.mean().item(),
                std=rows.std(correction=0).item(),
                low=rows.min().item(),
                high=rows.max().item(),
                constraint=None if constraint is None else constraint.kind,
                on_bound=None if vectors is None else ((vectors - 1).abs() <= ON_BOUND).double().mean().item(),
                vectors=weight.shape[0] if vectors is None else vectors.numel(),
            )
        )
    return tuple(found)
