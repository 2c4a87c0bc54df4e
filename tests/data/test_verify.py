"""Damaged tokens are found before anything trains on them, and files are read once only."""

import fcntl
import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from angpt.data import verify
from angpt.data.prepare import ShardWriter
from angpt.data.shards import INDEX, TokenData
from angpt.errors import UserError
from angpt.serialization import seal
from tests.command import angpt
from tests.data.corpora import prepare, write_jsonl, write_llmc, write_raw


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare((str(write_jsonl(folder / "x.jsonl", 300)),), folder / "out", tokenizer="bytes", shard_bytes=10_000)
    return folder / "out"


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy, which has not been verified."""
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.fixture
def reads(monkeypatch):
    """Names of the files that are read to compute their checksum."""
    names, read = [], verify._read
    monkeypatch.setattr(verify, "_read", lambda path, *rest: names.append(path.name) or read(path, *rest))
    return names


def open_both(folder):
    return [TokenData.open(folder, split) for split in ("train", "val")]


def flip(path, rng):
    """Change one bit of a file in place, which leaves its size as it is."""
    with path.open("r+b") as file:
        at = rng.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0] ^ 1 << rng.randrange(8)
        file.seek(at)
        file.write(bytes([byte]))


def test_a_changed_bit_of_a_shard_is_found(folder):
    open_both(folder)
    rng = random.Random(0)
    shards = sorted(folder.glob("*.bin"))
    for _ in range(50):
        path = rng.choice(shards)
        before = path.read_bytes()
        flip(path, rng)
        for _ in range(2):  # the second time without reading it again
            with pytest.raises(UserError, match=rf"{path.name}: is damaged"):
                open_both(folder)
        path.write_bytes(before)
    open_both(folder)


def test_train_refuses_a_damaged_shard(folder, tmp_path, capsys):
    flip(folder / "train-00002.bin", random.Random(1))
    code, said = angpt(capsys, "train", "--data.path", folder, "--out", tmp_path / "run")
    assert code == 2
    assert "train-00002.bin: is damaged (its tokens are not those of index.json); restore it" in said
    assert not (tmp_path / "run").exists()


def test_a_changed_number_of_the_index_is_found(folder):
    text = (folder / INDEX).read_text()
    for name in ("eot", "vocab_size", "max_token", "tokens", "documents", "text_bytes", "seed"):
        (folder / INDEX).write_text(text.replace(f'"{name}": ', f'"{name}": 1', 1))
        with pytest.raises(UserError, match=r"index.json: cannot be read \(the checksum is wrong"):
            TokenData.open(folder, "train")
    values = json.loads(text)
    del values["checksum"]  # as earlier versions wrote it
    (folder / INDEX).write_text(json.dumps(values))
    open_both(folder)
    values["vocab_size"] = 256
    (folder / INDEX).write_text(json.dumps(values))
    with pytest.raises(UserError, match="is damaged"):
        open_both(folder)


def test_files_are_read_once_for_each_change(folder, reads):
    names = sorted(path.name for path in folder.glob("*.bin"))
    open_both(folder)
    assert sorted(reads) == names
    open_both(folder)
    assert sorted(reads) == names
    os.utime(folder / names[1])
    open_both(folder)
    assert reads[len(names) :] == [names[1]]


def test_what_a_killed_process_left_is_removed(folder, reads):
    left = folder / f".{verify.VERIFIED}.{'0' * 16}.part"
    left.touch()
    TokenData.open(folder, "train")
    assert not left.exists()


def test_what_is_known_is_not_written_again(folder, reads):
    """A process that is killed while it writes leaves a temporary file, which the next one removes that has to read."""
    open_both(folder)
    before, files = (folder / verify.VERIFIED).stat(), sorted(folder.glob("*.bin"))
    verify.contents([(path, 0) for path in files], np.dtype("<u2"), again=True)
    assert len(reads) == 2 * len(files)
    assert (folder / verify.VERIFIED).stat().st_ino == before.st_ino


def test_processes_at_once_read_files_once(folder, reads):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: open_both(folder), range(4)))
    assert sorted(reads) == sorted(path.name for path in folder.glob("*.bin"))


def test_a_folder_that_cannot_be_written_to(folder, reads, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    (folder / verify.VERIFIED).unlink()
    before = sorted(folder.iterdir())
    for _ in range(2):
        open_both(folder)
    assert len(reads) == len(list(folder.glob("*.bin")))
    assert sorted(folder.iterdir()) == before
    (tmp_path / "cache" / "angpt").rename(tmp_path / "gone")
    (tmp_path / "cache" / "angpt").write_text("no folder")
    open_both(folder)  # nothing is remembered


def test_a_damaged_memory_is_not_believed(folder, reads):
    open_both(folder)
    path, rng, known = folder / verify.VERIFIED, random.Random(2), len(reads)
    good = path.read_bytes()
    for _ in range(20):
        path.write_bytes(good)
        flip(path, rng)
        open_both(folder)
    assert len(reads) > known
    for strange in ({"train-00000.bin": 1}, {"train-00000.bin": ["", 1, "a"]}, {"train-00000.bin": []}):
        path.write_text(json.dumps(seal(strange)))
        open_both(folder)


def test_raw_files_are_read_once_and_their_largest_token_is_known(tmp_path, reads):
    tokens = np.arange(5000) % 777
    write_raw(tmp_path / "train.bin", tokens)
    write_raw(tmp_path / "val.bin", tokens[:99])
    for _ in range(2):
        assert [data.max_token for data in open_both(tmp_path)] == [776, 98]
    assert reads == ["train.bin", "val.bin"]
    tokens[4000] = 60_000
    write_raw(tmp_path / "train.bin", tokens)
    assert TokenData.open(tmp_path, "train").max_token == 60_000
    assert TokenData.open(tmp_path, "train").part(0, 10).max_token == 60_000
    other = tmp_path / "llmc"
    other.mkdir()
    write_llmc(other / "x_train_0.bin", tokens[:3000])  # its header has larger numbers
    assert TokenData.open(other, "train").max_token == 776


def test_prepare_reads_what_it_has_written(tmp_path, monkeypatch):
    finish = ShardWriter.finish

    def damaged(writer):
        shard = finish(writer)
        flip(writer.path, random.Random(3))
        return shard

    source = write_jsonl(tmp_path / "x.jsonl", 50)
    monkeypatch.setattr(ShardWriter, "finish", damaged)
    with pytest.raises(UserError, match="is damaged"):
        prepare((str(source),), tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out" / INDEX).exists()


def test_a_lock_of_others_does_not_stop_it_for_ever(folder, monkeypatch):
    """It waits, and then reads the files itself; once they are known, nobody waits."""
    monkeypatch.setattr(verify, "WAIT_SECONDS", 0.3)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    open_both(folder)
    monkeypatch.setattr(verify, "WAIT_SECONDS", 1e9)
    open_both(folder)
    os.close(handle)


def test_without_a_place_to_remember_files_are_read_again_and_a_note_says_so(folder, reads, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(verify.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    (folder / verify.VERIFIED).unlink(missing_ok=True)
    for _ in range(2):
        open_both(folder)
    assert len(reads) == 2 * len(set(reads))
    assert "cannot be remembered (no home)" in capsys.readouterr().err


def test_a_split_without_shards_is_refused(folder):
    values = json.loads((folder / INDEX).read_text())
    del values["checksum"]
    values["train"]["shards"] = []
    (folder / INDEX).write_text(json.dumps(values))
    with pytest.raises(UserError, match="a split has no shards"):
        TokenData.open(folder, "train")


def test_preparing_again_finds_damage(folder, prepared):
    source = (str(prepared.parent / "x.jsonl"),)
    prepare(source, folder, tokenizer="bytes", shard_bytes=10_000)
    flip(next(folder.glob("train-*.bin")), random.Random(0))
    with pytest.raises(UserError, match="is damaged"):
        prepare(source, folder, tokenizer="bytes", shard_bytes=10_000)
