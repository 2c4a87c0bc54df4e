import dataclasses
import itertools
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.interpolate import Akima1DInterpolator

from angpt.config import ModelConfig, TrainConfig
from angpt.errors import UserError
from angpt.fits.hparams import SETTINGS, Best, fit_hparams, fit_law, fit_sweep
from angpt.fits.output import hparam_tables
from angpt.fits.plane import fit_plane
from angpt.fits.records import Record, average
from angpt.fits.rules import RULES, write_rules
from angpt.present.words import quantity
from angpt.serialization import from_dict
from angpt.training.plan import Rule, make_plan
from tests.fits.synthetic import Valley, sweep_records
from tests.intervals import check_intervals

SIZES = [32e6, 62e6, 127e6, 247e6, 506e6]
VALLEY = Valley()
EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def fit(records, **options):
    return fit_hparams(average(records), **options)


def trend(found, architecture="angpt"):
    return next(t for t in found.trends if t.architecture == architecture)


def at(law, n, d=None, batch=None, **options):
    """A law at a model size, a budget and a batch size."""
    return law.law.at({"parameters": n, "tokens": d, "batch_tokens": batch}, **options)


def exponents(law):
    return {name: e.mean for name, e in law.law.exponents.items()}


def optima(found):
    return [size.optimum for size in found.sizes]


OF_BATCH = {"parameters": VALLEY.lr[1] - VALLEY.coupling * VALLEY.batch[1], "batch_tokens": VALLEY.coupling}
"""Exponents of the best rate: (N / 1e8)^-0.2 at the best batch, and (batch / best batch)^coupling away from it."""


@pytest.mark.parametrize(("batches", "rates"), [(5, 5), (7, 6), (3, 3), (4, 4)])
def test_the_planted_laws_without_noise(batches, rates):
    found = fit(sweep_records(VALLEY, SIZES, batches=batches, rates=rates))
    law = trend(found)
    assert exponents(law.batch_tokens) == pytest.approx({"parameters": VALLEY.batch[1]}, abs=0.01)
    assert exponents(law.lr) == pytest.approx(OF_BATCH, abs=0.01)
    best = law.at_best_batch(1e8, 2e9)
    assert best["batch_tokens"].mean == pytest.approx(VALLEY.batch[0], rel=0.01)
    assert best["lr"].mean == pytest.approx(VALLEY.lr[0], rel=0.01)
    for n, optimum in zip(SIZES, optima(found), strict=True):
        assert (optimum.batch_tokens, optimum.lr) == pytest.approx(VALLEY.best(n), rel=0.01)


@pytest.mark.parametrize("noise", [0.001, 0.003])
def test_intervals_cover_the_truth(noise):
    batch, lr = VALLEY.best(3e8)
    trials = []
    for seed in range(100):
        law = trend(fit(sweep_records(VALLEY, [20e6, *SIZES], noise, seed)))
        slopes = *law.batch_tokens.law.exponents.values(), *law.lr.law.exponents.values()
        trials.append([*slopes, at(law.batch_tokens, 3e8), at(law.lr, 3e8, batch=batch)])
    check_intervals(trials, [VALLEY.batch[1], *OF_BATCH.values(), batch, lr], hits=90)


def test_seeds_are_averaged():
    """Four seeds halve the noise."""
    spread = {}
    for seeds in (1, 4):
        laws = [trend(fit(sweep_records(VALLEY, SIZES, 0.002, seed, seeds=seeds))) for seed in range(25)]
        spread[seeds] = np.std([exponents(law.lr)["parameters"] for law in laws])
    assert 0.3 < spread[4] / spread[1] < 0.75


def test_order_does_not_matter():
    records = sweep_records(VALLEY, SIZES, 0.001)
    shuffled = [records[i] for i in np.random.default_rng(0).permutation(len(records))]
    assert fit(shuffled) == fit(records)


