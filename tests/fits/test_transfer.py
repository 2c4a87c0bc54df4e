"""docs/evidence/transfer and rates: the files that describe their runs, the laws fitted to them, and the rules."""

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
FIRST, LATER = (ROOT / "docs" / "evidence" / name for name in ("transfer", "rates"))
FILES = {FIRST: "transfer-*.toml", LATER: "rates-*.toml"}
ADAM, MUON = "angpt", "angpt:muon"


@pytest.fixture(scope="module")
def first():
    return fit_hparams(read_table([FIRST], ("batch_tokens", "lr")))


@pytest.fixture(scope="module")
def fit():
    return fit_hparams(read_table([FIRST, LATER], ("batch_tokens", "lr")))


@pytest.fixture(scope="module")
def laws(fit):
    return {trend.architecture: trend.lr for trend in fit.trends}


def settings(config):
    """What decides the loss of a run; the device and what follows from it may differ."""
    o, plan = config.optimizer, make_plan(config)
    rates = o.lr, o.adam_lr, o.momentum, o.beta1, o.beta2, o.eps, plan.config.optimizer.weight_decay, o.clip, o.final_lr
    return config.model.resolved(), config.data, config.recipe, rates, plan.steps, plan.batch_tokens, config.seed


@pytest.mark.parametrize(("runs", "count"), [(FIRST, 48), (LATER, 13)])
def test_the_files_describe_the_runs(runs, count):
    """Every run is planned by one of the files, with the settings it was trained with, and no other is."""
    files = (ROOT / "experiments" / "evidence").glob(FILES[runs])
    planned = {job.folder.name: job.config for path in files for job in Study.read(path, Path("nowhere")).jobs()}
    trained = {path.parent.name: read_toml(TrainConfig, path) for path in runs.glob("*/config.toml")}
    assert {name: settings(c) for name, c in planned.items()} == {name: settings(c) for name, c in trained.items()}
    assert len(trained) == count


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


def test_the_laws_of_the_evidence(fit, laws, first):
    """The numbers of docs/hyperparameters.md. A best rate at the edge of the first sweeps (Muon, 62M) is left out."""
    for recipe, exponents in {ADAM: (-0.674, 0.038, 0.826), MUON: (-0.104, -0.707, 1.232)}.items():
        assert len(laws[recipe].points) == 9
        assert [e.mean for e in laws[recipe].law.exponents.values()] == pytest.approx(exponents, abs=0.002)
    assert any("62.3M: batch of 65.5k tokens: the best rate, 0.0205, is at the low edge" in n for n in first.notes)
    assert not any("edge" in note for note in fit.notes)
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


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("transfer", ROOT / "experiments" / "transfer.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def predictions(script, first, fit):
    """Predictions by recipe, millions of parameters, millions of tokens, and method."""
    every = script.predictions(first, fit)
    return {
        (p.target.architecture, round(p.target.parameters / 1e6), round(p.target.tokens / 1e6), p.method): p
        for p in every
    }


def test_the_table_of_the_docs_follows_from_the_runs(script, first, fit, predictions):
    page = (ROOT / "docs" / "hyperparameters.md").read_text(encoding="utf-8")
    table = script.table(first, fit)
    assert f"\n\n{table}\n" in page
    assert script.replaced(page, table) == page
    assert script.replaced(page.replace("| law of 7M", "| ?"), table) == page
    muon = predictions[MUON, 32, 40, "law of 7M"]
    assert muon.best == pytest.approx(0.0578, rel=0.01)
    assert muon.lr / muon.best == pytest.approx(0.93, abs=0.01)
    sweep = muon.sweep
    x, y = np.log(sweep.lrs), np.log(sweep.losses)  # three rates, each twice the one before: a parabola
    assert muon.cost == pytest.approx(np.exp(np.polyval(np.polyfit(x, y, 2), np.log(muon.lr))) - sweep.minimum.loss)
    assert predictions[MUON, 32, 40, "law of 7M and 14M"].cost is None  # beyond the highest rate tried


@pytest.mark.parametrize(("recipe", "law"), [(MUON, "law of 7M"), (ADAM, "… with a second sweep of 14M")])
def test_rates_of_small_models_hold_at_62M_and_four_times_the_tokens(predictions, recipe, law):
    for size, tokens in ((32, 40), (32, 80), (62, 80)):
        found = predictions[recipe, size, tokens, law]
        assert 1 / 1.4 < found.lr / found.best < 1.4
        assert found.cost < 0.01
