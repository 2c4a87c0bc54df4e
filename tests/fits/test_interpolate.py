import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.interpolate import Akima1DInterpolator

from angpt.fits.interpolate import Curve, edge


@given(st.integers(0, 10**6), st.integers(5, 9))
def test_the_minimiser_is_that_of_a_fine_grid(seed, count):
    rng = np.random.default_rng(seed)
    x = np.cumsum(rng.uniform(0.3, 1.0, count))
    y = (x - x[count // 2]) ** 2 + 0.1 * rng.standard_normal(count)
    best = int(np.argmin(y))
    assume(0 < best < count - 1)
    assert edge(y) == (best, None)
    at = Curve.through(x, y, best).minimiser()
    akima = Akima1DInterpolator(x, y)
    grid = np.linspace(x[0], x[-1], 20_001)
    assert akima(at) <= akima(grid).min() + 1e-12
    assert x[0] < at < x[-1]


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_parabolas_are_exact_and_not_quantised(count):
    """On evenly spaced points both methods reproduce a parabola."""
    x = np.arange(count) * math.log(2)
    curve = Curve.through(x, 0.7 * (x - 0.93) ** 2 + 3, edge((x - 0.93) ** 2)[0])
    assert curve.method == ("akima" if count >= 5 else "parabola")
    assert curve.minimiser() == pytest.approx(0.93)
    assert curve(0.93) == pytest.approx(3)


def test_a_parabola_of_uneven_points():
    x = np.array([0.0, 1.0, 3.0, 3.5])
    curve = Curve.through(x, (x - 1.7) ** 2, edge((x - 1.7) ** 2)[0])
    assert curve.minimiser() == pytest.approx(1.7)
    assert curve.support == (0.0, 3.0)


def test_a_flat_bottom():
    x = np.arange(6.0)
    assert 2 <= Curve.through(x, [2, 1, 0, 0, 1, 2], 2).minimiser() <= 3
    assert Curve.through([0, 1, 2], [1, 1, 1], 1).minimiser() == 1


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        ([3, 2, 1], (2, "high")),
        ([1, 2, 3], (0, "low")),
        ([2, 1, 3], (1, None)),
        ([1, 1, 2], (1, None)),
        ([2, 1, 1], (1, None)),
        ([1, 2, 1], (0, "low")),
        ([1], (0, "low")),
    ],
)
def test_edges(y, expected):
    assert edge(y) == expected
