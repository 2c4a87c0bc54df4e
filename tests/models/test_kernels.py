"""The hand-written kernels against their plain forms in float64."""

import pytest
import torch

from angpt.models.primitives import (
    NO_FACTOR,
    LerpFactor,
    cross_entropy,
    make_context,
    norm_rotated,
    split_heads,
    swiglu,
    update,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a CUDA device")

ROUNDING = 4e-3
"""bf16 rounds to 2⁻⁹ of each number."""


def draw(*shape):
    return torch.randn(*shape, device="cuda").bfloat16().requires_grad_()


def compare(function, *inputs, vectors=()):
    """Value and gradients of a function in bf16 and in float64; vectors are fp32 and their gradients sums."""
    exact = [x.detach().double().requires_grad_() for x in (*inputs, *vectors)]
    y, y_exact = function(*inputs, *vectors), function(*exact)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (*inputs, *vectors), dy)
    expected = torch.autograd.grad(y_exact, exact, dy.double())
    for a, b in zip((y, *found), (y_exact, *expected), strict=True):
        assert (a.double() - b).norm() <= ROUNDING * b.norm()


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_swiglu(scale):
    compare(lambda uz: swiglu(uz, scale), draw(3, 70, 600))


@pytest.mark.parametrize(("heads", "d", "rotated"), [(4, 64, 32), (6, 32, 16), (2, 128, 128)])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("gain", [None, "one", "each"])
def test_norm_rotated(heads, d, rotated, documents, gain):
    numbers = torch.arange(70, device="cuda").expand(3, 70) // 20 if documents else None
    vectors = {
        None: (),
        "one": (torch.rand(1, device="cuda", requires_grad=True),),
        "each": (torch.rand(heads, 1, d, device="cuda", requires_grad=True),),
    }[gain]

    def function(qkv, *gains):
        wide = qkv if qkv.dtype == torch.float64 else qkv.float()
        return norm_rotated(split_heads(qkv, d)[1], make_context(wide, rotated, 1e4, numbers), *gains)

    compare(function, draw(3, 70, 3 * heads * d), vectors=vectors)


@pytest.mark.parametrize("d", [1024, 256, 1280, 96])
@pytest.mark.parametrize("normed", [False, True])
def test_update(d, normed):
    def function(h, x, alpha):
        return update(h, x, alpha, NO_FACTOR if normed else LerpFactor(times=1.3), scale=0.7, normed=normed)

    compare(function, draw(3, 71, d), draw(3, 71, d), vectors=(torch.rand(d, device="cuda", requires_grad=True),))


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_cross_entropy(weight):
    logits, targets = draw(40, 50304), torch.randint(50304, (40,), device="cuda")
    targets[5:9] = -100
    compare(lambda x: weight * cross_entropy(x * 1, targets), logits)
    with torch.no_grad():
        loss = cross_entropy(logits.clone(), targets)
    exact = torch.nn.functional.cross_entropy(logits.double(), targets)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
