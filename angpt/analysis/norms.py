"""Part 1, norms through the network: the residual stream, the blocks, γ, and the rows of the weights.

"Output over input" of a block can be read in three ways. All are measured, as ratios of mean lengths:

- `maps`: the output of the block's last linear map over the input of its first. Only this reading makes the paper's
  numbers for GPT+ possible: it excludes the norms before and after the block.
- `relative_update`: what the update adds to the residual stream, that is the stream after it minus the stream before
  it, over the stream before it. This is the output of the block in GPT+, and α (x − h) ν(α), with the change that ν(α)
  or the norm makes, where the update interpolates.
- `growth`: the residual stream after the update over the stream before it.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from angpt.analysis.history import History
from angpt.analysis.probe import Lengths, Probe, Stats, length, ratio
from angpt.constraints import norms as lengths_along
from angpt.models.decoder import Block, Decoder
from angpt.models.primitives import wide
from angpt.training.moments import matrix_group

ON_BOUND = 1e-3
"""A vector is on the bound if its length is within this of 1: the last step may have moved it slightly inwards."""
FIRST_MAPS, LAST_MAPS = {"W_qkv": "attention", "W_uz": "mlp"}, {"W_p": "attention", "W_d": "mlp"}


@dataclass(frozen=True)
class BlockNorms:
    """Mean lengths at the attention or the MLP of a layer, and their ratios."""

    stream: float | None
    """Length of the residual stream that enters."""
    input: float | None
    """Length of the first linear map's input: the normed stream in GPT+, the stream itself elsewhere."""
    output: float | None
    """Length of the last linear map's output, with its factors, before any norm."""
    added: float | None
    """Length of what the update adds: the residual stream after it minus the stream that enters."""
    after: float | None
    """Length of the residual stream after the update."""

    maps: float | None
    """output / input."""
    relative_update: float | None
    """added / stream."""
    growth: float | None
    """after / stream."""

    @classmethod
    def of(cls, *lengths: float | None) -> "BlockNorms":
        """From the five lengths, in the order of the fields."""
        stream, input, output, added, after = lengths
        return cls(*[*lengths, ratio(output, input), ratio(added, stream), ratio(after, stream)])


@dataclass(frozen=True)
class RowNorms:
    """Lengths of the rows of one matrix, and the share of its constrained vectors that are on the bound."""

    group: str
    layer: int | None
    """Number of the layer, from 1; None for a matrix outside the layers."""
    mean: float
    std: float
    low: float
    high: float
    constraint: str | None
    """`bound`, `unit`, or None for an unconstrained matrix."""
    on_bound: float | None
    """Share of the constrained vectors (columns for some matrices of nGPT) whose length is 1."""
    vectors: int


@dataclass(frozen=True)
class Norms:
    stream: tuple[Stats, ...]
    """Lengths of the residual stream before each layer and after the last."""
    attention: tuple[BlockNorms, ...]
    mlp: tuple[BlockNorms, ...]
    gamma: dict[str, tuple[float, ...]]
    """‖γ‖ by norm: a value per layer, or one for the norm of the head."""
    rows: tuple[RowNorms, ...]
    history: History
    """Input norms, row norms and γ during training, as recorded by the run."""


class NormProbe(Probe):
    """Lengths of the residual stream and at both ends of each block, without the first `skip` positions."""

    def __init__(self, layers: int, skip: int = 0) -> None:
        self.layers, self.skip = layers, skip
        self.before = torch.empty(0)
        self.found: defaultdict[tuple[str, str, int], Lengths] = defaultdict(Lengths)

    def add(self, part: str, what: str, layer: int, x: Tensor) -> None:
        self.found[part, what, layer].add(length(x[:, self.skip :]))

    def attention(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        self.enter("attention", layer, h)

    def mlp(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        self.leave("attention", layer, h)
        self.enter("mlp", layer, h)

    def output(self, layer: int, h: Tensor) -> None:
        self.leave("mlp", layer, h)

    def enter(self, part: str, layer: int, h: Tensor) -> None:
        """The stream before an update, which is kept until after it."""
        self.add(part, "stream", layer, h)
        self.before = h

    def leave(self, part: str, layer: int, h: Tensor) -> None:
        self.add(part, "after", layer, h)
        self.add(part, "added", layer, wide(h) - wide(self.before))

    def linear(self, layer: int, block: Block, name: str, x: Tensor, scale: Tensor | float, y: Tensor) -> None:
        if name in FIRST_MAPS:
            self.add(FIRST_MAPS[name], "input", layer, x)
        if name in LAST_MAPS:
            self.add(LAST_MAPS[name], "output", layer, y)

    def stream(self) -> tuple[Stats, ...]:
        """Lengths of the residual stream before each layer and after the last."""
        places = [("attention", "stream", layer) for layer in range(self.layers)] + [("mlp", "after", self.layers - 1)]
        return tuple(self.found[place].stats() for place in places)

    def blocks(self, part: str) -> tuple[BlockNorms, ...]:
        """Lengths and ratios of the attention or MLP of each layer."""
        names = ("stream", "input", "output", "added", "after")
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
    """‖γ‖ of every norm that has one, times the constant factor of that norm."""
    found: defaultdict[str, tuple[float, ...]] = defaultdict(tuple)
    for owner in [*model.blocks, model]:
        for name, part in owner.named_children():
            if isinstance(gamma := getattr(part, "gamma", None), Tensor):
                found[name] += ((gamma * getattr(part, "factor", 1.0)).norm().item(),)
    return dict(found)


@torch.no_grad()
def row_norms(model: Decoder) -> tuple[RowNorms, ...]:
    """Row norms of every matrix, in the order of the model."""
    found, constraints = [], model.constraints()
    for name, weight in model.matrices().items():
        group, layer = matrix_group(name)
        rows = lengths_along(weight, 1).double()
        constraint = constraints.get(name)
        vectors = rows if constraint is None else lengths_along(weight, constraint.dim).double()
        found.append(
            RowNorms(
                group=group,
                layer=None if layer is None else layer + 1,
                mean=rows.mean().item(),
                std=rows.std(correction=0).item(),
                low=rows.min().item(),
                high=rows.max().item(),
                constraint=None if constraint is None else constraint.kind,
                on_bound=None if constraint is None else ((vectors - 1).abs() <= ON_BOUND).double().mean().item(),
                vectors=vectors.numel(),
            )
        )
    return tuple(found)
