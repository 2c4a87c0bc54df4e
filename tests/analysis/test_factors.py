import math
import statistics

import pytest
import torch

from angpt.models.factors import constants, nu_lerp
from angpt.models.primitives import norm
from angpt.models.variants import build
from tests.analysis.conftest import some_batches, tiny
from tests.analysis.parts import measure_factors

A, B, C, P, U, Z, D = 2.0, 0.5, 1.5, 0.7, 1.2, 3.0, 0.9
"""Factor by which each planted map scales its input."""


def lookup(found):
    return {(f.activation, f.layer): f for f in found}


@pytest.fixture
def planted():
    """anGPT with one head and maps that only scale, and embeddings of length 2."""
    model = tiny("angpt", n_heads=1, d_ff=16)
    eye = torch.eye(16, dtype=torch.float64)
    with torch.no_grad():
        model.W_e.weight.copy_(2 * torch.nn.functional.normalize(model.W_e.weight, dim=1))
        for block in model.blocks:
            block.W_qkv.weight.copy_(torch.cat([A * eye, B * eye, C * eye]))
            block.W_p.weight.copy_(P * eye)
            block.W_uz.weight.copy_(torch.cat([U * eye, Z * eye]))
            block.W_d.weight.copy_(D * eye)
    return model


def test_planted_maps(planted):
    found = lookup(measure_factors(planted, some_batches()))
    for name, gain in (("q", A), ("k", B), ("v", C)):
        first = found[name, 1]
        assert first.measured == pytest.approx(1 / (2 * gain), rel=1e-4)  # every input has length 2
        assert first.mean_inverse == pytest.approx(1 / (2 * gain), rel=1e-4)
        assert (first.variation, first.error) == pytest.approx((0, 0), abs=1e-4)
        assert first.nu == pytest.approx(1.0)  # d_h = d_m
        assert first.off == pytest.approx(2 * gain, rel=1e-4)
        for layer in (1, 2):
            assert found[name, layer].unit == pytest.approx(1 / gain, rel=1e-4)
    for layer in (1, 2):
        assert found["p", layer].unit == pytest.approx(1 / P, rel=1e-4)
        assert found["u", layer].unit == pytest.approx(1 / U, rel=1e-4)
        assert found["z", layer].unit == pytest.approx(1 / Z, rel=1e-4)
        assert found["d", layer].unit == pytest.approx(1 / D, rel=1e-4)
        assert found["acf", layer].unit is None
        assert found["u", layer].off == pytest.approx(found["u", layer].nu / found["u", layer].measured, rel=1e-9)


def rms(vectors):
    rows = vectors.flatten(0, -2).tolist()
    return math.sqrt(statistics.fmean(sum(x * x for x in row) for row in rows))


