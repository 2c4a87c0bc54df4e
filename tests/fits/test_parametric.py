import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import huber

from angpt.fits.compute import Sample
from angpt.fits.parametric import Parametric, bootstrap_interval, fit_parametric, jacobian, minimise, predict
from tests.fits.synthetic import FREE, LAW, MODELS, MULTIPLES, Law, multiples
from tests.intervals import check_intervals

SIZES, RATIOS = np.geomspace(3e7, 1e9, 6), np.geomspace(5, 100, 6)


def fit(sample, bootstrap=0, **options):
    return fit_parametric(sample, bootstrap, (0,), **options)


@pytest.mark.parametrize("law", [LAW, Law(1.8, 60, 900, 0.2, 0.35), Law(0.6, 20, 20, 0.15, 0.12)])
def test_all_parameters_without_noise(law):
    found = fit(multiples(law, SIZES, RATIOS))
    assert isinstance(found, Parametric)
    assert {name: e.mean for name, e in found.parameters().items()} == pytest.approx(
        {"E": law.E, "A": law.A, "B": law.B, "a": law.a, "b": law.b}, rel=1e-4
    )
    assert {k: v[0] for k, v in found.exponents().items()} == pytest.approx(law.exponents, rel=1e-4)
    assert found.agreeing > 1


def test_without_irreducible_loss():
    found = fit(multiples(FREE, SIZES, RATIOS, noise=1e-4), bootstrap=200)
    e = found.parameters()["E"]
    assert e.low == 0
    assert e.mean < 0.01
    assert found.reducible
    assert not fit(multiples(LAW, SIZES, RATIOS)).reducible
    assert found.exponents()["parameters"][0] == pytest.approx(FREE.exponents["parameters"], abs=0.01)


def check_coverage(trials, noise, draw, hits, design=(SIZES, RATIOS)):
    best = 1e20 ** LAW.exponents["parameters"] * best_size(LAW)
    truth = {"E": LAW.E, "a": LAW.a, "b": LAW.b} | LAW.exponents
    truth["L"] = math.log(LAW.loss(best, 1e20 / 6 / best))
    found_in = []
    for seed in range(trials):
        sample = multiples(LAW, *design)
        y = sample.log_loss + noise * draw(np.random.default_rng(seed), len(sample))
        found = fit_parametric(dataclasses.replace(sample, log_loss=y), 300, (seed,))
        estimates = found.parameters() | {k: found.estimate(v) for k, v in found.exponents().items()}
        estimates["L"] = found.estimate(found.log_optimum(math.log(1e20))[2])
        found_in.append([estimates[name] for name in truth])
    check_intervals(found_in, list(truth.values()), hits)


def best_size(law):
    """Prefactor of N_opt(C), as Chinchilla writes it: G·(1/6)^(b/(a+b))."""
    return (law.a * law.A / (law.b * law.B)) ** (1 / (law.a + law.b)) * (1 / 6) ** (law.b / (law.a + law.b))


def test_intervals_cover_the_truth_in_a_few_trials():
    check_coverage(20, 0.003, lambda rng, n: rng.standard_normal(n), hits=17)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.001, 0.005])
def test_intervals_cover_the_truth(noise):
    check_coverage(100, noise, lambda rng, n: rng.standard_normal(n), hits=90)


@pytest.mark.slow
def test_intervals_cover_the_truth_with_outliers():
    """Noise by Student's t with three degrees of freedom, which has outliers."""
    check_coverage(100, 0.002, lambda rng, n: rng.standard_t(3, n), hits=90)


@pytest.mark.slow
def test_intervals_cover_the_truth_with_uneven_noise():
    """The smallest models vary five times as much as the largest."""
    deviation = np.repeat(np.linspace(2.0, 0.4, len(SIZES)), len(RATIOS))
    check_coverage(100, 0.003, lambda rng, n: deviation * rng.standard_normal(n), hits=90)


@pytest.mark.slow
def test_intervals_of_the_papers_design():
    check_coverage(100, 0.003, lambda rng, n: rng.standard_normal(n), hits=90, design=(MODELS, MULTIPLES))


def chinchilla():
    """The runs that Besiroglu et al. (2024) read off a figure of Hoffmann et al. (2022), without the five worst."""
    n, d, loss = np.loadtxt(Path(__file__).with_name("chinchilla.csv"), delimiter=",", skiprows=1).T
    best = np.argsort(loss)[:240]
    return Sample(n, d, 6 * n * d, np.log(loss), np.ones(len(n))).take(best)


