import dataclasses
import math
import re

import numpy as np
import pytest
from scipy.interpolate import Akima1DInterpolator

from angpt.fits.compute import Sample
from angpt.fits.isoflop import IsoFlop, find_levels, fit_isoflop
from tests.fits.synthetic import FREE, LAW, REFIT, Law, grid
from tests.intervals import check_intervals

SIZES, COMPUTES = np.geomspace(2e7, 4e9, 10), np.geomspace(3e18, 1e21, 8)
METHODS = ("parabola", "akima")


@pytest.mark.parametrize("law", [LAW, FREE, Law(a=0.5, b=0.25, A=6000, B=300)], ids=["E", "no E", "lopsided"])
def test_exponents_without_noise(law):
    found = fit_isoflop(grid(law, SIZES, COMPUTES))
    assert isinstance(found, IsoFlop)
    assert found.parameters.exponent == pytest.approx(law.exponents["parameters"], abs=0.01)
    assert found.tokens.exponent == pytest.approx(law.exponents["tokens"], abs=0.01)
    if law.E == 0:
        assert found.loss.exponent == pytest.approx(law.exponents["loss"], abs=0.001)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("noise", [0.002, 0.004])
def test_intervals_cover_the_truth(noise, method):
    found = [fit_isoflop(grid(FREE, SIZES, COMPUTES, noise, seed), method) for seed in range(100)]
    slopes = [[getattr(f, name).slope for name in FREE.exponents] for f in found]
    check_intervals(slopes, list(FREE.exponents.values()), hits=90)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_irreducible_loss_is_covered(method):
    found = [fit_isoflop(grid(LAW, SIZES, COMPUTES, 0.002, seed), method).saturating for seed in range(100)]
    trials = [[f.estimates()["E"], f.estimates()["α"], f.log_at(1e20)] for f in found]
    n = np.geomspace(1e7, 1e10, 100_001)
    lowest = math.log(LAW.loss(n, 1e20 / (6 * n)).min())
    check_intervals(trials, [LAW.E, -LAW.exponents["loss"], lowest], hits=90)


def test_the_irreducible_loss_without_noise():
    """Beside the power law, which cannot have one."""
    found = fit_isoflop(grid(LAW, SIZES, COMPUTES))
    estimates = found.saturating.estimates()
    assert estimates["E"].mean == pytest.approx(LAW.E, rel=0.002)
    assert estimates["α"].mean == pytest.approx(-LAW.exponents["loss"], rel=0.005)
    for level in found.levels:
        assert estimates["E"].mean + (estimates["C₀"].mean / level.compute) ** estimates["α"].mean == pytest.approx(
            level.vertex.loss, rel=1e-3
        )
    assert any("L(C) is not a power law" in note for note in found.notes)
    assert isinstance(fit_isoflop(grid(LAW, SIZES, COMPUTES[:3])).saturating, str)


def test_akima_follows_a_valley_that_is_not_a_parabola():
    """Steeper for larger models, as with rates that were tuned for small ones: the parabola is misled, Akima is not."""
    n, c = np.tile(np.geomspace(5e6, 9e8, 16), 8), np.repeat(1.25e16 * 2.0 ** np.arange(8), 16)
    u = np.log(n / (0.4 * c**0.5))
    y = 3 - 0.05 * np.log(c) + 0.02 * u**2 + np.where(u > 0, 0.06, 0.0) * u**2 * (1 + 0.1 * np.log(c / 1e17))
    sample = Sample(n, c / (6 * n), c, y, np.ones(len(n)))
    errors = {
        m: np.log(np.array([v.vertex.parameters for v in fit_isoflop(sample, m).levels if v.vertex])) for m in METHODS
    }
    levels = [level.compute for level in fit_isoflop(sample).levels if level.vertex]
    off = {m: np.abs(found - np.log(0.4 * np.array(levels) ** 0.5)).mean() for m, found in errors.items()}
    assert off["akima"] < 0.5 * off["parabola"]