@pytest.mark.parametrize("architecture", ["angpt", "angpt/const-x2", "angpt/no-const", "angpt/attention-factor"])
def test_against_a_slow_walk_with_every_factor_in_its_place(architecture):
    """Table 1 written out: each activation before its own factor but after the earlier ones."""
    model = tiny(architecture)
    batches = some_batches(count=1)
    found = lookup(measure_factors(model, batches))
    h, ctx = model.start(batches[0].inputs)
    with torch.no_grad():
        for layer, block in enumerate(model.blocks, start=1):
            nu = block.nu
            plain = h @ block.W_qkv.weight.T
            for name, part in zip("qkv", plain.split(16, dim=-1), strict=True):
                heads = part.reshape(5, 12, 2, 8)
                assert found[name, layer].measured == pytest.approx(1 / rms(heads), rel=1e-9)
                assert found[name, layer].nu == nu.qkv
                unit = heads / h.norm(dim=-1)[..., None, None]
                assert found[name, layer].unit == pytest.approx(1 / rms(unit), rel=1e-9)
            seen = []
            hook = block.W_p.register_forward_hook(lambda _, args, __, seen=seen: seen.append(args[0]))
            h_a = norm(block.attention(h, ctx))
            hook.remove()
            out = seen[0] @ block.W_p.weight.T  # the values include ν_qkv
            assert found["p", layer].measured == pytest.approx(1 / rms(out), rel=1e-9)
            unit = seen[0] * math.sqrt(2) / seen[0].norm(dim=-1, keepdim=True)
            assert found["p", layer].unit == pytest.approx(1 / rms(unit @ block.W_p.weight.T), rel=1e-9)
            assert found["p", layer].nu == nu.p
            alpha = block.alpha_a()
            mixed = (1 - alpha) * h + alpha * h_a
            scaled = mixed * block.nu_lerp(alpha)
            lerp = found["lerp_a", layer]
            assert lerp.measured == pytest.approx(1 / rms(mixed), rel=1e-9)
            assert lerp.nu == pytest.approx(rms(scaled) / rms(mixed), rel=1e-9)
            assert lerp.off == pytest.approx(rms(scaled), rel=1e-9)
            unit = (1 - alpha) * h / h.norm(dim=-1, keepdim=True) + alpha * h_a
            assert lerp.unit == pytest.approx(1 / rms(unit), rel=1e-9)
            cosines = torch.nn.functional.cosine_similarity(h, h_a, dim=-1)
            assert lerp.cosine == pytest.approx(cosines.mean().item(), rel=1e-9)
            h = scaled
            u, z = (h @ block.W_uz.weight.T).chunk(2, dim=-1)
            assert found["u", layer].measured == pytest.approx(1 / rms(u), rel=1e-9)
            assert found["z", layer].measured == pytest.approx(1 / rms(z), rel=1e-9)
            gated = (u * nu.uz) * torch.nn.functional.silu(z * nu.uz)
            assert found["acf", layer].measured == pytest.approx(1 / rms(gated), rel=1e-9)
            down = (gated * nu.acf) @ block.W_d.weight.T
            assert found["d", layer].measured == pytest.approx(1 / rms(down), rel=1e-9)
            assert found["d", layer].off == pytest.approx(rms(down * nu.d), rel=1e-9)
            lengths = down.norm(dim=-1)
            assert found["d", layer].variation == pytest.approx(
                (lengths.std(correction=0) / lengths.mean()).item(), rel=1e-6
            )
            assert found["d", layer].error == pytest.approx((1 / lengths).mean().item() * rms(down) - 1, rel=1e-6)
            h_m = norm(block.mlp(h))
            assert found["lerp_m", layer].cosine == pytest.approx(
                torch.nn.functional.cosine_similarity(h, h_m, dim=-1).mean().item(), rel=1e-9
            )
            h = ((1 - (alpha := block.alpha_m())) * h + alpha * h_m) * block.nu_lerp(alpha)


def test_at_its_start_a_wide_model_has_the_factors_of_the_derivation():
    from angpt.config import ModelConfig

    cfg = ModelConfig(d_model=512, n_layers=1, n_heads=4, vocab_size=200, context=32)
    found = lookup(measure_factors(build(cfg), some_batches(length=32, vocab=200)))
    nu = constants(cfg)
    for name, value in (("q", nu.qkv), ("k", nu.qkv), ("v", nu.qkv), ("u", nu.uz), ("z", nu.uz)):
        assert found[name, 1].nu == value
        assert found[name, 1].off == pytest.approx(1, rel=0.03)
    alpha = torch.tensor(cfg.alpha_init)
    assert found["lerp_a", 1].nu == pytest.approx(nu_lerp(alpha).item(), rel=1e-4)
    assert found["lerp_a", 1].off == pytest.approx(1, rel=0.01)
    assert abs(found["lerp_a", 1].cosine) < 0.1


@pytest.mark.parametrize("architecture", ["gpt+", "ngpt"])
def test_models_without_factors_are_measured_too(architecture):
    found = lookup(measure_factors(tiny(architecture), some_batches()))
    assert {("q", 1), ("d", 2)} <= set(found)
    assert all(f.nu is None and f.off is None and f.measured for f in found.values())
    assert (("lerp_a", 1) in found) == (architecture == "ngpt")
