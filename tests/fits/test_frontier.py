import dataclasses
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

from angpt.fits.compute import Sample
from angpt.fits.frontier import WINDOW, Frontier, fit_frontier, fit_valley, power
from angpt.fits.powerlaw import jackknife
from angpt.fits.saturating import Saturating
from tests.fits.synthetic import FREE, LAW, MODELS, MULTIPLES, REFIT, Law, grid, multiples
from tests.intervals import check_intervals

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
DESIGNS = {
    "grid": lambda law, **o: grid(law, np.geomspace(2e7, 4e9, 10), np.geomspace(3e18, 3e21, 9), **o),
    "coarse grid": lambda law, **o: grid(law, np.geomspace(2e7, 2e9, 7), np.geomspace(1e18, 1e21, 12), **o),
    "fine grid": lambda law, **o: grid(law, np.geomspace(1e7, 5e9, 25), np.geomspace(1e18, 1e21, 20), **o),
    "multiples": lambda law, **o: multiples(law, np.geomspace(2e7, 2e9, 10), np.geomspace(2, 500, 12), **o),
    "scaling.toml": lambda law, **o: multiples(law, MODELS, MULTIPLES, **o),
}
"""At most two sizes of scaling.toml share a compute."""


def fit(sample):
    return fit_frontier(sample, np.arange(len(sample)))


def best_size(law, compute):
    """By search."""
    n = np.geomspace(1e5, 1e12, 200_001)
    return n[np.argmin(law.loss(n, compute / (6 * n)))]


def curves(law, gap, noise, seed, evaluations=25):
    """The runs of scaling.toml, evaluated on the way; until the end of its schedule, a run is worse by `gap` of it."""
    rng = np.random.default_rng(seed)
    n, end = np.repeat(MODELS, len(MULTIPLES)), np.outer(MODELS, MULTIPLES).ravel()
    run = np.repeat(np.arange(len(n)), evaluations)
    part = np.tile(np.arange(1, evaluations + 1) / evaluations, len(n))
    n, d = n[run], end[run] * part
    y = np.log(law.loss(n, d)) + np.log1p(gap * np.sqrt(1 - part)) + noise * rng.standard_normal(run.max() + 1)[run]
    return Sample(n, d, 6 * n * d, y + 0.3 * noise * rng.standard_normal(len(n)), np.ones(len(n))), run


def test_the_design_of_the_study_file():
    """The design of these tests is that of experiments/scaling.toml."""
    grids = tomllib.loads((EXPERIMENTS / "scaling.toml").read_text())["grid"]
    assert len(grids) == 1
    assert grids[0]["budgets"] == [f"{m:g}x" for m in MULTIPLES]
    assert len(grids[0]["sizes"]) == len(MODELS)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(
    "law", [LAW, REFIT, FREE, Law(a=0.5, b=0.25, A=6000, B=300)], ids=["E", "refit", "free", "skew"]
)
def test_laws_without_noise(design, law):
    found = fit(DESIGNS[design](law))
    assert isinstance(found, Frontier)
    assert found.optimal
    assert found.parameters.exponent == pytest.approx(law.exponents["parameters"], abs=0.005)
    assert found.tokens.exponent == pytest.approx(law.exponents["tokens"], abs=0.005)
    for compute in (2e19, 2e20):
        n = best_size(law, compute)
        assert found.parameters.at(compute).mean == pytest.approx(n, rel=0.02)
        assert found.tokens.at(compute).mean == pytest.approx(compute / (6 * n), rel=0.02)
        assert found.saturating.log_at(compute).mean == pytest.approx(
            math.log(law.loss(n, compute / (6 * n))), abs=0.002
        )
    if law.E == 0:
        assert found.loss.exponent == pytest.approx(law.exponents["loss"], abs=0.001)
    else:
        assert found.saturating.estimates()["E"].mean == pytest.approx(law.E, rel=0.03)


def check_coverage(law, samples):
    """Exponents of size and tokens, sizes and losses at two computes, and the law of the loss."""
    computes, trials = (1e18, 1e20), []
    sizes = [best_size(law, c) for c in computes]
    truth = [law.exponents["parameters"], law.exponents["tokens"], *sizes]
    truth += [math.log(law.loss(n, c / (6 * n))) for n, c in zip(sizes, computes, strict=True)]
    truth += [law.E, -law.exponents["loss"]] if law.E else [law.exponents["loss"]]
    for sample, run_of in samples:
        found = fit_frontier(sample, run_of)
        loss = found.saturating if law.E else found.loss
        of_loss = [loss.estimates()[name] for name in "Eα"] if law.E else [loss.slope]
        laws = *map(found.parameters.at, computes), *map(loss.log_at, computes), *of_loss
        trials.append([found.parameters.slope, found.tokens.slope, *laws])
    check_intervals(trials, truth, hits=0.9 * len(trials))


