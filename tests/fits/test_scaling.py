import contextlib
import dataclasses
import json
import math

import numpy as np
import pytest

from angpt.errors import UserError
from angpt.fits.compute import Counting
from angpt.fits.curve_figures import isoflop_curves, parametric_law
from angpt.fits.hparam_figures import sweeps, trends
from angpt.fits.hparams import fit_hparams
from angpt.fits.output import hparam_tables, plain, scaling_tables, scaling_values
from angpt.fits.records import Record, average
from angpt.fits.saturating import Saturating
from angpt.fits.scaling import APPROACHES, Options, fit_scaling
from angpt.fits.scaling_figures import loss_over_compute, optimal_sizes, savings
from angpt.present.charts import Absent, Chart
from tests.fits.synthetic import Law, isoflop_records
from tests.intervals import check_intervals

OURS = set(APPROACHES) - {"paper"}
SIZES, COMPUTES = np.geomspace(2e7, 4e9, 10), np.geomspace(3e18, 1e21, 8)
PAPER = {
    "gpt+": {"tokens": (13.408079, 0.466271), "parameters": (0.336617, 0.465600)},
    "angpt": {"tokens": (9.727337, 0.473190), "parameters": (0.650506, 0.451378)},
}
"""D₀, α_D, N₀ and α_N of the paper's table."""


def options(**values):
    return Options(**({"counting": Counting(), "bootstrap": 100} | values))


def two(noise=0.0, seed=0, factor=0.93, E=0.0):
    """Two architectures, one of which has its reducible loss scaled by a factor."""
    one, other = Law(E=E), Law(E=E, A=factor * Law.A, B=factor * Law.B)
    records = isoflop_records(one, SIZES, COMPUTES, noise, 2 * seed, "gpt+")
    return records + isoflop_records(other, SIZES, COMPUTES, noise, 2 * seed + 1, "angpt")


def paper_records(noise=0.0):
    """Runs around the optima of the paper's laws: at each compute models from a quarter to four times the best size.

    Its exponents do not sum to one, so the compute is stated in the records and not 6·N·D.
    """
    rng = np.random.default_rng(0)
    records = []
    for name, laws in PAPER.items():
        for compute in np.geomspace(1e17, 3e21, 60):
            for k in range(-2, 3):
                n = laws["parameters"][0] * compute ** laws["parameters"][1] * 2.0**k
                d = laws["tokens"][0] * compute ** laws["tokens"][1] * 2.0**-k
                loss = 30 * compute**-0.055 * math.exp(0.01 * k**2 + noise * rng.standard_normal())
                records.append(Record("x", name, n, d, loss, flops=compute))
    return records


def test_the_numbers_of_the_paper():
    """From data that follow the paper's laws, to its six digits, by approaches that take the lowest."""
    found = fit_scaling(average(paper_records()), options(counting=Counting("given"), paper=True))
    for name, laws in PAPER.items():
        for approach in ("isoflop", "paper"):
            for what, (prefactor, exponent) in laws.items():
                law = found.of(name).law(approach, what)
                assert law.exponent == pytest.approx(exponent, abs=5e-7)
                assert law.prefactor.mean == pytest.approx(prefactor, rel=5e-6)
            assert found.of(name).law(approach, "loss").exponent == pytest.approx(-0.055, abs=1e-6)
            assert found.of(name).law(approach, "loss").prefactor.mean == pytest.approx(30, rel=1e-5)
        # These valleys are parabolas, those of the regression are skewed: they agree in exponents.
        for what, (_, exponent) in laws.items():
            assert found.of(name).law("frontier", what).exponent == pytest.approx(exponent, abs=1e-3)
    noisy = fit_scaling(average(paper_records(0.002)), options(counting=Counting("given")))
    for name, laws in PAPER.items():
        for what, (_, exponent) in laws.items():
            law = noisy.of(name).law("frontier", what)
            assert law.slope.covers(exponent)
            assert law.slope.high - law.slope.low < 0.008  # exponents of other seeds lie within 0.004


@pytest.mark.parametrize("approach", sorted(OURS))
def test_compute_saved_without_noise(approach):
    """L = K·C^−α: a factor f of K is a factor f^(1/α) of compute, the same at every loss."""
    found = fit_scaling(average(two()), options())
    comparison = next(c for c in found.comparisons if c.approach == approach)
    assert (comparison.baseline, comparison.other, comparison.problem) == ("gpt+", "angpt", None)
    expected = 0.93 ** (-1 / Law().exponents["loss"])
    for saving in comparison.savings:
        assert saving.factor.mean == pytest.approx(expected, rel=0.02)
    for e in comparison.exponents:
        assert e.difference.estimate.mean == pytest.approx(0, abs=0.005)


