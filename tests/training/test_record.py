import json

import pytest

from angpt.errors import UserError
from angpt.training.record import BLOCK_BYTES, Evaluation, RunRecord, TrainStep, newest_values
from angpt.training.run import Run
from tests.training.conftest import small

LINES = [
    {
        "kind": "train",
        "step": 1,
        "tokens": 256,
        "loss": 3.0,
        "lr": 0.1,
        "grad_norm": 0.5,
        "tokens_per_s": 9.0,
        "mfu": 0.4,
        "seconds": 1.0,
    },
    {
        "kind": "train",
        "step": 2,
        "tokens": 512,
        "loss": 3.0,
        "lr": 0.1,
        "grad_norm": None,
        "tokens_per_s": 9.0,
        "mfu": 0.4,
        "seconds": 2.0,
    },
    {"kind": "layers", "step": 1, "tokens": 256, "input_norm": [1.0, 2.0]},
    {"kind": "layers", "step": 2, "tokens": 512, "input_norm": [1.0, None]},
    {"kind": "moments", "step": 2, "tokens": 512, "W_p": [0.5]},
    {"kind": "val", "step": 2, "tokens": 512, "seconds": 1.5, "val_loss": 2.5},
    {"kind": "val", "step": 4, "tokens": 1024, "seconds": 3.0, "val_loss": None},
]


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run", small(tmp_path / "data"))


def test_a_record_has_what_the_run_wrote_but_for_values_that_were_not_finite(run):
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"kind": "va')
    record = RunRecord.open(run.path)
    assert record.evaluations == (Evaluation(512, 1.5, 2.5),)
    assert record.layers == (LINES[2],)
    assert record.moments == (LINES[4],)
    assert record.steps == (TrainStep(1, 256, 3.0, 0.1, 0.5, 9.0, 0.4, 1.0),)
    assert (record.name, record.config, record.summary) == ("run", run.config(), None)


def test_a_run_that_has_just_begun_has_no_records(run):
    record = RunRecord.open(run.path)
    assert record.evaluations == record.layers == record.moments == record.steps == ()


def test_many_records_are_thinned_evenly_and_the_last_one_stays(run):
    with run.metrics.open("w") as file:
        for step in range(1, 5001):
            head = {"step": step, "tokens": step}
            file.write(json.dumps({"kind": "train", **head, "loss": 3.0}) + "\n")
            file.write(json.dumps({"kind": "val", **head, "seconds": 0.1 * step, "val_loss": 2.0}) + "\n")
    tokens = [e.tokens for e in RunRecord.open(run.path).evaluations]
    assert tokens == [*range(1, 5001, 8), 5000]


HEAD = '"step": 1, "tokens": 256'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is no record of a run"),
        ("[]", "is no record of a run"),
        ("half", "is no record of a run"),
        ('{"kind": "vol", "step": 1}', "is no record of a run"),
        ('{"kind": "val"}', "step must be a whole number, not None"),
        (f'{{"kind": "val", {HEAD}, "seconds": 1.0, "val_loss": "x"}}', "val_loss must be a number, not 'x'"),
        (f'{{"kind": "val", {HEAD}, "seconds": 1e999, "val_loss": 2.0}}', "seconds must be a finite number, not inf"),
        (f'{{"kind": "val", {HEAD}, "seconds": 1.0, "val_loss": 2.0', "not valid JSON"),
        ('{"kind": "val", "step": 1, "tokens": ' + "9" * 5000 + "}", "not valid JSON: Exceeds the limit"),
        ('{"kind": "val", "step": 1, "tokens": ' + "9" * 30 + "}", "tokens must be a number of at most 18 digits"),
        (f'{{"kind": "val", {HEAD}, "seconds": ' + "[" * 9000, "not valid JSON"),
        ('{"kind": "layers", "W_e": 1.0}', "step must be a whole number, not None"),
        (f'{{"kind": "layers", {HEAD}, "W_e": {{}}}}', "W_e must be a number or a list"),
        (f'{{"kind": "layers", {HEAD}, "W_e": [1.0, "x"]}}', r"W_e\[1\] must be a number, not 'x'"),
    ],
    ids=lambda text: text[:30],
)
def test_damage_is_an_error_that_names_the_line(run, text, message):
    run.metrics.write_text(f"{json.dumps(LINES[0])}\n{text}\n")
    record = RunRecord.open(run.path)
    with pytest.raises(UserError, match=rf"run/metrics.jsonl, line 2: .*{message}"):
        record.evaluations, record.layers  # noqa: B018


def test_records_of_layers_that_differ_are_an_error(run):
    other = LINES[2] | {"input_norm": [1.0, 2.0, 3.0]}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in (LINES[2], other)))
    with pytest.raises(UserError, match=r"line 2: .*other names or another number of layers than the first record"):
        RunRecord.open(run.path).layers  # noqa: B018


def test_the_newest_validation_loss_is_found_however_long_ago_it_was(run):
    steps = [dict(LINES[0], step=step) for step in range(2000)]
    lines = [{"kind": "val", "step": 0, "tokens": 0, "val_loss": 2.5, "seconds": 1.0}, *steps]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "val", "val_loss": 9')
    assert run.metrics.stat().st_size > 3 * BLOCK_BYTES
    found = newest_values(run.path)
    assert (found["val_loss"], found["step"]) == (2.5, 1999.0)


def test_newest_values_are_numbers(run):
    assert newest_values(run.path) == {}
    damaged = ["[]", "half", '{"kind": "train", "step": "x", "loss": ' + "9" * 400 + ', "val_loss": [1]}']
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES) + "\n".join(damaged) + "\n")
    assert newest_values(run.path) == {"step": 4.0, "loss": 3.0, "val_loss": 2.5, "tokens_per_s": 9.0}