@pytest.mark.parametrize("law", [LAW, REFIT], ids=["E", "refit"])
def test_the_optima_of_the_study_file(law):
    """Although no compute has three sizes; 0.3 % is about the noise between seeds."""
    made = (DESIGNS["scaling.toml"](law, noise=0.003, seed=seed) for seed in range(100))
    check_coverage(law, ((sample, np.arange(len(sample))) for sample in made))


@pytest.mark.slow
@pytest.mark.parametrize("law", [LAW, REFIT], ids=["E", "refit"])
@pytest.mark.parametrize("noise", [0.0005, 0.001, 0.005])
def test_the_optima_of_the_study_file_at_other_noise(law, noise):
    made = (DESIGNS["scaling.toml"](law, noise=noise, seed=seed) for seed in range(100))
    check_coverage(law, ((sample, np.arange(len(sample))) for sample in made))


@pytest.mark.slow
@pytest.mark.parametrize("law", [LAW, REFIT], ids=["E", "refit"])
@pytest.mark.parametrize("gap", [0.0, 0.02, 0.04])
def test_evaluations_during_the_runs(law, gap):
    """Their gap to complete runs does not move the optima, and the noise of a run is shared by its evaluations."""
    truth, trials = law.exponents, []
    for seed in range(100):
        found = fit_frontier(*curves(law, gap, 0.003, seed))
        trials.append([found.parameters.slope, found.tokens.slope, found.parameters.at(1e20)])
    check_intervals(trials, [truth["parameters"], truth["tokens"], best_size(law, 1e20)], hits=90)


@pytest.mark.slow
@pytest.mark.parametrize("law", [LAW, FREE], ids=["E", "free"])
@pytest.mark.parametrize(("design", "noise"), [("grid", 0.001), ("fine grid", 0.004), ("multiples", 0.002)])
def test_the_optima_of_other_designs(law, design, noise):
    made = (DESIGNS[design](law, noise=noise, seed=seed) for seed in range(100))
    check_coverage(law, ((sample, np.arange(len(sample))) for sample in made))


@pytest.mark.slow
def test_noise_that_differs_between_runs():
    """The smallest models vary five times as much as the largest."""
    truth, trials = LAW.exponents, []
    for seed in range(100):
        sample = DESIGNS["scaling.toml"](LAW)
        deviation = np.interp(np.log(sample.parameters), np.log(MODELS[[0, -1]]), [0.005, 0.001])
        y = sample.log_loss + deviation * np.random.default_rng(seed).standard_normal(len(sample))
        found = fit(dataclasses.replace(sample, log_loss=y))
        trials.append([found.parameters.slope, found.parameters.at(1e19)])
    check_intervals(trials, [truth["parameters"], best_size(LAW, 1e19)], hits=90)


def test_evaluations_and_complete_runs_agree():
    """A gap of 4 % between them is four times the difference between neighbouring sizes."""
    found = fit_frontier(*curves(LAW, 0.04, 0.0, 0))
    assert found.parameters.exponent == pytest.approx(LAW.exponents["parameters"], abs=0.01)
    assert found.parameters.at(1e19).mean == pytest.approx(best_size(LAW, 1e19), rel=0.03)


def test_it_is_the_least_squares_fit_of_its_formula():
    """The formula of the module written out, and a search from the values found."""
    sample = DESIGNS["scaling.toml"](LAW, noise=0.003)
    found = fit_valley(sample, np.arange(len(sample)), 3)
    n, t = np.log(sample.parameters), np.log(sample.compute) - found.center
    weight = np.maximum(0, 1 - (found.offset / math.log(WINDOW)) ** 2) ** 2
    assert found.weight == pytest.approx(weight)

    def objective(theta):
        *f, k, level, alpha = theta
        u, a, b = n - level - alpha * t, k * (1 - alpha), k * alpha
        above = -np.polyval(np.polyder(f), t) * ((np.exp(b * u) - 1) / b + (np.exp(-a * u) - 1) / a)
        return 1e6 * np.sum(weight * (sample.log_loss - np.polyval(f, t) - np.log(1 + above)) ** 2)

    start = [*np.polyfit(t, found.curve, 3), found.k, found.level, found.exponent]
    searched = minimize(objective, start, method="Nelder-Mead", options={"maxiter": 4000, "maxfev": 4000})
    assert objective(start) <= searched.fun * (1 + 1e-4)
    assert searched.x[-1] == pytest.approx(found.exponent, abs=1e-3)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("law", [FREE, Law(0.0, 6000, 300, 0.5, 0.25)], ids=["free", "skew"])
