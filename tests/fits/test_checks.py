import dataclasses
import math
import re

import numpy as np
import pytest

from angpt.errors import UserError
from angpt.fits.checks import check_units, mark_diverged
from angpt.fits.reading import read_table
from angpt.fits.records import Record
from tests.fits.synthetic import LAW, MODELS, MULTIPLES, Valley, isoflop_records, sweep_records, write_csv
from tests.fits.test_parametric import chinchilla

PAPER = [r for n in MODELS for r in isoflop_records(LAW, [n], 6 * n**2 * np.array(MULTIPLES), 0.003, int(n))]
SWEEP = sweep_records(Valley(), MODELS[:3], 0.001)


def change(records, **factors):
    return [dataclasses.replace(r, **{k: v * getattr(r, k) for k, v in factors.items()}) for r in records]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            change(PAPER, parameters=1e-6),
            "parameters = 32.05 cannot be the count; write 125e6, not millions or billions",
        ),
        (change(PAPER, parameters=1e-9), "parameters = 0.03205 cannot be the count"),
        (change(PAPER, parameters=1e-6, tokens=1e-9), "parameters = 32.05 cannot be the count"),
        (change(PAPER, tokens=1e-9), "tokens = 0.3205 cannot be the count for 32M parameters; write 2.5e9"),
        (change(PAPER, tokens=1e-6), "tokens = 320.5 cannot be the count for 32M parameters"),
        (change(PAPER[-1:], tokens=1e-6), "tokens = 107300 cannot be the count for 1.07B parameters"),
        (PAPER[:9] + change(PAPER[9:], parameters=1e-6), "(21 of 30 runs: units are mixed)"),
        (PAPER[:9] + change(PAPER[9:], tokens=1e-9), "(21 of 30 runs: units are mixed)"),
        (
            [dataclasses.replace(r, parameters=70_000.0, tokens=1.4e12) for r in PAPER],
            "parameters = 70000 for 1.4T tokens cannot be the counts of one run; write 125e6, not millions",
        ),
        (
            [dataclasses.replace(r, loss=math.exp(r.loss)) for r in PAPER],
            "look like perplexities; write their natural logarithms",
        ),
        (change(SWEEP, batch_tokens=1 / 2048), "steps; write tokens per step, not sequences"),
    ],
)
def test_units_that_cannot_be_right(tmp_path, records, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read_table([write_csv(tmp_path / "x.csv", records)])
    assert "\n" not in str(error.value)
    assert "x.csv:" in str(error.value)


def test_one_wrong_unit_is_not_called_mixed(tmp_path):
    """Models of more than ten billion parameters are more than 10,000 millions, which could be a count."""
    records = [Record("", "m", n / 1e6, 20 * n / 1e9, 2.0) for n in np.geomspace(1e8, 7e10, 8)]
    with pytest.raises(UserError, match="parameters = 100 cannot be the count") as error:
        read_table([write_csv(tmp_path / "x.csv", records)])
    assert "mixed" not in str(error.value)


def test_rates_times_100(tmp_path):
    table = read_table([write_csv(tmp_path / "x.csv", change(SWEEP, lr=100.0))])
    assert sum("are unusually high; are they in per cent, or times 100?" in note for note in table.notes) == 1


def test_usual_input_passes():
    laptop = [
        Record("x", "angpt", 1.6e5, 4e4, 5.3, batch_tokens=256.0, lr=0.26),
        Record("x", "angpt", 1.6e6, 6.4e6, 3.1),
    ]
    large = [Record("x", "m", 4.05e11, 1.56e13, 1.6, batch_tokens=1.6e7, lr=8e-5), Record("x", "m", 8e9, 1.5e13, 1.9)]
    bytes_ = [Record("x", "m", 1e5, 1e10, 0.9)]
    for records in (PAPER, SWEEP, laptop, large, bytes_):
        assert check_units(records) == []


def spoil(records, places, loss=10.8):
    return [dataclasses.replace(r, loss=loss) if i in places else r for i, r in enumerate(records)]


@pytest.mark.parametrize("places", [{0}, {29}, {4, 12}, {0, 1, 2, 3, 4, 25, 26, 27, 28, 29}])
def test_absurd_losses_count_as_diverged(places):
    """At any corner of the design, and up to a third of the runs."""
    changed, notes = mark_diverged(spoil(PAPER, places))
    assert {i for i, r in enumerate(changed) if r.status == "diverged"} == places
    assert len(notes) == 1
    first = PAPER[min(places)].source
    assert f"with a loss far above those of similar runs count as diverged: {first} (10.8, others " in notes[0]


@pytest.mark.parametrize(
    ("sizes", "ratios"),
    [([1e8], [20, 40, 80]), ([1e8, 3e8], [20, 40]), ([1e8, 3e8, 1e9], [20]), ([3e7, 1e8], [5, 20, 60])],
)
def test_an_absurd_loss_among_few_runs(sizes, ratios):
    """It is the one that counts as diverged, wherever it is; a plane fits three runs exactly."""
    runs = [(n, n * ratio) for n in sizes for ratio in ratios]
    records = [Record(str(i), "m", n, d, float(LAW.loss(n, d))) for i, (n, d) in enumerate(runs)]
    for place in range(len(records)):
        changed, _ = mark_diverged(spoil(records, {place}))
        assert [i for i, r in enumerate(changed) if r.status == "diverged"] == [place]


def test_a_fit_is_that_without_the_absurd_losses(tmp_path):
    table = read_table([write_csv(tmp_path / "x.csv", spoil(PAPER, {7}))])
    assert (len(table.cells), len(table.diverged)) == (29, 1)
    assert table.notes[0].startswith("1 run with a loss far above those of similar runs count as diverged: ")
    assert "x.csv:9" in table.notes[0]


def test_the_highest_rate_of_a_sweep():
    """It bounds the best rate from above, as a run with a loss of nan does."""
    highest = max(r.lr for r in SWEEP if r.parameters == MODELS[0])
    places = {i for i, r in enumerate(SWEEP) if (r.parameters, r.lr) == (MODELS[0], highest)}
    changed, _ = mark_diverged(spoil(SWEEP, places, 7.5))
    assert {i for i, r in enumerate(changed) if r.status == "diverged"} == places


def test_a_rate_that_is_too_low_has_not_diverged():
    lowest = min(r.lr for r in SWEEP if r.parameters == MODELS[0])
    places = {i for i, r in enumerate(SWEEP) if (r.parameters, r.lr) == (MODELS[0], lowest)}
    changed, notes = mark_diverged(spoil(SWEEP, places, 7.5))
    assert all(r.status == "finished" for r in changed)
    assert notes == []


def test_usual_losses_have_not_diverged():
    sample = chinchilla()
    wide = isoflop_records(LAW, np.geomspace(1e6, 1e10, 12), np.geomspace(1e15, 1e22, 12))
    read = [
        Record("x", "m", n, d, math.exp(y))
        for n, d, y in zip(sample.parameters, sample.tokens, sample.log_loss, strict=True)
    ]
    for records in (PAPER, SWEEP, [r for r in wide if 0.1 < r.tokens / r.parameters < 1e4], read, PAPER[:2]):
        assert mark_diverged(records)[1] == []
