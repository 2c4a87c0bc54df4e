"""docs/evidence/transfer: the files that describe its runs, the laws fitted to it, and the rules made of them."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from angpt.config import TrainConfig, preset
from angpt.fits.hparams import fit_hparams
from angpt.fits.reading import read_table
from angpt.serialization import read_toml
from angpt.studies.study import Study
from angpt.training.plan import make_plan, rule_for

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "docs" / "evidence" / "transfer"
FILES = sorted((ROOT / "experiments" / "evidence").glob("transfer-*.toml"))
ADAM, MUON = "angpt", "angpt:muon"


@pytest.fixture(scope="module")
def fit():
    return fit_hparams(read_table([RUNS], ("batch_tokens", "lr")))


@pytest.fixture(scope="module")
def laws(fit):
    return {trend.architecture: trend.lr for trend in fit.trends}


def settings(config):
    """What decides the loss of a run; the device and what follows from it may differ."""
    o, plan = config.optimizer, make_plan(config)
    rates = o.lr, o.adam_lr, o.momentum, o.beta1, o.beta2, o.eps, plan.config.optimizer.weight_decay, o.clip, o.final_lr
    return config.model, config.data, config.recipe, rates, plan.steps, plan.batch_tokens, config.seed


def test_the_files_describe_the_runs():
    """Every run is planned by one of the files, with the settings it was trained with, and no other is."""
    planned = {job.folder.name: job.config for path in FILES for job in Study.read(path, Path("nowhere")).jobs()}
    trained = {path.parent.name: read_toml(TrainConfig, path) for path in RUNS.glob("*/config.toml")}
    assert {name: settings(c) for name, c in planned.items()} == {name: settings(c) for name, c in trained.items()}
    assert len(trained) >= 48


@pytest.mark.parametrize("recipe", [ADAM, MUON])
def test_the_laws_are_least_squares_of_logarithms(laws, recipe):
    points = laws[recipe].points
    design = np.array([[1.0, *np.log(list(p.settings.values()))] for p in points])
    inverse, y = np.linalg.inv(design.T @ design), np.log([p.value for p in points])
    theta = inverse @ design.T @ y
    freedom = len(points) - 4
    errors = np.sqrt(np.sum((y - design @ theta) ** 2) / freedom * np.diag(inverse)) * stats.t.ppf(0.975, freedom)
    found = laws[recipe].law.exponents
    assert list(found) == ["parameters", "tokens", "batch_tokens"]
    assert [e.mean for e in found.values()] == pytest.approx(theta[1:], abs=1e-6)
    assert [e.high - e.mean for e in found.values()] == pytest.approx(errors[1:], rel=1e-5)


def test_the_laws_of_the_evidence(fit, laws):
    """The numbers of docs/hyperparameters.md. A best rate at the edge (Muon, 62M) is left out."""
    expected = {ADAM: (7, (-0.670, 0.007, 0.791)), MUON: (6, (0.079, -0.637, 1.149))}
    for recipe, (points, exponents) in expected.items():
        assert len(laws[recipe].points) == points
        assert [e.mean for e in laws[recipe].law.exponents.values()] == pytest.approx(exponents, abs=0.002)
    assert any("62.3M: batch of 65.5k tokens: the best rate, 0.0205, is at the low edge" in note for note in fit.notes)
    assert all(trend.batch_tokens is None for trend in fit.trends)


@pytest.mark.parametrize("recipe", [ADAM, MUON])
def test_the_rules_are_within_the_intervals_and_near_the_best_rates(laws, recipe):
    rule, intervals = rule_for(recipe), laws[recipe].law.exponents
    rounded = {"tokens": rule.lr_tokens_exponent, "batch_tokens": rule.lr_batch_exponent}
    for name, value in {**rounded, "parameters": rule.lr_exponents[0]}.items():
        assert intervals[name].low <= value <= intervals[name].high
    assert rule.lr_exponents[0] == rule.lr_exponents[1]
    for point in laws[recipe].points:
        assert 1 / 1.5 < rule.lr_at(*map(round, point.settings.values())) / point.value < 1.5


def test_the_rules_hold_where_they_were_measured_and_on_a_laptop():
    """32M and 100M tokens as measured; on a laptop, 0.1 to 0.2 and 0.016 were best (docs/hyperparameters.md)."""

    def rates(name, recipe, tokens):
        o = make_plan(dataclasses.replace(preset(name), tokens=tokens).with_recipe(recipe)).config.optimizer
        return o.lr, o.adam_lr

    assert rates("32M", MUON, "100M") == (0.031, 0.009)
    assert rates("32M", ADAM, "80M") == (0.0095, None)
    assert 0.1 < rates("laptop", MUON, "300k")[0] < 0.2
    assert rates("laptop", ADAM, "400k")[0] == pytest.approx(0.016, rel=0.1)


def test_the_table_of_the_docs_follows_from_the_runs(fit):
    spec = importlib.util.spec_from_file_location("transfer", ROOT / "experiments" / "transfer.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "hyperparameters.md").read_text(encoding="utf-8")
    assert f"\n\n{script.table(fit)}\n" in page
    assert script.replaced(page, script.table(fit)) == page
    assert script.replaced(page.replace("| law of 7M", "| ?"), script.table(fit)) == page
    found = {(p.target.architecture, round(p.target.parameters / 1e6), p.method): p for p in script.predictions(fit)}
    muon = found[MUON, 32, "law of 7M"]
    assert muon.best == pytest.approx(0.0578, rel=0.01)
    assert muon.lr / muon.best == pytest.approx(0.93, abs=0.01)
    sweep = muon.sweep
    x, y = np.log(sweep.lrs), np.log(sweep.losses)  # three rates, each twice the one before: a parabola
    assert muon.cost == pytest.approx(np.exp(np.polyval(np.polyfit(x, y, 2), np.log(muon.lr))) - sweep.minimum.loss)
    assert found[MUON, 32, "law of 7M and 14M"].cost is None  # beyond the highest rate tried
