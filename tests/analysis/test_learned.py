import numpy as np
import pytest
import torch

from angpt.analysis import learned
from tests.analysis.conftest import VOCAB, tiny


def plant(scale, values):
    with torch.no_grad():
        scale.stored.copy_(torch.as_tensor(values, dtype=scale.stored.dtype) * scale.scale / scale.init)


def test_planted_alpha_and_g():
    model = tiny("angpt")
    plant(model.blocks[0].alpha_a, [0.1] * 12 + [-0.3] * 4)
    plant(model.blocks[1].alpha_m, np.linspace(0.0, 1.5, 16))
    plant(model.blocks[0].g, [4.5])
    plant(model.blocks[1].g, [7.25])
    found = learned.measure(model, None)
    one = found.alpha["alpha_a"][0]
    assert (one.layer, one.mean, one.size, one.negative) == pytest.approx((1, 0.0, 0.15, 0.25), abs=1e-6)
    assert (one.low, one.high) == pytest.approx((-0.3, 0.1))
    assert one.std == pytest.approx(np.std([0.1] * 12 + [-0.3] * 4))
    two = found.alpha["alpha_m"][1]
    assert (two.layer, two.mean, two.high) == pytest.approx((2, 0.75, 1.5))
    assert found.g == pytest.approx((4.5, 7.25))
    assert (found.alpha_start, found.s_z) == (0.05, None)
    assert found.g_start == pytest.approx(8**0.5)


def test_missing_parameters_are_empty():
    gpt = learned.measure(tiny("gpt+"), np.ones(VOCAB, np.int64))
    assert (gpt.alpha, gpt.s_z, gpt.alpha_start, len(gpt.g)) == ({}, None, None, 2)
    ngpt = learned.measure(tiny("ngpt"), np.ones(VOCAB, np.int64))
    assert (ngpt.g, ngpt.g_start) == ((), None)
    assert ngpt.s_z is not None
    assert set(ngpt.alpha) == {"alpha_a", "alpha_m"}
    assert learned.measure(tiny("angpt/no-lerp"), None).alpha == {}
    assert learned.measure(tiny("gpt+/no-qk-norm"), None).g == ()


def test_planted_logit_scales():
    """|s_z| falls with the frequency, every other token is negative, ten tokens do not occur."""
    model = tiny("angpt")
    counts = np.array([0] * 10 + [1] * 11 + [5] * 20 + [40] * 20)
    sizes = np.array([9.0] * 10 + [8.0] * 11 + [6.0] * 20 + [2.0] * 20)
    plant(model.s_z, sizes * np.where(np.arange(VOCAB) % 2, -1, 1))
    found = learned.measure(model, counts).s_z
    assert [(b.first, b.last, b.tokens) for b in found.bins] == [(0, 0, 10), (1, 1, 11), (5, 5, 20), (40, 40, 20)]
    assert [b.mean for b in found.bins] == pytest.approx([9, 8, 6, 2])
    assert found.correlation == pytest.approx(-1.0)
    assert found.negative == pytest.approx(30 / 61)
    assert found.mean == pytest.approx(sizes.mean())
    assert found.std == pytest.approx(sizes.std())
    assert (found.start, found.counted) == (1.0, 11 + 100 + 800)


def test_bins_are_half_decades_with_their_quantiles():
    s_z = np.arange(1.0, 101.0)
    found = learned.logit_scale(s_z, np.arange(1, 101), 1.0)
    assert [(b.first, b.last) for b in found.bins] == [(1, 3), (4, 9), (10, 31), (32, 99), (100, 100)]
    assert found.bins[2].low == pytest.approx(np.quantile(s_z[9:31], 0.1))
    assert found.bins[2].high == pytest.approx(np.quantile(s_z[9:31], 0.9))
