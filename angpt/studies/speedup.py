"""Convergence speed-up as the paper defines it, with intervals over seeds.

The baseline's complete runs at several budgets, each with its own schedule, give a curve of final loss against tokens
(or seconds). The speed-up of another architecture is what the baseline needs for the same loss, read off this curve by
linear interpolation of logarithms, over what the other used. Outside of the curve's range only a bound is known.

Noise: the logarithm of a final loss varies between seeds with a standard deviation that is taken to be the same at
every architecture and budget of one comparison, and estimated from all of them together (`pooled_deviation`). With two
or three seeds each, this is the difference between a useful interval and none.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from angpt.studies.results import Interval, SpeedUp

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Deviation:
    """Standard deviation of a logarithm between seeds, and the degrees of freedom that it was estimated with."""

    value: float
    freedom: int

    def half_width(self, scale: float) -> float | None:
        """Of the confidence interval for a quantity whose standard error is `scale` times the deviation."""
        if self.freedom == 0:
            return None
        return float(stats.t.ppf((1 + CONFIDENCE) / 2, self.freedom)) * scale * self.value


def pooled_deviation(groups: Sequence[Sequence[float]]) -> Deviation:
    """From the values of each group of runs that differ in the seed alone."""
    squares, freedom = 0.0, 0
    for values in groups:
        logs = [math.log(x) for x in values]
        if logs:
            mean = sum(logs) / len(logs)
            squares += sum((x - mean) ** 2 for x in logs)
            freedom += len(logs) - 1
    return Deviation(math.sqrt(squares / freedom) if freedom else 0.0, freedom)


def mean_loss(losses: Sequence[float], deviation: Deviation) -> Interval:
    """The geometric mean over seeds and its interval."""
    n, log = len(losses), _mean_log(losses)
    half = deviation.half_width(1 / math.sqrt(n))
    if half is None:
        return Interval(math.exp(log), None, None, n)
    return Interval(math.exp(log), math.exp(log - half), math.exp(log + half), n)


def mean_of(values: Sequence[float]) -> Interval:
    """The mean and its interval from the values' own spread."""
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return Interval(mean, None, None, 1)
    error = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1) / n)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    return Interval(mean, mean - half, mean + half, n)


@dataclass(frozen=True)
class Point:
    """Complete runs of one architecture at one budget."""

    uses: tuple[float, ...]
    """Tokens or seconds of each run."""
    losses: tuple[float, ...]

    @property
    def used(self) -> float:
        return math.exp(_mean_log(self.uses))

    @property
    def log_loss(self) -> float:
        return _mean_log(self.losses)


def _mean_log(values: Sequence[float]) -> float:
    return sum(math.log(x) for x in values) / len(values)


def speed_up(baseline: Sequence[Point], other: Point, losses: Deviation, uses: Deviation) -> SpeedUp | None:
    """What the baseline needs for the loss of `other`, over what `other` used; None without a baseline.

    `losses` and `uses` are the deviations between seeds of the two; tokens, unlike seconds, do not vary.
    A larger budget that did not lower the loss is left out of the curve: it says nothing about what a lower loss needs.
    """
    curve = falling(baseline)
    if not curve:
        return None
    first, last, target = curve[0], curve[-1], other.log_loss
    if target > first.log_loss:
        return SpeedUp(first.used / other.used, None, None, "<")
    if target < last.log_loss:
        return SpeedUp(last.used / other.used, None, None, ">")
    if len(curve) == 1:
        return SpeedUp(first.used / other.used, None, None, "=")
    left, right = next((a, b) for a, b in itertools.pairwise(curve) if target >= b.log_loss)
    weight = (left.log_loss - target) / (left.log_loss - right.log_loss)
    log_used = (1 - weight) * math.log(left.used) + weight * math.log(right.used)
    value = math.exp(log_used) / other.used
    # By the delta method: the logarithm of what is needed moves with the three mean losses around the point.
    slope = (math.log(right.used) - math.log(left.used)) / (left.log_loss - right.log_loss)
    variance = (1 - weight) ** 2 / len(left.losses) + weight**2 / len(right.losses) + 1 / len(other.losses)
    from_losses, from_uses = losses.half_width(slope * math.sqrt(variance)), uses.half_width(math.sqrt(variance))
    if from_losses is None or from_uses is None:
        return SpeedUp(value, None, None, "=")
    half = math.hypot(from_losses, from_uses)
    return SpeedUp(value, value * math.exp(-half), value * math.exp(half), "=")


def falling(points: Sequence[Point]) -> list[Point]:
    """The points in the order of what they used, as long as each lies below all before it."""
    curve: list[Point] = []
    for point in sorted(points, key=lambda p: p.used):
        if not curve or point.log_loss < curve[-1].log_loss:
            curve.append(point)
    return curve


def differ(one: Sequence[float], two: Sequence[float], deviation: Deviation) -> bool | None:
    """Whether the means of two groups of losses are apart at this confidence; None where that cannot be said."""
    half = deviation.half_width(math.sqrt(1 / len(one) + 1 / len(two)))
    return None if half is None else abs(_mean_log(one) - _mean_log(two)) > half
