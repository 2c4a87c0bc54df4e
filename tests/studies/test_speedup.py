import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from angpt.stats import Deviation, pooled_deviation
from angpt.studies import speedup
from angpt.studies.speedup import falling
from tests.intervals import check_intervals

NONE = Deviation(0.0, 0)


def point(uses, losses):
    return speedup.CurvePoint(tuple(uses), tuple(losses), NONE, NONE)


def speed_up(curve, other, losses, uses):
    """With these deviations between seeds at all points."""
    points = [replace(p, loss_deviation=losses, use_deviation=uses) for p in (*curve, other)]
    return speedup.speed_up(points[:-1], points[-1])


EXACT = Deviation(0.0, 100)
BUDGETS = (5e9, 1e10, 2e10, 4e10, 7e10)


def loss(tokens, exponent=0.05):
    return 2.7 * (tokens / 1e10) ** -exponent


def baseline(noise=lambda: 0.0, seeds=1):
    return [point((t,) * seeds, tuple(loss(t) * math.exp(noise()) for _ in range(seeds))) for t in BUDGETS]


@pytest.mark.parametrize("true", [1.0, 1.1, 1.4, 2.0, 0.8])
@pytest.mark.parametrize("used", [1e10, 1.7e10, 2e10])
def test_a_known_speed_up_is_found(true, used):
    found = speed_up(baseline(), point((used,), (loss(true * used),)), NONE, NONE)
    assert found.relation == "="
    assert found.value == pytest.approx(true, rel=0.01)


def test_a_curve_with_a_floor_is_found_to_two_per_cent():
    """L = E + A·T^−a is no straight line in log-log: between budgets a factor of two apart its bend costs 1.3 %."""
    floor = lambda t: 1.8 + 0.9 * (t / 1e10) ** -0.3  # noqa: E731
    curve = [point((t,), (floor(t),)) for t in BUDGETS]
    for used in (1e10, 1.5e10, 2e10):
        assert speed_up(curve, point((used,), (floor(1.4 * used),)), NONE, NONE).value == pytest.approx(1.4, rel=0.02)


def test_the_interval_covers_the_truth():
    rng = np.random.default_rng(0)
    sigma, true, seeds, covered, widths = 0.004, 1.4, 3, 0, []
    for _ in range(300):
        noise = lambda: float(rng.normal(0, sigma))  # noqa: E731
        base = baseline(noise, seeds)
        other = point((1e10,) * seeds, tuple(loss(true * 1e10) * math.exp(noise()) for _ in range(seeds)))
        found = speed_up(base, other, pooled_deviation([p.losses for p in [*base, other]]), EXACT)
        covered += found.low <= true <= found.high
        widths.append(found.high - found.low)
    assert 0.90 * 300 <= covered <= 0.985 * 300  # an interval that always covers is no interval of 95 %
    assert np.mean(widths) < 0.6


def test_the_interval_covers_the_truth_when_the_clock_is_noisy():
    rng = np.random.default_rng(1)
    sigma, clock, true, seeds, trials = 0.004, 0.03, 1.4, 3, []

    def noisy(used, tokens):
        uses = used * np.exp(rng.normal(0, clock, seeds))
        return point(uses, loss(tokens) * np.exp(rng.normal(0, sigma, seeds)))

    for _ in range(300):
        base, other = [noisy(t, t) for t in BUDGETS], noisy(1e10, true * 1e10)
        every = [*base, other]
        deviations = pooled_deviation([p.losses for p in every]), pooled_deviation([p.uses for p in every])
        trials.append([speed_up(base, other, *deviations)])
    check_intervals(trials, [true], hits=0.90 * 300)
    assert sum(found.low <= true <= found.high for (found,) in trials) <= 0.99 * 300


def test_outside_of_the_curve_it_is_a_bound():
    better = speed_up(baseline(), point((2e10,), (loss(1e12),)), NONE, NONE)
    assert (better.relation, better.value) == (">", pytest.approx(3.5))
    assert better.low is better.high is None
    worse = speed_up(baseline(), point((2e10,), (loss(1e9),)), NONE, NONE)
    assert (worse.relation, worse.value) == ("<", pytest.approx(0.25))


def test_a_bound_allows_for_noise():
    """A loss just below that of the longest runs of the baseline, by less than noise explains, is worth a point of the
    curve before its end."""
    deviation, clear = Deviation(0.004, 10), Deviation(1e-9, 10)
    curve, other = baseline(seeds=3), point((2e10,) * 3, (loss(7e10) * math.exp(-0.001),) * 3)
    assert speed_up(curve, other, clear, EXACT).value == pytest.approx(3.5)
    found = speed_up(curve, other, deviation, EXACT)
    half = stats.t.ppf(0.975, 10) * 0.004 * math.sqrt(2 / 3)
    on_the_curve = 7e10 * math.exp((0.001 - half) / 0.05)  # where the law has this loss
    assert (found.relation, found.value) == (">", pytest.approx(on_the_curve / 2e10, rel=1e-6))
    slow = speed_up(curve, other, deviation, Deviation(0.03, 10))
    assert slow.value == pytest.approx(found.value * math.exp(-stats.t.ppf(0.975, 10) * 0.03 * math.sqrt(2 / 3)))
    worse = point((2e10,) * 3, (loss(5e9) * math.exp(0.001),) * 3)
    below = speed_up(curve, worse, deviation, EXACT)
    assert (below.relation, below.value) == ("<", pytest.approx(5e9 * math.exp((half - 0.001) / 0.05) / 2e10, rel=1e-6))
    assert speed_up(curve, other, Deviation(0.4, 10), EXACT) is None  # noise larger than the curve
    assert speed_up(curve[:1], point((5e9,), (loss(5e9) * 0.999,)), deviation, EXACT) is None


def test_bounds_hold_in_39_of_40_cases():
    """Runs as good as those of the baseline, just shorter than its longest, look better in many cases, but have a bound
    above 1 in about 2.5 % of them."""
    rng = np.random.default_rng(0)
    sigma, wrong, cases = 0.004, 0, 2000
    for _ in range(cases):
        noise = lambda: float(rng.normal(0, sigma))  # noqa: E731
        other = point((6.9e10,) * 3, tuple(loss(6.9e10) * math.exp(noise()) for _ in range(3)))
        found = speed_up(baseline(noise, 3), other, Deviation(sigma, 100), EXACT)
        wrong += found.relation == ">" and found.value > 1
    assert 0.005 * cases < wrong < 0.03 * cases


def test_one_budget_gives_bounds_only():
    single = [point((1e10,), (2.7,))]
    assert speed_up(single, point((1e10,), (2.6,)), NONE, NONE).relation == ">"
    assert speed_up(single, point((1e10,), (2.8,)), NONE, NONE).relation == "<"
    assert speed_up([], point((1e10,), (2.8,)), NONE, NONE) is None


def test_a_budget_that_did_not_help_is_left_out():
    points = [point((2,), (3.0,)), point((1,), (4.0,)), point((4,), (3.1,)), point((8,), (2.5,))]
    assert [p.uses[0] for p in falling(points)] == [1, 2, 8]
