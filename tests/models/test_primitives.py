import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from angpt.errors import UserError
from angpt.models.factors import nu_lerp
from angpt.models.primitives import (
    LearnedScale,
    Linear,
    RMSNorm,
    attend,
    lerp,
    make_context,
    norm,
    rms,
    rotate,
    split_heads,
)
from tests.models import reference

ROTARY = {"rotary_dim": 4, "rotary_base": 10_000.0}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("fast", "slow"), [(norm, reference.norm), (rms, reference.rms)])
def test_norm_and_rms_equal_their_definition(fast, slow):
    x = draw(5, 7)
    torch.testing.assert_close(fast(x), torch.stack([slow(row) for row in x]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("function", [norm, rms])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_zero_vector_gives_zero_and_passes_its_gradient_through_any_number_of_layers(function, dtype):
    x = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
    y = x
    for _ in range(12):
        y = function(y)
    weights = draw(2, 8).to(dtype)
    (y * weights).sum().backward()
    assert y.dtype == dtype
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(x.grad, weights)


@pytest.mark.parametrize(("fast", "slow"), [(norm, reference.norm), (rms, reference.rms)])
def test_a_zero_vector_changes_nothing_for_its_neighbours(fast, slow):
    x, weights = draw(3, 7), draw(3, 7, seed=1)
    x[1] = 0
    x.requires_grad_()
    (found,) = torch.autograd.grad((fast(x) * weights).sum(), x)
    for row in (0, 2):
        alone = x[row].detach().requires_grad_()
        (expected,) = torch.autograd.grad((slow(alone) * weights[row]).sum(), alone)
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-12)


def test_norm_of_bf16_reduces_in_fp32():
    # 4,096 equal entries: summed in bf16, whose steps at 256 are 2, the squares would stop adding up long before.
    x = torch.ones(4096, dtype=torch.bfloat16)
    assert float(norm(x)[0]) == pytest.approx(1 / 64, rel=2**-8)


def test_lerp_is_interpolation_times_factor():
    h, x, alpha = draw(3, 6), draw(3, 6, seed=1), draw(6, seed=2)
    nu = nu_lerp(alpha)
    torch.testing.assert_close(lerp(h, x, alpha, nu), (h + alpha * (x - h)) * nu, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lerp(h, x, alpha), h + alpha * (x - h), rtol=1e-12, atol=1e-14)


def test_learned_scale_starts_at_init_and_moves_init_over_scale_times_as_fast_under_adam():
    scale = LearnedScale(4, init=0.05, scale=0.01)
    assert torch.allclose(scale(), torch.full((4,), 0.05))
    optimizer = torch.optim.Adam(scale.parameters(), lr=1e-3)
    scale().sum().backward()
    optimizer.step()
    assert torch.allclose(scale(), torch.full((4,), 0.05 - 1e-3 * 5), atol=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_linear_scales_its_output(scaled):
    layer = Linear(5, 3).double()
    with torch.no_grad():
        layer.weight.copy_(draw(3, 5))
    x, s = draw(2, 5), draw(3, seed=4)
    expected = torch.stack([reference.matvec(layer.weight, row) for row in x])
    found = layer(x, s) if scaled else layer(x)
    torch.testing.assert_close(found, expected * s if scaled else expected, rtol=1e-12, atol=1e-14)


def test_rms_norm_multiplies_gamma_and_factor():
    layer = RMSNorm(6, factor=0.5).double()
    with torch.no_grad():
        layer.gamma.copy_(draw(6, seed=3))
    x = draw(2, 6)
    torch.testing.assert_close(layer(x), rms(x) * layer.gamma * 0.5)


def test_rotation_equals_its_definition():
    x = draw(2, 3, 5, 8)  # batch, heads, positions, d_h
    ctx = make_context(draw(2, 5, 1), **ROTARY)
    out = rotate(x, ctx.cos, ctx.sin)
    for t in range(5):
        torch.testing.assert_close(out[1, 2, t], reference.rotate(x[1, 2, t], t, 4, 10_000.0), rtol=1e-12, atol=1e-14)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60), st.integers(0, 10_000))
