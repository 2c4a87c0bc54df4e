"""Looking into a model while it runs: probes see what passes, keep sums, and never an activation.

`observe` sends batches through a model once, with any number of probes attached.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from angpt.data.loader import Batch
from angpt.models.decoder import Block, Decoder
from angpt.models.factors import NONE, Factors
from angpt.models.primitives import Context, Linear, wide

LOGITS = 1 << 26
"""Logits that exist at a time: 256 MiB of fp32. A long sequence of a large vocabulary would fill the memory."""


@dataclass(frozen=True)
class Stats:
    """Of the lengths of many vectors. None stands for a value that is not finite."""

    count: int
    mean: float | None
    std: float | None
    rms: float | None
    """sqrt(E‖·‖²), whose inverse a factor ν stands for."""
    mean_inverse: float | None
    """E[1/‖·‖], what exact normalization multiplies with on average."""
    low: float | None
    high: float | None

    variation: float | None
    """Standard deviation over mean: how well the length concentrates."""


class Lengths:
    """Streamed statistics of lengths: a few sums in float64, on the device until they are asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: Tensor | None = None
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def add(self, lengths: Tensor) -> None:
        x = lengths.detach().double().flatten()
        if not len(x):
            return
        sums = torch.stack([x.sum(), x.square().sum(), x.reciprocal().sum()])
        low, high = x.min(), x.max()
        self.sums = sums if self.sums is None else self.sums + sums
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        self.count += len(x)

    def stats(self) -> Stats:
        if self.sums is None or self.low is None or self.high is None:
            return Stats(0, *[None] * 7)
        total, squares, inverses = self.sums.tolist()
        mean, square = total / self.count, squares / self.count
        std = math.sqrt(max(0.0, square - mean**2))
        return Stats(
            count=self.count,
            mean=finite(mean),
            std=finite(std),
            rms=finite(math.sqrt(square)),
            mean_inverse=finite(inverses / self.count),
            low=finite(self.low.item()),
            high=finite(self.high.item()),
            variation=ratio(std, mean),
        )


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def ratio(one: float | None, two: float | None) -> float | None:
    return None if one is None or not two else finite(one / two)


def length(x: Tensor) -> Tensor:
    """‖x‖ along the last dimension, in at least fp32."""
    return torch.linalg.vector_norm(wide(x), dim=-1)


def constants(block: Block) -> Factors:
    """The constant factors of a block, all 1 where the architecture has none."""
    found = getattr(block, "nu", NONE)
    return found if isinstance(found, Factors) else NONE


