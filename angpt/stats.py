"""Statistics: confidence intervals, deviation between seeds, tests of a difference, and the edge of a grid.

Distributions are functions of scipy.special, which loads in a quarter of the time of scipy.stats.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
OUTLIER = 0.001
"""Probability below which a group of runs counts as varying more than the others."""


@dataclass(frozen=True)
class Interval:
    """An estimate (a mean unless stated otherwise) and its 95 % interval, None if the data give none."""

    mean: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    """Number of seeds, if it is a mean over seeds."""

    @classmethod
    def around(cls, mean: float, error: float, freedom: float, n: int | None = None, tests: int = 1) -> Self:
        """An estimate with this standard error and degrees of freedom, and its interval by Student's t, see
        `quantile`."""
        if freedom <= 0:
            return cls(mean, n=n)
        half = quantile(freedom, tests) * error
        return cls(mean, mean - half, mean + half, n)

    def map(self, function: Callable[[float], float]) -> "Interval":
        """The interval of an increasing function of the quantity."""
        low, high = (None if x is None else function(x) for x in (self.low, self.high))
        return Interval(function(self.mean), low, high, self.n)

    def exp(self) -> "Interval":
        """The interval of a quantity whose logarithm this is."""
        return self.map(lambda x: math.exp(min(x, 700.0)))

    def times(self, factor: float) -> "Interval":
        """The interval of a positive multiple."""
        return self.map(lambda x: factor * x)

    def covers(self, truth: float) -> bool:
        return self.low is not None and self.high is not None and self.low <= truth <= self.high


def quantile(freedom: float, tests: int = 1) -> float:
    """The absolute value that Student's t exceeds with a probability of 5 % / `tests`, so that of as many tests none
    exceeds it with a probability of at least 95 % (Bonferroni)."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - (1 - CONFIDENCE) / (2 * tests)))


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of the values, with its interval from their standard deviation."""
    import numpy as np

    n = len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return Interval.around(float(np.mean(values)), error, n - 1, n)


@dataclass(frozen=True)
class Deviation:
    """Standard deviation of a logarithm between seeds, and its degrees of freedom."""

    value: float
    freedom: int

    def half_width(self, scale: float) -> float | None:
        """Half the width of the confidence interval if the standard error is `scale` times the deviation."""
        return None if self.freedom == 0 else quantile(self.freedom) * scale * self.value


def mean_log(values: Sequence[float]) -> float:
    return sum(math.log(x) for x in values) / len(values)


def pooled_deviation(groups: Sequence[Sequence[float]]) -> Deviation:
    """The deviation of the logarithms within groups of runs that differ only in the seed, assumed equal in all."""
    groups = [values for values in groups if len(values)]
    squares = sum(
        sum((math.log(x) - center) ** 2 for x in values) for values in groups for center in [mean_log(values)]
    )
    freedom = sum(len(values) - 1 for values in groups)
    return Deviation(math.sqrt(squares / freedom) if freedom else 0.0, freedom)


def deviations(groups: Sequence[Sequence[float]]) -> list[Deviation]:
    """The deviation between seeds of each group: pooled over all groups except outliers, which get their own.

    A group is an outlier if it varies far more than the others by an F test, such as a variant close to divergence.
    """
    from scipy.special import fdtrc

    own = [pooled_deviation([group]) for group in groups]
    order = sorted((i for i, d in enumerate(own) if d.freedom), key=lambda i: own[i].value)
    outliers: list[int] = []
    for first in range(len(order) - 1, len(order) // 2 - 1, -1):  # at most the wider half
        rest = pooled_deviation([groups[i] for i in order[:first]])
        if rest.freedom and rest.value:
            ratio, freedom = (own[order[first]].value / rest.value) ** 2, own[order[first]].freedom
            if fdtrc(freedom, rest.freedom, ratio) * len(order) < OUTLIER:
                outliers = order[first:]
    pooled = pooled_deviation([group for i, group in enumerate(groups) if i not in outliers])
    return [own[i] if i in outliers else pooled for i in range(len(groups))]


def geometric_mean(values: Sequence[float], deviation: Deviation) -> Interval:
    """The geometric mean over seeds, with its interval from the deviation of the logarithms."""
    n = len(values)
    return Interval.around(mean_log(values), deviation.value / math.sqrt(n), deviation.freedom, n).exp()


def welch(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Standard error and degrees of freedom of a sum of independent estimates, given as (error, freedom), by Welch."""
    total = sum(error**2 for error, _ in parts)
    if any(freedom <= 0 for _, freedom in parts):
        return math.sqrt(total), 0.0
    below = sum(error**4 / freedom for error, freedom in parts)
    return math.sqrt(total), total**2 / below if below else math.inf


