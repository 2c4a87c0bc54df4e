"""The loss with an irreducible part as a function of compute, L(C) = E + (C₀/C)ᵅ, by least squares of log L.

Intervals are those of the delta method with Student's t for n − 3 degrees of freedom.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares

from angpt.fits.powerlaw import Floats
from angpt.stats import Interval

SHARES = (0.05, 0.6, 0.9)
"""Starting points: the irreducible loss as parts of the lowest loss."""


@dataclass(frozen=True)
class Saturating:
    """L(C) = E + exp(level − α·(log C − center))."""

    theta: Floats
    """E, level and α."""
    covariance: Floats
    center: float
    freedom: int
    influence: Floats
    """Change of theta with the log loss of each point."""

    def propagate(self, terms: Floats, covariance: Floats, freedom: int) -> "Saturating":
        """The law with errors from those of its points, which are linear in parameters with this covariance."""
        moved = self.influence @ terms
        return replace(self, covariance=moved @ covariance @ moved.T, freedom=freedom)

    def _interval(self, value: float, gradient: tuple[float, float, float]) -> Interval:
        error = math.sqrt(max(0.0, float(np.array(gradient) @ self.covariance @ np.array(gradient))))
        return Interval.around(value, error, self.freedom)

    def estimates(self) -> dict[str, Interval]:
        """E, C₀ and α; the interval of C₀ is that of its logarithm."""
        e, level, alpha = map(float, self.theta)
        irreducible = self._interval(e, (1, 0, 0))
        low = None if irreducible.low is None else max(0.0, irreducible.low)
        scale = self._interval(self.center + level / alpha, (0, 1 / alpha, -level / alpha**2)).exp()
        found = Interval(e, low, irreducible.high), scale, self._interval(alpha, (0, 0, 1))
        return dict(zip(("E", "C₀", "α"), found, strict=True))

    @property
    def exponent(self) -> tuple[float, float, float]:
        """The exponent of L(C) − E, −α, with its standard error and degrees of freedom."""
        return -float(self.theta[2]), math.sqrt(float(self.covariance[2, 2])), self.freedom

    def log_inverse(self, loss: float) -> tuple[float, float]:
        """log C at which the law reaches a loss, and its standard error; infinite for a loss below E."""
        e, level, alpha = map(float, self.theta)
        if loss <= e:
            return math.inf, math.inf
        t = (level - math.log(loss - e)) / alpha
        gradient = np.array([1 / (alpha * (loss - e)), 1 / alpha, -t / alpha])
        return self.center + t, math.sqrt(max(0.0, float(gradient @ self.covariance @ gradient)))

    def log_mean(self, compute: Floats) -> Floats:
        """log L at each compute, without intervals."""
        e, level, alpha = self.theta
        return np.log(e + np.exp(level - alpha * (np.log(compute) - self.center)))

    def log_at(self, compute: float) -> Interval:
        """log L at a compute."""
        e, level, alpha = map(float, self.theta)
        t = math.log(compute) - self.center
        above = math.exp(level - alpha * t)
        loss = e + above
        return self._interval(math.log(loss), (1 / loss, above / loss, -t * above / loss))


def fit_saturating(compute: ArrayLike, loss: ArrayLike, weights: ArrayLike | None = None) -> Saturating | str:
    """The law, or why there is none. Weights are relative inverse variances of log loss."""
    x, y = np.log(np.asarray(compute, float)), np.log(np.asarray(loss, float))
    if len(x) < 5 or len(np.unique(np.round(x, 2))) < 4:
        return "three parameters need at least five points at four values of compute"
    center = float(x.mean())
    t, lowest = x - center, math.exp(float(y.min()))
    root = np.ones_like(x) if weights is None else np.sqrt(np.asarray(weights, float) / np.mean(np.asarray(weights)))

    def residual(theta: Floats) -> Floats:
        return root * (np.log(theta[0] + np.exp(theta[1] - theta[2] * t)) - y)

    def jacobian(theta: Floats) -> Floats:
        above = np.exp(theta[1] - theta[2] * t)
        return np.stack([np.ones_like(t), above, -t * above], axis=1) * (root / (theta[0] + above))[:, None]

    found = []
    for e in (share * lowest for share in SHARES):
        slope, level = np.polyfit(t, np.log(np.exp(y) - e), 1)
        start, bounds = [e, level, max(-slope, 2e-4)], ([0.0, -np.inf, 1e-4], [lowest, np.inf, 10.0])
        found.append(least_squares(residual, start, jacobian, bounds, x_scale=(1.0, 1.0, 0.1)))
    best = min(found, key=lambda fit: fit.cost)
    if best.x[0] > 0.999 * lowest or best.x[2] < 2e-4:
        return "the losses do not approach a limit below the lowest one"
    freedom = len(x) - 3
    inverse = np.linalg.pinv(best.jac.T @ best.jac)
    return Saturating(best.x, 2 * best.cost / freedom * inverse, center, freedom, inverse @ (best.jac.T * root))
