"""Measure inside a model while it runs: probes accumulate sums and never store an activation.

`observe` sends batches through a model once, with any number of probes attached.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from angpt.data.loader import Batch
from angpt.models.decoder import Block, Decoder
from angpt.models.primitives import Context, Linear, wide

LOGITS = 1 << 26
"""Logits in memory at a time (256 MiB of fp32): those of a long sequence and a large vocabulary may not fit at once."""


@dataclass(frozen=True)
class Stats:
    """Statistics of the lengths of many vectors. Values that are not finite are None."""

    count: int
    mean: float | None
    std: float | None
    rms: float | None
    """sqrt(E‖·‖²), whose inverse a factor ν approximates."""
    mean_inverse: float | None
    """E[1/‖·‖], the mean multiplier of exact normalization."""
    low: float | None
    high: float | None

    variation: float | None
    """Standard deviation over mean: how well the length concentrates."""


class Lengths:
    """Statistics of lengths that arrive in batches: a few sums in float64, kept on the device."""

    count = 0
    sums: Tensor
    low: Tensor
    high: Tensor

    def add(self, lengths: Tensor) -> None:
        x = lengths.detach().double().flatten()
        if not len(x):
            return
        sums, low, high = torch.stack([x.sum(), x.square().sum(), x.reciprocal().sum()]), x.min(), x.max()
        if self.count:
            sums, low, high = self.sums + sums, torch.minimum(self.low, low), torch.maximum(self.high, high)
        self.sums, self.low, self.high = sums, low, high
        self.count += len(x)

    def stats(self) -> Stats:
        if not self.count:
            return Stats(0, *[None] * 7)
        mean, square, inverse = (self.sums / self.count).tolist()
        std = math.sqrt(max(0.0, square - mean**2))
        values = (mean, std, math.sqrt(square), inverse, self.low.item(), self.high.item())
        return Stats(self.count, *(finite(value) for value in values), *[ratio(std, mean)])


def finite(value: float) -> float | None:
    """The value, or None if it is infinite or NaN."""
    return value if math.isfinite(value) else None


def ratio(one: float | None, two: float | None) -> float | None:
    """one / two, or None if one of them is unknown or the result is not finite."""
    return None if one is None or not two else finite(one / two)


def length(x: Tensor) -> Tensor:
    """‖x‖ along the last dimension, in at least fp32."""
    return torch.linalg.vector_norm(wide(x), dim=-1)


class Probe:
    """Base class of probes: a subclass overrides the events that it needs. Layers count from 0."""

    def attention(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        """The attention of a layer computed x, the input of the residual update, from the stream h."""

    def mlp(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        """The MLP of a layer computed x, the input of the residual update, from the stream h."""

    def linear(self, layer: int, block: Block, name: str, x: Tensor, scale: Tensor | float, y: Tensor) -> None:
        """A linear map of a block computed y = W x · scale."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> None:
        """softmax(q kᵀ) v is about to be computed; each is (B, H, T, d_h)."""

    def output(self, layer: int, h: Tensor) -> None:
        """A layer returned the stream h."""


@contextmanager
def watch(model: Decoder, probes: Sequence[Probe]) -> Iterator[None]:
    """Call the probes in every forward pass of the model inside the context."""

    def notify(event: str, *args: Any) -> None:
        for probe in probes:
            getattr(probe, event)(*args)

    blocks: list[Any] = list(model.blocks)
    handles = []
    try:
        for layer, block in enumerate(blocks):
            # Instance attributes take precedence over the methods of the class, for every variant.
            for name in ("attention", "mlp"):
                setattr(block, name, partial(_after, getattr(block, name), partial(notify, name, layer, block)))
            block.attend = partial(_before, block.attend, partial(notify, "attend", layer))
            handles.append(block.register_forward_hook(lambda _, args, h, layer=layer: notify("output", layer, h)))
            for name, part in block.named_children():
                if isinstance(part, Linear):
                    hook = partial(_linear, partial(notify, "linear", layer, block, name))
                    handles.append(part.register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for block in blocks:
            for name in ("attention", "mlp", "attend"):
                block.__dict__.pop(name, None)


def _after(method: Callable[..., Tensor], notify: Callable[..., None], h: Tensor, *args: Any) -> Tensor:
    x = method(h, *args)
    notify(h, x)
    return x


def _before(
    method: Callable[..., Tensor], notify: Callable[..., None], q: Tensor, k: Tensor, v: Tensor, ctx: Context, gain: Any
) -> Tensor:
    notify(q * gain, k, v, ctx)
    return method(q, k, v, ctx, gain)


def _linear(notify: Callable[..., None], part: Linear, args: Any, options: dict[str, Any], y: Tensor) -> None:
    notify(args[0], args[1] if len(args) > 1 else options.get("factor", 1.0), y)


@contextmanager
def context_of(model: Decoder, tokens: int) -> Iterator[None]:
    """Let the model accept sequences of this length, even if it was trained on shorter ones."""
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
    """Send batches through a model and return the mean loss over the positions from `skip` on.

    `tick` is called with the number of tokens of each batch.
    """
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
    """Sum of the cross-entropy over all positions, in chunks of at most `LOGITS` logits."""
    positions = max(1, LOGITS // model.cfg.vocab_size)
    total = torch.zeros((), dtype=torch.float64, device=h.device)
    chunks = zip(torch.split(h.flatten(0, 1), positions), torch.split(targets.flatten(), positions), strict=True)
    for states, tokens in chunks:
        total += F.cross_entropy(wide(model.head(states[None])[0]), tokens, reduction="sum")
    return total