class Probe:
    """What a probe can see; each overrides what it wants. Layers count from 0."""

    def attention(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        """The attention of a layer has made x, which the residual update takes in, from the stream h."""

    def mlp(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        """The MLP of a layer has made x, which the residual update takes in, from the stream h."""

    def linear(self, layer: int, block: Block, name: str, x: Tensor, scale: Tensor | float, y: Tensor) -> None:
        """A linear map of a block has made y = W x · scale."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> None:
        """softmax(q kᵀ) v is about to be computed, each (B, H, T, d_h)."""

    def output(self, layer: int, h: Tensor) -> None:
        """The stream leaves a layer."""


class StreamProbe(Probe):
    """Lengths of the residual stream as it enters each layer, and after the last."""

    def __init__(self, layers: int, skip: int = 0) -> None:
        self.states = [Lengths() for _ in range(layers + 1)]
        self.skip = skip

    def attention(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        self.states[layer].add(length(h[:, self.skip :]))

    def output(self, layer: int, h: Tensor) -> None:
        if layer == len(self.states) - 2:
            self.states[-1].add(length(h[:, self.skip :]))

    def stats(self) -> tuple[Stats, ...]:
        return tuple(state.stats() for state in self.states)


@contextmanager
def watch(model: Decoder, probes: Sequence[Probe]) -> Iterator[None]:
    """Let probes see every forward pass of the model until the end of the context."""
    blocks: list[Any] = list(model.blocks)
    handles = []
    try:
        for layer, block in enumerate(blocks):
            # On the instance, in front of the methods of its class, whichever variant that is.
            block.attention = _seen(block.attention, _caller(probes, "attention", layer, block))
            block.mlp = _seen(block.mlp, _caller(probes, "mlp", layer, block))
            block.attend = _attend(block.attend, probes, layer)
            handles.append(block.register_forward_hook(_output(probes, layer)))
            for name, part in block.named_children():
                if isinstance(part, Linear):
                    hook = _linear(probes, layer, block, name)
                    handles.append(part.register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for block in blocks:
            for name in ("attention", "mlp", "attend"):
                block.__dict__.pop(name, None)


def _seen(method: Callable[..., Tensor], tell: Callable[[Tensor, Tensor], None]) -> Callable[..., Tensor]:
    def call(h: Tensor, *args: Any) -> Tensor:
        x = method(h, *args)
        tell(h, x)
        return x

    return call


def _caller(probes: Sequence[Probe], what: str, layer: int, block: Block) -> Callable[[Tensor, Tensor], None]:
    def tell(h: Tensor, x: Tensor) -> None:
        for probe in probes:
            getattr(probe, what)(layer, block, h, x)

    return tell


def _attend(method: Callable[..., Tensor], probes: Sequence[Probe], layer: int) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, ctx: Context, gain: Tensor | float) -> Tensor:
        for probe in probes:
            probe.attend(layer, q * gain, k, v, ctx)
        return method(q, k, v, ctx, gain)

    return call


def _output(probes: Sequence[Probe], layer: int) -> Callable[..., None]:
    def hook(block: Block, args: Any, h: Tensor) -> None:
        for probe in probes:
            probe.output(layer, h)

    return hook


def _linear(probes: Sequence[Probe], layer: int, block: Block, name: str) -> Callable[..., None]:
    def hook(part: Linear, args: tuple[Any, ...], options: dict[str, Any], y: Tensor) -> None:
        scale = args[1] if len(args) > 1 else options.get("factor", 1.0)
        for probe in probes:
            probe.linear(layer, block, name, args[0], scale, y)

    return hook


@contextmanager
def context_of(model: Decoder, tokens: int) -> Iterator[None]:
    """Let the model take sequences of this length, also beyond what it was trained for."""
    before = model.cfg
    model.cfg = dataclasses.replace(before, context=max(tokens, before.context))
    try:
        yield
    finally:
        model.cfg = before


@torch.no_grad()
def observe(
    model: Decoder,
    batches: Iterable[Batch],
    probes: Sequence[Probe] = (),
    *,
    bf16: bool = False,
    skip: int = 0,
    tick: Callable[[int], None] = lambda tokens: None,
) -> float | None:
    """Send batches through a model; the mean loss, of the positions from `skip` on. `tick` hears of the tokens done."""
    device = model.W_h.weight.device
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    with watch(model, probes), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        for batch in batches:
            inputs, targets, documents = batch.map(lambda x: x.to(device))
            with context_of(model, inputs.shape[1]):
                h, ctx = model.start(inputs, documents)
                for block in model.blocks:
                    h = block(h, ctx)
                total += _summed_loss(model, h[:, skip:], targets[:, skip:])
            count += targets[:, skip:].numel()
            tick(inputs.numel())
    return finite(total.item() / count) if count else None


def _summed_loss(model: Decoder, h: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of all positions, a part of the logits at a time."""
    h, targets = h.flatten(0, 1)[None], targets.flatten()
    step = max(1, LOGITS // model.cfg.vocab_size)
    total = torch.zeros((), dtype=torch.float64, device=h.device)
    for i in range(0, h.shape[1], step):
        logits = wide(model.head(h[:, i : i + step])[0])
        total += F.cross_entropy(logits, targets[i : i + step], reduction="sum")
    return total