def test_the_valley_of_two_power_laws_is_exact(design, law):
    """Also its level: no bias remains that would exceed the intervals of many runs with little noise."""
    found = fit(DESIGNS[design](law))
    for compute in (1e18, 1e20):
        n = best_size(law, compute)
        assert found.parameters.at(compute).mean == pytest.approx(n, rel=1e-4)
        assert found.loss.at(compute).mean == pytest.approx(law.loss(n, compute / (6 * n)), rel=1e-6)


def test_the_derivatives_of_a_power():
    u = np.linspace(-2, 2, 9)
    for p in (0.6, -0.3, 0.0, -3.0):
        value, along_p, along_u = power(p, u)
        assert value == pytest.approx(np.expm1(p * u) / p if p else u, abs=1e-4)
        assert along_p == pytest.approx((power(p + 1e-4, u)[0] - power(p - 1e-4, u)[0]) / 2e-4, abs=1e-3, rel=1e-5)
        assert along_u == pytest.approx((power(p, u + 1e-5)[0] - power(p, u - 1e-5)[0]) / 2e-5, rel=1e-4)


def test_errors_are_those_of_leaving_runs_out():
    rng = np.random.default_rng(0)
    x, weight, run = rng.normal(size=(40, 3)), rng.uniform(0.5, 2, 40), np.repeat(np.arange(10), 4)
    y = x @ [1.0, 2.0, 3.0] + rng.normal(size=40)

    def coefficients(kept):
        root = np.sqrt(weight[kept])
        return np.linalg.lstsq(x[kept] * root[:, None], y[kept] * root, rcond=None)[0]

    whole = coefficients(np.full(40, True))
    moved = np.array([coefficients(run != i) - whole for i in range(10)])
    assert jackknife(x, weight, y - x @ whole, run) == pytest.approx(0.9 * moved.T @ moved)


def test_sizes_on_one_side_have_no_optimum():
    for sizes in (np.geomspace(1e6, 1e7, 6), np.geomspace(1e10, 1e11, 6)):
        for noise in (0.0, 0.003):
            found = fit(grid(LAW, sizes, np.geomspace(1e20, 1e21, 8), noise))
            assert (found.parameters, found.tokens, found.optimal) == (None, None, False)
            assert any("no N_opt(C)" in note for note in found.notes)


def test_a_law_is_claimed_between_the_sizes_tried():
    """At the lowest and highest compute the best size is beyond those tried."""
    found = fit(grid(LAW, np.geomspace(1e8, 1e9, 8), np.geomspace(1e17, 1e23, 20), 0.001))
    assert found.parameters.slope.covers(LAW.exponents["parameters"])
    low, high = found.parameters.x
    assert 0.5 * 1e8 < best_size(LAW, low) < best_size(LAW, high) < 2 * 1e9
    assert any("points are not used" in note for note in found.notes)


def test_runs_of_random_sizes():
    """No two runs have the same size or compute."""
    rng = np.random.default_rng(0)
    n = np.exp(rng.uniform(math.log(1e7), math.log(5e9), 2000))
    d = n * np.exp(rng.uniform(math.log(5), math.log(200), 2000))
    y = np.log(LAW.loss(n, d)) + 0.005 * rng.standard_normal(2000)
    found = fit(Sample(n, d, 6 * n * d, y, np.ones(2000)))
    assert found.parameters.slope.covers(LAW.exponents["parameters"])
    assert found.parameters.slope.high - found.parameters.slope.low < 0.01


def test_noise_that_hides_the_best_size_is_refused():
    refused = [fit(DESIGNS["scaling.toml"](LAW, noise=0.05, seed=seed)).parameters is None for seed in range(10)]
    assert sum(refused) >= 7
    flat = DESIGNS["scaling.toml"](LAW)
    assert fit(dataclasses.replace(flat, log_loss=-0.05 * np.log(flat.compute))).parameters is None


def test_too_few_runs():
    assert "fewer than three runs" in fit(multiples(LAW, [1e8, 2e8], [20.0]))
    found = fit(multiples(LAW, MODELS, [20.0]))
    assert found.parameters is None
    assert found.saturating == "there is no optimum"


def test_two_computes_give_an_optimum_but_no_irreducible_loss():
    found = fit(grid(LAW, np.geomspace(5e7, 2e9, 7), [1e20, 2e20], 0.001))
    assert found.parameters.at(1.4e20).covers(best_size(LAW, 1.4e20))
    assert not isinstance(found.saturating, Saturating)