@pytest.mark.parametrize(("law", "side"), [(Law(0, 3000, 60, 0.5, 0.2), 1), (Law(0, 60, 3000, 0.2, 0.5), -1)])
def test_skewed_valleys_are_noticed(law, side):
    """The parabola misplaces the optimum, by as much as the note says."""
    sizes = np.geomspace(3e6, 4e9, 16) if side > 0 else np.geomspace(1e9, 1e12, 16)
    for seed in range(10):
        found = fit_isoflop(grid(law, sizes, COMPUTES, 0.0005, seed))
        note = next(note for note in found.notes if "the valleys are skewed" in note)
        off = [v.vertex.parameters / sizes_at_optimum(law, v.compute) - 1 for v in found.levels if v.vertex]
        percent = int(re.search(r"about (\d+)% too (high|low)", note)[1])
        assert percent == pytest.approx(100 * abs(np.mean(off)), abs=2)
        assert ("too high" in note) == (np.mean(off) > 0) == (side > 0)
    other = [fit_isoflop(grid(REFIT, SIZES, COMPUTES, 0.003, seed)).notes for seed in range(40)]
    assert sum("skewed" in note for notes in other for note in notes) <= 3
    assert not any("skewed" in note for note in fit_isoflop(grid(law, sizes, COMPUTES), "akima").notes)


@pytest.mark.parametrize("law", [LAW, FREE], ids=["E", "free"])
@pytest.mark.parametrize("noise", [0.0005, 0.002])
def test_intervals_include_the_skew(law, noise):
    """Parabolas misplace N_opt by 1.3 %, more than it varies; the interval is wider by no more than that."""
    n = sizes_at_optimum(law, 1e20)
    found = [fit_isoflop(grid(law, SIZES, COMPUTES, noise, seed)).parameters.at(1e20) for seed in range(100)]
    assert sum(e.covers(n) for e in found) >= 90
    value, width = np.array([(e.mean, e.high - e.low) for e in found]).T
    assert np.median(width) <= 2 * (2 * 1.96 * value.std() + 2 * abs(value.mean() - n))


def sizes_at_optimum(law, compute):
    n = np.geomspace(1e5, 1e13, 200_001)
    return n[np.argmin(law.loss(n, compute / (6 * n)))]


def test_akima_is_scipys():
    sample = grid(LAW, SIZES, [1e19, 1e20], 0.003)
    level = fit_isoflop(sample, "akima").levels[1]
    mine = np.isclose(sample.compute, 1e20)
    curve = Akima1DInterpolator(np.log(sample.parameters[mine]), sample.log_loss[mine])
    fine = np.linspace(*np.log(SIZES[[0, -1]]), 200_001)
    at = fine[np.argmin(curve(fine))]
    assert math.log(level.vertex.parameters) == pytest.approx(at, abs=1e-4)
    assert math.log(level.vertex.loss) == pytest.approx(float(curve(at)))
    assert level.vertex.tokens == pytest.approx(1e20 / 6 / level.vertex.parameters)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [0.1, 0.19])
def test_wide_levels(width, method):
    """Compute that differs by 10 to 20 % within a level is worth 0.5 to 1 % in loss, more than the noise."""
    truth, trials = LAW.exponents["parameters"], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        sample = grid(LAW, SIZES, COMPUTES)
        d = sample.tokens * np.exp(math.log(1 + width) * rng.uniform(-0.5, 0.5, len(sample)))
        n, y = sample.parameters, np.log(LAW.loss(sample.parameters, d)) + 0.002 * rng.standard_normal(len(sample))
        found = fit_isoflop(Sample(n, d, 6 * n * d, y, sample.seeds), method)
        trials.append([found.parameters.slope])
        assert len(found.levels) == len(COMPUTES)
        assert any("wide in compute; their losses are moved" in note for note in found.notes)
    check_intervals(trials, [truth], hits=54)


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
        "no level of compute (within 20%) has three model sizes"
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


def test_several_runs_of_one_size_are_averaged():
    sample = grid(LAW, SIZES, COMPUTES)
    worse = dataclasses.replace(sample, log_loss=sample.log_loss + 0.1)
    both = Sample(*(np.r_[getattr(sample, k), getattr(worse, k)] for k in sample.__dataclass_fields__))
    assert fit_isoflop(both).parameters.level == pytest.approx(fit_isoflop(sample).parameters.level)
    assert len(fit_isoflop(both).levels[0].parameters) == len(SIZES)
    np.testing.assert_allclose(
        fit_isoflop(both).levels[0].losses, math.exp(0.05) * fit_isoflop(sample).levels[0].losses
    )
