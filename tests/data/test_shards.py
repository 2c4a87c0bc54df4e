import json
from pathlib import Path

import numpy as np
import pytest

from angpt.data.shards import MAPPED_SHARDS, Index, TokenData
from angpt.errors import UserError
from tests.data.corpora import prepare, write_jsonl, write_llmc, write_raw


@pytest.fixture
def folder(tmp_path):
    prepare((str(write_jsonl(tmp_path / "x.jsonl", 300)),), tmp_path / "out", tokenizer="bytes", shard_bytes=10_000)
    return tmp_path / "out"


def test_prepared_folder(folder):
    data = TokenData.open(folder, "train")
    index = Index.read(folder)
    assert len(data.files) > 3
    assert data.tokens == index.train.tokens == sum(file.tokens for file in data.files)
    assert (data.eot, data.vocab_size, data.max_token, data.dtype) == (256, 257, 256, np.dtype("<u2"))
    assert data.tokenizer_fingerprint == index.recipe.tokenizer_fingerprint
    # Each document is followed by one end-of-text, and a byte is a token.
    assert data.tokens == index.train.text_bytes + index.train.documents
    assert int((data.read(0, data.tokens) == 256).sum()) == index.train.documents
    assert data.fingerprint == TokenData.open(folder, "train").fingerprint
    assert data.fingerprint != TokenData.open(folder, "val").fingerprint


def test_read_and_gather_are_the_stream(folder):
    data = TokenData.open(folder, "train")
    stream = np.concatenate([np.fromfile(file.path, data.dtype) for file in data.files])
    assert np.array_equal(data.read(0, data.tokens), stream)
    assert len(data.read(data.tokens, 0)) == 0
    rng = np.random.default_rng(0)
    for length in (1, 2, 100, 25_000):  # the last is longer than a shard
        starts = rng.integers(0, data.tokens - length + 1, 200)
        starts[:2] = 0, data.tokens - length
        assert np.array_equal(data.gather(starts, length), np.stack([stream[s : s + length] for s in starts]))
    with pytest.raises(IndexError):
        data.read(data.tokens - 1, 2)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files through /proc")
def test_more_shards_than_are_mapped_at_once(tmp_path):
    for number in range(300):
        write_raw(tmp_path / f"x_train_{number:04d}.bin", np.arange(10) + 10 * number)
    data = TokenData.open(tmp_path, "train")
    assert np.array_equal(data.read(0, data.tokens), np.arange(3000))
    open_files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert sum(str(tmp_path) in name for name in open_files) <= MAPPED_SHARDS


def test_nanogpt_files(tmp_path):
    tokens = np.arange(5000) % 50257
    write_raw(tmp_path / "train.bin", tokens)
    write_raw(tmp_path / "val.bin", tokens[:99])
    for path in (tmp_path, tmp_path / "train.bin"):
        train, val = TokenData.open(path, "train"), TokenData.open(path, "val")
        assert np.array_equal(train.read(0, train.tokens), tokens)
        assert val.tokens == 99
        assert (train.eot, train.vocab_size, train.tokenizer_fingerprint, train.max_token) == (None, None, None, 4999)
    before = TokenData.open(tmp_path, "train").fingerprint
    write_raw(tmp_path / "train.bin", tokens + 1)
    assert TokenData.open(tmp_path, "train").fingerprint != before


def test_llmc_files(tmp_path):
    write_llmc(tmp_path / "fineweb_train_000001.bin", np.arange(100))
    write_llmc(tmp_path / "fineweb_train_000002.bin", np.arange(100, 250))
    write_llmc(tmp_path / "fineweb_val_000000.bin", np.arange(30))
    data = TokenData.open(tmp_path, "train")
    assert np.array_equal(data.read(0, data.tokens), np.arange(250))
    assert TokenData.open(tmp_path, "val").tokens == 30
    assert TokenData.open(tmp_path / "fineweb_train_000001.bin", "train").tokens == 100


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(UserError, match=r"nowhere: no such file or folder"):
        TokenData.open(tmp_path / "nowhere", "train")
    with pytest.raises(UserError, match=r"no tokens of the split 'train'"):
        TokenData.open(tmp_path, "train")
    file = write_raw(tmp_path / "train.bin", np.arange(10))
    with pytest.raises(UserError, match=r"no tokens of the split 'val'"):
        TokenData.open(tmp_path, "val")
    with pytest.raises(UserError, match=r"train.bin: there is no val file beside it"):
        TokenData.open(file, "val")
    file.write_bytes(b"123")
    with pytest.raises(UserError, match=r"train.bin: 3 bytes are not a sequence of uint16"):
        TokenData.open(tmp_path, "train")
    write_llmc(tmp_path / "train.bin", np.arange(10), claimed=11)
    with pytest.raises(UserError, match=r"train.bin: has 1,044 bytes and should have 1,046"):
        TokenData.open(tmp_path, "train")
    write_llmc(tmp_path / "train.bin", np.arange(0))
    with pytest.raises(UserError, match=r"train.bin: has no tokens"):
        TokenData.open(tmp_path, "train")
    write_llmc(tmp_path / "train.bin", np.arange(10), version=2)
    with pytest.raises(UserError, match=r"train.bin: llm.c format version 2"):
        TokenData.open(tmp_path, "train")


def test_damaged_folder(folder):
    shard = folder / "train-00001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(UserError, match=r"train-00001.bin: has .* bytes and should have"):
        TokenData.open(folder, "train")
    assert TokenData.open(folder, "val").tokens > 0
    shard.unlink()
    with pytest.raises(UserError, match=r"train-00001.bin: the shard is missing"):
        TokenData.open(folder, "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values | {"format": 2}, "format 2"),
        (lambda values: values | {"extra": 1}, "extra"),
        (lambda values: {k: v for k, v in values.items() if k != "eot"}, "eot"),
        (lambda values: [], "must be a table"),
    ],
)
def test_an_index_that_is_not_ours(folder, change, message):
    path = folder / "index.json"
    values = {name: value for name, value in json.loads(path.read_text()).items() if name != "checksum"}
    path.write_text(json.dumps(change(values)))
    with pytest.raises(UserError, match=message):
        TokenData.open(folder, "train")


def test_another_tokenizer_beside_the_tokens_is_refused(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")
    with pytest.raises(UserError, match="is not the tokenizer that the tokens were made with"):
        TokenData.open(folder, "train")
    path.unlink()
    with pytest.raises(UserError, match="is missing; restore it"):
        TokenData.open(folder, "train")


def test_a_part_is_the_tokens_between_its_ends(folder):
    data = TokenData.open(folder, "train")
    start, stop = data.files[0].tokens - 5, data.files[0].tokens + data.files[1].tokens + 3  # over three files
    part = data.part(start, stop)
    assert np.array_equal(part.read(0, part.tokens), data.read(start, stop - start))
    assert part.fingerprint != data.fingerprint
