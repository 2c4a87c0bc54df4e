import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angpt.studies.search import beyond, grow, optimum, side

INF = math.inf


def bowl(centre, batch_centre=1024.0, slope=0.5):
    """A loss with its minimum at a batch size, whose best rate moves with the batch."""

    def loss(batch, lr):
        best = centre * (batch / batch_centre) ** slope
        return 2 + math.log(lr / best) ** 2 + 0.3 * math.log(batch / batch_centre) ** 2

    return loss


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1: 3.0, 2: 2.0, 4: 3.0}, 0),
        ({1: 1.0, 2: 2.0, 4: 3.0}, -1),
        ({4: 1.0, 2: 2.0, 1: 3.0}, 1),
        ({1: 2.0, 2: 2.0, 4: 3.0}, 0),  # as good inside
        ({1: 3.0, 2: 2.0, 4: INF}, 0),  # what diverges is a worse neighbour
        ({1: 3.0}, 0),
        ({1: 2.0, 2: 3.0}, -1),
    ],
)
def test_sides(losses, expected):
    assert side(losses) == expected


@pytest.mark.parametrize(
    ("losses", "limits", "expected"),
    [
        ({1.0: 1.0, 3.0: 2.0}, (0.1, 100), 1 / 3),
        ({1.0: 1.0, 3.0: 2.0}, (0.5, 100), None),
        ({1.0: 2.0, 3.0: 1.0}, (0.1, 9.0), 9.0),  # the limit belongs to it
        ({1.0: 2.0, 3.0: 1.0}, (0.1, 8.9), None),
        ({1.0: 2.0, 3.0: 1.0}, (), None),
        ({1.0: 3.0, 2.0: 2.5, 8.0: 2.0}, (0.1, 100), 32.0),  # by the ratio at that edge
        ({1.0: INF, 2.0: INF}, (0.1, 100), 0.5),  # all diverged: lower
        ({1.0: 2.0}, (0.1, 100), None),  # no ratio
        ({1.0: 3.0, 2.0: 2.0, 4.0: 2.5}, (0.1, 100), None),
    ],
)
def test_the_next_value(losses, limits, expected):
    assert beyond(losses, limits) == (None if expected is None else pytest.approx(expected))


@given(st.floats(1e-4, 1e-1), st.floats(200, 9000))
def test_a_grid_grows_until_its_best_point_is_inside(centre, batch_centre):
    loss = bowl(centre, batch_centre)
    start = {batch: [0.002, 0.004, 0.008] for batch in (512, 1024)}
    lines = grow(start, loss, (1e-6, 10), (32, 1_000_000), context=32)
    best = optimum(lines, loss)
    assert (best.lr_side, best.batch_side) == (0, 0)
    # No point of the whole lattice is better than those that were tried.
    lattice = [(32 * 2**i, 0.002 * 2.0**j) for i in range(14) for j in range(-9, 10)]
    assert best.loss <= min(loss(b, r) for b, r in lattice) + 0.02  # rates are rounded to three digits
    for batch, rates in lines.items():
        assert batch % 32 == 0
        assert len(rates) >= 3
        assert all(b / a == pytest.approx(2, rel=0.01) for a, b in itertools.pairwise(rates))


def test_it_ends_at_its_limits():
    loss = bowl(1.0, 1e6)
    lines = grow({512: [0.01, 0.02], 1024: [0.01, 0.02]}, loss, (0.001, 0.05), (512, 2048), context=32)
    assert lines == {512: [0.01, 0.02, 0.04], 1024: [0.01, 0.02, 0.04], 2048: [0.01, 0.02, 0.04]}
    best = optimum(lines, loss)
    assert (best.batch, best.lr, best.batch_side, best.lr_side) == (2048, 0.04, 1, 1)


def test_without_limits_it_stays():
    start = {512: [0.01, 0.02], 1024: [0.01, 0.02]}
    assert grow(start, bowl(1.0), (), (), 32) == start


def test_nothing_is_decided_on_losses_that_are_not_known():
    """Only the line that is complete grows, and batch sizes only once all lines are settled."""
    whole = bowl(1e-4, 1e5)
    known = {(512, 0.01), (512, 0.02), (1024, 0.01)}
    lines = grow(
        {512: [0.01, 0.02], 1024: [0.01, 0.02]},
        lambda b, r: whole(b, r) if (b, r) in known else None,
        (1e-5, 1),
        (512, 1e6),
        32,
    )
    assert lines == {512: [0.005, 0.01, 0.02], 1024: [0.01, 0.02]}


@given(st.permutations(range(40)))
def test_the_order_in_which_runs_end_does_not_matter(order):
    """Runs end one after the other in any order; the study that comes of it is the same."""
    loss = bowl(0.03, 4000)
    start = {512: [0.002, 0.004], 1024: [0.002, 0.004]}
    whole = grow(start, loss, (1e-4, 1), (128, 65_536), 32)
    done = set()
    rank = {}
    while True:
        lines = grow(start, lambda b, r: loss(b, r) if (b, r) in done else None, (1e-4, 1), (128, 65_536), 32)
        left = [(b, r) for b, rates in lines.items() for r in rates if (b, r) not in done]
        if not left:
            break
        for point in left:
            rank.setdefault(point, order[len(rank) % len(order)])
        done.add(min(left, key=lambda p: (rank[p], p)))
    assert lines == whole


def test_divergence_bounds_a_grid_from_above():
    loss = lambda b, r: INF if r > 0.01 else 1 / r  # noqa: E731
    lines = grow({32: [0.02, 0.04, 0.08]}, loss, (1e-4, 1), (), 32)
    assert lines == {32: [0.005, 0.01, 0.02, 0.04, 0.08]}
    assert optimum(lines, loss).lr_side == 0


def test_where_everything_diverges_there_is_no_optimum():
    lines = grow({32: [0.02, 0.04], 64: [0.02, 0.04]}, lambda b, r: INF, (0.004, 1), (32, 1024), 32)
    assert lines == {b: [0.005, 0.01, 0.02, 0.04] for b in (32, 64)}
    assert optimum(lines, lambda b, r: INF) is None
    assert optimum(lines, lambda b, r: None) is None


def test_a_ratio_near_one_ends():
    assert grow({32: [0.1, 0.10001]}, lambda b, r: r, (1e-4, 1), (), 32) == {32: [0.1, 0.10001]}


def test_a_new_batch_begins_around_the_best_rate_of_its_neighbour():
    loss = bowl(0.01, 1e4, slope=0.0)
    lines = grow({512: [0.001, 0.002], 1024: [0.001, 0.002]}, loss, (1e-4, 1), (128, 2048), 32)
    assert lines[1024] == [0.001, 0.002, 0.004, 0.008, 0.016]
    assert lines[2048] == [0.004, 0.008, 0.016]
