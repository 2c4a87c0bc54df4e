"""Files that hold something else than they should: the error names the file, the key and what is wrong."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from angpt.analysis.analyse import Analysis
from angpt.config import ModelConfig, TrainConfig
from angpt.data.journal import Journal
from angpt.data.shards import Index
from angpt.errors import UserError
from angpt.evaluation.results import read_results
from angpt.fits.rules import write_rules
from angpt.inference.source import open_source
from angpt.inference.store import read_about
from angpt.results import Result
from angpt.serialization import from_dict, read_json, read_toml, typed
from angpt.studies.cluster import known_jobs
from angpt.training.checkpoint import read_state
from angpt.training.run import Run


@dataclasses.dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    rate: float
    inner: Inner
    pair: tuple[int, float] = (0, 0.0)
    by_name: dict[str, float | None] = dataclasses.field(default_factory=dict)


GOOD = {"name": "a", "rate": 1, "inner": {"sizes": [1, 2]}}
DEEP = "[" * 50_000 + "]" * 50_000
DIGITS = "9" * 5000

WRONG = {
    "": "not valid JSON",
    "[]": "it must be a table, not []",
    DEEP: "values are nested too deeply",
    f'{{"rate": {DIGITS}}}': "not valid JSON: Exceeds the limit",
    json.dumps(GOOD | {"rate": 10**400}): "rate must be a number of at most 18 digits, not 1000000",
    json.dumps(GOOD | {"inner": {"sizes": [1, 10**30]}}): "inner.sizes[1] must be a number of at most 18 digits",
    json.dumps(GOOD).replace("1,", "1e999,", 1): "rate must be a finite number, not inf",
    json.dumps(GOOD | {"rate": math.nan}): "rate must be a finite number, not nan",
    json.dumps(GOOD | {"by_name": {"x": math.inf}}): "by_name.x must be a finite number, not inf",
    json.dumps(GOOD | {"inner": 3}): "inner must be a table, not 3",
    json.dumps(GOOD | {"inner": {}}): "the key 'inner.sizes' is missing",
    json.dumps(GOOD | {"inner": {"sizes": 3}}): "inner.sizes must be a list, not 3",
    json.dumps(GOOD | {"inner": {"sizes": [1, "x" * 1000]}}): "inner.sizes[1] must be a whole number, not 'xxxxx",
    json.dumps(GOOD | {"pair": [1]}): "pair must have 2 values, not 1",
    json.dumps(GOOD | {"pair": [1.5, 2]}): "pair[0] must be a whole number, not 1.5",
    json.dumps({"rate": 1.0}): "the key 'name' is missing",
    json.dumps(GOOD | {"nmae": 3}): "unknown key 'nmae': did you mean name",
    json.dumps(GOOD | {"name": json.loads("[" * 300 + "]" * 300)}): "name must be a string, not [[[[[",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=range(len(WRONG)))
def test_a_json_file_that_is_wrong_gets_one_short_line(tmp_path, text, message):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_json(Outer, path, "write it again")
    assert str(caught.value).startswith(f"{path}: cannot be read (")
    assert message in str(caught.value)
    assert str(caught.value).endswith("); write it again")
    assert len(str(caught.value)) < len(str(path)) + 250


def test_a_good_file_is_read(tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(GOOD | {"pair": [1, 2], "by_name": {"x": None, "y": 2}}))
    assert read_json(Outer, path, "") == Outer("a", 1.0, Inner((1, 2)), (1, 2.0), {"x": None, "y": 2.0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"seed = {DIGITS}", "cannot be read as TOML (Exceeds the limit"),
        (f"seed = 0x{'f' * 5000}", "seed must be a number of at most 18 digits, not an integer of thousands of digits"),
        (f"model = {DEEP}", "values are nested too deeply"),
        ("optimizer.lr = 1e999", "optimizer.lr must be between 1e-30 and 1e+30, not inf"),
        ("optimizer.eps = inf", "optimizer.eps must be between 1e-30 and 1e+30, not inf"),
        ("timeout = inf", "timeout must be positive and at most 10,000,000, not inf"),
        ("model.d_model = 1099511627776", "model.d_model must be positive and at most 67,108,864, not 1099511627776"),
        ("model.vocab_size = 1000000000000000", "model.vocab_size must be positive and at most 67,108,864"),
        ("model.n_layers = 1000000", "model.n_layers must be positive and at most 10,000, not 1000000"),
        (f"tokens = '{'9' * 400}'", "must be at least one token and below 2⁶³"),
        ("tokens = '1e99x'", "must be at least one token and below 2⁶³"),
        ("tokens = '0.4'", "must be at least one token and below 2⁶³"),
        ("model = 3", "model must be a table, not 3"),
    ],
    ids=lambda text: text[:20],
)
def test_numbers_out_of_range_in_a_configuration(tmp_path, text, message):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_toml(TrainConfig, path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 250


def test_a_configuration_may_have_an_infinite_number_where_that_means_something(tmp_path):
    (tmp_path / "c.toml").write_text("[optimizer]\nclip = inf\n")
    assert read_toml(TrainConfig, tmp_path / "c.toml").optimizer.clip == math.inf


def test_single_values_are_typed():
    assert typed(dict[str, int], {"a": 1}, "x") == {"a": 1}
    with pytest.raises(UserError, match=r"x\.a must be a whole number, not '1'"):
        typed(dict[str, int], {"a": "1"}, "x")
    with pytest.raises(UserError, match="model must be a table, not None"):
        from_dict(ModelConfig, None, "model")


def journal(folder: Path) -> None:
    Journal.begin(folder, Index.read(folder).recipe if (folder / "index.json").exists() else None)  # type: ignore[arg-type]


READERS = {
    "result.json": Result.read,
    "analysis.json": lambda folder: Analysis.read(folder / "analysis.json"),
    "eval/results.json": read_results,
    "summary.json": lambda folder: Run(folder).summary(),
    "state.json": lambda folder: read_state(folder),
    "index.json": Index.read,
    "folded.json": read_about,
    "config.json": open_source,
    "journal.log": journal,
    "slurm/jobs.json": known_jobs,
    "rules.toml": lambda folder: write_rules(folder / "rules.toml", [], ""),
    "config.toml": lambda folder: Run.open(folder).config(),
}
"""How each file that the package reads back is read."""


@pytest.mark.parametrize("text", ["", "3\n", "[]\n", '{"a": 1}\n', f"{DEEP}\n", f'{{"step": {DIGITS}}}\n', "\udcff\n"])
@pytest.mark.parametrize("name", READERS)
def test_every_file_that_is_damaged_is_named(tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, errors="surrogateescape")
    if text == "" and name in ("journal.log", "config.toml", "rules.toml"):
        return  # nothing is lost: an empty configuration has all defaults, and an empty journal no shards
    with pytest.raises(UserError) as caught:
        READERS[name](tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 2 * len(str(path)) + 250
