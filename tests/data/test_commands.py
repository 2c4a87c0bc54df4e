import pytest
import tyro

from angpt.cli.data import info, prepare
from angpt.data.prepare import default_name
from angpt.data.shards import Index
from angpt.errors import UserError


def test_prepare_then_info(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for name in ("a", "b"):
        (tmp_path / "notes" / f"{name}.txt").write_text(f"the text of {name}")
    tyro.cli(prepare, args=["notes", "--tokenizer", "bytes", "--workers", "1"])
    assert Index.read(tmp_path / "data" / "notes").train.documents == 1
    assert "data/notes/train: 14 tokens, 1 document," in capsys.readouterr().out
    tyro.cli(info, args=["data/notes"])
    assert "checksums correct" in " ".join(capsys.readouterr().out.split())


def test_defaults_for_the_standard_library(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tyro.cli(prepare, args=["stdlib"])
    index = Index.read(tmp_path / "data" / "stdlib")
    assert (index.recipe.tokenizer, index.vocab_size, index.recipe.val_fraction) == ("bpe:2048", 2048, 0.05)
    assert index.train.tokens > 10 * index.val.tokens > 100_000


def test_name_of_the_folder(tmp_path):
    (tmp_path / "v1.5").mkdir()
    (tmp_path / "x.jsonl.xz").touch()
    assert default_name(("stdlib",)) == "stdlib"
    assert default_name(("hf:cerebras/SlimPajama-627B",)) == "SlimPajama-627B"
    assert default_name((f"{tmp_path}/v1.5/",)) == "v1.5"
    assert default_name((f"{tmp_path}/x.jsonl.xz",)) == "x"
    for sources in ((), ("a", "b")):
        with pytest.raises(UserError, match="give one source"):
            default_name(sources)
