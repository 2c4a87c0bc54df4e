"""Scalars of each layer, recorded during training: input norms, learned scales, row lengths, saturation in 8 bits."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from angpt.data.loader import Batch
from angpt.float8 import HALF_STEP, LARGEST, measured_scale
from angpt.models.decoder import Decoder
from angpt.models.float8 import Float8Linear, Scale, float8_linears
from angpt.models.primitives import LearnedScale, Linear, RMSNorm
from angpt.training.strategy import Strategy


@torch.no_grad()
def layer_scalars(model: Decoder, batch: Batch, strategy: Strategy) -> dict[str, Any]:
    """Scalars by name: a list over layers, or a number for what the model has once.

    `input_norm`: mean length of the residual stream before each layer and after the last. Learned scales: mean (for α,
    whose entries may have either sign, also the mean absolute value); matrices: mean length of rows; γ: length.
    """
    lengths = model.input_lengths(batch.inputs, batch.documents)
    strategy.release()
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


def float8_scalars(compute: Decoder, batch: Batch) -> dict[str, list[float]]:
    """Statistics of the input and the output gradient of each matrix in 8 bits, as lists over layers, from one pass.

    saturated: the share of numbers above the largest of e4m3. zero: the share that conversion makes zero. kurtosis:
    E[x⁴] / E[x²]², 3 for a normal distribution of mean 0. Names are such as `W_d_input_saturated`. Leaves no gradients.
    """
    found: dict[str, dict[int, Tensor]] = {}

    def note(name: str, layer: int, x: Tensor, scale: Scale | None) -> None:
        sizes = x.float().abs()
        scaled, squares = sizes * (measured_scale(x) if scale is None else scale.value), sizes.square()
        parts = {
            "saturated": (scaled > LARGEST).float().mean(),
            "zero": ((scaled <= HALF_STEP) & (sizes > 0)).float().mean(),
            "kurtosis": squares.square().mean() / squares.mean().square(),
        }
        for part, value in parts.items():
            found.setdefault(f"{name}_{part}", {})[layer] = value

    def observe(name: str, layer: int, part: Float8Linear, x: Tensor, y: Tensor) -> None:
        note(f"{name}_input", layer, x.detach(), part.x_scale)  # again in the backward pass if blocks are recomputed

        def backward(dy: Tensor) -> None:
            note(f"{name}_gradient", layer, dy, part.dy_scale)

        y.register_hook(backward)  # type: ignore[no-untyped-call]

    embedded: list[Tensor] = []
    handle = compute.W_e.register_forward_hook(lambda *call: embedded.append(call[-1]))
    try:
        for name, linear in float8_linears(compute):
            _, layer, kind = name.split(".")  # blocks.0.W_d
            linear.observer = partial(observe, kind, int(layer), linear)
        with torch.compiler.set_stance("force_eager"):
            torch.autograd.grad(compute(*batch), embedded)
    finally:
        handle.remove()
        for _, linear in float8_linears(compute):
            linear.observer = None
    layers = range(len(compute.blocks))
    return {name: torch.stack([values[layer] for layer in layers]).tolist() for name, values in found.items()}
