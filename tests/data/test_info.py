import numpy as np
import pytest
from rich.console import Console

from angpt.data.info import describe, render
from angpt.errors import UserError
from tests.data.corpora import prepare, write_raw


@pytest.fixture
def folder(tmp_path):
    for name in ("train", "val"):
        (tmp_path / f"{name}.txt").write_text("aab[b]" * 100)
    prepare((str(tmp_path),), tmp_path / "out", tokenizer="bytes", shard_bytes=100)
    return tmp_path / "out"


def shown(info) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render(info))
    return capture.get()


def test_a_prepared_folder(folder):
    info = describe(folder)
    train = info.splits[0]
    assert (train.split, train.tokens, train.documents, train.text_bytes, train.files) == ("train", 601, 1, 600, 1)
    assert train.top == (("'a'", 200), ("'b'", 200), ("'['", 100), ("']'", 100), ("'<|endoftext|>'", 1))
    assert (train.vocabulary_used, train.max_token) == (5, 256)
    assert train.sample.startswith("aab[b]aab[b]")
    text = shown(info)
    for part in ("checksums correct", "601", "'a' 33.28%", "aab[b]aab[b]", "1.9%"):
        assert part in text


def test_a_flipped_bit_is_found(folder):
    shard = folder / "val-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[100] ^= 1
    shard.write_bytes(raw)
    for verify in (True, False):
        with pytest.raises(UserError, match=r"val-00000.bin: is damaged"):
            describe(folder, verify)


def test_raw_files(tmp_path):
    write_raw(tmp_path / "train.bin", np.array([5, 5, 5, 9]))
    write_raw(tmp_path / "val.bin", np.array([1]))
    info = describe(tmp_path)
    assert info.index is None
    assert info.splits[0].top[:2] == (("5", 3), ("9", 1))
    assert info.splits[0].sample == "5 5 5 9"
    assert "unknown" in shown(info)
