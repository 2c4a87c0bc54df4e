"""The lowest point of a curve through few values: Akima's interpolant and its exact minimiser.

Akima's piecewise cubic has one piece between neighbouring points; on each the derivative is a quadratic, whose roots
are known. Akima's rule needs five points; with fewer, the curve is the parabola through the lowest point and its
neighbours.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import Akima1DInterpolator

from angpt.fits.powerlaw import Floats

AKIMA = 5
"""Points that Akima's interpolation needs."""


@dataclass(frozen=True)
class Curve:
    """An interpolant through points in rising order of x."""

    x: Floats
    y: Floats
    center: int
    """Index of the middle point of the parabola."""

    @classmethod
    def through(cls, x: ArrayLike, y: ArrayLike, center: int) -> "Curve":
        return cls(np.asarray(x, float), np.asarray(y, float), center)

    @property
    def method(self) -> Literal["akima", "parabola"]:
        return "akima" if len(self.x) >= AKIMA else "parabola"

    @property
    def support(self) -> tuple[float, float]:
        """The range of x in which the curve is defined."""
        first, last = (0, -1) if self.method == "akima" else (self.center - 1, self.center + 1)
        return float(self.x[first]), float(self.x[last])

    def __call__(self, x: ArrayLike) -> Floats:
        if self.method == "akima":
            return np.asarray(Akima1DInterpolator(self.x, self.y)(x))
        return np.polyval(self._parabola(), np.asarray(x, float) - self.x[self.center])

    def _parabola(self) -> Floats:
        """Coefficients of the parabola around the center, the highest power first."""
        near = slice(self.center - 1, self.center + 2)
        return np.polyfit(self.x[near] - self.x[self.center], self.y[near], 2)

    def minimiser(self) -> float:
        """The x of the lowest value; the lowest point must not be at an end."""
        if self.method == "parabola":
            curvature, slope, _ = self._parabola()
            return float(self.x[self.center] - (slope / (2 * curvature) if curvature > 0 else 0.0))
        pieces = Akima1DInterpolator(self.x, self.y)
        roots = pieces.derivative().roots(extrapolate=False)
        candidates = np.r_[self.x, roots[np.isfinite(roots)]]  # a flat piece has NaN among its roots
        return float(candidates[np.argmin(pieces(candidates))])