def test_an_edge_over_rates_is_flagged_and_not_used():
    """Without the higher rates of one batch size, its minimum is at the edge, and that batch is left out."""
    best = VALLEY.best(SIZES[2])
    records = sweep_records(VALLEY, SIZES, batches=7, rates=9)
    far = max(r.batch_tokens for r in records if r.parameters == SIZES[2])
    kept = [
        r
        for r in records
        if r.parameters != SIZES[2] or r.batch_tokens != far or r.lr < best[1] * (far / best[0]) ** 0.5 / 1.5
    ]
    found = fit(kept)
    sweep = next(s for s in found.sizes[2].sweeps if s.batch_tokens == far)
    assert sweep.minimum is None
    assert "at the high edge of the grid; try higher ones" in sweep.problem
    assert any(sweep.problem in note for note in found.notes)
    assert (found.sizes[2].optimum.batch_tokens, found.sizes[2].optimum.lr) == pytest.approx(best, rel=0.01)


def test_an_edge_over_batches_is_not_an_optimum():
    records = [
        r for r in sweep_records(VALLEY, SIZES, batches=7) if r.batch_tokens > 1.6 * VALLEY.best(r.parameters)[0]
    ]
    found = fit(records)
    assert optima(found) == [None] * len(SIZES)
    assert all("at the low edge of the grid: no optimum; try smaller ones" in size.problem for size in found.sizes)
    assert trend(found).batch_tokens is None
    assert exponents(trend(found).lr) == pytest.approx(OF_BATCH, abs=0.01)  # which needs no best batch


def test_an_edge_that_is_better_still_refuses_the_size():
    """The best batch has no minimum over its rates: the minimum of the other batches is not the optimum."""
    n = SIZES[0]
    best_batch, best_lr = VALLEY.best(n)
    records = sweep_records(VALLEY, SIZES, batches=7, rates=9)
    far = max(r.batch_tokens for r in records if r.parameters == n)
    kept = []
    for r in records:
        if (r.parameters, r.batch_tokens) == (n, far):
            if r.lr > best_lr * (far / best_batch) ** 0.5:
                continue
            r = dataclasses.replace(r, loss=0.8 * r.loss)
        kept.append(r)
    found = fit(kept)
    assert found.sizes[0].optimum is None
    assert "has a lower loss, but its best rate is not inside" in found.sizes[0].problem
    assert len(trend(found).batch_tokens.sizes) == 4


@pytest.mark.parametrize(
    ("points", "diverged", "lr", "bounded", "problem"),
    [
        ([(1, 3.0), (2, 2.9), (4, 3.0)], [], 2.0, False, None),
        ([(1, 3.0), (2, 3.0), (4, 3.0), (8, 3.1)], [], 2.0, False, None),
        ([(1, 3.0), (2, 2.9)], [4], 2.0, True, None),
        ([(1, 3.0), (2, 2.9), (4, 2.8)], [8], 4.0, True, None),
        ([(1, 3.0), (2, 2.9), (4, 2.8)], [0.5], None, None, "at the high edge"),
        ([(1, 2.8), (2, 2.9), (4, 3.0)], [8], None, None, "at the low edge"),
        ([(1, 3.0), (2, 2.9)], [], None, None, "2 rates are too few"),
        ([(1, 3.0)], [2], None, None, "1 rates are too few"),
        ([], [1, 2], None, None, "all 2 rates diverged; try lower ones"),
    ],
)
def test_one_sweep(points, diverged, lr, bounded, problem):
    sweep = fit_sweep(65536, points, diverged)
    if lr is None:
        assert sweep.minimum is None
        assert problem in sweep.problem
    else:
        assert (sweep.minimum.lr, sweep.minimum.bounded, sweep.problem) == (pytest.approx(lr), bounded, None)


