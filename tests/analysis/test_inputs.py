import dataclasses

import numpy as np
import pytest

from angpt.analysis.inputs import (
    Condition,
    Missing,
    TextSource,
    condition_batches,
    conditions,
    text_batches,
    token_counts,
)
from angpt.data.loader import document_numbers
from angpt.data.shards import TokenData
from angpt.data.tokenizers import load_tokenizer

CONTEXT = 16


def write(folder, tokens, split):
    np.array(tokens, dtype="<u2").tofile(folder / f"{split}.bin")


@pytest.fixture
def source(tmp_path):
    """Token n occurs about 1000/n times in training; the tokenizer is that of bytes."""
    rng = np.random.default_rng(0)
    train = np.concatenate([np.full(1000 // n, n) for n in range(1, 101)])
    write(tmp_path, rng.permutation(train), "train")
    write(tmp_path, rng.choice(train, size=400), "val")
    load_tokenizer("bytes").save(str(tmp_path / "tokenizer.json"))
    return TextSource(TokenData.open(tmp_path, "train"), TokenData.open(tmp_path, "val"), CONTEXT, vocab_size=300)


def by_name(source, tokens=64):
    counts = token_counts(source.train, source.vocab_size)
    return {c.name: c for c in conditions(source, tokens, counts)}


def test_counts_are_those_of_the_training_text(source):
    counts = token_counts(source.train, 300)
    assert counts.tolist() == [0] + [1000 // n for n in range(1, 101)] + [0] * 199
    assert counts.sum() == source.train.tokens


def test_a_long_text_is_counted_in_blocks_over_all_of_it(source, monkeypatch):
    from angpt.analysis import inputs

    monkeypatch.setattr(inputs, "BLOCK", 100)
    counts = token_counts(source.train, 300, limit=1000)
    stream = source.train.read(0, source.train.tokens)
    starts = [(len(stream) - 100) * i // 9 for i in range(10)]
    assert (starts[0], starts[-1]) == (0, len(stream) - 100)
    expected = sum(np.bincount(stream[s : s + 100], minlength=300) for s in starts)
    assert (counts == expected).all()


def test_text_comes_in_windows_with_their_targets(source):
    batches = list(text_batches(source, 5 * CONTEXT, 2 * CONTEXT))
    assert [tuple(b.inputs.shape) for b in batches] == [(2, CONTEXT), (2, CONTEXT), (1, CONTEXT)]
    stream = source.val.read(0, source.val.tokens).tolist()
    for batch in batches:
        for row, target in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            text = [*row, target[-1]]
            assert any(stream[i : i + 17] == text for i in range(len(stream)))
            assert target == text[1:]
    assert batches[0].documents is None


def test_attention_stays_inside_documents_of_text_as_in_training(source, monkeypatch):
    monkeypatch.setattr(TokenData, "eot", 1)  # that of prepared data
    masked = dataclasses.replace(source, mask_documents=True)
    found = by_name(masked)
    longer = (next(condition_batches(found[f"context × {times}"], 64)) for times in (2, 4))
    for batch in (next(text_batches(masked, 64, 64)), *longer):
        assert batch.documents.max() > 0
        assert (batch.documents == document_numbers(batch.inputs, 1)).all()
    assert next(condition_batches(found["random"], 64)).documents is None


def test_every_kind_of_input_is_what_it_says(source):
    found = by_name(source)
    assert list(found) == [
        "same token",
        "random",
        "rare",
        "context × 2",
        "context × 4",
        "whitespace",
        "German",
        "Russian",
    ]
    same = found["same token"].tokens
    assert same.shape == (4, CONTEXT + 1)
    assert all(len(set(row)) == 1 for row in same.tolist())
    assert len({row[0] for row in same.tolist()}) == 4
    assert same[0, 0] == 1  # the most frequent token first
    assert token_counts(source.train, 300)[same[-1, 0]] == 10  # and the rarest last
    assert found["random"].tokens.max() > 150  # also tokens that never occur
    assert set(found["rare"].tokens.flatten().tolist()) <= set(range(91, 101))
    for times in (2, 4):
        longer = found[f"context × {times}"]
        assert longer.tokens.shape[1] == times * CONTEXT + 1
        assert longer.skip == CONTEXT
    decode = load_tokenizer("bytes").decode
    assert decode(found["whitespace"].tokens[0].tolist()).strip(" \n\t") == ""
    assert decode(found["German"].tokens[0].tolist()) == "Am frühen Morgen"
    assert decode(found["Russian"].tokens[0].tolist()).startswith("Старый")
    assert all(c.description and c.tokens.dtype == np.int64 for c in found.values())


def test_equal_arguments_give_equal_inputs(source):
    for one, two in zip(by_name(source).values(), by_name(source).values(), strict=True):
        assert (one.tokens == two.tokens).all()


def test_random_tokens_stay_inside_the_tokenizers_vocabulary(source):
    small = dataclasses.replace(source, vocab_size=101)
    assert by_name(small)["random"].tokens.max() <= 100


def test_one_token_is_repeated_512_times_where_the_context_allows(source):
    wide = dataclasses.replace(source, context=600)
    counts = token_counts(source.train, 300)
    assert conditions(wide, 1, counts)[0].tokens.shape == (1, 513)


def test_a_missing_condition_says_why(source):
    (source.train.path / "tokenizer.json").unlink()
    found = by_name(dataclasses.replace(source, context=300))
    assert isinstance(found["random"], Condition)
    assert found["context × 2"] == Missing("context × 2", "the validation split has 400 tokens, a sequence needs 601")
    for name in ("whitespace", "German", "Russian"):
        assert isinstance(found[name], Missing)
        assert "tokenizer.json does not exist" in found[name].reason


def test_a_tokenizer_with_too_many_tokens_for_the_model(source):
    found = by_name(dataclasses.replace(source, vocab_size=150))
    assert isinstance(found["Russian"], Missing)  # its bytes lie above 150
    assert isinstance(found["whitespace"], Condition)