def test_the_published_fit():
    """E, A, B, a and b as published (Besiroglu et al. 2024); ours has the lower Huber loss."""
    sample = chinchilla()
    found = fit(sample, bootstrap=1000)
    published = {"E": 1.8172, "A": 482.01, "B": 2085.43, "a": 0.3478, "b": 0.3658}
    estimates = found.parameters()
    assert estimates["E"].mean == pytest.approx(published["E"], abs=1e-4)
    assert estimates["a"].mean == pytest.approx(published["a"], abs=1e-3)
    assert estimates["b"].mean == pytest.approx(published["b"], abs=2e-3)
    assert estimates["A"].mean == pytest.approx(published["A"], rel=0.01)
    assert estimates["B"].mean == pytest.approx(published["B"], rel=0.03)
    theirs = [*np.log([published[k] for k in "EAB"]), published["a"], published["b"]]
    n, d = np.log(sample.parameters), np.log(sample.tokens)
    ours, other = (
        huber(1e-3, sample.log_loss - predict(np.array([t]), n, d)[0][0]).sum() for t in (found.theta[0], theirs)
    )
    assert ours < other < 1.01 * ours
    # Published is an interval of 0.084 for b.
    assert estimates["b"].high - estimates["b"].low == pytest.approx(0.084, rel=0.1)
    assert all(e.covers(published[name]) for name, e in estimates.items())


def test_intervals_are_those_of_resampled_runs():
    """The plain pairs bootstrap: draw runs with replacement, and fit each draw."""
    sample, rng, rows = chinchilla(), np.random.default_rng(7), []
    n, d = np.log(sample.parameters), np.log(sample.tokens)
    best = fit(sample).theta[:1]
    for _ in range(150):
        drawn = rng.integers(0, len(sample), len(sample))
        rows.append(minimise(best, n[drawn], d[drawn], sample.log_loss[drawn], 1e-3, 200)[0][0])
    found = fit(sample, bootstrap=1000).theta[1:]
    assert np.std(found, axis=0) == pytest.approx(np.std(rows, axis=0), rel=0.25)


def test_counts_are_repetitions():
    sample = multiples(LAW, SIZES, RATIOS, noise=0.003)
    n, d, y = np.log(sample.parameters), np.log(sample.tokens), sample.log_loss
    counts = np.random.default_rng(0).multinomial(len(y), np.full(len(y), 1 / len(y)))
    again = np.repeat(np.arange(len(y)), counts)
    start = fit(sample).theta[:1]
    one, loss = minimise(start, n, d, y, 1e-3, 400, counts[None].astype(float))
    two, same = minimise(start, n[again], d[again], y[again], 1e-3, 400)
    assert loss == pytest.approx(same, rel=1e-6)
    assert one == pytest.approx(two, rel=1e-3)


def test_an_irreducible_loss_above_the_lowest_is_refused():
    sample = multiples(Law(3.2, 406.4, 410.7, 0.6, 0.5), SIZES, RATIOS, noise=0.001)
    y = sample.log_loss.copy()
    y[-2:] = math.log(3.1)
    found = fit(dataclasses.replace(sample, log_loss=y), bootstrap=100)
    assert found.startswith("the irreducible loss would be 3.1")
    assert "above the lowest loss seen, 3.1" in found
    # An interval does not reach beyond it either.
    noisy = fit(multiples(Law(2.9, 200, 200, 0.5, 0.4), SIZES, RATIOS, noise=0.003, seed=3), bootstrap=200)
    assert np.quantile(np.exp(noisy.theta[1:, 0]), 0.975) > 0.999 * noisy.lowest
    assert noisy.parameters()["E"].high == noisy.lowest


def test_another_form_is_noticed():
    def misfit(y, noise, seed):
        y = y + noise * np.random.default_rng(seed).standard_normal(len(y))
        return fit(dataclasses.replace(sample, log_loss=y)).misfit

    sample = multiples(LAW, SIZES, RATIOS)
    bent = sample.log_loss + 0.004 * np.log(sample.tokens / sample.parameters / 20) ** 2
    assert sum(misfit(bent, 0.003, seed) is not None for seed in range(20)) >= 17
    assert sum(misfit(sample.log_loss, 0.003, seed) is not None for seed in range(100)) <= 4
    assert misfit(sample.log_loss, 0.0, 0) is None
    assert "does not describe these runs (lack of fit" in misfit(bent, 0.001, 0)
    assert any("lack of fit" in note for note in fit(dataclasses.replace(sample, log_loss=bent)).notes)


def test_the_optimum_is_that_of_a_search():
    """At each compute the best of many allocations; also if C is not a multiple of N·D."""
    for gamma, factor in ((1.0, 6.0), (0.93, 25.0)):
        sample = multiples(LAW, SIZES, RATIOS)
        sample = dataclasses.replace(sample, compute=factor * sample.parameters**gamma * sample.tokens)
        found = fit(sample)
        assert found.scale == pytest.approx((math.log(factor), gamma))
        for compute in (1e19, 1e21):
            n = np.geomspace(1e6, 1e11, 200_001)
            losses = LAW.loss(n, compute / (factor * n**gamma))
            best = int(np.argmin(losses))
            log_n, log_d, log_loss = (v[0] for v in found.log_optimum(math.log(compute)))
            assert math.exp(log_n) == pytest.approx(n[best], rel=1e-3)
            assert math.exp(log_loss) == pytest.approx(losses[best], rel=1e-6)
            assert math.exp(log_d) == pytest.approx(compute / (factor * n[best] ** gamma), rel=1e-3)
            assert found.log_compute(math.exp(log_loss))[0] == pytest.approx(math.log(compute), rel=1e-6)
            power = compute ** found.exponents()["parameters"][0]
            assert math.exp(found.log_prefactors()["parameters"][0]) * power == pytest.approx(n[best], rel=1e-3)
        a, b = (found.exponents()[k][0] for k in ("parameters", "tokens"))
        assert gamma * a + b == pytest.approx(1)
    assert found.log_compute(LAW.E * 0.99)[0] == math.inf