@pytest.mark.parametrize(
    ("E", "approaches"),
    [
        (0.0, ("frontier", "isoflop")),
        pytest.param(Law.E, ("frontier", "isoflop", "parametric"), marks=pytest.mark.slow),
    ],
)
def test_savings_and_differences_cover_the_truth(E, approaches):
    """Equal exponents differ significantly in few trials, and most intervals contain the true ratio.

    Without irreducible loss L(C) is a power law; with one, the law that has it is compared.
    """
    expected = 0.93 ** (-1 / Law().exponents["loss"])
    trials = {a: [] for a in approaches}
    for seed in range(40):
        found = fit_scaling(average(two(0.003, seed, E=E)), options(bootstrap=0 if E == 0 else 300))
        for c in found.comparisons:
            if c.approach in approaches:
                exponents, saved = [e.difference.estimate for e in c.exponents], [s.factor for s in c.savings]
                trials[c.approach].append([*exponents, *saved])
    for approach in approaches:
        assert exponents
        assert saved
        check_intervals(trials[approach], [0.0] * len(exponents) + [expected] * len(saved), hits=36)


def test_different_exponents_are_told_apart():
    records = isoflop_records(Law(E=0.0), SIZES, COMPUTES, 0.002, 0, "gpt+")
    records += isoflop_records(Law(E=0.0, a=0.40, A=1500), SIZES, COMPUTES, 0.002, 1, "angpt")
    found = fit_scaling(average(records), options())
    assert {c.approach for c in found.comparisons} == OURS
    for c in found.comparisons:
        e = next(e for e in c.exponents if e.quantity == "N_opt(C)")
        assert e.difference.estimate.covers(0.28 / 0.68 - 0.28 / 0.62)
        if c.approach != "akima":  # whose minima follow the noise of single runs
            assert not e.difference.estimate.covers(0.0)
            assert e.difference.p_value < 0.05


def test_nothing_is_extrapolated():
    """Losses that only one of two reached are not compared."""
    records = isoflop_records(Law(), SIZES, COMPUTES, 0, 0, "gpt+")
    records += [r for r in isoflop_records(Law(E=0.2), SIZES, COMPUTES, 0, 1, "angpt") if r.tokens > 0]
    found = fit_scaling(average(records), options())
    assert {c.approach for c in found.comparisons} == OURS
    for c in found.comparisons:
        assert c.savings == ()
        assert c.problem == "the two reached no common loss; nothing is extrapolated"


def test_curved_losses_are_compared_by_laws_of_one_form():
    """With an irreducible loss for both, or not at all."""
    records = isoflop_records(Law(), SIZES, COMPUTES, 0.001, 0, "gpt+")
    records += isoflop_records(Law(A=380, B=380), SIZES, COMPUTES[:4], 0.001, 1, "angpt")
    found = fit_scaling(average(records), options(bootstrap=0))
    comparison = next(c for c in found.comparisons if c.approach == "isoflop")
    assert isinstance(found.of("gpt+").isoflop.saturating, Saturating)
    assert isinstance(found.of("angpt").isoflop.saturating, str)  # four levels are too few
    assert comparison.problem == "the losses are curved, and one of the two has no law with an irreducible loss"
    frontier = next(c for c in found.comparisons if c.approach == "frontier")
    assert frontier.exponents[0].quantity == "L(C) − E"
    assert frontier.savings


def test_the_baseline_can_be_chosen():
    table = average(two() + isoflop_records(Law(), SIZES, COMPUTES, name="mine"))
    assert {(c.baseline, c.other) for c in fit_scaling(table, options()).comparisons} == {
        ("gpt+", "angpt"),
        ("gpt+", "mine"),
    }
    chosen = fit_scaling(table, options(), "mine").comparisons
    assert {(c.baseline, c.other) for c in chosen} == {("mine", "gpt+"), ("mine", "angpt")}
    with pytest.raises(UserError, match="--baseline other: no run has this architecture"):
        fit_scaling(table, options(), "other")


def test_a_result_does_not_depend_on_the_other_architectures():
    records = two(0.002)
    alone = fit_scaling(average([r for r in records if r.architecture == "angpt"]), options())
    both = fit_scaling(average(records), options())
    np.testing.assert_array_equal(alone.of("angpt").parametric.theta, both.of("angpt").parametric.theta)
    assert alone.comparisons == ()


