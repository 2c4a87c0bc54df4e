"""Grids that end well: as long as the best value of a grid lies on its edge, the grid goes on beyond that edge.

A loss is None while it is not known, and infinite where the run diverged. Everything here is a function of the losses
alone: a study that is killed and called again, or executed in another order, tries the same values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from angpt.stats import edge

Limits = Sequence[float]
"""Lowest and highest value to go to; empty for a grid that stays as it is."""
Loss = Callable[[int, float], float | None]
"""The loss at a batch size and a learning rate."""
DIGITS = 3
"""Significant digits of a rate that was worked out."""
SLACK = 1e-6
"""Relative tolerance of limits: one that is itself a value of the grid must not fall to rounding."""


@dataclass(frozen=True)
class Optimum:
    """The best point of a grid. A side is -1 or 1 where the value is the lowest or highest of those tried, and so not
    known to be a minimum; 0 where it has neighbours on both sides, or where there is one value only."""

    batch: int
    lr: float
    loss: float
    batch_side: int
    lr_side: int


def side(losses: Mapping[float, float]) -> int:
    """Which edge of the grid the best value lies on. Of equal losses the one inside counts."""
    return edge([losses[value] for value in sorted(losses)])[1]


def beyond(losses: Mapping[float, float], limits: Limits) -> float | None:
    """The next value to try; None where the best one is inside the grid, or the limits are reached.

    Where every value diverged, lower ones are tried.
    """
    at = -1 if all(map(math.isinf, losses.values())) else side(losses)
    if not limits or len(losses) < 2 or at == 0:
        return None
    values = sorted(losses)
    value = values[0] * values[0] / values[1] if at < 0 else values[-1] * values[-1] / values[-2]
    low, high = limits
    return value if low * (1 - SLACK) <= value <= high * (1 + SLACK) else None


def grow(
    start: Mapping[int, Sequence[float]], loss: Loss, lr_limits: Limits, batch_limits: Limits = (), context: int = 1
) -> dict[int, list[float]]:
    """The rates to try at each batch size, as far as the losses that are known call for them.

    First the rates at each batch size, then the batch sizes, which are multiples of the context: a new one begins
    around the best rate of its neighbour.
    """
    lines = {batch: sorted(rates) for batch, rates in start.items()}
    while True:
        known = {batch: _known(loss, batch, rates) for batch, rates in lines.items()}
        settled = {batch: line for batch, line in known.items() if line is not None}
        new_rates = {
            batch: rounded(value)
            for batch, line in settled.items()
            if (value := beyond(line, lr_limits)) is not None and rounded(value) not in line
        }
        for batch, rate in new_rates.items():
            lines[batch] = sorted([*lines[batch], rate])
        if new_rates:
            continue
        best = {float(batch): min(line.values()) for batch, line in settled.items()}
        if len(settled) < len(lines) or all(map(math.isinf, best.values())):
            return lines
        following = beyond(best, batch_limits)
        new = 0 if following is None else context * round(following / context)
        if new == 0 or new in lines:
            return lines
        neighbour = min(lines, key=lambda batch: abs(math.log(batch / new)))
        lines[new] = _around(lines[neighbour], settled[neighbour], lr_limits)


def optimum(lines: Mapping[int, Sequence[float]], loss: Loss) -> Optimum | None:
    """The best of the points that are known; None where none is, or all diverged."""
    points = {(b, r): v for b, rates in lines.items() for r in rates if (v := loss(b, r)) is not None}
    finite = {point: value for point, value in points.items() if math.isfinite(value)}
    if not finite:
        return None
    batch, lr = min(finite, key=finite.__getitem__)
    rates = {r: value for (b, r), value in points.items() if b == batch}
    batches = {float(b): min(v for (other, _), v in points.items() if other == b) for b, _ in points}
    return Optimum(batch, lr, finite[batch, lr], side(batches), side(rates))


def rounded(value: float) -> float:
    """Three digits: a rate stands in the name of its run."""
    return float(f"{value:.{DIGITS}g}")


def _known(loss: Loss, batch: int, rates: Sequence[float]) -> dict[float, float] | None:
    losses = {rate: loss(batch, rate) for rate in rates}
    found = {rate: value for rate, value in losses.items() if value is not None}
    return found if len(found) == len(losses) else None


def _around(rates: Sequence[float], losses: Mapping[float, float], limits: Limits) -> list[float]:
    """The best rate with its neighbours, or all rates where they are three at most or do not grow."""
    if not limits or len(rates) <= 3:
        return list(rates)
    best = min(range(len(rates)), key=lambda i: losses[rates[i]])
    first = min(max(best - 1, 0), len(rates) - 3)
    return list(rates[first : first + 3])
