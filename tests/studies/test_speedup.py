import math

import numpy as np
import pytest

from angpt.studies.speedup import Deviation, Point, differ, falling, mean_loss, mean_of, pooled_deviation, speed_up
from tests.intervals import check_intervals

NONE = Deviation(0.0, 0)
EXACT = Deviation(0.0, 100)
BUDGETS = (5e9, 1e10, 2e10, 4e10, 7e10)


def loss(tokens, exponent=0.05):
    return 2.7 * (tokens / 1e10) ** -exponent


def baseline(noise=lambda: 0.0, seeds=1):
    return [Point((t,) * seeds, tuple(loss(t) * math.exp(noise()) for _ in range(seeds))) for t in BUDGETS]


@pytest.mark.parametrize("true", [1.0, 1.1, 1.4, 2.0, 0.8])
@pytest.mark.parametrize("used", [1e10, 1.7e10, 2e10])
def test_a_known_speed_up_is_found(true, used):
    found = speed_up(baseline(), Point((used,), (loss(true * used),)), NONE, NONE)
    assert found.relation == "="
    assert found.value == pytest.approx(true, rel=0.01)


def test_a_curve_with_a_floor_is_found_to_two_per_cent():
    """L = E + A·T^−a is no straight line in log-log: between budgets a factor of two apart its bend costs 1.3 %."""
    floor = lambda t: 1.8 + 0.9 * (t / 1e10) ** -0.3  # noqa: E731
    curve = [Point((t,), (floor(t),)) for t in BUDGETS]
    for used in (1e10, 1.5e10, 2e10):
        assert speed_up(curve, Point((used,), (floor(1.4 * used),)), NONE, NONE).value == pytest.approx(1.4, rel=0.02)


def test_the_interval_covers_the_truth():
    rng = np.random.default_rng(0)
    sigma, true, seeds, covered, widths = 0.004, 1.4, 3, 0, []
    for _ in range(300):
        noise = lambda: float(rng.normal(0, sigma))  # noqa: E731
        base = baseline(noise, seeds)
        other = Point((1e10,) * seeds, tuple(loss(true * 1e10) * math.exp(noise()) for _ in range(seeds)))
        found = speed_up(base, other, pooled_deviation([p.losses for p in [*base, other]]), EXACT)
        covered += found.low <= true <= found.high
        widths.append(found.high - found.low)
    assert 0.90 * 300 <= covered <= 0.985 * 300  # an interval that always covers is no interval of 95 %
    assert np.mean(widths) < 0.6


def test_the_interval_covers_the_truth_when_the_clock_is_noisy():
    rng = np.random.default_rng(1)
    sigma, clock, true, seeds, trials = 0.004, 0.03, 1.4, 3, []

    def point(used, tokens):
        uses = used * np.exp(rng.normal(0, clock, seeds))
        return Point(tuple(uses), tuple(loss(tokens) * np.exp(rng.normal(0, sigma, seeds))))

    for _ in range(300):
        base, other = [point(t, t) for t in BUDGETS], point(1e10, true * 1e10)
        every = [*base, other]
        deviations = pooled_deviation([p.losses for p in every]), pooled_deviation([p.uses for p in every])
        trials.append([speed_up(base, other, *deviations)])
    check_intervals(trials, [true], hits=0.90 * 300)
    assert sum(found.low <= true <= found.high for (found,) in trials) <= 0.99 * 300


def test_differences_are_told_from_noise():
    rng = np.random.default_rng(2)
    wrong = right = 0
    for _ in range(300):
        groups = [np.exp(rng.normal(mean, 0.01, size=3)) for mean in (1.0, 1.0, 1.03)]
        deviation = pooled_deviation(groups)
        wrong += differ(groups[0], groups[1], deviation)
        right += differ(groups[0], groups[2], deviation)
    assert wrong < 0.08 * 300
    assert right > 0.7 * 300
    assert differ([1.0], [2.0], pooled_deviation([[1.0], [2.0]])) is None


def test_outside_of_the_curve_it_is_a_bound():
    better = speed_up(baseline(), Point((2e10,), (loss(1e12),)), NONE, NONE)
    assert (better.relation, better.value) == (">", pytest.approx(3.5))
    assert better.low is better.high is None
    worse = speed_up(baseline(), Point((2e10,), (loss(1e9),)), NONE, NONE)
    assert (worse.relation, worse.value) == ("<", pytest.approx(0.25))


def test_one_budget_gives_bounds_only():
    single = [Point((1e10,), (2.7,))]
    assert speed_up(single, Point((1e10,), (2.6,)), NONE, NONE).relation == ">"
    assert speed_up(single, Point((1e10,), (2.8,)), NONE, NONE).relation == "<"
    assert speed_up([], Point((1e10,), (2.8,)), NONE, NONE) is None


def test_a_budget_that_did_not_help_is_left_out():
    points = [Point((2,), (3.0,)), Point((1,), (4.0,)), Point((4,), (3.1,)), Point((8,), (2.5,))]
    assert [p.uses[0] for p in falling(points)] == [1, 2, 8]


def test_pooled_deviation():
    rng = np.random.default_rng(0)
    groups = [np.exp(rng.normal(i, 0.02, size=3)) for i in range(400)]
    found = pooled_deviation(groups)
    assert found.freedom == 800
    assert found.value == pytest.approx(0.02, rel=0.05)
    assert pooled_deviation([[1.0], [2.0]]).half_width(1) is None


def test_means():
    found = mean_loss([2.0, 8.0], Deviation(0.1, 4))
    assert found.mean == pytest.approx(4)
    assert math.log(found.high / found.mean) == pytest.approx(2.776 * 0.1 / math.sqrt(2), rel=1e-3)
    assert (mean_loss([2.0], NONE).low, mean_loss([2.0], NONE).n) == (None, 1)
    plain = mean_of([1.0, 2.0, 3.0])
    assert plain.mean == 2
    assert plain.high - 2 == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert mean_of([1.0]).low is None
