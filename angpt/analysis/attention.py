"""Part 7, the attention factor of the paper's appendix: row norms of the attention matrices against 1/√r.

Row r of a causal attention matrix has r entries that sum to 1. If attention is dense, all entries are 1/r, the row has
length 1/√r, and the factor √r makes it 1. The fewer tokens it concentrates on, the longer the row, up to 1; 1/‖a‖² is
the effective number of tokens attended to.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from angpt.analysis.probe import Probe, finite
from angpt.models.primitives import Context

ENTRIES = 1 << 25
"""Entries of attention matrices in memory at a time (128 MiB of fp32)."""


@dataclass(frozen=True)
class AttentionRows:
    """Means over the rows r with `first` ≤ r ≤ `last` of one layer, over all heads."""

    first: int
    last: int
    rows: int
    """Number of rows measured."""
    norm: float | None
    """Mean of ‖a_r‖."""
    dense: float | None
    """Mean of 1/√r, the length for dense attention."""
    scaled: float | None
    """Mean of √r · ‖a_r‖, the length after the factor of the appendix: 1 for dense attention."""
    effective: float | None
    """Mean of 1/‖a_r‖², the effective number of tokens attended to."""


@dataclass(frozen=True)
class LayerAttention:
    layer: int
    """Number of the layer, from 1."""
    total: AttentionRows
    bins: tuple[AttentionRows, ...]
    """Rows grouped by r: 1, 2 to 3, 4 to 7, and so on."""
    heads: tuple[float | None, ...]
    """Mean of √r · ‖a_r‖ of each head."""


class AttentionProbe(Probe):
    """Number of rows, and sums of ‖a_r‖ and 1/‖a_r‖², for each layer, head and r, in float64."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> None:
        batch, heads, tokens, _ = q.shape
        with torch.autocast(q.device.type, enabled=False):
            # q and k are rounded as in the model; the softmax is computed in fp32.
            q, k = (x.to(v.dtype).to(torch.promote_types(v.dtype, torch.float32)) for x in (q, k))
            step = max(1, ENTRIES // (batch * heads * tokens))
            for i in range(0, tokens, step):
                j = min(tokens, i + step)
                allowed = _allowed(ctx, i, j, q.device)
                scores = (q[:, :, i:j] @ k[:, :, :j].mT).masked_fill(~allowed, -torch.inf)
                squares = scores.softmax(dim=-1).square().sum(dim=-1).double()  # ‖a_r‖²: (B, H, rows)
                values = torch.stack([torch.ones_like(squares), squares.sqrt(), squares.reciprocal()])
                sums = self.sums.get(layer, squares.new_zeros(3, heads, 0))
                sums = F.pad(sums, (0, max(0, tokens + 1 - sums.shape[-1])))
                r = allowed.sum(dim=-1).expand_as(squares).transpose(0, 1).flatten(1).expand(3, -1, -1)
                self.sums[layer] = sums.scatter_add(2, r, values.transpose(1, 2).flatten(2))

    def results(self) -> tuple[LayerAttention, ...]:
        return tuple(_layer(layer + 1, self.sums[layer].cpu()) for layer in sorted(self.sums))


def _allowed(ctx: Context, i: int, j: int, device: torch.device) -> Tensor:
    """Mask of shape (…, j − i, j): True where one of the tokens i … j − 1 may attend to one of the first j."""
    if ctx.mask is not None:
        return ctx.mask[:, :, i:j, :j]
    return torch.arange(i, j, device=device)[:, None] >= torch.arange(j, device=device)


def _layer(layer: int, sums: Tensor) -> LayerAttention:
    r = torch.arange(sums.shape[-1], dtype=torch.float64)
    longest = int(torch.nonzero(sums[0].sum(dim=0))[-1])
    edges = [2**i for i in range(longest.bit_length())]
    if len(edges) > 1 and longest - edges[-1] < edges[-1] / 4:
        edges.pop()  # a short last group joins the one before it
    scaled = (sums[1] * r.sqrt()).sum(dim=1) / sums[0].sum(dim=1)
    ends = [first - 1 for first in edges[1:]] + [longest]
    bins = [_rows(sums, first, last) for first, last in zip(edges, ends, strict=True)]
    return LayerAttention(
        layer=layer,
        total=_rows(sums, 1, longest),
        bins=tuple(rows for rows in bins if rows.rows),
        heads=tuple(finite(value) for value in scaled.tolist()),
    )


def _rows(sums: Tensor, first: int, last: int) -> AttentionRows:
    counts, norms, effective = sums[..., first : last + 1].sum(dim=1)
    r = torch.arange(first, last + 1, dtype=torch.float64)
    count = max(1.0, counts.sum().item())
    return AttentionRows(
        first=first,
        last=last,
        rows=int(counts.sum()),
        norm=finite(norms.sum().item() / count),
        dense=finite((counts / r.sqrt()).sum().item() / count),
        scaled=finite((norms * r.sqrt()).sum().item() / count),
        effective=finite(effective.sum().item() / count),
    )