def test_both_stages_are_scipys_akima():
    """The grid of experiments/hparams.toml, three batches and rates, with a fourth of each where it grew."""
    grid = tomllib.loads((EXPERIMENTS / "hparams.toml").read_text())["grid"][0]
    assert (len(grid["batches"]), len(grid["lrs"])) == (3, 3)
    rng, n, records, minima = np.random.default_rng(0), 127e6, [], []
    for batch in 65536.0 * 2.0 ** np.arange(4):
        best = 0.01 * (batch / 131072) ** 0.4
        lrs = best * 2.0 ** np.arange(-1.3, 2.0)
        losses = 3 * np.exp(0.03 * np.abs(np.log(lrs / best)) ** 1.7 + 0.01 * abs(math.log(batch / 150_000)) ** 1.5)
        losses *= 1 + 0.001 * rng.standard_normal(4)
        records += [
            Record("x", "m", n, 20 * n, float(y), batch_tokens=batch, lr=float(x))
            for x, y in zip(lrs, losses, strict=True)
        ]
        curve = Akima1DInterpolator(np.log(lrs), np.log(losses))
        fine = np.linspace(*np.log(lrs[[0, -1]]), 100_001)
        at = fine[np.argmin(curve(fine))]
        minima.append((math.log(batch), at, curve(at)))
    batches, rates, losses = np.array(minima).T
    fine = np.linspace(*batches[[0, -1]], 100_001)
    best = fine[np.argmin(Akima1DInterpolator(batches, losses)(fine))]
    found = fit(records).sizes[0].optimum
    assert math.log(found.batch_tokens) == pytest.approx(best, abs=1e-4)
    assert math.log(found.lr) == pytest.approx(float(Akima1DInterpolator(batches, rates)(best)), abs=1e-4)


def test_a_rate_at_which_a_seed_diverged_counts_as_diverged():
    records = sweep_records(VALLEY, SIZES, seeds=2)
    high = max(r.lr for r in records if r.parameters == SIZES[0])
    spoilt = [
        dataclasses.replace(r, loss=math.nan, status="diverged")
        if (r.parameters, r.lr, r.seed) == (SIZES[0], high, "1")
        else r
        for r in records
    ]
    sweep = next(s for s in fit(spoilt).sizes[0].sweeps if high in s.diverged)
    assert high not in sweep.lrs


def test_batches_and_sizes_of_which_all_runs_diverged_are_told():
    def diverged(record):
        return record.parameters == SIZES[0] or record.batch_tokens == 131072

    records = sweep_records(VALLEY, SIZES[:3], batches=7)
    assert {r.parameters for r in records if r.batch_tokens == 131072} == {*SIZES[:3]}
    found = fit([dataclasses.replace(r, loss=math.nan, status="diverged") if diverged(r) else r for r in records])
    assert [len(size.sweeps) for size in found.sizes] == [7, 7, 7]
    lost = [s for size in found.sizes for s in size.sweeps if not s.losses]
    assert len(lost) == 7 + 2
    assert all(len(s.diverged) == 5 and s.problem == "all 5 rates diverged; try lower ones" for s in lost)
    assert "anGPT 62M: batch of 131k tokens: all 5 rates diverged; try lower ones" in found.notes
    assert ("anGPT 32M", "640M", "131k", "none", "", "") in hparam_tables(found)[0].rows
    assert found.sizes[0].problem.startswith("0 of 7 batch sizes have a best rate inside their grid")
    assert not any("several other settings" in note for note in found.notes)


def test_of_several_settings_the_best_is_taken():
    """β₂ = 0.95 is worse everywhere: the optima are those of 0.99."""
    good = sweep_records(VALLEY, SIZES, settings="beta2=0.99")
    bad = [dataclasses.replace(r, loss=1.01 * r.loss, settings="beta2=0.95") for r in good]
    found = fit(bad + good)
    assert optima(found) == optima(fit(good))
    assert any("with several other settings" in note for note in found.notes)


def test_one_size_gives_a_law_of_the_batch_alone():
    """The optimum of that size is found too."""
    found = fit(sweep_records(VALLEY, SIZES[:1]))
    assert exponents(trend(found).lr) == pytest.approx({"batch_tokens": VALLEY.coupling}, abs=0.01)
    assert trend(found).batch_tokens is None
    assert (found.sizes[0].optimum.batch_tokens, found.sizes[0].optimum.lr) == pytest.approx(
        VALLEY.best(32e6), rel=0.01
    )


def test_one_sweep_gives_no_law():
    found = fit(sweep_records(VALLEY, SIZES[:1], batches=1))
    assert found.trends == ()
    assert "anGPT: 1 of 1 sweeps have a best rate inside: no law" in found.notes


