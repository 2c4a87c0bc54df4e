"""Kernels that write e4m3 and its transpose, against the kernels that they replace and the conversion of their result.

The kernels round to the precision of their inputs before they convert, so that results are the same to the last bit
where the arithmetic is elementwise. Sums over rows are taken in another order: there a number may be rounded to its
other neighbour, which in e4m3 is up to 1/8 away; few are.
"""

import pytest
import torch

from angpt.config import ModelConfig
from angpt.fast import tuning
from angpt.fast.precision import low_precision
from angpt.float8 import E4M3, has_e4m3
from angpt.models.float8 import float8_product
from angpt.models.primitives import make_context
from angpt.models.variants import build
from angpt.training.engine import attention_backends, compile_parts
from tests.triton_anywhere import DEVICE, DTYPE, ON_GPU, kernels_apply  # noqa: F401

ROUNDING = 4e-3 if ON_GPU else 2e-5
ours = torch.ops.angpt
SCALE = 32.0


needs_e4m3 = pytest.mark.skipif(
    not ON_GPU or not has_e4m3(torch.device("cuda")), reason="needs a GPU with products in 8 bits"
)


def draw(*shape, size=1.0):
    return (size * torch.randn(*shape, device=DEVICE)).to(DTYPE)


def scale():
    return torch.tensor(SCALE, device=DEVICE)


def converted(x):
    from angpt.fast.float8_kernels import quantize

    return quantize(x.reshape(-1, x.shape[-1]).contiguous(), scale())


def compare(found, transposed, x):
    """The matrix in e4m3 is that of x up to numbers that are rounded otherwise; the transpose is its transpose."""
    expected, _ = converted(x)
    assert found.dtype == transposed.dtype == E4M3
    assert torch.equal(transposed.float(), found.float().t())
    assert transposed.is_contiguous()
    differing = found.float() != expected.float()
    assert differing.float().mean() <= (1e-2 if ON_GPU else 1e-4)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.13, atol=2**-9)


@pytest.mark.parametrize("shape", [(2, 70, 100), (1, 130, 16)])
def test_swiglu(shape):
    from angpt.fast.block_kernels import swiglu, swiglu_backward

    uz, dh = draw(*shape[:2], 2 * shape[2]), draw(*shape)
    assert_same(ours.swiglu_e4m3(uz, 1.7, scale()), converted(swiglu(uz, 1.7)))
    assert_same(ours.swiglu_backward_e4m3(uz, dh, 1.7, scale()), converted(swiglu_backward(uz, dh, 1.7)))


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0)


@pytest.mark.parametrize(("heads", "d", "rotated"), [(2, 64, 32), (6, 32, 16), (5, 128, 128), (1, 16, 8)])
@pytest.mark.parametrize("gains", [(False, False), (True, False), (True, True)])
def test_gradient_of_heads(heads, d, rotated, gains):
    from angpt.fast.head_kernels import heads_backward

    ctx = make_context(torch.zeros(2, 35, 1, device=DEVICE), rotated, 1e4)
    qkv, dq, dk, dv = draw(2, 35, 3, heads, d), *(draw(2, 35, heads, d) for _ in range(3))
    qkv[0, :4, :2] = 0  # some heads of q and k, which norms pass on
    found = [torch.rand(heads, d, device=DEVICE) if gain else None for gain in gains]
    arguments = qkv, ctx.cos, ctx.sin, *found, dq, dk, dv
    dqkv, *terms = heads_backward(*arguments)
    y, t, *others = ours.heads_backward_e4m3(*arguments, scale())
    compare(y, t, dqkv.flatten(2))
    for a, b in zip(others, terms, strict=True):
        torch.testing.assert_close(a.sum(0), b.sum(0), rtol=ROUNDING, atol=1e-4)


def examples():
    """Arguments of each fused kernel by the name of its operation."""
    qkv, heads = draw(2, 9, 3, 2, 16), [draw(2, 9, 2, 16) for _ in range(3)]
    angles = [torch.rand(9, 4, device=DEVICE) for _ in range(2)]
    gain = torch.rand(2, 16, device=DEVICE)
    uz, x = draw(2, 9, 64), draw(2, 9, 32)
    return {
        "swiglu_e4m3": (uz, 1.5, scale()),
        "swiglu_backward_e4m3": (uz, x, 1.5, scale()),
        "heads_backward_e4m3": (qkv, *angles, gain, None, *heads, scale()),
    }


def test_the_compiler_is_told_what_results_look_like():
    for name, arguments in examples().items():
        torch.library.opcheck(getattr(ours, name).default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_tensors_may_be_views():
    for name, arguments in examples().items():
        views = [
            x.movedim(0, -1).contiguous().movedim(-1, 0) if isinstance(x, torch.Tensor) and x.ndim else x
            for x in arguments
        ]
        assert not views[0].is_contiguous()
        assert_same(getattr(ours, name)(*views)[:2], getattr(ours, name)(*arguments)[:2])


@needs_e4m3
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("architecture", ["ngpt", "angpt"])
def test_a_compiled_model_has_the_gradients_of_separate_kernels(architecture, monkeypatch):
    """Up to numbers that are rounded otherwise, as above, and what follows from them."""
    from angpt.fast.fusion import FuseConversions

    size = {"d_model": 256, "n_layers": 2, "n_heads": 4, "vocab_size": 320, "context": 128}
    model = build(ModelConfig(architecture=architecture, **size), seed=1).cuda()
    tokens = torch.randint(320, (8, 128), device="cuda")
    found = []
    with torch._inductor.config.patch(force_disable_caches=True), attention_backends():
        for fused in (True, False):
            if not fused:
                monkeypatch.setattr(FuseConversions, "change", lambda self, graph: None)
            torch.compiler.reset()
            compute = low_precision(model, E4M3)
            compile_parts(compute, blocks=True)
            compute.zero_grad()
            loss = compute(tokens, tokens)
            loss.backward()
            found.append([loss.double(), *(p.grad.double().clone() for p in compute.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 3e-2 * b.norm()


@needs_e4m3
@pytest.mark.parametrize("terms", [tuning.FLOAT8_FAST_TERMS, 4 * tuning.FLOAT8_FAST_TERMS])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_sums_are_more_exact_than_their_terms(terms, offset):
    """Rounding to e4m3 changes a product of random numbers by 3.7 %; with an offset, partial sums grow steadily. The
    longer sums would fail if they were kept in tensor cores."""
    a, b = ((torch.randn(256, terms, device="cuda") + offset).to(E4M3) for _ in range(2))
    exact = a.double() @ b.double().t()
    found = float8_product(a, b, 1.0, *(torch.tensor(1.0, device="cuda") for _ in range(2)))
    assert (found.double() - exact).norm() <= 1e-2 * exact.norm()
