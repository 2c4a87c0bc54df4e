import json

import pytest

from angpt.errors import UserError
from angpt.training.record import Evaluation, RunRecord
from angpt.training.run import Run
from tests.training.conftest import small

LINES = [
    {"kind": "train", "step": 1, "tokens": 256, "loss": 3.0},
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
    assert record.layers == (LINES[1],)
    assert record.moments == (LINES[3],)
    assert (record.name, record.config, record.summary) == ("run", run.config(), None)


def test_a_run_that_has_just_begun_has_no_records(run):
    record = RunRecord.open(run.path)
    assert record.evaluations == record.layers == record.moments == ()


@pytest.mark.parametrize("text", ["{}\n", '{"kind": "layers", "W_e": 1.0}\n', '{"kind": "val"}\n', "[]\n", "half\n"])
def test_damage_is_an_error_that_names_the_file(run, text):
    run.metrics.write_text(text)
    with pytest.raises(UserError, match=r"run/metrics.jsonl, line 1: cannot be read"):
        RunRecord.open(run.path).evaluations  # noqa: B018
