import importlib.util
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from angpt.fits.binned import Binned, fit_binned
from tests.fits.synthetic import LAW, MODELS, MULTIPLES, REFIT, Law, grid, multiples

ROOT = Path(__file__).parents[2]
LAWS = [LAW, REFIT, Law(a=0.5, b=0.2, A=3000, B=60), Law(a=0.2, b=0.5, A=30, B=40_000)]


def test_the_best_run_of_each_bin():
    """A loop over the bins, and numpy's regression."""
    sample = grid(LAW, np.geomspace(2e7, 4e9, 10), np.geomspace(3e18, 3e21, 40), 0.003)
    x, chosen = np.log(sample.compute), []
    edges = np.linspace(x.min(), x.max(), 101)
    for low, high in itertools.pairwise(edges):
        inside = [i for i in range(len(x)) if low <= x[i] < high or (x[i] == high == x.max())]
        if inside:
            chosen.append(min(inside, key=lambda i: sample.log_loss[i]))
    found = fit_binned(sample, 100)
    assert sorted(found.runs.compute) == pytest.approx(sorted(sample.compute[chosen]))
    slope, constant = np.polyfit(x[chosen], np.log(sample.parameters[chosen]), 1)
    assert found.parameters.exponent == pytest.approx(slope)
    assert math.log(found.parameters.prefactor.mean) == pytest.approx(constant)
    assert found.loss.exponent == pytest.approx(np.polyfit(x[chosen], sample.log_loss[chosen], 1)[0])


def test_the_papers_design_determines_the_result():
    """Four laws, whose exponents of N_opt go from 0.29 to 0.71, and random losses."""
    samples = [multiples(law, MODELS, MULTIPLES, 0.003, i) for i, law in enumerate(LAWS)]
    samples.append(multiples(Law(3.0, 0.0, 0.0), MODELS, MULTIPLES, 0.5))
    found = [fit_binned(sample) for sample in samples]
    assert {f.alone for f in found} == {30}
    for f in found:
        assert f.parameters.exponent == pytest.approx(0.4484, abs=5e-5)
        assert f.tokens.exponent == pytest.approx(1 - 0.4484, abs=5e-5)
        assert "any losses give α_N = 0.4484" in f.notes[0]
    assert max(law.exponents["parameters"] for law in LAWS) - min(law.exponents["parameters"] for law in LAWS) > 0.4


def test_bins_with_a_choice_are_counted():
    found = fit_binned(grid(LAW, np.geomspace(2e7, 4e9, 10), np.geomspace(3e18, 3e21, 9)))
    assert found.alone == 0
    assert "0 of 9 bins hold one run" in found.notes[0]
    assert found.parameters.exponent == pytest.approx(LAW.exponents["parameters"], abs=0.08)


def test_too_few_bins():
    assert not isinstance(fit_binned(grid(LAW, [1e8, 2e8], [1e20, 2e20])), Binned)


def test_the_page_shows_what_its_script_prints():
    spec = importlib.util.spec_from_file_location("table_j1", ROOT / "experiments" / "table_j1.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "table-j1.md").read_text(encoding="utf-8")
    for line in [*module.synthetic(), *module.published()]:
        assert line in page
