"""Power laws of two variables, y = y₀ · N^a · D^b, by regression of logarithms, with intervals by Student's t."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from angpt.fits.powerlaw import Floats
from angpt.stats import Interval


@dataclass(frozen=True)
class PlaneLaw:
    """y = exp(level) · (N / exp(center₀))^a · (D / exp(center₁))^b."""

    center: tuple[float, float]
    theta: Floats
    """level, a and b."""
    covariance: Floats
    freedom: int
    """Degrees of freedom of the covariance."""
    deviation: float
    """Standard deviation of log y around the plane."""

    def at(self, parameters: float, tokens: float, new: bool = False) -> Interval:
        """y with its confidence interval, or with the prediction interval of a `new` point."""
        gradient = np.array([1.0, math.log(parameters) - self.center[0], math.log(tokens) - self.center[1]])
        variance = float(gradient @ self.covariance @ gradient) + (self.deviation**2 if new else 0.0)
        return Interval.around(float(gradient @ self.theta), math.sqrt(max(0.0, variance)), self.freedom).exp()

    @property
    def exponents(self) -> tuple[Interval, Interval]:
        """The exponents of N and D."""
        errors = np.sqrt(np.maximum(0.0, np.diag(self.covariance)))
        of_size, of_tokens = (Interval.around(float(self.theta[i]), float(errors[i]), self.freedom) for i in (1, 2))
        return of_size, of_tokens

    def summary(self) -> dict[str, Any]:
        """The law as fields of a JSON file."""
        return {
            "prefactor": self.at(1.0, 1.0),
            "parameters_exponent": self.exponents[0],
            "tokens_exponent": self.exponents[1],
            "freedom": self.freedom,
            "deviation_of_log": self.deviation,
        }


def fit_plane(parameters: ArrayLike, tokens: ArrayLike, y: ArrayLike) -> PlaneLaw:
    """Fit a power law of two variables by least squares; at least three points that lie on no line are needed."""
    n, d, v = (np.log(np.asarray(values, float)) for values in (parameters, tokens, y))
    center = float(n.mean()), float(d.mean())
    design = np.column_stack([np.ones(len(v)), n - center[0], d - center[1]])
    theta, _, rank, _ = np.linalg.lstsq(design, v, rcond=1e-9)
    if rank < 3:
        raise ValueError("a power law of two variables needs three points that lie on no line")
    residual, freedom = v - design @ theta, len(v) - 3
    variance = float(residual @ residual) / freedom if freedom else 0.0
    return PlaneLaw(center, theta, variance * np.linalg.inv(design.T @ design), freedom, math.sqrt(variance))
