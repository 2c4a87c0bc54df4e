import dataclasses
import math

import numpy as np
import pytest

from angpt.fits.compute import Sample
from angpt.fits.isoflop import IsoFlop, find_levels, fit_isoflop
from tests.fits.synthetic import FREE, LAW, Law, grid
from tests.intervals import check_intervals

SIZES, COMPUTES = np.geomspace(2e7, 4e9, 10), np.geomspace(3e18, 1e21, 8)


@pytest.mark.parametrize("law", [LAW, FREE, Law(a=0.5, b=0.25, A=6000, B=300)], ids=["E", "no E", "lopsided"])
def test_exponents_without_noise(law):
    found = fit_isoflop(grid(law, SIZES, COMPUTES))
    assert isinstance(found, IsoFlop)
    assert found.parameters.exponent == pytest.approx(law.exponents["parameters"], abs=0.01)
    assert found.tokens.exponent == pytest.approx(law.exponents["tokens"], abs=0.01)
    if law.E == 0:
        assert found.loss.exponent == pytest.approx(law.exponents["loss"], abs=0.001)


@pytest.mark.parametrize("noise", [0.002, 0.004])
def test_intervals_cover_the_truth(noise):
    found = [fit_isoflop(grid(FREE, SIZES, COMPUTES, noise, seed)) for seed in range(100)]
    slopes = [[getattr(f, name).slope for name in FREE.exponents] for f in found]
    check_intervals(slopes, list(FREE.exponents.values()), hits=90)


def test_a_level_is_a_parabola():
    """The vertex of one level, compared with numpy's fit of the same points."""
    sample = grid(LAW, SIZES, [1e19, 1e20], 0.003)
    found = fit_isoflop(sample)
    level = found.levels[1]
    mine = np.isclose(sample.compute, 1e20)
    n, y = np.log(sample.parameters[mine]), sample.log_loss[mine]
    best = int(np.argmin(y))
    near = np.abs(n - n[best]) <= math.log(4) + 1e-9
    c2, c1, c0 = np.polyfit(n[near], y[near], 2)
    assert math.log(level.vertex.parameters) == pytest.approx(-c1 / (2 * c2))
    assert math.log(level.vertex.loss) == pytest.approx(c0 - c1**2 / (4 * c2))
    assert level.vertex.tokens == pytest.approx(1e20 / 6 / level.vertex.parameters)
    # the variance of the slope at the vertex, by moving one loss at a time
    variance = 0.0
    for i in np.flatnonzero(near):
        moved = y.copy()
        moved[i] += 1e-6
        d2, d1, _ = np.polyfit(n[near], moved[near], 2)
        variance += ((2 * (d2 - c2) * -c1 / (2 * c2) + d1 - c1) / 1e-6) ** 2
    assert level.vertex.variance[0] == pytest.approx(variance, rel=1e-3)


def test_levels_are_found_in_unsorted_runs():
    sample = grid(LAW, SIZES, COMPUTES)
    order = np.random.default_rng(0).permutation(len(sample))
    shaken = sample.take(order)
    groups = find_levels(shaken.compute * np.random.default_rng(1).uniform(1, 1.01, len(order)), shaken.parameters)
    assert [len(g) for g in groups] == [10] * 8
    assert fit_isoflop(shaken).parameters.exponent == pytest.approx(fit_isoflop(sample).parameters.exponent)


def test_small_differences_of_compute_are_taken_off():
    """Budgets rounded to whole steps: 1 % in compute is more than the noise, but hardly moves the optima."""
    sample = grid(LAW, SIZES, COMPUTES)
    factor = np.random.default_rng(0).uniform(0.991, 1.009, len(sample))
    d = sample.tokens * factor
    rough = Sample(
        sample.parameters, d, 6 * sample.parameters * d, np.log(LAW.loss(sample.parameters, d)), sample.seeds
    )
    assert fit_isoflop(rough).parameters.exponent == pytest.approx(LAW.exponents["parameters"], abs=0.01)


def test_edges_are_never_optima():
    sample = grid(LAW, np.geomspace(1e8, 1e9, 8), np.geomspace(1e18, 1e22, 9))
    found = fit_isoflop(sample)
    refused = [level for level in found.levels if level.vertex is None]
    assert {level.problem for level in refused} == {
        "the best size is the smallest one tried",
        "the best size is the largest one tried",
    }
    for level in refused:
        assert int(np.argmin(level.losses)) in (0, len(level.losses) - 1)
    inside = [level for level in found.levels if level.vertex is not None]
    assert len(inside) >= 3
    for level in inside:
        assert level.parameters[0] < level.vertex.parameters < level.parameters[-1]
    assert any("not used, since the best size is the largest one tried" in note for note in found.notes)


def test_what_cannot_be_fitted_is_said():
    assert fit_isoflop(grid(LAW, [1e8, 2e8], COMPUTES)).startswith(
        "no level of compute (within 2%) has three model sizes"
    )
    assert fit_isoflop(grid(LAW, SIZES, [1e20])).startswith("only one level of compute")
    all_edges = fit_isoflop(grid(LAW, np.geomspace(1e6, 1e7, 6), COMPUTES))
    assert all_edges.startswith(
        "0 of 8 levels of compute have an optimum, two are needed (8 levels not used, since the"
    )
    two = fit_isoflop(grid(LAW, SIZES, [1e19, 1e20]))
    assert two.parameters.slope.low is None
    assert "only two levels have an optimum: the laws have no interval" in two.notes


def test_noise_that_decides_is_refused():
    assert "noise and the choice of sizes decide" in fit_isoflop(grid(LAW, np.geomspace(1e8, 1e9, 6), COMPUTES, 0.05))


def test_several_runs_of_one_size_count_once():
    sample = grid(LAW, SIZES, COMPUTES)
    worse = dataclasses.replace(sample, log_loss=sample.log_loss + 0.1)
    both = Sample(*(np.r_[getattr(sample, k), getattr(worse, k)] for k in sample.__dataclass_fields__))
    assert fit_isoflop(both).parameters.level == pytest.approx(fit_isoflop(sample).parameters.level)
    assert len(fit_isoflop(both).levels[0].parameters) == len(SIZES)
