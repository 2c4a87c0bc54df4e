import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.interpolate import Akima1DInterpolator

from angpt.fits.interpolate import Curve


@given(st.integers(0, 10**6), st.integers(3, 9))
def test_the_minimiser_is_that_of_a_fine_grid(seed, count):
    """SciPy's interpolant from three points on."""
    rng = np.random.default_rng(seed)
    x = np.cumsum(rng.uniform(0.3, 1.0, count))
    y = (x - x[count // 2]) ** 2 + 0.1 * rng.standard_normal(count)
    assume(0 < int(np.argmin(y)) < count - 1)
    at = Curve.through(x, y).minimiser()
    akima = Akima1DInterpolator(x, y)
    grid = np.linspace(x[0], x[-1], 20_001)
    assert akima(at) <= akima(grid).min() + 1e-12
    assert x[0] < at < x[-1]


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_parabolas_are_exact_and_not_quantised(count):
    """Evenly spaced points of a parabola."""
    x = np.arange(count) * math.log(2)
    curve = Curve.through(x, 0.7 * (x - 0.93) ** 2 + 3)
    assert curve.minimiser() == pytest.approx(0.93)
    assert curve(0.93) == pytest.approx(3)


def test_no_point_is_dropped():
    """The fourth point bends the curve around the lowest one."""
    x, y = np.arange(4.0), np.array([1.0, 0.0, 0.4, 3.0])
    three, four = Curve.through(x[:3], y[:3]).minimiser(), Curve.through(x, y).minimiser()
    assert abs(four - three) > 0.02
    assert Curve.through(x, y)(3.0) == pytest.approx(3.0)


def test_two_points_are_joined_by_a_line():
    curve = Curve.through([0, 2], [1, 5])
    assert curve(0.5) == pytest.approx(2)
    assert curve.minimiser() == 0


def test_a_flat_bottom():
    assert 2 <= Curve.through(np.arange(6.0), [2, 1, 0, 0, 1, 2]).minimiser() <= 3
    assert Curve.through([0, 1, 2], [1, 1, 1]).minimiser() == 1  # as of `edge`, inside the grid
    assert Curve.through(np.arange(5.0), [1, 2, 1, 2, 1]).minimiser() == 2