@dataclass(frozen=True)
class Difference:
    """The difference of two independent estimates, by Welch's test."""

    estimate: Interval
    p_value: float | None
    """Probability of a difference at least this large under the null hypothesis of no difference."""


def difference(one: tuple[float, float, float], two: tuple[float, float, float]) -> Difference:
    """two − one, each as (value, standard error, degrees of freedom)."""
    from scipy.special import stdtr

    error, freedom = welch([one[1:], two[1:]])
    value = two[0] - one[0]
    ratio = 0.0 if value == 0 else abs(value) / max(error, 1e-300)
    p_value = 2 * float(stdtr(freedom, -ratio)) if freedom > 0 else None
    return Difference(Interval.around(value, error, freedom), p_value)


def seed_difference(one: Sequence[float], two: Sequence[float], spread: Deviation, other: Deviation) -> Difference:
    """The mean of `two` minus that of `one`, with a t-test, given the deviations of their logarithms between seeds; by
    Welch if these differ."""
    means = sum(one) / len(one), sum(two) / len(two)
    errors = spread.value * means[0] / math.sqrt(len(one)), other.value * means[1] / math.sqrt(len(two))
    if spread == other:  # one estimate of the deviation
        return difference((means[0], math.hypot(*errors), spread.freedom), (means[1], 0.0, math.inf))
    return difference((means[0], errors[0], spread.freedom), (means[1], errors[1], other.freedom))


def holm(p_values: Sequence[float], tests: int | None = None) -> list[float]:
    """P-values after Holm's correction for this many tests, those given unless stated: others count as larger."""
    count, largest = tests or len(p_values), 0.0
    adjusted = [0.0] * len(p_values)
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (count - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def relative_change(
    values: Sequence[float], base: Sequence[float], spread: Deviation, base_spread: Deviation, tests: int = 1
) -> Interval:
    """The ratio of two geometric means, minus one, with its interval; by Welch if the deviations differ. It holds for
    the most extreme of `tests` such ratios, see `quantile`."""
    errors = spread.value / math.sqrt(len(values)), base_spread.value / math.sqrt(len(base))
    error, freedom = welch([(errors[0], spread.freedom), (errors[1], base_spread.freedom)])
    if spread == base_spread:
        freedom = spread.freedom
    return Interval.around(mean_log(values) - mean_log(base), error, freedom, len(values), tests).map(math.expm1)


def correlation(x: "ArrayLike", y: "ArrayLike", ranks: bool = False) -> float | None:
    """Pearson's correlation, or Spearman's of the ranks; None if x or y is constant."""
    import numpy as np

    if np.size(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(*(map(_ranks, (x, y)) if ranks else (x, y)))[0, 1])


def _ranks(values: "ArrayLike") -> "NDArray[np.float64]":
    """The rank of each value; equal ones share the mean of theirs. That of NaN is NaN."""
    import numpy as np

    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.where(np.isnan(values), np.nan, (np.cumsum(counts) - (counts - 1) / 2)[places])


def edge(values: "ArrayLike") -> tuple[int, int]:
    """The index of the lowest value of a grid, and its edge: −1 the first, 1 the last, 0 neither.

    Of equal lowest values, one inside the grid counts. A grid of one value has no edge.
    """
    import numpy as np

    found = np.asarray(values, float)
    last = len(found) - 1
    hits = np.flatnonzero(found == found.min())
    inside = hits[(hits > 0) & (hits < last)]
    best = int((inside if len(inside) else hits)[0])
    return best, 0 if 0 < best < last or last == 0 else -1 if best == 0 else 1