def test_a_law_through_as_many_points_as_it_has_numbers_has_no_interval():
    found = fit(sweep_records(VALLEY, SIZES[:2], 0.001))
    assert trend(found).batch_tokens.law.exponents["parameters"].low is None
    assert trend(found).batch_tokens.left_out == (None, None)
    assert "anGPT: 2 values: the law of the batch size has no interval" in found.notes
    assert trend(found).lr.law.freedom == 7  # ten sweeps, three numbers


def test_terms_are_for_what_varies():
    """Tokens within a size, the batch within a size and budget; sizes that differ in these alone tell nothing."""

    def terms(*settings):
        points = [Best(dict(zip(SETTINGS, values, strict=True)), 1.0) for values in settings]
        return "".join(SETTINGS[name] for name in fit_law(points).law.center)

    assert terms((1, 1, 1), (2, 1, 1)) == "N"
    assert terms((1, 1, 1), (2, 2, 2), (3, 5, 1)) == "N"
    assert terms((1, 1, 1), (1, 2, 1)) == "D"
    assert terms((1, 1, 1), (1, 2, 2), (1, 4, 1)) == "D"
    assert terms((1, 1, 1), (1, 1, 2), (2, 2, 1)) == "NB"
    assert terms((1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 1, 1)) == "NDB"
    assert fit_law([Best({"parameters": 1.0}, 1.0)]) is None
    assert fit_law([]) is None


def test_a_budget_can_be_chosen():
    records = sweep_records(VALLEY, SIZES)
    longer = [dataclasses.replace(r, tokens=2 * r.tokens, lr=0.5 * r.lr, loss=0.9 * r.loss) for r in records]
    chosen, alone = (trend(fit(runs, multiple=20)).lr for runs in (records + longer, records))
    assert chosen == alone
    halved = trend(fit(records + longer, multiple=40)).lr
    assert at(halved, 1e8, batch=VALLEY.batch[0]).mean == pytest.approx(VALLEY.lr[0] / 2, rel=0.01)
    with pytest.raises(UserError, match="no run has this many tokens per parameter"):
        fit(records, multiple=7)


def test_leaving_one_out():
    """Compared with laws fitted to the other best values."""
    records = sweep_records(VALLEY, SIZES, 0.002)
    found, others = trend(fit(records)), trend(fit([r for r in records if r.parameters != SIZES[1]]))
    expected, value = at(others.batch_tokens, SIZES[1], new=True), found.batch_tokens.points[1].value
    left = found.batch_tokens.left_out[1]
    assert (left.mean, left.low) == pytest.approx((expected.mean / value, expected.low / value))
    point = found.lr.points[7]
    without = [r for r in records if (r.parameters, r.batch_tokens) != (SIZES[1], point.settings["batch_tokens"])]
    expected = trend(fit(without)).lr.law.at(point.settings, new=True)
    left = found.lr.check(point.settings)
    assert (left.mean, left.low) == pytest.approx((expected.mean / point.value, expected.low / point.value))
    assert len(found.lr.left_out) == 25


OF_TOKENS = Valley(tokens=(0.4, -0.3))
"""At 20 tokens per parameter the same as VALLEY."""
BUDGETS = (3.0, 10.0, 20.0, 60.0)
OF_ALL = {"parameters": -0.2 + 0.3 - 0.5 * (0.5 - 0.4), "tokens": -0.3 - 0.5 * 0.4, "batch_tokens": 0.5}
"""Exponents of the best rate, N^0.1·D^-0.3 at the best batch, which is N^0.1·D^0.4."""


def test_laws_of_parameters_and_tokens_without_noise():
    """batch = 2e5·(N/1e8)^0.5·(D/20N)^0.4, and the rate likewise."""
    found = fit(sweep_records(OF_TOKENS, SIZES[:4], multiples=BUDGETS))
    law = trend(found)
    assert law.with_tokens
    assert (len(law.batch_tokens.points), len(law.lr.points)) == (16, 80)
    assert exponents(law.batch_tokens) == pytest.approx({"parameters": 0.5 - 0.4, "tokens": 0.4}, abs=0.01)
    assert exponents(law.lr) == pytest.approx(OF_ALL, abs=0.01)
    for n, d in ((5e7, 1e9), (2e8, 2e10)):
        batch, lr = OF_TOKENS.best(n, d)
        best = law.at_best_batch(n, d)
        assert (best["batch_tokens"].mean, best["lr"].mean) == pytest.approx((batch, lr), rel=0.02)
        assert at(law.lr, n, d, 4 * batch).mean == pytest.approx(2 * lr, rel=0.02)
    assert all(x.mean == pytest.approx(1, abs=0.05) for x in law.lr.left_out)
    assert "anGPT 32M, 640M tokens" in {size.name.replace("641M", "640M") for size in found.sizes}


