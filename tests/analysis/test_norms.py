import math
import statistics

import pytest
import torch

from angpt.analysis import norms
from angpt.analysis.history import History
from angpt.constraints import Constraint, apply_constraints
from angpt.models import decoder
from angpt.models.factors import ONES, nu_lerp
from angpt.models.gptplus import GPTPlus
from angpt.models.primitives import norm
from tests.analysis.conftest import some_batches, tiny
from tests.analysis.parts import measure_norms

ATTENTION, MLP, START = (0.5, 1.25), (2.0, 0.8), 3.0
"""Factors of the two layers' attention and MLP, and the length of every embedding."""


class Planted(GPTPlus):
    """Blocks that only scale: every norm and ratio is known."""

    class Block(decoder.Block):
        def attention(self, h, ctx):
            return self.W_p(self.W_qkv(h)[..., : h.shape[-1]])

        def mlp(self, h):
            return self.W_d(self.W_uz(h)[..., : 4 * h.shape[-1]])

        def forward(self, h, ctx):
            h = h + self.attention(h, ctx)
            return h + self.mlp(h)


@pytest.fixture
def planted():
    model = Planted(tiny().cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    eye = torch.eye(16)
    with torch.no_grad():
        model.W_e.weight.copy_(START * torch.nn.functional.normalize(model.W_e.weight, dim=1))
        for block, a, m in zip(model.blocks, ATTENTION, MLP, strict=True):
            block.W_qkv.weight.zero_()[:16] = 2 * eye
            block.W_p.weight.copy_(a / 2 * eye)
            block.W_uz.weight.zero_()[:16] = 4 * eye
            block.W_d.weight.zero_()[:, :16] = m / 4 * eye
    return model


def test_planted_ratios(planted):
    found = measure_norms(planted, some_batches())
    expected = START
    for layer, (a, m) in enumerate(zip(ATTENTION, MLP, strict=True)):
        assert found.stream[layer].mean == pytest.approx(expected, rel=1e-5)
        assert found.stream[layer].std == pytest.approx(0, abs=1e-4)
        attention, mlp = found.attention[layer], found.mlp[layer]
        assert (attention.maps, attention.relative_update) == pytest.approx((a, a), rel=1e-5)
        assert attention.growth == pytest.approx(1 + a, rel=1e-5)
        assert (attention.stream, attention.input) == pytest.approx((expected, expected), rel=1e-5)
        assert (attention.output, attention.added) == pytest.approx((a * expected, a * expected), rel=1e-5)
        expected *= 1 + a
        assert attention.after == mlp.stream == pytest.approx(expected, rel=1e-5)
        assert (mlp.maps, mlp.relative_update) == pytest.approx((m, m), rel=1e-5)
        assert mlp.growth == pytest.approx(1 + m, rel=1e-5)
        expected *= 1 + m
    assert found.stream[-1].mean == pytest.approx(expected, rel=1e-5)
    assert found.stream[-1].count == 2 * 5 * 12


def test_planted_spread(planted):
    """Tokens of two lengths in equal number: mean, deviation, extremes follow."""
    with torch.no_grad():
        planted.W_e.weight[30:] *= 2
    batches = some_batches(count=1, vocab=30)
    mixed = batches[0]._replace(inputs=torch.cat([batches[0].inputs, batches[0].inputs + 30]),
                                targets=torch.cat([batches[0].targets] * 2))  # fmt: skip
    stream = measure_norms(planted, [mixed]).stream[0]
    assert (stream.mean, stream.std) == pytest.approx((4.5, 1.5), rel=1e-4)
    assert (stream.low, stream.high) == pytest.approx((3.0, 6.0), rel=1e-4)
    assert stream.rms == pytest.approx(math.sqrt((9 + 36) / 2), rel=1e-4)
    assert stream.variation == pytest.approx(1 / 3, rel=1e-4)


def mean_length(vectors):
    rows = vectors.flatten(0, -2).tolist()
    return statistics.fmean(math.sqrt(sum(x * x for x in row)) for row in rows)


@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt", "angpt/const-x2"])
def test_against_a_slow_walk_through_the_model(architecture):
    model = tiny(architecture)
    batches = some_batches(count=1)
    found = measure_norms(model, batches)
    h, ctx = model.start(batches[0].inputs)
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            seen = {}
            hooks = [
                part.register_forward_hook(lambda _, args, y, name=name, seen=seen: seen.update({name: args[0]}))
                for name, part in block.named_children()
                if name.startswith("W_")
            ]
            entering = h
            h_a = block.attention(h, ctx)
            if architecture != "gpt+":
                h_a = norm(h_a)
            match architecture:
                case "gpt+":
                    after = h + h_a
                case "ngpt":
                    after = norm(h + block.alpha_a() * (h_a - h))
                case _:
                    after = (h + block.alpha_a() * (h_a - h)) * nu_lerp(block.alpha_a())
            block.mlp(after)
            h = block(h, ctx)
            nu = getattr(block, "nu", ONES)
            for hook in hooks:
                hook.remove()
            attention, mlp = found.attention[layer], found.mlp[layer]
            assert found.stream[layer].mean == pytest.approx(mean_length(entering), rel=1e-9)
            assert attention.input == pytest.approx(mean_length(seen["W_qkv"]), rel=1e-9)
            assert attention.output == pytest.approx(nu.p * mean_length(seen["W_p"] @ block.W_p.weight.T), rel=1e-9)
            assert attention.added == pytest.approx(mean_length(after - entering), rel=1e-9)
            assert attention.relative_update == pytest.approx(attention.added / attention.stream, rel=1e-12)
            assert attention.after == mlp.stream == pytest.approx(mean_length(after), rel=1e-9)
            assert mlp.input == pytest.approx(mean_length(seen["W_uz"]), rel=1e-9)
            assert mlp.output == pytest.approx(nu.d * mean_length(seen["W_d"] @ block.W_d.weight.T), rel=1e-9)
            assert mlp.added == pytest.approx(mean_length(h - after), rel=1e-9)
            assert mlp.after == pytest.approx(mean_length(h), rel=1e-9)
            assert mlp.maps == pytest.approx(mlp.output / mlp.input, rel=1e-12)
    assert found.stream[-1].mean == pytest.approx(mean_length(h), rel=1e-9)


@pytest.mark.parametrize("architecture", ["ngpt", "angpt"])
def test_a_block_that_hardly_counts_adds_hardly_anything(architecture):
    """The output of a block is normed, so that its length says nothing; α says how much of it the stream receives."""
    model = tiny(architecture)
    apply_constraints(model)  # so that the stream of nGPT starts with length 1
    with torch.no_grad():
        for block in model.blocks:
            block.alpha_a.stored.fill_(1e-3 * block.alpha_a.scale / block.alpha_a.init)
            block.alpha_m.stored.fill_(1e-2 * block.alpha_m.scale / block.alpha_m.init)
    found = measure_norms(model, some_batches(count=1))
    for attention, mlp in zip(found.attention, found.mlp, strict=True):
        assert 0 < attention.relative_update < 2e-3
        assert 0.2e-2 < mlp.relative_update < 2e-2


def test_gamma_of_every_norm_with_its_constant():
    model = tiny("gpt+/ln-scaling")
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            block.norm_a.gamma.fill_(1.5 + layer)
            block.norm_m.gamma.fill_(0.5)
        model.norm_h.gamma.zero_()[:9] = 2
    found = norms.gamma_norms(model)
    assert found["norm_a"] == pytest.approx((1.5 * 4, 2.5 * 4 / math.sqrt(2)), rel=1e-6)
    assert found["norm_m"] == pytest.approx((0.5 * 4, 0.5 * 4 / math.sqrt(2)), rel=1e-6)
    assert found["norm_h"] == pytest.approx((6.0,), rel=1e-6)
    assert norms.gamma_norms(tiny("angpt")) == {}
    assert norms.gamma_norms(tiny("gpt+/dyt"))["norm_h"]


def test_the_share_of_rows_on_the_bound():
    model = tiny("angpt")
    apply_constraints(model)
    with torch.no_grad():
        weight = model.blocks[1].W_p.weight
        weight.copy_(torch.nn.functional.normalize(weight, dim=1))
        weight[:4] *= 0.5  # 12 of 16 rows on the bound
    found = {(r.group, r.layer): r for r in norms.row_norms(model)}
    assert len(found) == 2 + 2 * 4
    planted = found["W_p", 2]
    assert (planted.mean, planted.on_bound, planted.low, planted.high) == pytest.approx(
        (0.875, 0.75, 0.5, 1.0), rel=1e-4
    )
    assert planted.std == pytest.approx(math.sqrt(0.75) / 4, rel=1e-4)
    assert (planted.constraint, planted.vectors) == ("bound", 16)
    assert found["W_e", None].vectors == 61


def test_ngpt_is_on_its_sphere_along_the_dimension_that_it_declares():
    model = tiny("ngpt")
    apply_constraints(model)
    found = {(r.group, r.layer): r for r in norms.row_norms(model)}
    assert all(r.on_bound == 1.0 and r.constraint == "unit" for r in found.values())
    assert found["W_d", 1].vectors == 64  # columns
    slow = statistics.fmean(math.sqrt(sum(x * x for x in row)) for row in model.blocks[0].W_d.weight.tolist())
    assert found["W_d", 1].mean == pytest.approx(slow, rel=1e-9)
    assert model.constraints()["blocks.0.W_d.weight"] == Constraint("unit", 0)


def test_nothing_is_bounded_in_gpt_plus():
    assert {(r.constraint, r.on_bound) for r in norms.row_norms(tiny("gpt+"))} == {(None, None)}


def test_history_keeps_the_values_of_norms():
    record = {"kind": "layers", "step": 3, "tokens": 30, "input_norm": [1.0, 2.0], "W_p": [0.5], "W_e": 0.7, "g": [5.0]}
    history = History.of([record, record | {"step": 4, "tokens": 40, "W_e": 0.8}])
    found = measure_norms(tiny(), some_batches(count=1), history).history
    assert set(found.values) == {"input_norm", "W_p", "W_e"}
    assert found.values["W_e"] == ((0.7,), (0.8,))
    assert found.records()[1] == {"step": 4, "tokens": 40, "input_norm": [1.0, 2.0], "W_p": [0.5], "W_e": 0.8}
