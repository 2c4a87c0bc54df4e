import math

import numpy as np
import pytest
from scipy import stats

from angpt.fits.powerlaw import end_exponents, fit_power_law

X = np.array([1e7, 3e7, 2e8, 5e8, 4e9])
Y = 3.0 * X**-0.4 * np.exp([0.1, -0.05, 0.02, -0.1, 0.03])


def test_is_the_regression_of_logarithms():
    law, line = fit_power_law(X, Y), stats.linregress(np.log(X), np.log(Y))
    t = stats.t.ppf(0.975, 3)
    assert law.exponent == pytest.approx(line.slope)
    assert law.prefactor.mean == pytest.approx(math.exp(line.intercept))
    assert (law.slope.low, law.slope.high) == pytest.approx(
        (line.slope - t * line.stderr, line.slope + t * line.stderr)
    )
    assert math.log(law.prefactor.high) == pytest.approx(line.intercept + t * line.intercept_stderr)


def test_bands_are_the_delta_method():
    """The formula of the paper: σ² = Jᵀ Cov(θ) J, ŷ ± t·σ, here with explicit matrices."""
    law = fit_power_law(X, Y)
    design = np.stack([np.ones(5), np.log(X)], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    theta = inverse @ design.T @ np.log(Y)
    residual = np.log(Y) - design @ theta
    covariance = residual @ residual / 3 * inverse
    for at in (1e9, 1e11):
        j = np.array([1.0, math.log(at)])
        sigma = math.sqrt(j @ covariance @ j)
        half = stats.t.ppf(0.975, 3) * sigma
        found = law.log_at(at)
        assert (found.mean, found.low, found.high) == pytest.approx((j @ theta, j @ theta - half, j @ theta + half))


def test_weights_are_inverse_variances():
    """A point of weight 2 counts as two points of weight 1."""
    weighted = fit_power_law(X, Y, [1, 2, 1, 1, 1])
    repeated = fit_power_law(np.r_[X, X[1]], np.r_[Y, Y[1]])
    assert weighted.exponent == pytest.approx(repeated.exponent)
    assert weighted.level == pytest.approx(repeated.level)
    assert weighted.freedom == 3
    scaled = fit_power_law(X, Y, [10, 20, 10, 10, 10])
    assert scaled.slope.high == pytest.approx(weighted.slope.high)


def test_two_points_have_no_interval_and_one_no_law():
    law = fit_power_law([1, 10], [5, 50])
    assert law.exponent == pytest.approx(1)
    assert law.slope.low is None
    assert law.at(100).high is None
    for x in ([2.0], [2.0, 2.0]):
        with pytest.raises(ValueError, match="two different x"):
            fit_power_law(x, np.ones(len(x)))


def test_the_inverse_goes_back():
    law = fit_power_law(X, Y)
    log_x, error = law.log_inverse(law.at(7e8).mean)
    assert log_x == pytest.approx(math.log(7e8))
    # by the delta method: the error of y over the slope
    at = law.log_at(7e8)
    assert error == pytest.approx((at.high - at.mean) / stats.t.ppf(0.975, 3) / abs(law.exponent))


def test_intervals_cover_in_95_of_100():
    rng = np.random.default_rng(1)
    laws = [fit_power_law(X, 2 * X**0.5 * np.exp(0.1 * rng.standard_normal(5))) for _ in range(400)]
    for hits in ([law.slope.covers(0.5) for law in laws], [law.at(1e10).covers(2e5) for law in laws]):
        assert 0.92 <= np.mean(hits) <= 0.98


def test_curvature_is_noticed_and_noise_is_not():
    rng = np.random.default_rng(0)
    x = np.geomspace(1e18, 1e22, 20)
    straight = [end_exponents(x, 30 * x**-0.05 * np.exp(0.003 * rng.standard_normal(20))) for _ in range(200)]
    assert sum(b is not None for b in straight) <= 8
    y = 1.7 + 300 * x**-0.15
    low, high = end_exponents(x, y * np.exp(0.001 * rng.standard_normal(20)))
    for at, found in ((x[0], low), (x[-1], high)):
        slope = -0.15 * 300 * at**-0.15 / (1.7 + 300 * at**-0.15)
        assert found == pytest.approx(slope, abs=0.015)
    assert end_exponents(x[:3], y[:3]) is None
    assert end_exponents(x, 3 * x**-0.1) is None
