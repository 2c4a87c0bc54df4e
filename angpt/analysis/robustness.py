"""Part 5, robustness: the residual stream and the loss on inputs unlike any training text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from angpt.analysis.inputs import Condition, Missing, condition_batches
from angpt.analysis.norms import NormProbe
from angpt.analysis.probe import Stats, finite, observe, ratio
from angpt.models.decoder import Decoder


@dataclass(frozen=True)
class Shift:
    """What was measured on one kind of input."""

    name: str
    description: str
    sequences: int
    length: int
    loss: float | None
    mean: float | None
    """Mean length of the residual stream over tokens and places (before each layer and after the last)."""
    std: float | None
    """Standard deviation over tokens at one place: root of the variance averaged over places."""
    stream: tuple[Stats, ...]
    """Lengths before each layer and after the last."""
    change: float | None
    """Ratio of the mean to that of text, the larger over the smaller: at least 1."""
    worst_layer: int | None
    """The place where the stream changes most: a layer, from 1, or the number of layers + 1 for after the last."""
    worst_change: float | None


@dataclass(frozen=True)
class Robustness:
    shifts: tuple[Shift, ...]
    """Validation text first."""
    missing: tuple[Missing, ...]


def compare(
    model: Decoder,
    base: Shift,
    conditions: Sequence[Condition | Missing],
    batch_tokens: int,
    *,
    bf16: bool = False,
    tick: Callable[[int], None] = lambda tokens: None,
) -> Robustness:
    """Measure each condition and compare it with `base`, which was measured on text."""
    shifts = [base]
    for condition in conditions:
        if isinstance(condition, Condition):
            probe = NormProbe(len(model.blocks), condition.skip)
            batches = condition_batches(condition, batch_tokens)
            loss = observe(model, batches, [probe], bf16=bf16, skip=condition.skip, tick=tick)
            rows, tokens = condition.tokens.shape
            shifts.append(shift(condition.name, condition.description, rows, tokens - 1, loss, probe.stream(), base))
    return Robustness(tuple(shifts), tuple(c for c in conditions if isinstance(c, Missing)))


def shift(
    name: str,
    description: str,
    sequences: int,
    length: int,
    loss: float | None,
    stream: tuple[Stats, ...],
    base: Shift | None = None,
) -> Shift:
    """One kind of input, compared with `base`; the one without a base is what others are compared with."""
    changes = [factor(s.mean, b.mean) for s, b in zip(stream, base.stream, strict=True)] if base else []
    known = [i for i, change in enumerate(changes) if change is not None]
    worst = max(known, key=lambda i: changes[i] or 0.0, default=None)
    mean = _mean([s.mean for s in stream])
    variance = _mean([None if s.std is None else s.std**2 for s in stream])
    return Shift(
        name=name,
        description=description,
        sequences=sequences,
        length=length,
        loss=loss,
        mean=mean,
        std=None if variance is None else math.sqrt(variance),
        stream=stream,
        change=factor(mean, base.mean) if base else None,
        worst_layer=None if worst is None else worst + 1,
        worst_change=None if worst is None else changes[worst],
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return finite(sum(known) / len(known)) if len(known) == len(values) and known else None


def factor(one: float | None, two: float | None) -> float | None:
    """The factor by which two lengths differ: the larger over the smaller."""
    found = ratio(one, two)
    return None if not found else max(found, 1 / found)
