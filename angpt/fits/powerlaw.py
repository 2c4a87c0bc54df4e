"""Power laws by regression of logarithms, with the intervals of the paper: delta method and Student's t.

y = prefactor · x^exponent is a line in the logarithms. With n points the errors have n − 2 degrees of freedom; a
quantity that depends on the two parameters through a gradient J has the variance J Cov Jᵀ.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from angpt.stats import Interval

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class PowerLaw:
    """y = exp(level) · (x / exp(center))^exponent.

    `center` is the mean of log x, which makes level and exponent uncorrelated.
    """

    center: float
    level: float
    exponent: float
    level_error: float
    """Standard error of `level`."""
    exponent_error: float
    freedom: int
    """Degrees of freedom of the standard errors."""
    deviation: float
    """Standard deviation of log y around the line."""
    x: tuple[float, float]
    """Lowest and highest x of the fitted points."""
    points: int

    def log_at(self, x: float) -> Interval:
        """log y at x with its confidence interval."""
        distance = math.log(x) - self.center
        variance = self.level_error**2 + (distance * self.exponent_error) ** 2
        return Interval.around(self.level + self.exponent * distance, math.sqrt(variance), self.freedom)

    def log_mean(self, x: Floats) -> Floats:
        """log y at each x, without intervals."""
        return self.level + self.exponent * (np.log(x) - self.center)

    def at(self, x: float) -> Interval:
        return self.log_at(x).exp()

    @property
    def prefactor(self) -> Interval:
        return self.at(1.0)

    @property
    def slope(self) -> Interval:
        """The exponent with its interval."""
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
    """Fit a power law by least squares of log y on log x; at least two different x are needed.

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


def line(
    center: float,
    level: float,
    exponent: float,
    covariance: Floats,
    freedom: int,
    x: tuple[float, float],
    points: int,
) -> PowerLaw:
    """A power law from its level and exponent at any center, and their covariance; `deviation` is not known and 0."""
    of_level, both, of_exponent = float(covariance[0, 0]), float(covariance[0, 1]), float(covariance[1, 1])
    shift = -both / max(of_exponent, 1e-300)  # to where level and exponent are uncorrelated
    errors = math.sqrt(max(0.0, of_level + shift * both)), math.sqrt(of_exponent)
    return PowerLaw(center + shift, level + exponent * shift, exponent, *errors, freedom, 0.0, x, points)


def jackknife(jacobian: Floats, weight: Floats, residual: Floats, run_of: Ints) -> Floats:
    """Covariance of a weighted linear regression, from its change when each run in turn is left out.

    The noise may differ from run to run, and be shared by the points of a run.
    """
    order = np.argsort(run_of, kind="stable")
    first = np.flatnonzero(np.r_[True, np.diff(run_of[order]) > 0])
    j, w, e = jacobian[order], weight[order], residual[order]
    weighted = j * w[:, None]
    squares = np.add.reduceat(weighted[:, :, None] * j[:, None, :], first)
    sides = np.add.reduceat(weighted * e[:, None], first)
    moved = np.einsum("rij,rj->ri", np.linalg.pinv(squares.sum(axis=0) - squares, rcond=1e-12, hermitian=True), sides)
    return moved.T @ moved * (1 - 1 / len(moved))


def end_exponents(x: ArrayLike, y: ArrayLike) -> tuple[float, float] | None:
    """Exponents at the lowest and highest x if log y over log x is curved at the 1 % level; otherwise None.

    The exponent of the power law is then a mean, and its interval does not account for the curvature.
    """
    u, v = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    freedom = len(u) - 3
    if freedom < 1 or len(np.unique(np.round(u, 2))) < 3:
        return None
    t = u - u.mean()
    (curvature, slope, _), covariance = np.polyfit(t, v, 2, cov=True)
    rounding = abs(curvature) * float(np.ptp(t)) ** 2 < 1e-6
    if rounding or 2 * float(stats.t.sf(abs(curvature) / math.sqrt(covariance[0, 0]), freedom)) > 0.01:
        return None
    return float(slope + 2 * curvature * t.min()), float(slope + 2 * curvature * t.max())


def curvature_notes(x: ArrayLike, y: ArrayLike) -> list[str]:
    """A note for L(C) if it is not a power law over the range of the points."""
    if (ends := end_exponents(x, y)) is None:
        return []
    low, high = (f"{exponent:.3f}".replace("-", "−") for exponent in ends)
    return [
        f"L(C) is not a power law over this range: its exponent changes from {low} to {high}, as with an irreducible "
        "loss; the exponent given is a mean, and E + (C₀/C)ᵅ includes that loss"
    ]
