"""Files and names made to do harm: planted links, paths that lead out of a folder, control characters."""

import io
import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from rich.console import Console

from angpt.config import TrainConfig
from angpt.data.info import describe, render
from angpt.data.journal import JOURNAL
from angpt.data.shards import INDEX, TokenData
from angpt.errors import UserError
from angpt.inference.source import open_source
from angpt.present.tables import Table, show
from angpt.present.words import printable
from angpt.system import available_threads, locked, new_folder, write_atomically
from angpt.training.checkpoint import State
from angpt.training.ranks import log_to
from angpt.training.sinks import MetricsFile
from tests.command import call
from tests.data.corpora import prepare


@pytest.fixture
def victim(tmp_path):
    """A file that nothing may write to."""
    path = tmp_path / "victim"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


@pytest.fixture
def folder(tmp_path):
    """A prepared folder, whose text has control characters."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"\x1b]0;title\x07\x1b[31mred {number}\x9b2J\r\x08\u202eevil")
    prepare((str(tmp_path),), tmp_path / "out", tokenizer="bytes", val_fraction=0.5, console=Console(quiet=True))
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["../{}", "/tmp/{}", "sub/{}", "..", "", "./{}"])
def test_an_index_cannot_name_files_elsewhere(folder, tmp_path, name):
    values = json.loads((folder / INDEX).read_text())
    del values["checksum"]
    shard = values["train"]["shards"][0]
    shutil.copy(folder / shard["file"], tmp_path / shard["file"])
    shard["file"] = name.format(shard["file"])
    (folder / INDEX).write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"index.json: .*is not the name of a file in its folder"):
        TokenData.open(folder, "train")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_an_export_cannot_name_files_elsewhere(tmp_path, name):
    config = {"model_type": "angpt", "angpt_model": {}, "angpt_training": {"step": 1, "tokens": 1, "val_loss": 1.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"W_e.weight": name}}))
    with pytest.raises(UserError, match="is not the name of a file in its folder"):
        open_source(tmp_path)


def test_planted_links_are_not_followed(tmp_path, victim, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    (tmp_path / ".a.json.known.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "a.json", "text")
    assert (tmp_path / ".a.json.known.part").is_symlink()
    monkeypatch.undo()
    write_atomically(tmp_path / "a.json", "text")
    assert (tmp_path / "a.json").read_text() == "text"
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o666 & ~umask()

    (tmp_path / "inside").mkdir()
    (tmp_path / ".new.part").symlink_to(tmp_path / "inside")
    with new_folder(tmp_path / "new") as part:
        (part / "file").write_text("text")
    assert (tmp_path / "new" / "file").read_text() == "text"
    assert not list((tmp_path / "inside").iterdir())

    (tmp_path / ".lock").symlink_to(victim)
    with pytest.raises(UserError, match=r"\.lock: cannot be locked"), locked(tmp_path / ".lock", "busy"):
        pass


def umask():
    found = os.umask(0)
    os.umask(found)
    return found


def test_planted_links_in_a_folder_being_prepared(tmp_path, victim):
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text("words " * 9)
    options = {"tokenizer": "bytes", "val_fraction": 0.5, "console": Console(quiet=True)}
    prepare((str(tmp_path / "text"),), tmp_path / "out", **options)
    recipe = json.loads((tmp_path / "out" / INDEX).read_text())["recipe"]
    for path in (tmp_path / "out").glob("*.bin"):
        path.unlink()
        path.with_name(path.name + ".part").symlink_to(victim)
    (tmp_path / "out" / INDEX).unlink()
    (tmp_path / "out" / JOURNAL).write_text(json.dumps(recipe) + "\n")
    prepare((str(tmp_path / "text"),), tmp_path / "out", **options)
    TokenData.open(tmp_path / "out", "train")


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(*args, **options):
    console = Console(file=io.StringIO(), width=200, **options)
    console.print(*args)
    return console.file.getvalue()


def test_control_characters_are_shown_not_sent(folder, capsys):
    info = describe(folder)
    assert CONTROL.search(info.splits[0].sample)
    text = shown(render(replace(info, path=folder / "\x1b[1mbold")))
    assert not CONTROL.search(text)
    assert r"\x1b[31mred" in text
    console = Console(file=io.StringIO(), width=200)
    show(console, Table(("run\x1b[1m",), [("a\x1b[31m",)], "title\x1b[1m", "note\x1b[1m"))
    assert not CONTROL.search(console.file.getvalue())
    code, out, err = call(capsys, "data", "info", "no\x1b[31m\x9b such\x07 folder")
    assert code == 2
    assert not CONTROL.search(out + err)
    assert r"no\x1b[31m\x9b such\x07 folder" in err
    assert printable("two\nlines\tand ümläuts 😀") == "two\nlines\tand ümläuts 😀"


def test_a_planted_link_is_not_appended_to(victim, tmp_path):
    """Neither metrics nor logs of ranks; and charts replace a link."""
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        MetricsFile(tmp_path / "metrics.jsonl", 0)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-1.log").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"), log_to(tmp_path / "logs/rank-1.log"):
        pass


@pytest.mark.parametrize("name", ["/dev/zero", "../model.safetensors", "a\x1b"])
def test_a_checkpoint_cannot_name_files_elsewhere(tmp_path, name):
    state = State(1, "angpt", 0, 1.0, None, "", None, {}, TrainConfig())
    with pytest.raises(UserError, match="is not the name of a file in its folder"):
        replace(state, sha256={name: "0"})


def test_two_that_make_one_folder_do_not_mix(tmp_path):
    """The second to end gets an error, and what the first made stays; what killed processes left is removed."""
    (tmp_path / f".x.{'0' * 16}.part").mkdir()
    slow, fast = new_folder(tmp_path / "x"), new_folder(tmp_path / "x")
    with fast as one:
        (slow.__enter__() / "b").write_text("two")
        (one / "a").write_text("one")
    with pytest.raises(UserError, match="cannot be written"):
        slow.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["a"]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(UserError, match="use a file system with flock"), locked(tmp_path / ".lock", "busy"):
        pass


@pytest.mark.parametrize(("limit", "cores"), [("1", 1), ("1000000", None), ("0", None), ("4,2", None), ("", None)])
def test_the_number_of_threads_has_the_limit_of_openmp(monkeypatch, limit, cores):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    usable = available_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert available_threads() == (usable if cores is None else cores)
