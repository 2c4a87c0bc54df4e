import math
import statistics

import pytest
import torch

from angpt.analysis import attention
from angpt.analysis.attention import AttentionProbe
from angpt.data.loader import document_numbers
from angpt.models.primitives import make_context
from tests.analysis.conftest import some_batches, tiny
from tests.analysis.parts import measure_attention


def test_dense_attention_has_rows_of_one_over_root_r():
    """Queries of length 0 attend to all tokens equally."""
    model = tiny("angpt")
    with torch.no_grad():
        for block in model.blocks:
            block.W_qkv.weight[:16] = 0
    layers = measure_attention(model, some_batches())
    assert [found.layer for found in layers] == [1, 2]
    for found in layers:
        assert found.total.scaled == pytest.approx(1, abs=1e-6)
        assert found.heads == pytest.approx((1, 1), abs=1e-6)
        assert found.total.norm == found.total.dense == pytest.approx(statistics.fmean(r**-0.5 for r in range(1, 13)))
        assert found.total.effective == pytest.approx(statistics.fmean(range(1, 13)))
        assert found.total.rows == 2 * 5 * 2 * 12
        assert [(b.first, b.last) for b in found.bins] == [(1, 1), (2, 3), (4, 7), (8, 12)]
        assert found.bins[1].norm == pytest.approx((2**-0.5 + 3**-0.5) / 2)


def test_attention_to_a_single_token_has_rows_of_length_one():
    eye = 100 * torch.eye(9, dtype=torch.float64)
    q = k = eye.expand(2, 3, 9, 9)
    probe = AttentionProbe()
    probe.attend(0, q, k, q, make_context(torch.zeros(2, 9, 4, dtype=torch.float64), 0, 1e4))
    [found] = probe.results()
    assert found.total.norm == pytest.approx(1, abs=1e-6)
    assert found.total.effective == pytest.approx(1, abs=1e-6)
    assert found.total.scaled == pytest.approx(statistics.fmean(math.sqrt(r) for r in range(1, 10)), rel=1e-6)


def slow_rows(q, k, allowed):
    """(head, r, ‖a‖) for each row, with loops."""
    rows = []
    for b in range(q.shape[0]):
        for head in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [j for j in range(q.shape[2]) if allowed(b, i, j)]
                scores = [float(q[b, head, i] @ k[b, head, j]) for j in keys]
                total = sum(math.exp(s) for s in scores)
                rows.append((head, len(keys), math.sqrt(sum((math.exp(s) / total) ** 2 for s in scores))))
    return rows


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("entries", [1 << 25, 40])
def test_against_loops_over_every_entry(monkeypatch, masked, entries):
    """Also a few rows at a time, and inside documents, where r counts the document's own tokens."""
    monkeypatch.setattr(attention, "ENTRIES", entries)
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 10, 4, generator=rng, dtype=torch.float64) for _ in range(3))
    tokens = torch.tensor([[1, 1, 0, 2, 2, 2, 0, 3, 3, 3], [5] * 10])
    documents = document_numbers(tokens, 0)
    ctx = make_context(torch.zeros(2, 10, 4, dtype=torch.float64), 0, 1e4, documents if masked else None)
    probe = AttentionProbe()
    probe.attend(3, q, k, v, ctx)
    [found] = probe.results()
    same = documents.tolist()
    rows = slow_rows(q, k, lambda b, i, j: j <= i and (not masked or same[b][i] == same[b][j]))
    assert found.layer == 4
    assert found.total.rows == len(rows) == 40
    assert found.total.norm == pytest.approx(statistics.fmean(n for _, _, n in rows), rel=1e-9)
    assert found.total.dense == pytest.approx(statistics.fmean(r**-0.5 for _, r, _ in rows), rel=1e-9)
    assert found.total.scaled == pytest.approx(statistics.fmean(r**0.5 * n for _, r, n in rows), rel=1e-9)
    assert found.total.effective == pytest.approx(statistics.fmean(n**-2 for _, _, n in rows), rel=1e-9)
    for head in (0, 1):
        mine = [r**0.5 * n for h, r, n in rows if h == head]
        assert found.heads[head] == pytest.approx(statistics.fmean(mine), rel=1e-9)
    for part in found.bins:
        mine = [n for _, r, n in rows if part.first <= r <= part.last]
        assert (part.rows, part.norm) == (len(mine), pytest.approx(statistics.fmean(mine), rel=1e-9))


def test_shorter_and_longer_sequences_add_up():
    model = tiny("gpt+")
    together = measure_attention(model, some_batches(length=6) + some_batches(length=12))
    alone = [measure_attention(model, some_batches(length=n)) for n in (6, 12)]
    for both, short, long in zip(together, *alone, strict=True):
        assert both.total.rows == short.total.rows + long.total.rows
        expected = short.total.effective * short.total.rows + long.total.effective * long.total.rows
        assert both.total.effective == pytest.approx(expected / both.total.rows, rel=1e-9)


def test_the_model_attends_with_these_matrices():
    """With one-hot values, the output of attention is the row itself."""
    model = tiny("gpt+", n_heads=1, context=12)
    seen = {}

    class Catch(AttentionProbe):
        def attend(self, layer, q, k, v, ctx):
            names = torch.eye(12, 16, dtype=q.dtype).expand(5, 1, 12, 16)
            rows = type(model.blocks[0]).attend(model.blocks[0], q, k, names, ctx, 1.0)
            seen.setdefault(layer, []).append(rows.norm(dim=-1))
            super().attend(layer, q, k, v, ctx)

    from angpt.analysis.probe import observe

    probe = Catch()
    observe(model, some_batches(), [probe])
    assert [found.layer for found in probe.results()] == [1, 2]
    for found in probe.results():
        assert found.total.norm == pytest.approx(torch.cat(seen[found.layer - 1]).mean().item(), rel=1e-9)
