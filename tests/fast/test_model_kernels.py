"""The hand-written kernels against their plain forms in float64."""

import pytest
import torch

import angpt.fast  # noqa: F401
from angpt.models.primitives import Linear, RMSNorm, cross_entropy, make_context, normed_heads, residual_update, swiglu
from tests.triton_anywhere import DEVICE, DTYPE, ON_GPU, kernels_apply  # noqa: F401

ROUNDING = 4e-3 if ON_GPU else 2e-5
"""bf16 rounds to 2⁻⁹ of each number, fp32 to 2⁻²⁴, but a gain has the sum of thousands of terms as its gradient."""


def draw(*shape):
    return torch.randn(*shape, device=DEVICE).to(DTYPE).requires_grad_()


def compare(function, *inputs, vectors=()):
    """Value and gradients of a function in bf16 and in float64; vectors are fp32 and their gradients sums."""
    exact = [x.detach().double().requires_grad_() for x in (*inputs, *vectors)]
    y, y_exact = function(*inputs, *vectors), function(*exact)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (*inputs, *vectors), dy)
    expected = torch.autograd.grad(y_exact, exact, dy.double())
    for a, b in zip((y, *found), (y_exact, *expected), strict=True):
        assert (a.double() - b).norm() <= ROUNDING * b.norm()


@pytest.mark.parametrize("factor", [1.0, 3.74])
@pytest.mark.parametrize("width", [300, 1500, 2048])
def test_swiglu(factor, width):
    compare(lambda uz: swiglu(uz, factor), draw(3, 5, 2 * width))


@pytest.mark.parametrize("shape", [(300, 64), (77, 1500)])
def test_linear_with_scaled_rows(shape):
    layer = Linear(shape[1], shape[0])
    scale = torch.randn(shape[0], device=DEVICE, requires_grad=True)
    compare(
        lambda x, w, s: torch.func.functional_call(layer, {"weight": w}, (x, s)),
        draw(3, 70, shape[1]),
        draw(*shape),
        vectors=(scale,),
    )


@pytest.fixture
def few_programs(monkeypatch):
    """So few that each has several tiles to sum."""
    from angpt.fast import block_kernels as kernels
    from angpt.fast import head_kernels

    for module in (head_kernels, kernels):
        monkeypatch.setattr(module, "PROGRAMS", 3)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("heads", "d", "rotated"), [(4, 64, 32), (6, 32, 16), (2, 128, 128), (4, 64, 0), (20, 128, 64)]
)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("gain", [None, "one", "each"])
def test_normed_heads(heads, d, rotated, documents, gain):
    numbers = torch.arange(70, device=DEVICE).expand(3, 70) // 20 if documents else None
    gains = {
        None: (),
        "one": (torch.rand(1, device=DEVICE, requires_grad=True),),
        "each": tuple(torch.rand(heads, 1, d, device=DEVICE, requires_grad=True) for _ in range(2)),
    }[gain]

    def function(qkv, *gains):
        ctx = make_context(qkv if qkv.dtype == torch.float64 else qkv.float(), rotated, 1e4, numbers)
        return torch.stack(normed_heads(qkv, d, ctx.cos, ctx.sin, *gains))

    compare(function, draw(3, 70, 3 * heads * d), vectors=gains)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("d", [1024, 256, 1280, 96, 5000])
@pytest.mark.parametrize("normed", [False, True])
def test_update(d, normed):
    def function(h, x, alpha):
        return residual_update(h, x, alpha, not normed, 1.0 if normed else 1.3, normed)

    compare(function, draw(3, 71, d), draw(3, 71, d), vectors=(torch.rand(d, device=DEVICE, requires_grad=True),))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("d", [1024, 96, 5000])
def test_rms(d):
    norm = RMSNorm(d, factor=0.7).to(DEVICE)

    def function(x, gamma):
        return torch.func.functional_call(norm, {"gamma": gamma}, (x,))

    compare(function, draw(3, 71, d), vectors=(torch.rand(d, device=DEVICE, requires_grad=True),))


@pytest.mark.usefixtures("few_programs")
def test_gradient_of_rms_added_to_another():
    from angpt.fast.block_kernels import rms_backward

    x, dy, total = (draw(5, 7, 96).detach() for _ in range(3))
    gain = torch.rand(96, device=DEVICE)
    before = total.clone()
    alone, terms = rms_backward(x, gain, dy, None)
    both, same = rms_backward(x, gain, dy, total)
    expected = total.double() + alone.double()
    assert (both.double() - expected).norm() <= ROUNDING * expected.norm()
    torch.testing.assert_close((same, total), (terms, before), rtol=0, atol=0)


@pytest.mark.parametrize("total", [False, True])
def test_the_compiler_is_told_what_the_gradient_of_rms_looks_like(total):
    x, dy, g = (draw(96, 5, 7).detach().permute(1, 2, 0) for _ in range(3))
    inputs = (x, torch.rand(96, device=DEVICE), dy, g if total else None)
    torch.library.opcheck(torch.ops.angpt.rms_backward.default, inputs)
    whole = torch.ops.angpt.rms_backward(*(None if tensor is None else tensor.contiguous() for tensor in inputs))
    torch.testing.assert_close(torch.ops.angpt.rms_backward(*inputs), whole, rtol=0, atol=0)


def test_second_derivatives_of_rms_are_refused():
    x, norm = draw(5, 96), RMSNorm(96).to(DEVICE)
    (dx,) = torch.autograd.grad(norm(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dx.float().sum().backward()


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("vocabulary", [100, 8192, 9001])
def test_cross_entropy(weight, vocabulary):
    logits, targets = draw(20, vocabulary), torch.randint(vocabulary, (20,), device=DEVICE)
    targets[5:9] = -100
    exact = logits.detach().double().requires_grad_()
    loss = weight * cross_entropy(logits * 1, targets)
    expected = weight * torch.nn.functional.cross_entropy(exact, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (found,), (gradient,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, exact)
    rows = torch.arange(20, device=DEVICE)[targets >= 0]
    chosen = rows, targets[targets >= 0]
    assert (found[chosen].double() - gradient[chosen]).norm() <= ROUNDING * gradient[chosen].norm()
    found, gradient = found.double(), gradient.clone()
    found[chosen] = gradient[chosen] = 0  # else they would hide all others
    assert (found - gradient).norm() <= ROUNDING * gradient.norm()
    with torch.no_grad():
        assert cross_entropy(logits.clone(), targets).item() * weight == pytest.approx(expected.item(), rel=1e-5)


def test_a_target_that_does_not_exist_shows():
    logits = draw(3, 64).detach()
    assert cross_entropy(logits, torch.tensor([1, 64, 2], device=DEVICE)).isnan()


def test_views_are_taken_as_they_are():
    h, x = draw(64, 5, 3).permute(1, 2, 0), draw(64, 5, 3).permute(1, 2, 0)
    alpha = torch.rand(64, device=DEVICE)
    whole = residual_update(h.contiguous(), x.contiguous(), alpha)
    torch.testing.assert_close(residual_update(h, x, alpha), whole, rtol=0, atol=0)
    torch.testing.assert_close(swiglu(x), swiglu(x.contiguous()), rtol=0, atol=0)
    norm, found = RMSNorm(64).to(DEVICE), []
    for form in (x, x.contiguous()):
        y = norm(form)
        found.append((y, *torch.autograd.grad(y, (x, norm.gamma), h)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
