import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from angpt.stats import (
    Deviation,
    Interval,
    correlation,
    deviations,
    difference,
    edge,
    geometric_mean,
    holm,
    mean_interval,
    pooled_deviation,
    relative_change,
    seed_difference,
    welch,
)


def test_differences_are_told_from_noise():
    rng = np.random.default_rng(2)
    wrong = right = 0
    for _ in range(300):
        groups = [np.exp(rng.normal(mean, 0.01, size=3)) for mean in (1.0, 1.0, 1.03)]
        deviation = pooled_deviation(groups)
        same, other = (relative_change(groups[0], group, deviation, deviation) for group in groups[1:])
        wrong += not same.covers(0)
        right += not other.covers(0)
    assert wrong < 0.08 * 300
    assert right > 0.7 * 300
    assert relative_change([1.0], [2.0], Deviation(0.0, 0), Deviation(0.0, 0)) == Interval(-0.5, n=1)


def test_pooled_deviation():
    rng = np.random.default_rng(0)
    groups = [np.exp(rng.normal(i, 0.02, size=3)) for i in range(400)]
    found = pooled_deviation(groups)
    assert found.freedom == 800
    assert found.value == pytest.approx(0.02, rel=0.05)
    assert pooled_deviation([[1.0], [2.0]]).half_width(1) is None


def test_means():
    found = geometric_mean([2.0, 8.0], Deviation(0.1, 4))
    assert found.mean == pytest.approx(4)
    assert math.log(found.high / found.mean) == pytest.approx(2.776 * 0.1 / math.sqrt(2), rel=1e-3)
    assert geometric_mean([2.0], Deviation(0.0, 0)) == Interval(2.0, n=1)
    plain = mean_interval([1.0, 2.0, 3.0])
    assert plain.mean == 2
    assert plain.high - 2 == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert mean_interval([1.0]).low is None


def test_the_interval_of_a_change():
    """Compared with its definition: exp of the difference of mean logs, ± t · s · sqrt(1/n + 1/m)."""
    spread = Deviation(0.01, 3)
    found = relative_change([2.0, 2.1], [1.9, 2.0, 2.2], spread, spread)
    log = (math.log(2.0) + math.log(2.1)) / 2 - (math.log(1.9) + math.log(2.0) + math.log(2.2)) / 3
    half = 3.18244630528 * 0.01 * math.sqrt(1 / 2 + 1 / 3)
    assert found.mean == pytest.approx(math.exp(log) - 1)
    assert (found.low, found.high) == pytest.approx((math.exp(log - half) - 1, math.exp(log + half) - 1))
    assert relative_change([2.0], [1.0], Deviation(0.0, 0), Deviation(0.0, 0)).low is None


def test_changes_between_groups_of_different_spread_are_welchs():
    one, two = np.exp([0.1, 0.3, 0.35]), np.exp([0.0, 0.01, 0.02, 0.015])
    found = relative_change(one, two, pooled_deviation([one]), pooled_deviation([two]))
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
        interval = relative_change(calm[5], calm[0], found[5], found[0])
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


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        ([3, 2, 1], (2, 1)),
        ([1, 2, 3], (0, -1)),
        ([2, 1, 3], (1, 0)),
        ([1, 1, 2], (1, 0)),
        ([2, 1, 1], (1, 0)),
        ([1, 2, 1], (0, -1)),
        ([1, 1], (0, -1)),
        ([1], (0, 0)),
    ],
)
def test_edges(y, expected):
    assert edge(y) == expected


def test_welch_is_that_of_scipy():
    rng = np.random.default_rng(0)
    one, two = rng.normal(0, 1, 8), rng.normal(1, 3, 5)
    parts = [(v.mean(), v.std(ddof=1) / math.sqrt(len(v)), len(v) - 1) for v in (one, two)]
    expected = stats.ttest_ind(two, one, equal_var=False)
    found = difference(*parts)
    interval = expected.confidence_interval(0.95)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.estimate.low, found.estimate.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("pooled", [True, False])
def test_a_difference_over_seeds_is_that_of_scipy(pooled):
    """For equal numbers of seeds and nearly equal losses, of which the logarithms vary like the losses over their mean:
    Student's test with one deviation, Welch's with two."""
    one, two = [3.486, 3.491, 3.480], [3.485, 3.489, 3.495]
    spreads = [pooled_deviation([one, two])] * 2 if pooled else [pooled_deviation([x]) for x in (one, two)]
    found, expected = seed_difference(one, two, *spreads), stats.ttest_ind(two, one, equal_var=pooled)
    assert found.p_value == pytest.approx(expected.pvalue, rel=5e-3)
    interval = expected.confidence_interval()
    assert (found.estimate.low, found.estimate.high) == pytest.approx((interval.low, interval.high), rel=5e-3)
    assert seed_difference([3.0], [2.0], Deviation(0.0, 0), Deviation(0.0, 0)).p_value is None


def test_holms_correction():
    """An obvious restatement: the k-th smallest is multiplied by the number of those that are not smaller."""
    p_values = [0.01, 0.04, 0.03, 0.005]
    assert holm(p_values) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(p_values, tests=12) == pytest.approx([0.11, 0.36, 0.3, 0.06])
    rng = np.random.default_rng(0)
    for _ in range(50):
        p_values = rng.uniform(0, 0.2, size=7).tolist()
        order = sorted(p_values)
        expected = [max(min(1, (7 - k) * order[k]) for k in range(order.index(p) + 1)) for p in p_values]
        assert holm(p_values) == pytest.approx(expected)


def test_a_difference_without_freedom_says_so():
    assert welch([(0.1, 3), (0.0, 0)])[1] == 0
    found = difference((1.0, 0.1, 3), (2.0, 0.0, 0))
    assert (found.estimate, found.p_value) == (Interval(1.0), None)
    assert difference((1.0, 0.0, 3), (1.0, 0.0, 3)).p_value == 1.0


def test_correlation():
    assert math.isnan(correlation([1, 2, math.nan, 4], [1, 3, 2, 5], ranks=True))
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert correlation([1.0, 2, 4], [3.0, 1, 0]) == pytest.approx(-39 / 42)
    assert correlation([1.0, 2, 40], [3.0, 1, 0], ranks=True) == pytest.approx(-1)
    assert correlation([1, 1, 2, 3], [1, 2, 2, 4], ranks=True) == pytest.approx(7.5 / 9)  # ties share their mean rank
    for ranks in (False, True):
        assert correlation([1, 2, 3], [1, 1, 1], ranks) is correlation([1], [1], ranks) is None


IMPORT = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # an import of these is an error now
import angpt.stats
for package in map(importlib.import_module, sys.argv[2].split(",")):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if found.name != "angpt.fits.rules":  # which writes the rules of training
            importlib.import_module(found.name)
"""


@pytest.mark.parametrize(
    ("hidden", "packages"),
    [("tyro,rich", "angpt.present,angpt.fits"), ("scipy,tyro,torch", "angpt.present")],
)
def test_statistics_fits_and_charts_need_no_command_line(hidden, packages):
    made = subprocess.run([sys.executable, "-c", IMPORT, hidden, packages], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
