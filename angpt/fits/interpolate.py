"""The lowest point of a curve through few values: Akima's interpolant, and its minimiser without a grid.

Akima's piecewise cubic has as many pieces as there are gaps; on each the derivative is a quadratic, whose roots are
known. With fewer than five points, which Akima's rule for the slopes needs, it is the parabola through the lowest point
and its neighbours.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import Akima1DInterpolator

from angpt.fits.powerlaw import Floats

AKIMA = 5


@dataclass(frozen=True)
class Curve:
    """An interpolant through points in rising order of x."""

    x: Floats
    y: Floats
    center: int
    """Index of the middle point, where the curve is a parabola."""

    @classmethod
    def through(cls, x: ArrayLike, y: ArrayLike, center: int) -> "Curve":
        return cls(np.asarray(x, float), np.asarray(y, float), center)

    @property
    def method(self) -> Literal["akima", "parabola"]:
        return "akima" if len(self.x) >= AKIMA else "parabola"

    @property
    def support(self) -> tuple[float, float]:
        """Where the curve says anything."""
        if self.method == "akima":
            return float(self.x[0]), float(self.x[-1])
        return float(self.x[self.center - 1]), float(self.x[self.center + 1])

    def __call__(self, x: ArrayLike) -> Floats:
        if self.method == "akima":
            return np.asarray(Akima1DInterpolator(self.x, self.y)(x))
        return np.polyval(self._parabola(), np.asarray(x, float) - self.x[self.center])

    def _parabola(self) -> Floats:
        """Coefficients about the centre, the highest power first."""
        near = slice(self.center - 1, self.center + 2)
        return np.polyfit(self.x[near] - self.x[self.center], self.y[near], 2)

    def minimiser(self) -> float:
        """Where the curve is lowest; its lowest point is not one of its ends."""
        if self.method == "parabola":
            bend, slope, _ = self._parabola()
            return float(self.x[self.center] - slope / (2 * bend)) if bend > 0 else float(self.x[self.center])
        pieces = Akima1DInterpolator(self.x, self.y)
        roots = pieces.derivative().roots(extrapolate=False)
        candidates = np.r_[self.x, roots[np.isfinite(roots)]]  # a flat piece has NaN among its roots
        return float(candidates[np.argmin(pieces(candidates))])
