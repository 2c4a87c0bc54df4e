import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from angpt.config import ModelConfig, OptimizerConfig, TrainConfig
from angpt.errors import UserError
from angpt.fits.compute import Counting, make_curves, make_sample
from angpt.fits.reading import read_table
from angpt.fits.records import COLUMNS, Record, average
from angpt.models.variants import build
from angpt.training.plan import make_plan
from angpt.training.run import Run, Summary

MODEL = ModelConfig(architecture="angpt", d_model=16, n_layers=2, n_heads=2, vocab_size=64, context=32)


def write(path, text):
    path.write_text(text)
    return path


def make_run(folder, status="finished", loss=3.0, seed=0, lr=0.01, optimizer="adam", settings=None, **model):
    config = TrainConfig(
        model=dataclasses.replace(MODEL, **model),
        optimizer=OptimizerConfig(name=optimizer, lr=lr),
        tokens="6400",
        batch_tokens=640,
        seed=seed,
        device="cpu",
    )
    plan = make_plan(config.with_settings(settings or {}))
    run = Run.create(folder, plan.config)
    lines = [{"kind": "val", "step": s, "tokens": 640 * s, "val_loss": loss + 10 - s, "seconds": 1.0} for s in (5, 10)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind"')
    if status != "running":
        done = 10 if status == "finished" else 3
        loss = None if status == "diverged" else loss
        counts = plan.parameters, plan.flops_per_token
        run.write_summary(Summary(status, done, 10, 640 * done, loss, 1.0, 0.0, 1e3, 0.1, *counts, None, {}))
    return folder


def test_run_folders(tmp_path):
    study = tmp_path / "study"
    study.mkdir()
    write(study / "study.toml", "")
    make_run(study / "runs" / "a")
    make_run(study / "runs" / "b", seed=1, loss=3.1)
    make_run(study / "runs" / "c", "diverged", lr=0.1)
    make_run(study / "runs" / "d", "interrupted", lr=0.2)
    make_run(study / "runs" / "e", "running", lr=0.3)
    make_run(study / "tuning" / "x", loss=1.0)
    table = read_table([study, study / "runs" / "a"], ("batch_tokens", "lr"), curves=True)
    (cell,) = table.cells
    record = cell.record
    model = build(MODEL)
    assert (record.architecture, record.parameters, record.tokens) == ("angpt", model.parameter_count(), 6400)
    assert (record.batch_tokens, record.lr) == (640, 0.01)
    assert cell.log_loss == pytest.approx((math.log(3.0) + math.log(3.1)) / 2)
    assert cell.seeds == 2
    assert [tokens for tokens, _ in record.curve] == [3200, 6400]
    assert [loss for _, loss in record.curve] == pytest.approx([math.sqrt(8 * 8.1), math.sqrt(3 * 3.1)])
    assert [(r.lr, r.tokens) for r in table.diverged] == [(0.1, 6400)]  # the budget that it was meant for
    assert table.notes[0].startswith("1 of 5 runs diverged")
    assert "2 of 5 runs have not finished and are left out" in table.notes


def test_optimizers_are_told_apart(tmp_path):
    """Their learning rates have nothing in common."""
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", optimizer="muon")
    assert read_table([tmp_path]).architectures() == ["angpt", "angpt:muon"]


@pytest.mark.parametrize(
    ("settings", "differ"),
    [
        ({"eval_tokens": 1024}, "eval_tokens (1048576, 1024)"),
        ({"precision": "bf16"}, "precision (fp32, bf16)"),
        ({"model.vocab_size": 128, "model.context": 64}, "model.vocab_size (64, 128) and model.context (32, 64)"),
        (
            {"data.path": "data/b", "data.mask_documents": True, "data.tuning_split": 0.1},
            "data.path (data/stdlib, data/b), data.mask_documents (False, True) and data.tuning_split (0.0, 0.1)",
        ),
    ],
)
def test_runs_whose_losses_cannot_be_compared_are_refused(tmp_path, settings, differ):
    one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b", d_model=32, settings=settings)
    with pytest.raises(UserError, match=re.escape(f"{one} and {two} differ in {differ}: their losses cannot be")):
        read_table([one, two])
    (two / "summary.json").unlink()  # unfinished: left out
    assert len(read_table([one, two]).cells) == 1


def test_the_same_data_by_another_path_is_the_same(tmp_path):
    for seed, path in enumerate(("data/x", "./data/x")):
        make_run(tmp_path / f"s{seed}", seed=seed, settings={"data.path": path})
    assert [cell.seeds for cell in read_table([tmp_path]).cells] == [2]


def test_compute_of_a_run_is_that_of_the_model(tmp_path):
    """With head and attention it equals the trainer's count, apart from vectors."""
    make_run(tmp_path / "a")
    cells = read_table([tmp_path / "a"]).cells
    model = build(MODEL)
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    n, per_token = Counting("head", attention=True).of(cells)
    assert n[0] == model.parameter_count() - 64 * 16
    assert per_token[0] - 6 * vectors == model.flops_per_token()
    assert Counting("none").of(cells)[0][0] == model.parameter_count() - 2 * 64 * 16
    assert Counting("all").of(cells)[1][0] == 6 * model.parameter_count()
    assert Counting("given").of(cells)[1][0] == model.flops_per_token()


def test_each_way_of_counting_says_what_it_is():
    assert Counting().describe() == "N: all parameters, embedding and head included; C = 6·N·D"
    assert Counting("head", True).describe().endswith("head included; C = (6·N + attention)·D")
    assert "without embedding and head" in Counting("none").describe()
    assert "that the records state" in Counting("given").describe()
    with pytest.raises(UserError, match="leave out --attention"):
        Counting("given", attention=True)
    with pytest.raises(UserError, match="count must be one of given, all, head, none, not 'some'"):
        Counting("some")


def test_a_csv_file(tmp_path):
    """Unsorted, with a byte order mark, blank lines, and unused columns."""
    path = tmp_path / "x.csv"
    text = "loss,tokens,parameters,hardware\n2.5,2e9,1e8,A100\n\n3.5,1e9,5e7,\n ,,,\nnan,1e9,1e8,\n"
    path.write_text(text, encoding="utf-8-sig")
    table = read_table([path])
    assert [(c.record.parameters, math.exp(c.log_loss)) for c in table.cells] == [
        (5e7, pytest.approx(3.5)),
        (1e8, pytest.approx(2.5)),
    ]
    assert table.architectures() == ["model"]
    assert "x.csv: unused columns: hardware" in table.notes
    assert any(note.startswith("1 of 3 runs diverged and are left out") and "x.csv:6" in note for note in table.notes)


@pytest.mark.parametrize("loss", ["", "nan", "NaN", "inf", "diverged", "null"])
def test_losses_that_are_not_finite(tmp_path, loss):
    table = read_table([write(tmp_path / "x.csv", f"parameters,tokens,loss\n1e8,1e9,{loss}\n2e8,1e9,3\n")])
    assert (len(table.cells), len(table.diverged)) == (1, 1)


def test_rows_of_a_run_are_its_curve(tmp_path):
    rows = "r1,1e8,3e9,2.8\nr2,2e8,1e9,3.0\nr1,1e8,1e9,3.3\nr1,1e8,2e9,nan\n"
    table = read_table([write(tmp_path / "x.csv", f"run,parameters,tokens,loss\n{rows}")])
    assert [(c.record.parameters, c.record.tokens) for c in table.cells] == [(1e8, 3e9), (2e8, 1e9)]
    assert table.cells[0].record.curve == ((1e9, 3.3), (3e9, 2.8))
    points, curve = make_curves(table.cells, Counting())
    assert points.compute.tolist() == [6e17, 18e17, 12e17]
    assert curve.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column parameters and no column tokens and no column loss (found: nothing)"),
        ("params,tokens,loss\n", "has no column parameters (found: params, tokens, loss); rename params to parameters"),
        ("N,D,val_loss\n", "rename N to parameters, rename D to tokens, rename val_loss to loss"),
        (
            "parameters,tokens,loss,learning_rate\n",
            "unknown column 'learning_rate': did you mean lr (peak learning rate)?",
        ),
        ("parameters,tokens,loss,Peak LR\n", "unknown column 'Peak LR': did you mean lr (peak learning rate)?"),
        ("parameters,tokens,loss,batch_size\n", "did you mean batch_tokens (tokens per step)?"),
        ("parameters,tokens,loss\n", "has no runs"),
        ("parameters,tokens,loss,batch_token\n1,1,1,1\n", "unknown column 'batch_token': did you mean batch_tokens"),
        ("parameters,tokens,loss,loss\n1,1,1,1\n", "has the column loss twice"),
        ("parameters,tokens,loss\n1e8,1e9,3\n1e8,ten,3\n", ":3: tokens = 'ten' is not a number"),
        ("parameters,tokens,loss\n1e8,-5,3\n", ":2: tokens = -5 must be positive and finite"),
        ("parameters,tokens,loss\n0,5,3\n", ":2: parameters = 0 must be positive and finite"),
        ("parameters,tokens,loss\n,5,3\n", ":2: parameters is empty"),
        ("parameters,tokens,loss\n1,5,abc\n", ":2: loss = 'abc' is not a number"),
        ("parameters,tokens,loss\n1,5,-2\n", ":2: loss = -2 must be positive"),
        ("parameters,tokens,loss\n1,5\n", ":2: its number of cells differs from the first line's"),
        ("parameters,tokens,loss\n1,5,3,4\n", ":2: its number of cells differs from the first line's"),
        ("parameters,tokens,loss\n1e8,1e9,nan\n2e8,1e9,inf\n", "none of the 2 runs has finished with a finite loss"),
        ("run,parameters,tokens,loss\na,1,5,3\na,2,6,2\n", "rows of the run 'a' differ in parameters"),
        ("run,parameters,tokens,loss\na,1,5,3\na,1,5,2\n", "the run 'a' has two rows at 5 tokens"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, text, message):
    path = write(tmp_path / "x.csv", text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_table([path])


def test_sources_that_are_none(tmp_path):
    with pytest.raises(UserError, match="name study folders"):
        read_table([])
    with pytest.raises(UserError, match="does not exist"):
        read_table([tmp_path / "no"])
    with pytest.raises(UserError, match="has no runs"):
        read_table([tmp_path])
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as CSV"):
        read_table([tmp_path / "x.csv"])
    (tmp_path / "broken").mkdir()
    write(tmp_path / "broken" / "config.toml", "tokens = [")
    with pytest.raises(UserError, match="cannot be read as TOML"):
        read_table([tmp_path / "broken"])


def test_what_a_fit_needs_is_asked_for(tmp_path):
    path = write(tmp_path / "x.csv", "parameters,tokens,loss,lr\n1e8,1e9,1,0.1\n2e8,1e9,1,\n")
    with pytest.raises(
        UserError, match=re.escape("x.csv:2: has no batch_tokens (tokens per step), which this fit needs")
    ):
        read_table([path], ("batch_tokens", "lr"))
    with pytest.raises(UserError, match=re.escape("has no embedding_parameters (parameters of the embedding")):
        make_sample(read_table([path]).cells, Counting("head"))
    with pytest.raises(UserError, match=re.escape("has no attention_flops")):
        make_sample(read_table([path]).cells, Counting(attention=True))
    big = write(tmp_path / "y.csv", "parameters,tokens,loss,embedding_parameters\n5e7,1e9,1,9e7\n6e7,1e9,1,1e7\n")
    with pytest.raises(UserError, match="no parameters are left"):
        make_sample(read_table([big]).cells, Counting("head"))
    with pytest.raises(UserError, match="the runs have no curves"):
        make_curves(read_table([big]).cells, Counting())


def test_duplicates_are_averaged_and_copies_dropped():
    def record(loss, seed, **fields):
        return Record("x", "angpt", 1e8, 2e9, loss, seed=seed, **fields)

    table = average([record(2.0, "0"), record(2.0, "0"), record(8.0, "1"), record(4.0, "1"), record(5.0, "0", lr=0.1)])
    assert sorted((round(math.exp(c.log_loss), 9), c.seeds) for c in table.cells) == [(4.0, 3), (5.0, 1)]
    assert "1 runs are copies of another (same settings, seed and loss) and are left out" in table.notes
    assert any(note.startswith("3 runs differ only in the seed and are averaged") for note in table.notes)
    assert "1 points have several losses for one seed; they count as further seeds" in table.notes


def test_the_best_of_each_size_and_budget():
    """Budgets that differ by one step count as equal."""
    records = [
        Record("a", "m", 1e8, 2.00e9, 3.0, lr=0.1),
        Record("b", "m", 1e8, 2.01e9, 2.9, lr=0.2),
        Record("c", "m", 1e8, 4e9, 2.8),
        Record("d", "m", 2e8, 2e9, 2.7),
    ]
    sample, notes = make_sample(average(records).cells, Counting())
    assert sample.tokens.tolist() == [2.01e9, 4e9, 2e9]
    assert sample.log_loss == pytest.approx([math.log(x) for x in (2.9, 2.8, 2.7)])
    assert len(notes) == 1
    assert notes[0].startswith("4 points, 3 pairs of size and budget (within 2%): of those that differ in batch size")


def test_runs_without_choices_are_all_kept():
    """Nearly equal budgets, and nothing in the records that could be chosen."""
    records = [Record("x", "m", 1e8, tokens, loss) for tokens, loss in ((2.00e9, 3.0), (2.01e9, 2.9), (2.02e9, 3.1))]
    sample, notes = make_sample(average(records).cells, Counting())
    assert sample.tokens.tolist() == [2.00e9, 2.01e9, 2.02e9]
    assert notes == []
    sample, _ = make_sample(average([*records, dataclasses.replace(records[0], loss=4.0, lr=0.1)]).cells, Counting())
    assert len(sample) == 3


def test_architectures_come_in_the_order_of_table_1():
    records = [Record("x", name, 1e8, 1e9, 3.0) for name in ("angpt/no-lerp", "angpt", "gpt+", "ngpt")]
    assert average(records).architectures() == ["gpt+", "ngpt", "angpt", "angpt/no-lerp"]


def test_every_column_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "fits.md").read_text(encoding="utf-8")
    assert not [name for name in COLUMNS if f"`{name}`" not in text]
