import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from angpt.data.tokenizers import end_of_text_id, fingerprint, load_tokenizer, vocab_size
from angpt.errors import UserError
from tests.data.corpora import NEOX

BYTES = load_tokenizer("bytes")
TEXT = "héllo <|endoftext|> wörld\n\t 漢字 🙂"


@given(st.text())
def test_bytes_are_their_own_ids(text):
    ids = BYTES.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


def test_bytes_vocabulary():
    assert vocab_size(BYTES) == 257
    assert end_of_text_id(BYTES) == 256


def test_bpe_is_trained_on_the_text_and_always_the_same():
    texts = [f"the quick brown fox {i} jumps over the lazy dog" for i in range(200)]
    tokenizer, again = load_tokenizer("bpe:300", texts), load_tokenizer("bpe:300", iter(texts))
    assert vocab_size(tokenizer) == 300
    assert fingerprint(tokenizer) == fingerprint(again)
    assert fingerprint(tokenizer) != fingerprint(load_tokenizer("bpe:300", texts[:10]))
    assert len(tokenizer.encode("the lazy dog").ids) < 8
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


@pytest.mark.parametrize(
    "spec",
    [
        "bytes",
        "bpe:300",
        pytest.param("file", marks=pytest.mark.skipif(not NEOX.exists(), reason=f"no tokenizer at {NEOX}")),
    ],
)
def test_a_tokenizer_survives_its_folder(tmp_path, spec):
    tokenizer = load_tokenizer(NEOX if spec == "file" else spec, [TEXT])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    again = load_tokenizer(tmp_path)
    assert fingerprint(again) == fingerprint(tokenizer)
    assert again.encode(TEXT).ids == tokenizer.encode(TEXT).ids
    assert again.decode(again.encode(TEXT).ids) == TEXT
    assert end_of_text_id(again) not in again.encode(TEXT).ids


def test_text_is_never_cut(tmp_path):
    tokenizer = load_tokenizer("bytes")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "short.json"))
    assert len(load_tokenizer(tmp_path / "short.json").encode("abcdefghijkl").ids) == 12


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_end_of_text_by_its_usual_names(name):
    assert end_of_text_id(Tokenizer(models.WordLevel({"a": 0, name: 7}, unk_token="a"))) == 7
    assert vocab_size(Tokenizer(models.WordLevel({"a": 0, name: 7}, unk_token="a"))) == 8


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no end-of-text token"):
        end_of_text_id(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    for spec in ("bpe:x", "bpe:256", "bpe:", "bpe:1000001", f"bpe:{'9' * 5000}", "bpe:٣٣٣"):
        with pytest.raises(UserError, match="write bpe:N with N from 257"):
            load_tokenizer(spec)
    with pytest.raises(UserError, match=r"none.json: no such tokenizer file"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad.json: is not a tokenizer.json"):
        load_tokenizer(tmp_path / "bad.json")

    def offline(name):
        raise Exception("no network")

    monkeypatch.setattr("angpt.data.tokenizers.Tokenizer.from_pretrained", offline, raising=False)
    with pytest.raises(UserError, match=r"'some/name': cannot be downloaded \(no network\); pass the path"):
        load_tokenizer("some/name")