@pytest.mark.slow
def test_intervals_of_parameters_and_tokens_cover_the_truth():
    truth, trials = OF_TOKENS.best(1e8, 3e9), []
    for seed in range(100):
        law = trend(fit(sweep_records(OF_TOKENS, SIZES[:4], 0.0015, seed, multiples=BUDGETS)))
        values = [at(law.batch_tokens, 1e8, 3e9), at(law.lr, 1e8, 3e9, truth[0])]
        trials.append([*law.batch_tokens.law.exponents.values(), *law.lr.law.exponents.values(), *values])
    check_intervals(trials, [0.1, 0.4, *OF_ALL.values(), *truth], hits=90)


def few_sweeps(noise, seed=0):
    """The design of docs/evidence/transfer: two batches at two budgets of one size, and one sweep at three others."""
    sizes = [(7e6, 2e7, 2**15), (7e6, 2e7, 2**16), (7e6, 8e7, 2**15), (7e6, 8e7, 2**16)]
    sizes += [(14e6, 4e7, 2**16), (32e6, 4e7, 2**16), (62e6, 8e7, 2**16)]
    rng, records = np.random.default_rng(seed), []
    for n, d, batch in sizes:
        best = 0.03 * (n / 32e6) ** -0.3 * (d / 1e8) ** -0.6 * (batch / 2**16) ** 0.6
        for lr in 2.0 ** (round(math.log2(best)) + np.arange(-1, 2)):
            loss = 4 * math.exp(0.03 * math.log(lr / best) ** 2 + noise * rng.standard_normal())
            records.append(Record("x", "angpt", n, d, loss, batch_tokens=float(batch), lr=float(lr)))
    return records


def test_two_batches_are_enough_for_a_law_of_the_rate():
    found = fit(few_sweeps(0.0))
    law = trend(found).lr
    assert exponents(law) == pytest.approx({"parameters": -0.3, "tokens": -0.6, "batch_tokens": 0.6}, abs=1e-6)
    assert at(law, 32e6, 1e8, 2**16).mean == pytest.approx(0.03)
    assert [left.mean for left in law.left_out] == pytest.approx([1.0] * 7)
    assert trend(found).batch_tokens is None
    # A sweep whose best rate is at the edge is left out and flagged, and the law stays.
    edge = [r for r in few_sweeps(0.0) if r.parameters != 62e6 or r.lr > 0.03]
    assert len(trend(fit(edge)).lr.points) == 6
    assert exponents(trend(fit(edge)).lr) == pytest.approx(exponents(law))
    assert any("62M: batch of 65.5k tokens: " in note for note in fit(edge).notes)


def test_intervals_of_few_sweeps_cover_the_truth():
    trials = []
    for seed in range(200):
        law = trend(fit(few_sweeps(0.002, seed))).lr
        trials.append([*law.law.exponents.values(), at(law, 32e6, 1e8, 2**16)])
    check_intervals(trials, [-0.3, -0.6, 0.6, 0.03], hits=184, widest=2.5)