def test_samples_of_two_architectures_are_independent():
    """For the same runs under two names, the difference varies like that of two independent fits."""
    records = isoflop_records(Law(), SIZES, COMPUTES, 0.003, 0, "gpt+")
    records += isoflop_records(Law(), SIZES, COMPUTES, 0.003, 0, "angpt")
    found = fit_scaling(average(records), options(bootstrap=1000))
    one, two_ = (found.of(name).parametric.theta[1:, 3] for name in ("gpt+", "angpt"))
    assert abs(np.corrcoef(one, two_)[0, 1]) < 0.1
    assert np.std(two_ - one) == pytest.approx(math.sqrt(2) * np.std(one), rel=0.1)


def test_one_size_gives_no_law():
    with pytest.raises(UserError, match="all runs have 20M parameters; a scaling law needs several model sizes"):
        fit_scaling(average(isoflop_records(Law(), [2e7], COMPUTES)), options())
    others = isoflop_records(Law(), [2e7], COMPUTES, name="gpt+") + isoflop_records(Law(), SIZES, COMPUTES)
    with pytest.raises(
        UserError, match=r"GPT\+: all runs have 20M parameters; .* \(leave it out with --architectures\)"
    ):
        fit_scaling(average(others), options())


def test_two_sizes_say_what_is_missing():
    found = fit_scaling(average(isoflop_records(Law(), [2e7, 2e8], COMPUTES)), options()).of("angpt")
    assert isinstance(found.isoflop, str)
    assert isinstance(found.parametric, str)
    assert found.frontier.parameters is None
    assert sum("none:" in note for note in found.notes) == 3


def test_attention_changes_what_counts():
    records = [
        Record("x", "m", r.parameters, r.tokens, r.loss, embedding_parameters=0.3 * r.parameters,
               head_parameters=0.3 * r.parameters, attention_flops=4 * r.parameters**0.8)
        for r in isoflop_records(Law(), SIZES, COMPUTES)
    ]  # fmt: skip
    table = average(records)
    plain, with_attention, without = (
        fit_scaling(table, options(counting=c)) for c in (Counting(), Counting(attention=True), Counting("none"))
    )
    sample = with_attention.of("m").sample
    np.testing.assert_allclose(sample.compute, (6 * sample.parameters + 4 * sample.parameters**0.8) * sample.tokens)
    np.testing.assert_allclose(without.of("m").sample.parameters, 0.4 * plain.of("m").sample.parameters)
    assert len({plain.counting, with_attention.counting, without.counting}) == 3
    assert with_attention.of("m").parametric.scale[1] < 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bins": 1}, "--bins 1"),
        ({"bootstrap": -1}, "--bootstrap -1"),
        ({"huber": 0.0}, "--huber 0.0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_options_are_checked(values, message):
    with pytest.raises(UserError, match=message):
        options(**values)


def odd_records(rng):
    """Unusual runs: few, many, equal losses, extreme losses, diverged ones."""
    kind, records = rng.integers(5), []
    for name in ("gpt+", "angpt", "x")[: rng.integers(1, 4)]:
        for n in np.round(np.geomspace(1e6, 10 ** rng.uniform(6.5, 10), rng.integers(1, 8))):
            budgets = rng.choice([1e8, 1e9, 1e10], 3) if kind < 2 else 10 ** rng.uniform(18, 21, rng.integers(1, 5)) / n
            for d in budgets:
                true = Law().loss(n, d)
                noisy = true * math.exp(0.01 * rng.standard_normal())
                loss = (3.0, float(rng.uniform(1, 5)), true, noisy, round(true, 1))[kind]
                status = "diverged" if rng.random() < 0.1 else "finished"
                batch, lr = 2.0 ** rng.integers(10, 14), 2.0 ** rng.integers(-9, -4)
                records.append(Record("x", name, n, d, loss, status, batch, lr, str(rng.integers(3)),
                                      curve=((d / 2, loss), (d, loss))))  # fmt: skip
    return records


def test_whatever_comes_is_fitted_or_explained():
    """Every unusual table gives a result that can be shown, or a UserError."""
    shown = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        records = odd_records(rng)
        with contextlib.suppress(UserError):
            how = options(bootstrap=20, curves=bool(rng.random() < 0.2))
            found = fit_scaling(average(records), how)
            json.dumps(plain(scaling_values(found)), allow_nan=False)
            scaling_tables(found)
            assert isinstance(loss_over_compute(found), Chart)
            for make in (optimal_sizes, isoflop_curves, parametric_law, savings):
                assert isinstance(make(found), Chart | Absent)
            shown += 1
        with contextlib.suppress(UserError):
            swept = fit_hparams(average([dataclasses.replace(r, tokens=20 * r.parameters) for r in records]))
            json.dumps(plain(swept), allow_nan=False)
            assert hparam_tables(swept)
            assert isinstance(sweeps(swept), Chart)
            assert isinstance(trends(swept), Chart | Absent)
            shown += 1
    assert shown > 20
