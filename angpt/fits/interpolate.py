"""The lowest point of a curve through few values: Akima's interpolant and its exact minimiser.

Akima's piecewise cubic has one piece between neighbouring points; on each the derivative is a quadratic, whose roots
are known. With fewer than five points it is SciPy's, which extends the slopes at the ends: two points are joined by a
line, and three evenly spaced ones by a parabola.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import Akima1DInterpolator

from angpt.fits.powerlaw import Floats


@dataclass(frozen=True)
class Curve:
    """Akima's interpolant through at least two points in rising order of x."""

    x: Floats
    y: Floats

    @classmethod
    def through(cls, x: ArrayLike, y: ArrayLike) -> "Curve":
        return cls(np.asarray(x, float), np.asarray(y, float))

    def __call__(self, x: ArrayLike) -> Floats:
        return np.asarray(Akima1DInterpolator(self.x, self.y)(x))

    def minimiser(self) -> float:
        """The x of the lowest value; of equally low points, one inside the grid counts."""
        pieces = Akima1DInterpolator(self.x, self.y)
        roots = pieces.derivative().roots(extrapolate=False)
        roots = roots[np.isfinite(roots)]  # a flat piece has NaN among its roots
        candidates = np.r_[self.x[1:-1], roots, self.x[[0, -1]]]  # argmin takes the first of equal values
        return float(candidates[np.argmin(pieces(candidates))])
