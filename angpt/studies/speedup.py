"""Convergence speed-up as the paper defines it, with intervals over seeds.

The baseline's complete runs at several budgets, each with its own schedule, give a curve of final loss against tokens
(or seconds). The speed-up of another architecture is what the baseline needs for the same loss, read off this curve by
linear interpolation of logarithms, over what the other used. Outside the curve's range only a bound is known, and one
that noise allows: a loss just below the last of the baseline does not show that the baseline would need more tokens.

Noise: the logarithm of a final loss varies between seeds with a standard deviation that is taken to be the same at
every architecture and budget of one comparison, and estimated from all of them together, except from those that vary
far more (`stats.deviations`). With two or three seeds each, this is the difference between a useful interval and none.
Of the points that a speed-up is read from, the widest deviation counts for all.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from angpt.results import SpeedUp
from angpt.stats import Deviation, mean_log


@dataclass(frozen=True)
class CurvePoint:
    """Complete runs of one architecture at one budget."""

    uses: tuple[float, ...]
    """Tokens or seconds of each run."""
    losses: tuple[float, ...]
    loss_deviation: Deviation
    """Between seeds."""
    use_deviation: Deviation
    """Between seeds: 0 for tokens, unlike seconds."""

    @property
    def used(self) -> float:
        return math.exp(mean_log(self.uses))

    @property
    def log_loss(self) -> float:
        return mean_log(self.losses)


def speed_up(baseline: Sequence[CurvePoint], other: CurvePoint) -> SpeedUp | None:
    """What the baseline needs for the loss of `other`, over what `other` used; None if not even a bound is known.

    A larger budget that did not lower the loss is left out of the curve: it says nothing about what a lower loss needs.
    """
    curve = falling(baseline)
    if not curve:
        return None
    first, last, target = curve[0], curve[-1], other.log_loss
    if target > first.log_loss:
        return bound(curve, other, "<")
    if target < last.log_loss:
        return bound(curve, other, ">")
    if len(curve) == 1:
        return SpeedUp(first.used / other.used, None, None, "=")
    left, right, weight = around(curve, target)
    value = needed(left, right, weight) / other.used
    # By the delta method: the logarithm of what is needed moves with the three mean losses around the point.
    slope = (math.log(right.used) - math.log(left.used)) / (left.log_loss - right.log_loss)
    variance = (1 - weight) ** 2 / len(left.losses) + weight**2 / len(right.losses) + 1 / len(other.losses)
    losses, uses = deviations_of(left, right, other)
    from_losses, from_uses = losses.half_width(slope * math.sqrt(variance)), uses.half_width(math.sqrt(variance))
    if from_losses is None or from_uses is None:
        return SpeedUp(value, None, None, "=")
    half = math.hypot(from_losses, from_uses)
    return SpeedUp(value, value * math.exp(-half), value * math.exp(half), "=")


def deviations_of(*points: CurvePoint) -> tuple[Deviation, Deviation]:
    """The widest deviations of losses and of uses among these points."""
    losses, uses = [p.loss_deviation for p in points], [p.use_deviation for p in points]
    return max(losses, key=lambda d: d.value), max(uses, key=lambda d: d.value)


def bound(curve: Sequence[CurvePoint], other: CurvePoint, relation: Literal["<", ">"]) -> SpeedUp | None:
    """The end of an interval that is open where the curve ends: with a confidence of 97.5 %, the speed-up is above (or
    below) it. It belongs to the end of the curve if the loss lies far enough outside, otherwise to a point
    inside; None if the noise spans the whole curve. Without several seeds there is no noise to allow for."""
    sign, end, opposite = (1, curve[0], curve[-1]) if relation == "<" else (-1, curve[-1], curve[0])
    scale = math.sqrt(1 / len(end.losses) + 1 / len(other.losses))
    losses, uses = deviations_of(end, other)
    target = other.log_loss - sign * (losses.half_width(scale) or 0.0)
    if sign * (target - end.log_loss) >= 0:
        used = end.used
    elif sign * (target - opposite.log_loss) >= 0:
        used = needed(*around(curve, target))
    else:
        return None
    slower = math.exp(sign * (uses.half_width(scale) or 0.0))
    return SpeedUp(used / other.used * slower, None, None, relation)


def around(curve: Sequence[CurvePoint], target: float) -> tuple[CurvePoint, CurvePoint, float]:
    """The neighbouring points of a falling curve with a logarithm of the loss between them, and the weight of the
    second."""
    left, right = next((a, b) for a, b in itertools.pairwise(curve) if target >= b.log_loss)
    return left, right, (left.log_loss - target) / (left.log_loss - right.log_loss)


def needed(left: CurvePoint, right: CurvePoint, weight: float) -> float:
    """What the baseline needs between two points, interpolated in logarithms."""
    return math.exp((1 - weight) * math.log(left.used) + weight * math.log(right.used))


def falling(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """The points in the order of what they used, as long as each lies below all before it."""
    curve: list[CurvePoint] = []
    for point in sorted(points, key=lambda p: p.used):
        if not curve or point.log_loss < curve[-1].log_loss:
            curve.append(point)
    return curve