def test_jacobian_is_the_derivative():
    rng = np.random.default_rng(0)
    theta, n, d = rng.normal(0, 0.5, (3, 5)), rng.normal(0, 1, 7), rng.normal(0, 1, 7)
    slopes = jacobian(predict(theta, n, d)[1], n, d)
    for i in range(5):
        up, down = theta.copy(), theta.copy()
        up[:, i] += 1e-6
        down[:, i] -= 1e-6
        numeric = (predict(up, n, d)[0] - predict(down, n, d)[0]) / 2e-6
        np.testing.assert_allclose(slopes[:, i], numeric, atol=1e-8)


@pytest.mark.parametrize("delta", [1e-3, 1e-2])
def test_it_is_the_lowest_that_scipy_finds(delta):
    """Chinchilla's method: BFGS from a grid of starts."""
    sample = multiples(LAW, SIZES, RATIOS, noise=0.004)
    found = fit(sample, delta=delta)
    n, d = np.log(sample.parameters), np.log(sample.tokens)

    def objective(theta):
        return 1e6 * huber(delta, sample.log_loss - predict(theta[None], n, d)[0][0]).sum()

    ends = [
        minimize(objective, [e, a, b, x, x], method="Nelder-Mead", options={"maxiter": 20_000, "maxfev": 20_000}).fun
        for e, a, b, x in ((0.5, 6, 6, 0.3), (0.0, 3, 3, 0.2), (0.7, 5, 8, 0.4))
    ]
    assert objective(found.theta[0]) <= min(ends) * (1 + 1e-6)


def test_an_outlier_moves_it_little():
    sample = multiples(LAW, SIZES, RATIOS, noise=0.001)
    y = sample.log_loss.copy()
    y[7] += 0.2
    clean, spoilt = fit(sample), fit(dataclasses.replace(sample, log_loss=y))
    assert spoilt.theta[0, 3:] == pytest.approx(clean.theta[0, 3:], abs=0.01)


def test_the_same_seed_gives_the_same_intervals():
    sample = multiples(LAW, SIZES, RATIOS, noise=0.003)
    one, two, other = (fit_parametric(sample, 50, seed) for seed in ((0,), (0,), (1,)))
    np.testing.assert_array_equal(one.theta, two.theta)
    assert not np.array_equal(one.theta[1:], other.theta[1:])
    np.testing.assert_array_equal(one.theta[0], other.theta[0])


def test_intervals_widen_by_students_t():
    values = np.r_[0.0, np.random.default_rng(0).standard_normal(20_000)]
    assert bootstrap_interval(values, 10**9, 10**9 + 5).high == pytest.approx(1.96, abs=0.05)
    assert bootstrap_interval(values, 3, 8).high == pytest.approx(3.18 * math.sqrt(8 / 3), rel=0.03)
    assert bootstrap_interval(values, 0, 5).high is None
    assert bootstrap_interval(values[:5], 10, 15).high is None


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (multiples(LAW, SIZES[:2], RATIOS), "12 points with 2 sizes"),
        (multiples(LAW, SIZES, [20.0]), "tokens and parameters grow together"),
        (multiples(LAW, SIZES[:3], RATIOS[:1]), "3 points with 3 sizes and 3 budgets"),
        (multiples(Law(2.0, 1e-4, 410.7, -0.4, 0.28), SIZES, RATIOS), "does not fall with more parameters"),
    ],
)
def test_what_cannot_be_fitted_is_said(sample, message):
    assert message in fit(sample)


def test_a_large_sample_takes_part_of_it_for_the_search():
    rng = np.random.default_rng(0)
    n = np.exp(rng.uniform(17, 21, 6000))
    d = n * np.exp(rng.uniform(1, 5, 6000))
    sample = Sample(n, d, 6 * n * d, np.log(LAW.loss(n, d)) + 0.002 * rng.standard_normal(6000), np.ones(6000))
    found = fit(sample, bootstrap=1000)
    assert len(found.theta) == 1 + 2_000_000 // 6000
    a = found.parameters()["a"]
    assert a.covers(LAW.a)
    assert a.high - a.low < 0.007  # other seeds lie within 0.0036
    assert found.theta[0, 3] == pytest.approx(LAW.a, abs=0.005)
