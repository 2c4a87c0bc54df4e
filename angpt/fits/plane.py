"""Power laws of several variables, y = y₀ · Nᵃ · Dᵇ · Bᶜ, by regression of logarithms, with Student's intervals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from angpt.fits.powerlaw import Floats
from angpt.stats import Interval


@dataclass(frozen=True)
class PlaneLaw:
    """y = exp(level) · the product over the variables x of (x / exp(center))^exponent."""

    center: dict[str, float]
    """Mean logarithm of each variable, by its name."""
    theta: tuple[float, ...]
    """The level and the exponents, in the order of `center`."""
    covariance: Floats = field(compare=False)
    freedom: int
    """Degrees of freedom of the covariance."""
    deviation: float
    """Standard deviation of log y around the plane."""

    def at(self, values: Mapping[str, float], new: bool = False) -> Interval:
        """y with its confidence interval, or with the prediction interval of a `new` point.

        Values of variables that the law does not have are ignored.
        """
        gradient = np.array([1.0, *(math.log(values[name]) - center for name, center in self.center.items())])
        variance = float(gradient @ self.covariance @ gradient) + (self.deviation**2 if new else 0.0)
        mean = float(gradient @ np.array(self.theta))
        return Interval.around(mean, math.sqrt(max(0.0, variance)), self.freedom).exp()

    @property
    def exponents(self) -> dict[str, Interval]:
        """The exponent of each variable."""
        errors = np.sqrt(np.maximum(0.0, np.diag(self.covariance)))
        found = zip(self.center, self.theta[1:], errors[1:], strict=True)
        return {name: Interval.around(value, float(error), self.freedom) for name, value, error in found}

    @property
    def prefactor(self) -> Interval:
        return self.at(dict.fromkeys(self.center, 1.0))

    def summary(self) -> dict[str, Any]:
        """The law as fields of a JSON file."""
        names = ("prefactor", "exponents", "freedom")
        return {**{name: getattr(self, name) for name in names}, "deviation_of_log": self.deviation}


def fit_plane(variables: Mapping[str, ArrayLike], y: ArrayLike) -> PlaneLaw:
    """Fit a power law by least squares; the points must vary in as many directions as there are variables."""
    logs = {name: np.log(np.asarray(values, float)) for name, values in variables.items()}
    center, v = {name: float(x.mean()) for name, x in logs.items()}, np.log(np.asarray(y, float))
    design = np.column_stack([np.ones(len(v)), *(x - center[name] for name, x in logs.items())])
    theta, _, rank, _ = np.linalg.lstsq(design, v, rcond=1e-9)
    if rank < design.shape[1]:
        raise ValueError(f"the points do not tell the effects of {', '.join(variables)} apart")
    residual, freedom = v - design @ theta, len(v) - design.shape[1]
    variance = float(residual @ residual) / freedom if freedom else 0.0
    covariance = variance * np.linalg.inv(design.T @ design)
    return PlaneLaw(center, tuple(map(float, theta)), covariance, freedom, math.sqrt(variance))
