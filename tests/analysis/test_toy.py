import math

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from angpt.analysis import toy


@pytest.mark.parametrize("kappa", [1.0, 3.0, 40.0])
def test_the_best_rate_gives_the_contraction_of_the_paper(kappa):
    eigenvalues = toy.spectrum(kappa)
    rate = toy.best_rate(eigenvalues)
    slow = max(abs(1 - rate * value) for value in eigenvalues)
    assert toy.best_contraction(kappa) == pytest.approx(slow, abs=1e-12)
    assert toy.measured_contraction(eigenvalues, rate) == pytest.approx(slow, abs=1e-6)
    for worse in (0.97 * rate, 1.02 * rate):
        assert max(abs(1 - worse * value) for value in eigenvalues) >= slow


def test_rates_above_two_over_the_largest_eigenvalue_diverge():
    eigenvalues = toy.spectrum(10.0)
    assert toy.descend(eigenvalues, 0.99 * 2 / 10, 500)[-1] < 1e-2
    assert toy.descend(eigenvalues, 1.01 * 2 / 10, 500)[-1] > 1e2


def test_normalized_columns_have_condition_number_1():
    assert toy.preconditioned(np.array([0.1, 3.0, 50.0])) == pytest.approx([1, 1, 1])
    assert toy.measured_contraction(toy.preconditioned(toy.spectrum(100.0)), 1.0) == 0


def test_the_sum_grows_with_the_root_of_the_depth_and_the_factor_keeps_it_at_1():
    growth = toy.residual_growth(50, d=512, samples=200, alpha=0.3)
    depth = np.arange(1, 51)
    assert growth.summed.numpy() == pytest.approx(np.sqrt(depth), rel=0.02)
    assert growth.normalized.numpy() == pytest.approx(np.ones(50), rel=0.02)
    # ‖h‖² → (1−α)² ‖h‖² + α², from 1
    square, expected = 1.0, []
    for _ in depth:
        expected.append(math.sqrt(square))
        square = 0.49 * square + 0.09
    assert growth.interpolated.numpy() == pytest.approx(expected, rel=0.02)


def test_both_figures_are_written_and_say_what_they_show(tmp_path):
    paths = toy.write_figures(tmp_path / "new" / "figures")
    assert [path.name for path in paths] == ["toy-preconditioning.png", "toy-residual.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    rows = toy.residual_chart(layers=8, d=64, samples=16).rows
    assert len(rows) == 8
    assert rows[3][:2] == (4, 2.0)