def test_rotation_keeps_lengths_and_depends_on_relative_position_only(i, j, shift, seed):
    ctx = make_context(draw(1, 128, 1), **ROTARY)
    q, k = draw(1, 1, 1, 8, seed=seed), draw(1, 1, 1, 8, seed=seed + 1)
    rotated_q, rotated_k = (rotate(x.expand(1, 1, 128, 8), ctx.cos, ctx.sin)[0, 0] for x in (q, k))
    assert torch.allclose(rotated_q.norm(dim=-1), q.norm(), rtol=1e-12)
    near, far = rotated_q[i] @ rotated_k[j], rotated_q[i + shift] @ rotated_k[j + shift]
    assert float(near - far) == pytest.approx(0, abs=1e-11)


def test_attention_equals_its_definition():
    q, k, v = (draw(1, 2, 6, 4, seed=s) for s in range(3))
    for gain in (1.7, torch.tensor([1.7], dtype=torch.float64)):
        out = attend(q, k, v, None, gain)
        for head in range(2):
            expected = torch.stack(reference.attention(list(q[0, head]), list(k[0, head]), list(v[0, head]), 1.7))
            torch.testing.assert_close(out[0, :, head * 4 : head * 4 + 4], expected, rtol=1e-11, atol=1e-13)


def test_a_constant_factor_of_a_linear_map_multiplies_value_and_gradients():
    layer, x = Linear(5, 7).double(), draw(2, 3, 5).requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(draw(7, 5, seed=4))
    torch.testing.assert_close(layer(x, 0.3), 0.3 * layer(x), rtol=1e-14, atol=1e-15)
    parameters = (x, layer.weight)
    found = torch.autograd.grad(layer(x, 0.3).square().sum(), parameters)
    torch.testing.assert_close(found, torch.autograd.grad((0.3 * layer(x)).square().sum(), parameters))
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(layer, {"weight": w}, (x, 0.3)), parameters)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (0, 5), (2, 3, 5)])
def test_a_constant_factor_takes_every_shape_that_a_linear_map_takes(shape):
    layer, x = Linear(5, 7).double(), draw(*shape).requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(draw(7, 5, seed=4))
    torch.testing.assert_close(layer(x, 0.3), 0.3 * layer(x))
    layer(x, 0.3).sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.shape == (7, 5)


def test_gradients_of_a_constant_factor_may_be_taken_outside_autocast():
    layer, x = Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    torch.nn.init.normal_(layer.weight, std=0.1)
    gradients = []
    for call in (lambda: layer(x, 0.5), lambda: 0.5 * layer(x)):
        with torch.autocast("cpu", torch.bfloat16):
            y = call()
        gradients.append(torch.autograd.grad(y.float().square().sum(), (x, layer.weight)))
    for found, expected in zip(*gradients, strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() <= 0.02 * expected.norm()


def test_a_frozen_weight_has_no_gradient():
    layer, x = Linear(5, 7), draw(3, 5).float().requires_grad_()
    torch.nn.init.normal_(layer.weight)
    layer.weight.requires_grad_(False)
    layer(x, 0.3).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None


def test_split_heads_takes_queries_keys_and_values_apart():
    qkv = torch.arange(2 * 3 * 24).view(2, 3, 24)
    q, k, v = split_heads(qkv, 4)
    assert q.shape == (2, 2, 3, 4)
    assert q[1, 1, 2].tolist() == qkv[1, 2, 4:8].tolist()
    assert k[1, 1, 2].tolist() == qkv[1, 2, 12:16].tolist()
    assert v[1, 1, 2].tolist() == qkv[1, 2, 20:24].tolist()


def test_documents_restart_positions_and_close_the_mask():
    documents = torch.tensor([[0, 0, 1, 1, 1], [4, 4, 4, 4, 4]])
    ctx = make_context(draw(2, 5, 1), **ROTARY, documents=documents)
    assert ctx.positions.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    for b in range(2):
        for i in range(5):
            for j in range(5):
                assert bool(ctx.mask[b, 0, i, j]) == (j <= i and documents[b, i] == documents[b, j])


def test_angles_are_exact_far_from_the_start():
    ctx = make_context(torch.zeros(1, 2048, 1), **ROTARY)
    assert float(ctx.cos[2047, 0]) == pytest.approx(math.cos(2047), abs=1e-6)


def test_what_has_no_norm_and_scales_that_cannot_learn_are_refused():
    for x in (torch.tensor([3, 4]), torch.tensor([3 + 1j])):
        with pytest.raises(UserError, match="norms are those of floating-point numbers"):
            norm(x)
    with pytest.raises(UserError, match="numbers other than 0, not init = 0"):
        LearnedScale(3, init=0, scale=1.0)
