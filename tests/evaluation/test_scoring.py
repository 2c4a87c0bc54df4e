import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from angpt.errors import UserError
from angpt.evaluation import scoring
from angpt.evaluation.scoring import Model, Row, Target, batches, log_probabilities, rows, score, windows
from angpt.evaluation.subjects import of_decoder
from angpt.models.decoder import Decoder
from tests.evaluation.material import CONFIG, small_decoder, small_model

CONTEXT = CONFIG.context


def random_pairs(count: int, longest: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(256) for _ in range(rng.randint(1, most))]

    return [(tokens(longest), tokens(9)) for _ in range(count)]


@torch.no_grad()
def slow_score(model: Decoder, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One request by itself: the last tokens that fit, every logit of every position, then those that count."""
    whole = (context + continuation)[-(CONTEXT + 1) :]
    table = model.double()(torch.tensor([whole[:-1]]))[0].log_softmax(-1)
    table = table[len(table) - len(continuation) :]
    values = [table[i, token].item() for i, token in enumerate(continuation)]
    return math.fsum(values), all(table[i].argmax().item() == token for i, token in enumerate(continuation))


@pytest.mark.parametrize("batch_tokens", [1, 100, 10_000])
def test_scores_are_those_of_each_request_alone(batch_tokens: int) -> None:
    """Short ones, ones that are too long, and four with the same inputs."""
    shared = list(range(20))
    pairs = [*random_pairs(12, 30), *random_pairs(6, 2 * CONTEXT, seed=1), *((shared, [5, t]) for t in range(4))]
    found = score(small_model(), pairs, CONTEXT, batch_tokens)
    model = small_decoder()
    expected = [slow_score(model, *pair) for pair in pairs]
    np.testing.assert_allclose(found.logprob, [value for value, _ in expected], rtol=1e-5)
    assert found.greedy.tolist() == [greedy for _, greedy in expected]
    assert found.cut == sum(len(a) + len(b) > CONTEXT + 1 for a, b in pairs) > 0
    assert found.windowed == 0


def test_greedy_is_the_continuation_that_the_model_would_write() -> None:
    model, tokens = small_decoder(), [1, 2, 3]
    with torch.no_grad():
        for _ in range(4):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    pairs = [(tokens[:3], tokens[3:]), (tokens[:3], [*tokens[3:6], (tokens[6] + 1) % 256]), (tokens[:5], tokens[5:])]
    assert score(small_model(), pairs, CONTEXT, 100).greedy.tolist() == [True, False, True]


def test_of_equal_logits_the_first_is_the_likeliest() -> None:
    """Like argmax, which the harness uses."""
    model = Model(lambda tokens, _: tokens[..., None], lambda h: torch.zeros(len(h), 7), 7, torch.device("cpu"))
    found = score(model, [([1], [0]), ([1], [3])], 8, 100)
    assert found.greedy.tolist() == [True, False]
    np.testing.assert_allclose(found.logprob, -math.log(7), rtol=1e-6)


def test_answers_that_differ_in_their_last_token_cost_one_row() -> None:
    question = [*range(30)]
    made = rows([(question, [t]) for t in (65, 66, 67, 68)], CONTEXT)
    assert made == [Row(question, [Target(i, [t]) for i, t in enumerate((65, 66, 67, 68))])]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 200))
def test_batches_hold_every_row_once_and_no_more_tokens_than_allowed(lengths: list[int], tokens: int) -> None:
    made = [Row([0] * n, []) for n in sorted(lengths, reverse=True)]
    parts = list(batches(made, tokens))
    assert [row for part in parts for row in part] == made
    for part in parts:
        assert len(part) == 1 or len(part) * len(part[0].inputs) <= tokens


@given(st.integers(1, 30), st.integers(1, 90), st.integers(1, 25))
def test_windows_predict_each_token_once_with_all_the_context_that_fits(before: int, after: int, length: int) -> None:
    context, continuation = list(range(before)), list(range(before, before + after))
    found = list(windows(context, continuation, length))
    assert [t for _, targets in found for t in targets] == continuation
    for inputs, targets in found:
        assert inputs == list(range(inputs[0], targets[-1]))
        assert len(targets) <= len(inputs) <= length
        assert len(inputs) == min(length, targets[-1])


@given(st.integers(1, 90), st.integers(1, 25))
def test_whole_texts_are_cut_as_the_harness_cuts_them(size: int, length: int) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    text = list(range(100, 100 + size))
    theirs = utils.get_rolling_token_windows(text, prefix_token=7, max_seq_len=length, context_len=1)
    ours = windows([7], text, length)
    assert [(list(a), list(b)) for a, b in ours] == [(list(a), list(b)) for a, b in theirs]


@torch.no_grad()
def test_a_long_text_is_the_sum_over_its_windows() -> None:
    text = [random.Random(3).randrange(256) for _ in range(2 * CONTEXT + 11)]
    found = score(small_model(), [([256], text)], CONTEXT, 1_000)
    model, whole, total = small_decoder().double(), [256, *text], 0.0
    for i in range(1, len(whole)):
        # The windows that do not end the text begin at a multiple of the context, the last one reaches back.
        number, last = (i - 1) // CONTEXT, (len(text) - 1) // CONTEXT
        start = number * CONTEXT if number < last else len(whole) - 1 - CONTEXT
        total += model(torch.tensor([whole[start:i]]))[0, -1].log_softmax(-1)[whole[i]].item()
    assert found.logprob[0] == pytest.approx(total, rel=1e-6)
    assert (found.cut, found.windowed) == (0, 1)


def test_logits_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    h, targets = torch.randn(600, 16), torch.arange(600) % 256
    whole = log_probabilities(model, h, targets)
    sizes: list[int] = []
    monkeypatch.setitem(scoring.LOGITS, "cpu", 1)
    noted = dataclasses.replace(model, head=lambda part: sizes.append(len(part)) or model.head(part))
    for a, b in zip(log_probabilities(noted, h, targets), whole, strict=True):
        torch.testing.assert_close(a, b)
    assert sizes == [256, 256, 88]


def test_a_diverged_model_is_named_as_such() -> None:
    model = small_decoder()
    with torch.no_grad():
        model.W_e.weight[5] = math.nan
    with pytest.raises(UserError, match="not finite"):
        score(of_decoder(model, torch.float32), [([5], [6])], CONTEXT, 100)


def test_bf16_is_near_fp32() -> None:
    pairs = random_pairs(20, 30)
    exact = score(small_model(), pairs, CONTEXT, 500).logprob
    rough = score(of_decoder(small_decoder(), torch.bfloat16), pairs, CONTEXT, 500).logprob
    assert not np.array_equal(exact, rough)
    np.testing.assert_allclose(rough, exact, rtol=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_a_gpu_finds_the_same(dtype: torch.dtype, rtol: float) -> None:
    pairs = [*random_pairs(50, 30), *random_pairs(10, 2 * CONTEXT, seed=1)]
    exact = score(small_model(), pairs, CONTEXT, 500)
    found = score(of_decoder(small_decoder().cuda(), dtype), pairs, CONTEXT, 500)
    np.testing.assert_allclose(found.logprob, exact.logprob, rtol=rtol)
