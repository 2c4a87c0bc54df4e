import itertools
import re

import numpy as np
import pytest
from matplotlib.collections import PathCollection

from angpt.fits.compute import Counting
from angpt.fits.curve_figures import LEVELS, SIZES, isoflop_curves, parametric_law
from angpt.fits.hparam_figures import rates, sweeps, token_trends, trends
from angpt.fits.hparams import fit_hparams
from angpt.fits.records import Record, average
from angpt.fits.scaling import Options, fit_scaling
from angpt.fits.scaling_figures import loss_over_compute, optimal_sizes, savings
from angpt.present.charts import Absent
from angpt.present.style import styled
from angpt.present.words import scientific
from tests.fits.synthetic import MODELS, MULTIPLES, Law, Valley, isoflop_records, sweep_records
from tests.fits.test_parametric import chinchilla

LAWS = {"gpt+": Law(1.69, 420, 1200, 0.34, 0.335), "angpt": Law(1.69, 400, 1080, 0.34, 0.335)}


def paper_design():
    return [
        r
        for k, (name, law) in enumerate(LAWS.items())
        for i, n in enumerate(MODELS)
        for r in isoflop_records(law, [n], 6 * n**2 * np.array(MULTIPLES), 0.003, 10 * i + k, name)
    ]


def grid_design(sizes=12, computes=9):
    axes = np.geomspace(2e7, 4e9, sizes), np.geomspace(3e18, 1e21, computes)
    return [r for k, (name, law) in enumerate(LAWS.items()) for r in isoflop_records(law, *axes, 0.003, k, name)]


def read_runs():
    s = chinchilla()
    values = zip(s.parameters, s.tokens, np.exp(s.log_loss), strict=True)
    return [Record("x", "model", *map(float, v)) for v in values]


def fitted(records):
    return fit_scaling(average(records), Options(Counting(), bootstrap=50, paper=True))


@pytest.fixture(scope="module")
def fits():
    return {"paper": fitted(paper_design()), "grid": fitted(grid_design()), "read": fitted(read_runs())}


def texts(figure):
    found = [t.get_text() for legend in figure.legends for t in legend.get_texts()]
    for ax in figure.axes:
        found += [ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel(), *(t.get_text() for t in ax.texts)]
        found += [t.get_text() for axis in (ax.xaxis, ax.yaxis) for t in axis.get_ticklabels()]
        found += [t.get_text() for t in (ax.get_legend().get_texts() if ax.get_legend() else ())]
    return found


def curves(ax):
    """Lines with more than a few points, as functions of log x."""
    drawn = [line for line in ax.lines if len(line.get_xdata()) > 10 and line.get_linestyle() != "None"]
    lines = [(np.log(line.get_xdata()), np.log(line.get_ydata())) for line in drawn]
    return [line for line in lines if np.all(np.diff(line[0]) > 0)]


def check(figure):
    """No carets or computer notation, and no line on another."""
    figure.draw_without_rendering()
    words = " ".join(texts(figure))
    assert "^" not in words
    assert not re.search(r"\de[+-]?\d", words)
    for ax in figure.axes:
        for (x, y), (u, v) in itertools.combinations(curves(ax), 2):
            common = np.linspace(max(x[0], u[0]), min(x[-1], u[-1]), 20)
            if common[-1] > common[0]:
                apart = np.abs(np.interp(common, x, y) - np.interp(common, u, v))
                assert np.median(apart) > 0.003 * np.ptp(np.concatenate([y, v])), ax.get_title(loc="left")


@pytest.mark.parametrize("design", ["paper", "grid", "read"])
@pytest.mark.parametrize("make", [loss_over_compute, optimal_sizes, isoflop_curves, parametric_law, savings])
def test_figures_are_readable(fits, design, make):
    chart = make(fits[design])
    if isinstance(chart, Absent):  # no three sizes at one compute, or one architecture
        assert (design, chart.title) in {("paper", "IsoFLOP curves"), ("read", "Compute at equal loss")}
        return
    assert "^" not in chart.caption + chart.alt
    with styled():
        for narrow in (False, True) if design == "paper" else (False,):
            check(chart.draw(narrow))


def points(ax):
    return sum(len(c.get_offsets()) for c in ax.collections if isinstance(c, PathCollection))


def test_every_run_is_drawn_and_sizes_have_names(fits):
    with styled():
        (ax,) = loss_over_compute(fits["paper"]).draw(False).axes
    assert points(ax) == 60
    assert [t.get_text() for t in ax.texts] == ["32M", "62.2M", "127M", "247M", "506M", "1.07B"]
    areas = {float(a) for c in ax.collections if isinstance(c, PathCollection) for a in c.get_sizes()}
    assert len(areas) == 6
    with styled():
        ax, bar = loss_over_compute(fits["read"]).draw(False).axes
    assert points(ax) == 240
    assert bar.get_ylabel() == "parameters"


def test_optima_are_drawn_with_runs_bands_and_intervals(fits):
    with styled():
        axes = optimal_sizes(fits["grid"]).draw(False).axes
    for sizes, tokens, exponents in (axes[:3], axes[3:]):
        for ax in (sizes, tokens):
            assert points(ax) == 108
            assert len([c for c in ax.collections if not isinstance(c, PathCollection)]) == 1  # the band
        names = [t.get_text().replace("\n", " ") for t in exponents.get_yticklabels()]
        assert names == [
            "frontier regression",
            "IsoFLOP parabolas",
            "IsoFLOP interpolated",
            "parametric fit",
            "the paper's procedure",
        ]


def test_all_levels_are_shown_or_the_caption_says_which(fits):
    chart = isoflop_curves(fits["grid"])
    with styled():
        figure = chart.draw(False)
    for ax in figure.axes:
        assert len(ax.get_legend().get_texts()) == 9
    assert "evenly spaced" not in chart.caption
    many = fit_scaling(average(grid_design(8, 30)), Options(Counting(), bootstrap=0))
    assert f"Shown are {LEVELS} of up to 30 levels" in isoflop_curves(many).caption
    assert f"Shown are {SIZES} of up to " in parametric_law(fits["read"]).caption


def test_figures_of_hyper_parameters():
    one = fit_hparams(average(sweep_records(Valley(), MODELS[:4], 0.001)))
    two = fit_hparams(
        average(sweep_records(Valley(tokens=(0.4, -0.3)), MODELS[:3], 0.001, multiples=(5.0, 20.0, 60.0)))
    )
    with styled():
        for chart in (sweeps(one), rates(one), trends(one), sweeps(two), rates(two), token_trends(two)):
            assert "^" not in chart.caption
            figure = chart.draw(False)
            figure.draw_without_rendering()
            assert "^" not in " ".join(texts(figure))
        for ax in token_trends(two).draw(False).axes:
            assert [t.get_text() for t in ax.get_legend().get_texts()] == ["32M", "62.2M", "127M"]
            assert sum(len(line.get_xdata()) == 3 for line in ax.lines) == 3  # the optima of each size


@pytest.mark.parametrize(
    ("value", "text"), [(1e19, "10¹⁹"), (3.24e18, "3.2·10¹⁸"), (9.99e20, "10²¹"), (4.1e-5, "4.1·10⁻⁵")]
)
def test_powers_of_ten(value, text):
    assert scientific(value) == text
