import math

import numpy as np
import pytest
from scipy import stats

from angpt.studies.outcome import change, deviations, markdown, outcome
from angpt.studies.speedup import Deviation, pooled_deviation
from tests.studies.conftest import ONE, pretend


def test_diverged_runs_are_data(make):
    study = make(("lrs = [", "seeds = [0, 1, 2]\nlrs = ["), *ONE[1:])
    for job in study.jobs():
        lr, seed, variant = job.config.optimizer.lr, job.config.seed, job.config.model.architecture
        lost = (variant == "angpt" and lr > 0.01) or (variant == "gpt+" and lr > 0.06 and seed == 1)
        pretend(job, "diverged" if lost else "finished", None if lost else 2 + abs(lr - 0.05) + 0.001 * seed)
    gpt, ours = outcome(study).rows
    assert (gpt.lr, gpt.lr_side, gpt.diverged, gpt.val_loss.n) == (0.016, 0, 0, 3)  # 0.064 lost a seed
    assert (ours.lr, ours.lr_side) == (0.004, -1)
    for job in study.jobs():
        pretend(job, "diverged", None)
    gpt, ours = outcome(study).rows
    assert (gpt.val_loss, gpt.diverged, gpt.seeds, ours.change) == (None, 3, 3, None)
    assert "| anGPT | diverged (3 of 3 seeds) |" in markdown(outcome(study))
    assert outcome(study).complete


def test_changes_are_relative_to_a_budget_of_the_baseline(make):
    study = make(
        ('budgets = ["2048"]', 'budgets = ["1k", "2k", "4k"]'),
        ('baseline = "gpt+"', 'baseline = "gpt+"\nbaseline_budget = "2000"'),
        ("lrs = [0.004, 0.016, 0.064]", "lrs = [0.004]"),
        *ONE[1:],
    )
    for job in study.jobs():
        pretend(job, val_loss={"1000": 3.0, "2000": 2.0, "4000": 1.0}[job.config.tokens])
    changes = {(r.architecture, r.budget): r.change and r.change.mean for r in outcome(study).rows}
    assert changes == pytest.approx(
        {("gpt+", "1k"): 0.5, ("gpt+", "2k"): None, ("gpt+", "4k"): -0.5}
        | {("angpt", "1k"): 0.5, ("angpt", "2k"): 0.0, ("angpt", "4k"): -0.5}
    )


def test_the_interval_of_a_change():
    """Against its definition: exp of the difference of mean logs, ± t · s · sqrt(1/n + 1/m)."""
    spread = Deviation(0.01, 3)
    found = change([2.0, 2.1], [1.9, 2.0, 2.2], spread, spread)
    log = (math.log(2.0) + math.log(2.1)) / 2 - (math.log(1.9) + math.log(2.0) + math.log(2.2)) / 3
    half = 3.18244630528 * 0.01 * math.sqrt(1 / 2 + 1 / 3)
    assert found.mean == pytest.approx(math.exp(log) - 1)
    assert (found.low, found.high) == pytest.approx((math.exp(log - half) - 1, math.exp(log + half) - 1))
    assert change([2.0], [1.0], Deviation(0.0, 0), Deviation(0.0, 0)).low is None


def test_changes_between_groups_of_different_spread_are_welchs():
    one, two = np.exp([0.1, 0.3, 0.35]), np.exp([0.0, 0.01, 0.02, 0.015])
    found = change(one, two, pooled_deviation([one]), pooled_deviation([two]))
    low, high = stats.ttest_ind(np.log(one), np.log(two), equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((math.expm1(low), math.expm1(high)))


def test_a_wild_variant_does_not_widen_the_others():
    rng = np.random.default_rng(0)
    covered, widths, told = 0, [], 0
    for _ in range(300):
        calm = [np.exp(rng.normal(0.001 * i, 0.003, 3)) for i in range(8)]
        wild = [np.exp(rng.normal(1.0, 0.2, 3)) for _ in range(2)]
        found = deviations([*calm, *wild])
        told += found[8] != found[0] != found[9]
        interval = change(calm[5], calm[0], found[5], found[0])
        covered += interval.low <= math.expm1(0.005) <= interval.high
        widths.append(interval.high - interval.low)
    assert 0.92 * 300 <= covered <= 0.98 * 300
    assert np.median(widths) == pytest.approx(2 * 2.12 * 0.003 * math.sqrt(2 / 3), rel=0.1)
    assert told > 0.9 * 300


def test_where_nothing_is_wild_all_is_pooled():
    rng = np.random.default_rng(1)
    alone = 0
    for _ in range(200):
        groups = [np.exp(rng.normal(0, 0.01, 3)) for _ in range(10)]
        found = deviations(groups)
        alone += found != [pooled_deviation(groups)] * 10
    assert alone <= 2
    assert deviations([]) == []
    assert deviations([[2.0], []]) == [Deviation(0.0, 0)] * 2
    assert deviations([[2.0, 2.0], [3.0, 3.1]]) == [pooled_deviation([[2.0, 2.0], [3.0, 3.1]])] * 2
