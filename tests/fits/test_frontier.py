import math
from types import SimpleNamespace

import numpy as np
import pytest

from angpt.fits.compute import Sample
from angpt.fits.frontier import Bins, Frontier, between, fit_frontier
from tests.fits.synthetic import Law
from tests.intervals import check_intervals, numbers_of

LAW = Law()
FREE = Law(E=0.0)
"""Without irreducible loss, L(C) is an exact power law."""


def grid(law, sizes, computes, noise=0.0, seed=0):
    """Every size at every compute."""
    n, c = np.tile(sizes, len(computes)), np.repeat(computes, len(sizes))
    d = c / (6 * n)
    y = np.log(law.loss(n, d)) + noise * np.random.default_rng(seed).standard_normal(len(n))
    return Sample(n, d, c, y, np.ones(len(n)))


def multiples(law, sizes, ratios, noise=0.0, seed=0):
    """Every size with budgets that are multiples of it, so that each compute has different sizes."""
    n = np.repeat(sizes, len(ratios))
    d = n * np.tile(ratios, len(sizes))
    y = np.log(law.loss(n, d)) + noise * np.random.default_rng(seed).standard_normal(len(n))
    return Sample(n, d, 6 * n * d, y, np.ones(len(n)))


def by_size(sample):
    return np.unique(sample.parameters, return_inverse=True)[1]


def fit(sample, **options):
    return fit_frontier(sample, by_size(sample), **options)


DESIGNS = {
    "grid": lambda law, **o: grid(law, np.geomspace(2e7, 4e9, 10), np.geomspace(3e18, 3e21, 9), **o),
    "coarse grid": lambda law, **o: grid(law, np.geomspace(2e7, 2e9, 7), np.geomspace(1e18, 1e21, 12), **o),
    "fine grid": lambda law, **o: grid(law, np.geomspace(1e7, 5e9, 25), np.geomspace(1e18, 1e21, 20), **o),
    "multiples": lambda law, **o: multiples(law, np.geomspace(2e7, 2e9, 10), np.geomspace(2, 500, 12), **o),
}


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("law", [LAW, FREE], ids=["E", "no E"])
def test_exponents_without_noise(design, law):
    found = fit(DESIGNS[design](law))
    assert isinstance(found, Frontier)
    assert found.optimal
    assert found.parameters.exponent == pytest.approx(law.exponents["parameters"], abs=0.005)
    assert found.tokens.exponent == pytest.approx(law.exponents["tokens"], abs=0.005)
    if law.E == 0:
        assert found.loss.exponent == pytest.approx(law.exponents["loss"], abs=0.001)
    # not only the exponents: the best size at a compute itself
    for compute in (2e19, 2e20):
        n = np.geomspace(1e7, 1e10, 20_001)
        best = n[np.argmin(law.loss(n, compute / (6 * n)))]
        assert found.parameters.at(compute).mean == pytest.approx(best, rel=0.05)


@pytest.mark.parametrize(("design", "noise"), [("grid", 0.002), ("fine grid", 0.004), ("multiples", 0.001)])
def test_intervals_cover_the_truth(design, noise):
    """Size, tokens and loss (exponent and level), in at least 90 of 100 noisy studies."""
    truth, trials = FREE.exponents, []
    clean = fit(DESIGNS[design](FREE)).loss
    for seed in range(100):
        found = fit(DESIGNS[design](FREE, noise=noise, seed=seed))
        middle = math.exp(found.loss.center)
        _, expected, _ = numbers_of(clean.at(middle))
        low, level, high = (x / expected - 1 for x in numbers_of(found.loss.at(middle)))  # the middle varies
        off = SimpleNamespace(low=low, mean=level, high=high)
        trials.append([found.parameters.slope, found.tokens.slope, found.loss.slope, off])
    check_intervals(trials, [truth["parameters"], truth["tokens"], truth["loss"], 0.0], hits=90)


def test_noise_hardly_lowers_the_loss():
    """The lowest of many noisy losses is too low by about a standard deviation; the parabola removes most of it."""
    noise, low, raw = 0.005, [], []
    clean = fit(DESIGNS["fine grid"](FREE)).loss
    for seed in range(30):
        sample = DESIGNS["fine grid"](FREE, noise=noise, seed=seed)
        found = fit(sample).loss
        low.append(found.level - math.log(clean.at(math.exp(found.center)).mean))
        middle = np.flatnonzero(np.isclose(sample.compute, np.unique(sample.compute)[10]))
        raw.append(sample.log_loss[middle].min() - np.log(FREE.loss(sample.parameters, sample.tokens))[middle].min())
    assert np.mean(raw) < -0.5 * noise
    assert abs(np.mean(low)) < 0.1 * noise


