"""Scalars of each layer, recorded during training: input norms, learned scales, lengths of weight rows."""

from typing import Any

import torch
from torch import Tensor

from angpt.models.decoder import Decoder
from angpt.models.primitives import LearnedScale, Linear, RMSNorm
from angpt.training.strategy import Strategy


@torch.no_grad()
def layer_scalars(model: Decoder, tokens: Tensor, strategy: Strategy) -> dict[str, Any]:
    """Scalars by name: a list over layers, or a number for what the model has once.

    `input_norm`: mean length of the residual stream before each layer and after the last. Learned scales: mean (for α,
    whose entries may have either sign, also mean size); matrices: mean length of rows; γ: length.
    """
    lengths = model.input_lengths(tokens)
    rows: dict[str, list[Tensor]] = {}
    for block in model.blocks:
        for name, part in block.named_children():
            if (value := _scalar(part, strategy)) is not None:
                rows.setdefault(name, []).append(value)
            if isinstance(part, LearnedScale) and name.startswith("alpha"):
                rows.setdefault(f"{name}_size", []).append(part().abs().mean())
    single = {name: value for name, part in model.named_children() if (value := _scalar(part, strategy)) is not None}
    layers = {"input_norm": lengths} | {name: torch.stack(values) for name, values in rows.items()}
    return {name: value.tolist() for name, value in (layers | single).items()}


def _scalar(part: torch.nn.Module, strategy: Strategy) -> Tensor | None:
    match part:
        case LearnedScale():
            return part().mean()
        case RMSNorm():
            return (part.gamma * part.factor).norm()
        case Linear() | torch.nn.Embedding():
            shard = strategy.shard(part.weight)
            return strategy.whole(shard.with_rows(shard.rows.norm(dim=1))).mean()
    return None
