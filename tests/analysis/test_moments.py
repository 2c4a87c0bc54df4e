import numpy as np
import pytest

from angpt.analysis import moments
from angpt.analysis.history import History


def history(steps, **values):
    records = [
        {"kind": "moments", "step": step, "tokens": 10 * step, **{name: v[i] for name, v in values.items()}}
        for i, step in enumerate(steps)
    ]
    return History.of(records)


def test_every_step_recorded_gives_the_formula_of_the_paper():
    variances = np.array([[3.0, 1.0], [1.0, 1.0], [4.0, 2.0], [2.0, 0.0]])
    found = moments.relative_variance(variances, np.array([1, 2, 3, 4]))
    for layer in (0, 1):
        for t in range(4):
            assert found[t, layer] == pytest.approx(variances[t, layer] / sum(variances[:, layer]), rel=1e-12)


def test_a_record_counts_for_the_steps_since_the_previous_one():
    """A variance that is constant between records gives the same as if every step had been recorded."""
    every = np.array([5.0, 2, 2, 2, 2, 7, 7, 7, 7, 7])
    dense = moments.relative_variance(every[:, None], np.arange(1, 11))
    sparse = moments.relative_variance(np.array([[5.0], [2.0], [7.0]]), np.array([1, 5, 10]))
    assert sparse[:, 0] == pytest.approx(dense[[0, 1, 5], 0], rel=1e-12)


def test_a_matrix_that_never_moves_has_no_variance():
    assert (moments.relative_variance(np.zeros((3, 2)), np.array([1, 2, 3])) == 0).all()


def test_planted_series():
    """The variance of layer 1 is high in steps 1 to 5 of 100, that of layer 2 is constant."""
    steps = (1, 5, *range(10, 101, 5))
    first = [10.0 if step <= 5 else 1.0 for step in steps]
    found = moments.measure(history(steps, W_p=[[v, 2.0] for v in first], W_e=[1.0] * len(steps)), warmup=0.1)
    groups = {g.group: g for g in found.groups}
    total = 5 * 10 + 95 * 1
    assert (found.total_steps, found.warmup, found.steps) == (100, 0.1, steps)
    w_p = groups["W_p"]
    assert w_p.relative[0] == pytest.approx((10 / total, 1 / 100))
    assert w_p.relative[-1] == pytest.approx((1 / total, 1 / 100))
    assert w_p.peak == pytest.approx(100 * (10 / total + 1 / 100) / 2)
    assert w_p.peak_at == 0.01
    assert w_p.early == pytest.approx(((5 * 10 + 5 * 1) / total + 0.1) / 2)
    one, two = (10 / total + 0.01) / 2, (1 / total + 0.01) / 2
    expected = (5 * (10 / total - 0.01) / 2 / one + 95 * abs(1 / total - 0.01) / 2 / two) / 100
    assert w_p.spread == pytest.approx(expected)
    assert (groups["W_e"].early, groups["W_e"].peak, groups["W_e"].spread) == pytest.approx((0.1, 1.0, 0.0))


def test_the_border_of_the_first_tenth_may_lie_inside_a_record():
    found = moments.measure(history((1, 6, 12, 24), W_e=[1.0, 1.0, 1.0, 1.0]), warmup=0.0)
    assert found.groups[0].early == pytest.approx(0.1)


def test_a_run_without_records_has_no_moments():
    assert moments.measure(History(), 0.1) is None
