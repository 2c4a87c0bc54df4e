import math
import statistics

import pytest
import torch
import torch.nn.functional as F

from angpt.analysis import probe as probe_module
from angpt.analysis.attention import AttentionProbe
from angpt.analysis.factors import FactorProbe
from angpt.analysis.norms import NormProbe
from angpt.analysis.probe import Lengths, Probe, observe, watch
from angpt.models.variants import ARCHITECTURES
from tests.analysis.conftest import some_batches, tiny


def test_streamed_statistics_are_those_of_the_whole():
    rng = torch.Generator().manual_seed(0)
    parts = [5 + torch.rand(n, generator=rng) for n in (7, 1, 100)]
    lengths = Lengths()
    for part in parts:
        lengths.add(part.reshape(1, -1))
    values = torch.cat(parts).double().tolist()
    found = lengths.stats()
    assert found.count == 108
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert found.std == pytest.approx(statistics.pstdev(values), rel=1e-9)
    assert found.rms == pytest.approx(math.sqrt(statistics.fmean(v * v for v in values)), rel=1e-12)
    assert found.mean_inverse == pytest.approx(statistics.fmean(1 / v for v in values), rel=1e-12)
    assert (found.low, found.high) == (min(values), max(values))
    assert found.variation == pytest.approx(statistics.pstdev(values) / statistics.fmean(values), rel=1e-9)


def test_a_small_spread_around_a_large_mean_is_not_lost_in_rounding():
    lengths = Lengths()
    for sign in (-1, 1):
        lengths.add(torch.full((1000,), 1e4 + sign * 1e-2, dtype=torch.float64))
    assert lengths.stats().std == pytest.approx(1e-2, rel=1e-4)


def test_values_that_are_not_finite_and_empty_statistics_are_none():
    lengths = Lengths()
    lengths.add(torch.tensor([1.0, math.nan]))
    assert lengths.stats().mean is None
    zero = Lengths()
    zero.add(torch.zeros(3))
    assert (zero.stats().mean, zero.stats().mean_inverse, zero.stats().variation) == (0.0, None, None)
    lengths = Lengths()
    lengths.add(torch.empty(0))
    assert (lengths.stats().count, lengths.stats().mean) == (0, None)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_watching_changes_nothing_and_leaves_nothing_behind(architecture):
    model = tiny(architecture)
    [batch] = some_batches(count=1)
    before = model(batch.inputs)
    probes = [NormProbe(2), FactorProbe(), AttentionProbe()]
    with watch(model, probes):
        during = model(batch.inputs)
    assert torch.equal(before, during)
    assert torch.equal(before, model(batch.inputs))
    for block in model.blocks:
        assert not {"attention", "mlp", "attend"} & set(block.__dict__)
        assert not block._forward_hooks
        assert not block.W_p._forward_hooks
    assert len(probes[0].stream()) == 3
    assert len(probes[2].results()) == 2
    assert probes[0].stream()[0].count == batch.inputs.numel()


def test_a_model_is_left_clean_after_an_error():
    class Broken(Probe):
        def mlp(self, layer, block, h, x):
            raise RuntimeError("broken")

    model = tiny()
    with pytest.raises(RuntimeError, match="broken"):
        observe(model, some_batches(), [Broken()])
    assert not any("mlp" in block.__dict__ for block in model.blocks)
    assert model.cfg.context == 12


def test_the_loss_in_chunks_is_the_loss_of_the_model(monkeypatch):
    model, batches = tiny(), some_batches()
    expected = statistics.fmean(model(b.inputs, b.targets).item() for b in batches)
    assert observe(model, batches) == pytest.approx(expected, rel=1e-9)
    monkeypatch.setattr(probe_module, "LOGITS", 7 * model.cfg.vocab_size)
    assert observe(model, batches) == pytest.approx(expected, rel=1e-9)


def test_skipped_positions_are_neither_in_the_loss_nor_in_the_lengths():
    model, batches = tiny(), some_batches(count=1)
    probe = NormProbe(2, skip=8)
    loss = observe(model, batches, [probe], skip=8)
    [(inputs, targets, _)] = batches
    logits = model(inputs)[:, 8:]
    assert loss == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets[:, 8:].flatten()).item(), rel=1e-9)
    expected = model.hidden_states(inputs)[:, :, 8:].norm(dim=-1).flatten(1).mean(dim=1)
    assert [s.mean for s in probe.stream()] == pytest.approx(expected.tolist(), rel=1e-9)
    assert probe.stream()[0].count == 5 * 4


def test_sequences_longer_than_the_context_can_be_observed():
    model = tiny()
    assert observe(model, some_batches(length=30)) is not None
    assert model.cfg.context == 12


@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_in_bf16_the_numbers_are_nearly_the_same(architecture):
    model = tiny(architecture, double=False)
    exact, rounded = NormProbe(2), NormProbe(2)
    attention, factors = AttentionProbe(), FactorProbe()
    observe(model, some_batches(), [exact])
    loss = observe(model, some_batches(), [rounded, attention, factors], bf16=True)
    assert loss == pytest.approx(observe(model, some_batches()), rel=0.02)
    for one, two in zip(exact.blocks("attention") + exact.blocks("mlp"),
                        rounded.blocks("attention") + rounded.blocks("mlp"), strict=True):  # fmt: skip
        assert (two.maps, two.relative_update) == pytest.approx((one.maps, one.relative_update), rel=0.02)
    assert attention.results()[0].bins[0].norm == pytest.approx(1.0, abs=1e-6)
    assert factors.results()
    assert all(f.measured is not None for f in factors.results())
