"""Power laws by regression of logarithms, with the intervals of the paper: delta method and Student's t.

y = prefactor · x^exponent is a line in the logarithms. With n points the errors are estimated with n − 2 degrees of
freedom; a quantity that depends on the two parameters through a gradient J has the variance J Cov Jᵀ.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from angpt.stats import Interval

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PowerLaw:
    """y = exp(level) · (x / exp(center))^exponent. About the mean of log x, level and exponent are not correlated."""

    center: float
    level: float
    exponent: float
    level_error: float
    """Standard errors of the two."""
    exponent_error: float
    freedom: int
    deviation: float
    """Standard deviation of log y about the line."""
    x: tuple[float, float]
    """The range of the points that it was fitted to."""
    points: int

    def log_at(self, x: float, new: bool = False) -> Interval:
        """log y at x with its interval; of a new point there rather than of the law if `new`."""
        distance = math.log(x) - self.center
        variance = self.level_error**2 + (distance * self.exponent_error) ** 2 + (self.deviation**2 if new else 0.0)
        return Interval.around(self.level + self.exponent * distance, math.sqrt(variance), self.freedom)

    def at(self, x: float, new: bool = False) -> Interval:
        return self.log_at(x, new).exp()

    @property
    def prefactor(self) -> Interval:
        return self.at(1.0)

    @property
    def slope(self) -> Interval:
        return Interval.around(self.exponent, self.exponent_error, self.freedom)

    def log_inverse(self, y: float) -> tuple[float, float]:
        """log x at which the law reaches y, and its standard error."""
        distance = (math.log(y) - self.level) / self.exponent
        error = math.hypot(self.level_error, distance * self.exponent_error) / abs(self.exponent)
        return self.center + distance, error

    def summary(self) -> dict[str, Any]:
        """The law as fields of a JSON file."""
        return {
            "prefactor": self.prefactor,
            "exponent": self.slope,
            "points": self.points,
            "freedom": self.freedom,
            "deviation_of_log": self.deviation,
            "range": self.x,
        }


def fit_power_law(x: ArrayLike, y: ArrayLike, weights: ArrayLike | None = None) -> PowerLaw:
    """A power law by least squares of log y on log x, with at least two different x.

    Weights are relative inverse variances.
    """
    u, v = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    w = np.ones_like(u) if weights is None else np.asarray(weights, float) / np.mean(np.asarray(weights, float))
    center = float(np.average(u, weights=w))
    spread = float(np.sum(w * (u - center) ** 2))
    if len(u) < 2 or spread == 0:
        raise ValueError("a power law needs two different x")
    level = float(np.average(v, weights=w))
    exponent = float(np.sum(w * (u - center) * v)) / spread
    residuals = v - level - exponent * (u - center)
    freedom = len(u) - 2
    deviation = math.sqrt(float(np.sum(w * residuals**2)) / freedom) if freedom else 0.0
    return PowerLaw(
        center=center,
        level=level,
        exponent=exponent,
        level_error=deviation / math.sqrt(float(np.sum(w))),
        exponent_error=deviation / math.sqrt(spread),
        freedom=freedom,
        deviation=deviation,
        x=(math.exp(float(u.min())), math.exp(float(u.max()))),
        points=len(u),
    )


def bend(x: ArrayLike, y: ArrayLike) -> tuple[float, float] | None:
    """Exponents at the lowest and highest x where a parabola of the logarithms is plainly better than a line.

    That is at a probability below 1 % of so much bend if there were none. The exponent of the power law is a mean then,
    and its interval knows nothing of what lies beyond.
    """
    u, v = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    freedom = len(u) - 3
    if freedom < 1:
        return None
    t = u - u.mean()
    (curve, slope, _), covariance = np.polyfit(t, v, 2, cov=True)
    error = math.sqrt(covariance[0, 0])
    rounding = abs(curve) * float(np.ptp(t)) ** 2 < 1e-6
    if rounding or 2 * float(stats.t.sf(abs(curve) / error, freedom)) > 0.01:
        return None
    return float(slope + 2 * curve * t.min()), float(slope + 2 * curve * t.max())