def test_minima_are_those_of_a_loop():
    """Plain restatement: interpolate every size in every bin, take the lowest, refine by least squares."""
    sample = DESIGNS["multiples"](LAW, noise=0.002, seed=3)
    bins = 150
    x = np.log(sample.compute)
    centers = x.min() + (np.arange(bins) + 0.5) * np.ptp(x) / bins
    found = Bins(sample, by_size(sample), bins).minima(sample.log_loss)
    assert len(found.log_compute) == bins
    for k, center in enumerate(centers):
        sizes, losses = [], []
        for n in np.unique(sample.parameters):
            mine = sample.parameters == n
            if x[mine].min() <= center <= x[mine].max():
                sizes.append(math.log(n))
                losses.append(np.interp(center, x[mine], sample.log_loss[mine]))
            elif np.any(own := mine & (np.minimum((x - x.min()) // (np.ptp(x) / bins), bins - 1) == k)):
                sizes.append(math.log(n))  # its first or last run stands for itself
                losses.append(sample.log_loss[own].min())
        best = int(np.argmin(losses))
        if best in (0, len(sizes) - 1):
            assert found.edge[k] == (-1 if best == 0 else 1)
            assert found.log_parameters[k] == pytest.approx(sizes[best])
            continue
        reach = min(math.log(4), sizes[best] - sizes[0], sizes[-1] - sizes[best]) + 1e-9
        near = [i for i in range(len(sizes)) if abs(sizes[i] - sizes[best]) <= reach or abs(i - best) <= 1]
        c2, c1, c0 = np.polyfit([sizes[i] - sizes[best] for i in near], [losses[i] for i in near], 2)
        step = np.clip(-c1 / (2 * c2), sizes[near[0]] - sizes[best], sizes[near[-1]] - sizes[best])
        assert found.edge[k] == 0
        assert found.log_parameters[k] == pytest.approx(sizes[best] + step, abs=1e-6)
        assert found.log_loss[k] == pytest.approx(c0 + c1 * step + c2 * step**2, abs=1e-9)
        assert found.log_tokens[k] == pytest.approx(center - math.log(6) - found.log_parameters[k], abs=0.1)


def test_edge_minima_are_never_used():
    """All sizes are too small: the largest is always the best, and no optimum is reported."""
    found = fit(grid(LAW, np.geomspace(1e6, 1e7, 6), np.geomspace(1e20, 1e22, 8)))
    assert (found.parameters, found.tokens, found.optimal) == (None, None, False)
    assert np.all(found.minima.edge == 1)
    assert any("no N_opt(C)" in note for note in found.notes)
    # partly on the edge: what is used lies between smaller and larger sizes
    sample = grid(LAW, np.geomspace(1e8, 1e9, 8), np.geomspace(1e18, 1e22, 20))
    found = fit(sample)
    assert np.any(found.minima.edge < 0)
    assert np.any(found.minima.edge > 0)
    assert not np.any(found.minima.used & (found.minima.edge != 0))
    inside = np.exp(found.minima.log_parameters[found.minima.used])
    assert 1e8 < inside.min() < inside.max() < 1e9
    assert found.parameters.exponent == pytest.approx(LAW.exponents["parameters"], abs=0.01)


def test_between_starts_where_edges_end():
    edge = np.array([-1, -1, 0, -1, 0, 0, 0, 1, 0, 1, 1], np.int8)
    assert between(edge).tolist() == [False, False, False, False, True, True, True, False, False, False, False]
    assert between(np.zeros(3, np.int8)).all()
    assert not between(np.full(3, 1, np.int8)).any()


def test_noise_that_decides_is_refused():
    """Runs of random sizes, a few in each bin: their minima follow the choice of sizes, so there is no law."""
    rng = np.random.default_rng(0)
    n = np.exp(rng.uniform(math.log(1e7), math.log(5e9), 5000))
    d = n * np.exp(rng.uniform(math.log(5), math.log(200), 5000))
    y = np.log(LAW.loss(n, d)) + 0.005 * rng.standard_normal(5000)
    found = fit(Sample(n, d, 6 * n * d, y, np.ones(5000)))
    assert found.parameters is None
    assert any("noise and the choice of sizes decide" in note for note in found.notes)


def test_curves_of_runs():
    """Evaluations of one run share its noise."""
    sizes, trials = np.geomspace(2e7, 4e9, 9), []
    n, d = np.repeat(sizes, 40), np.concatenate([np.geomspace(s, 400 * s, 40) for s in sizes])
    curve = np.repeat(np.arange(9), 40)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        y = np.log(LAW.loss(n, d)) + 0.002 * rng.standard_normal(9)[curve] + 0.0003 * rng.standard_normal(360)
        found = fit_frontier(Sample(n, d, 6 * n * d, y, np.ones(360)), curve, curves=True)
        trials.append([found.parameters.slope])
    check_intervals(trials, [LAW.exponents["parameters"]], hits=36)


def test_too_few_runs():
    few = fit(multiples(LAW, [1e8, 2e8], [20.0]))
    assert isinstance(few, str)
    assert "fewer than three runs" in few
    short = fit(grid(LAW, np.geomspace(5e7, 2e9, 7), [1e20, 2e20]))
    assert short.parameters.slope.low is None
    assert any("no intervals" in note for note in short.notes)
