"""Folders whose names are not plain ASCII, up to names that are not UTF-8."""

import os

import pytest

from angpt.errors import UserError
from angpt.serialization import read_toml
from angpt.studies.config import StudyConfig
from angpt.training.launch import start
from angpt.training.reporter import Quiet
from angpt.training.run import Run
from tests.command import call
from tests.studies.conftest import ONE, write_study
from tests.training.conftest import Stops, small, write_tokens

NOT_UTF8 = os.fsdecode(b"donn\xe9es")
NAMES = {"emoji": "😀 漢字", "latin-1": NOT_UTF8, "odd": 'a "b" \\ c\x7f'}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_configurations_hold_any_path(tmp_path, name):
    config = small(tmp_path / name)
    assert Run.create(tmp_path / "run", config).config() == config


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_every_command_works_in_such_folders(tmp_path, monkeypatch, capsys, name):
    """Text is prepared, a run is interrupted, resumed and used, and a study is run."""
    monkeypatch.chdir(tmp_path)
    name = name.replace("\x7f", "")  # a new folder may not have control characters
    text = tmp_path / f"text {name}"
    text.mkdir()
    for number in range(40):
        (text / f"{number}{name}.txt").write_text(f"document {number} says {number * number} " * 9)
    data = f"data {name}"
    run, study, comparison = ("run", "study", "compare") if name == NOT_UTF8 else (name, f"s {name}", f"c {name}")

    def works(*args):
        code, _, err = call(capsys, *args)
        assert code == 0, err

    for _ in range(2):
        works("data", "prepare", text, "--out", data, "--tokenizer", "bytes", "--val-fraction", "0.2")
    works("data", "info", data)
    assert start(small(data, model__vocab_size=257), tmp_path / run, Stops(5)).status == "interrupted"
    works("train", "--resume", run)
    works("generate", run, "a", "--tokens", "3")
    works("eval", run, "--data", data)
    works("compare", "--config", f"{run}/config.toml", "--out", comparison, "--budgets", "512", "--seeds", "0")
    if '"' not in name:  # which would have to be escaped in TOML
        file = write_study(tmp_path / f"{name}.toml", "DATA", *ONE, ("vocab_size = 61", "vocab_size = 257"))
        file.write_bytes(file.read_bytes().replace(b"DATA", os.fsencode(data)))
        works("study", "run", file, "--out", study, "--workers", "0")
        works("study", "status", study)
        works("report", study)
        assert read_toml(StudyConfig, tmp_path / study / "study.toml").train.data.path == data


def test_a_run_does_not_begin_where_it_could_not_be_resumed(tmp_path):
    write_tokens(tmp_path)
    with pytest.raises(UserError, match="is not UTF-8, and safetensors could not open the files in it"):
        start(small(tmp_path), tmp_path / NOT_UTF8, Quiet())
    assert not list(tmp_path.glob("*donn*"))