def test_a_plane_is_the_regression_of_logarithms():
    """With explicit matrices."""
    rng = np.random.default_rng(0)
    n, d = np.exp(rng.uniform(17, 20, 9)), np.exp(rng.uniform(20, 24, 9))
    y = 3e-4 * n**0.2 * d**-0.3 * np.exp(0.1 * rng.standard_normal(9))
    design = np.column_stack([np.ones(9), np.log(n), np.log(d)])
    inverse = np.linalg.inv(design.T @ design)
    theta = inverse @ design.T @ np.log(y)
    residual = np.log(y) - design @ theta
    covariance, t = residual @ residual / 6 * inverse, stats.t.ppf(0.975, 6)
    law = fit_plane({"n": n, "d": d}, y)
    for found, i in zip(law.exponents.values(), (1, 2), strict=True):
        half = t * math.sqrt(covariance[i, i])
        assert (found.mean, found.low, found.high) == pytest.approx((theta[i], theta[i] - half, theta[i] + half))
    for new in (False, True):
        point = np.array([1.0, math.log(1e8), math.log(2e9)])
        half = t * math.sqrt(point @ covariance @ point + (residual @ residual / 6 if new else 0.0))
        assert math.log(law.at({"n": 1e8, "d": 2e9}, new).high) == pytest.approx(point @ theta + half)
    with pytest.raises(ValueError, match="do not tell the effects of n, d apart"):
        fit_plane({"n": n, "d": 20 * n}, y)


def test_one_size_with_several_budgets_gives_laws_of_tokens():
    found = trend(fit(sweep_records(OF_TOKENS, SIZES[:1], multiples=BUDGETS)))
    assert exponents(found.batch_tokens) == pytest.approx({"tokens": 0.4}, abs=0.01)
    assert exponents(found.lr) == pytest.approx({"tokens": -0.5, "batch_tokens": 0.5}, abs=0.01)


def test_diverged_runs_count_at_their_own_budget():
    records = sweep_records(OF_TOKENS, SIZES[:3], multiples=(20.0, 60.0))
    high = max(r.lr for r in records if (r.parameters, r.tokens) == (SIZES[0], 20 * SIZES[0]))
    spoilt = [
        dataclasses.replace(r, loss=math.nan, status="diverged")
        if (r.parameters, r.tokens, r.lr) == (SIZES[0], 20 * SIZES[0], high)
        else r
        for r in records
    ]
    first, second = fit(spoilt).sizes[:2]
    assert any(high in s.diverged for s in first.sweeps)
    assert not any(s.diverged for s in second.sweeps)


def test_laws_of_tokens_become_rules(tmp_path):
    path = tmp_path / "rules.toml"
    found = fit(sweep_records(OF_TOKENS, [16e6, *SIZES[:3]], multiples=BUDGETS))
    write_rules(path, found.trends, "angpt fit hparams x")
    rule = rules(path)["angpt"]
    assert rule.lr_exponents == pytest.approx((OF_ALL["parameters"],) * 2, abs=0.01)
    assert (rule.lr_tokens_exponent, rule.lr_batch_exponent) == pytest.approx((-0.5, 0.5), abs=0.01)
    assert (rule.batch_exponent, rule.batch_tokens_exponent) == pytest.approx((0.1, 0.4), abs=0.01)
    for n, d in ((20_000_000, 10**9), (100_000_000, 4 * 10**9)):
        batch, lr = OF_TOKENS.best(n, d)
        for factor in (1, 4):  # a rate is rounded to two digits: by up to 5 %
            assert rule.lr_at(n, d, factor * batch) == pytest.approx(math.sqrt(factor) * lr, rel=0.06)
        assert abs(math.log2(rule.batch_at(n, d, 2048) / batch)) <= 0.55
    text = path.read_text()
    assert "# lr = 0.0" in text
    batch = quantity(rule.batch_tokens)
    assert f" at 32M parameters, 100M tokens, {batch} tokens per step; exponents 0.05" in text
    assert "] over tokens\n[angpt]\n" in text
    # A law of the parameters alone has no term for tokens; the comments of other rules are kept.
    write_rules(path, fit(sweep_records(VALLEY, SIZES)).trends, "angpt fit hparams y")
    assert rules(path)["angpt"].lr_tokens_exponent == 0
    assert rules(path)["angpt"].lr_batch_exponent == pytest.approx(0.5, abs=0.01)
    write_rules(path, fit(sweep_records(VALLEY, SIZES, name="gpt+")).trends, "angpt fit hparams z")
    assert "by: angpt fit hparams y\n" in path.read_text()


