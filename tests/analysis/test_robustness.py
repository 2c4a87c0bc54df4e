import math

import numpy as np
import pytest
import torch

from angpt.analysis import robustness
from angpt.analysis.inputs import Condition, Missing
from angpt.analysis.probe import context_of
from angpt.data.loader import Batch
from tests.analysis.conftest import VOCAB, tiny
from tests.analysis.parts import measure_robustness

LONG = 40
"""Embeddings of tokens from this one on have length 6, the others 2."""


@pytest.fixture
def model():
    """GPT+ whose blocks add 0, so that the stream is the embedding, and whose logits are all 0."""
    found = tiny("gpt+")
    with torch.no_grad():
        found.W_e.weight.copy_(2 * torch.nn.functional.normalize(found.W_e.weight, dim=1))
        found.W_e.weight[LONG:] *= 3
        found.W_h.weight.zero_()
        for block in found.blocks:
            block.W_p.weight.zero_()
            block.W_d.weight.zero_()
    return found


def rows(low, high, shape=(3, 13)):
    return np.random.default_rng(0).integers(low, high, size=shape)


def text():
    tokens = torch.from_numpy(rows(0, LONG))
    return [Batch(tokens[:, :-1], tokens[:, 1:], None)]


def test_planted_lengths(model):
    half = np.where(np.arange(13) % 2, 0, LONG) * np.ones((2, 1), int)
    conditions = [
        Condition("long", "long embeddings", rows(LONG, VOCAB)),
        Missing("absent", "there is none"),
        Condition("mixed", "both in turn", half),
        Condition("beyond", "long ones first, which do not count", np.array([[LONG] * 6 + [0] * 7]), skip=6),
    ]
    found = measure_robustness(model, text(), conditions, batch_tokens=12)
    assert [s.name for s in found.shifts] == ["text", "long", "mixed", "beyond"]
    assert found.missing == (conditions[1],)
    base, long, mixed, beyond = found.shifts
    assert (base.mean, base.change, base.worst_layer) == (pytest.approx(2, rel=1e-4), None, None)
    assert (base.sequences, base.length) == (3, 12)
    assert (long.mean, long.std) == pytest.approx((6, 0), abs=1e-4)
    assert (long.change, long.worst_change) == pytest.approx((3, 3), rel=1e-4)
    assert (mixed.mean, mixed.std, mixed.change) == pytest.approx((4, 2, 2), rel=1e-4)
    assert (beyond.mean, beyond.change) == pytest.approx((2, 1), rel=1e-4)
    assert (beyond.sequences, beyond.length) == (1, 12)
    assert [s.loss for s in found.shifts] == pytest.approx([math.log(VOCAB)] * 4, rel=1e-6)


def test_the_loss_beyond_the_context_counts_those_positions_only():
    model = tiny("angpt")
    tokens = rows(0, VOCAB, (3, 25))
    found = measure_robustness(model, text(), [Condition("beyond", "", tokens, skip=12)], batch_tokens=24)
    inputs, targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
    with context_of(model, 24):
        logits = model(inputs)
    expected = torch.nn.functional.cross_entropy(logits[:, 12:].flatten(0, 1), targets[:, 12:].flatten())
    assert found.shifts[1].loss == pytest.approx(expected.item(), rel=1e-9)


def test_the_worst_layer_is_where_the_stream_changes_most(model):
    """The second layer's attention doubles the stream."""
    block = model.blocks[1]
    with torch.no_grad():
        eye = torch.eye(16, dtype=torch.float64)
        block.W_qkv.weight.zero_()[32:] = eye
        block.W_p.weight.copy_(eye)
    block.norm_a = torch.nn.Identity()
    constant = Condition("same", "one long token", np.full((2, 13), LONG))
    base = [Batch(torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.long), None)]
    found = measure_robustness(model, base, [constant], batch_tokens=100)
    assert [s.mean for s in found.shifts[0].stream] == pytest.approx([2, 2, 4], rel=1e-4)
    assert [s.mean for s in found.shifts[1].stream] == pytest.approx([6, 6, 12], rel=1e-4)
    assert found.shifts[1].mean == pytest.approx(8, rel=1e-4)
    stretched = robustness.shift("x", "", 1, 12, None, tuple(
        s if i != 2 else found.shifts[0].stream[0] for i, s in enumerate(found.shifts[1].stream)
    ), found.shifts[0])  # fmt: skip
    assert (stretched.worst_layer, stretched.worst_change) == (1, pytest.approx(3))
    shrunk = robustness.shift("x", "", 1, 12, None, found.shifts[0].stream[:2] * 1 + (found.shifts[1].stream[2],),
                               found.shifts[0])  # fmt: skip
    assert (shrunk.worst_layer, shrunk.worst_change) == (3, pytest.approx(3))


def test_a_change_is_the_larger_over_the_smaller():
    assert robustness.factor(2.0, 6.0) == robustness.factor(6.0, 2.0) == 3.0
    assert robustness.factor(None, 1.0) is None
    assert robustness.factor(0.0, 1.0) is None