def test_a_written_law_of_tokens_is_what_a_run_trains_with(tmp_path, monkeypatch):
    """For every recipe that has a rule; the plan of a run reads the file."""
    path, recipes, sizes = tmp_path / "rules.toml", rules(RULES), [16e6, *SIZES[:3]]
    records = [r for name in recipes for r in sweep_records(OF_TOKENS, sizes, name=name, multiples=BUDGETS)]
    write_rules(path, fit(records).trends, "angpt fit hparams x")
    monkeypatch.setattr("angpt.training.plan.read_rules", lambda: rules(path))
    for recipe, tokens in itertools.product(recipes, ("2x", "20x", "3B")):
        cfg = TrainConfig(model=ModelConfig.size("32M"), tokens=tokens).with_recipe(recipe)
        plan = make_plan(cfg)
        batch, lr = OF_TOKENS.best(plan.parameters, int(plan.config.tokens))
        assert plan.peak_lr == pytest.approx(lr * math.sqrt(plan.batch_tokens / batch), rel=0.04)
        assert abs(math.log2(plan.batch_tokens / batch)) <= 0.55


def rules(path):
    return {name: from_dict(Rule, values) for name, values in tomllib.loads(path.read_text()).items()}


def test_the_law_becomes_the_rule(tmp_path):
    records = sweep_records(VALLEY, SIZES) + sweep_records(Valley(lr=(1e-3, -0.4)), SIZES, name="gpt+")
    found = fit(records)
    path = tmp_path / "rules.toml"
    write_rules(path, found.trends[:1], "angpt fit hparams x")
    write_rules(path, found.trends[1:], "angpt fit hparams y")
    before, after = rules(RULES), rules(path)
    assert list(after) == list(before)
    assert after["ngpt"] == before["ngpt"]
    for name, valley in (("angpt", VALLEY), ("gpt+", Valley(lr=(1e-3, -0.4)))):
        for n in (64_000_000, 500_000_000):
            batch, lr = valley.best(n)
            assert after[name].lr_at(n, 10**8, batch) == pytest.approx(lr, rel=0.03)
            assert abs(math.log2(after[name].batch_at(n, 10**8, 2048) / batch)) <= 0.51
        assert after[name].lr_exponents[0] == before[name].lr_exponents[0]  # no model of the fit lies below the anchor
        assert (after[name].weight_decay, after[name].warmup) == (before[name].weight_decay, before[name].warmup)
    text = path.read_text()
    assert text.startswith(RULES.read_text()[:80])
    for source in "xy":
        assert f"# Fitted to 25 best rates, 5 sizes from 32M to 506M, by: angpt fit hparams {source}\n# lr = " in text


def test_without_best_batches_the_rule_keeps_its_batch(tmp_path):
    path = tmp_path / "rules.toml"
    write_rules(path, fit(few_sweeps(0.001)).trends, "angpt fit hparams x")
    before, after = rules(RULES)["angpt"], rules(path)["angpt"]
    assert (after.batch_tokens, after.batch_exponent) == (before.batch_tokens, before.batch_exponent)
    law = trend(fit(few_sweeps(0.001))).lr
    assert after.lr == pytest.approx(at(law, 32e6, 1e8, before.batch_tokens).mean, rel=0.01)
    assert "# batch_tokens = " not in path.read_text()


def test_rules_that_cannot_be_written(tmp_path):
    found = fit(sweep_records(VALLEY, SIZES, name="angpt/no-lerp"))
    with pytest.raises(UserError, match="no rule for angpt/no-lerp; rules exist for gpt"):
        write_rules(tmp_path / "rules.toml", found.trends, "")
    for few, words in ((sweep_records(VALLEY, SIZES[:1]), "5 best rates for 1 sizes"),
                       (sweep_records(VALLEY, SIZES[:2], batches=1), "2 best rates for 2 sizes")):  # fmt: skip
        with pytest.raises(UserError, match=f"angpt has {words}; a rule needs two sizes and an interval"):
            write_rules(tmp_path / "rules.toml", fit(few).trends, "")
    good = fit(sweep_records(VALLEY, SIZES)).trends
    (tmp_path / "other.toml").write_text("lr = 3\n")
    with pytest.raises(UserError, match="is not a file of rules"):
        write_rules(tmp_path / "other.toml", good, "")
    with pytest.raises(UserError, match="cannot be written"):
        write_rules(tmp_path / "no" / "rules.toml", good, "")
    assert not (tmp_path / "rules.toml").exists()
