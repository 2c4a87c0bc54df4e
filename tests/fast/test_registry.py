"""Every operation of the registry: its fast form against its plain form, and every kernel in use by one of them."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch

import angpt.fast
from angpt.constraints import Constraint
from angpt.fast import models
from angpt.float8 import E4M3
from angpt.models.primitives import make_context
from angpt.operations import OPERATIONS, kernels, use_kernels
from angpt.optim.states import ParameterState
from tests.fast import test_float8_kernels as fused
from tests.models.conftest import some_tokens, tiny
from tests.triton_anywhere import DEVICE, DTYPE, ON_GPU, kernels_apply  # noqa: F401

ROUNDING = 1e-2 if ON_GPU else 2e-5


def draw(*shape, dtype=DTYPE):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def with_zeros(x):
    """The same with a zero vector in the first row, which norms pass on."""
    x.data[0] = 0
    return x


def without_carry(*shape):
    """Numbers that e4m3 does not round up to a power of two: the interpreter halves those. Some saturate."""
    mantissas = 1 + 0.9 * torch.rand(*shape, device=DEVICE)
    return torch.randn(*shape, device=DEVICE).sign() * mantissas * 2.0 ** torch.randint(-15, 6, shape, device=DEVICE)


def heads():
    ctx = make_context(torch.zeros(2, 9, 1, device=DEVICE), 16, 1e4)
    gain = torch.rand(4, 1, 32, device=DEVICE, requires_grad=True)
    qkv = draw(2, 9, 3 * 4 * 32)
    qkv.data[0, :4, :256] = 0  # some heads of q and k
    return qkv, 32, ctx.cos, ctx.sin, gain, gain


def decoding(rows=2, slots=64):
    from angpt.inference.fold import fold

    model = fold(tiny("angpt", d_model=32, context=slots).float()).prepare(DEVICE, DTYPE)
    positions = torch.arange(rows, device=DEVICE)
    return model, some_tokens(rows).to(DEVICE), positions, model.make_caches(rows, slots), slots


def prompts():
    model, _, _, caches, _ = decoding()
    return model, some_tokens(2, 5).to(DEVICE), torch.tensor([5, 3], device=DEVICE), caches


def states():
    """Matrices with constrained rows and with constrained columns, each with a copy in low precision."""
    rng = torch.Generator().manual_seed(2)
    found = []
    for constraint in (Constraint("bound", 1), Constraint("unit", 0)):
        weight, gradient = (torch.randn(24, 48, generator=rng).to(DEVICE) for _ in range(2))
        moments = (torch.rand(24, 48, generator=rng).to(DEVICE) for _ in range(2))
        found.append((ParameterState(weight, weight, weight.bfloat16(), *moments, 0.1, constraint), gradient))
    return found


def changed(name, form):
    """The tensors that a step of an optimizer changes."""
    chosen, gradients = (list(column) for column in zip(*states(), strict=True))
    clip, updates = torch.tensor(0.5, device=DEVICE), [torch.zeros_like(g, dtype=torch.bfloat16) for g in gradients]
    if name == "adam_":
        form(chosen, gradients, clip, lr=0.1, betas=(0.9, 0.95), eps=1e-9, step=3)
    elif name == "momentum_":
        form(chosen, gradients, updates, clip, 0.95)
    else:
        form(chosen, gradients, 0.1, 2.0)
    return *updates, *(t for s in chosen for t in (s.weight, s.exp_avg, s.exp_avg_sq, s.copy))


def symmetric(count, size):
    x = torch.randn(count, size, size, device=DEVICE)
    return (x + x.mT).to(DTYPE)


EXAMPLES = {
    "square_sum": lambda: ([torch.randn(24, 48, device=DEVICE), torch.randn(3, 48, device=DEVICE)],),
    "residual_update": lambda: (
        with_zeros(draw(5, 64)),
        with_zeros(draw(5, 64)),
        draw(64, dtype=torch.float32),
        True,
        1.0,
        True,
    ),
    "swiglu": lambda: (draw(5, 128), 3.74),
    "cross_entropy": lambda: (draw(6, 300), torch.randint(300, (6,), device=DEVICE)),
    "scaled_rms": lambda: (with_zeros(draw(5, 64)), draw(64, dtype=torch.float32)),
    "linear_with_row_gains": lambda: (draw(5, 64), draw(48, 64), draw(48, dtype=torch.float32)),
    "normed_heads": heads,
    "quantize": lambda: (without_carry(70, 100).to(DTYPE), torch.tensor(32.0, device=DEVICE)),
    "transpose": lambda: (without_carry(70, 100).to(E4M3),),
    "float8_product": lambda: (
        without_carry(32, 64).to(E4M3),
        without_carry(48, 64).to(E4M3),
        1.7,
        torch.tensor(32.0, device=DEVICE),
        torch.tensor(0.5, device=DEVICE),
    ),
    "decode_step": decoding,
    "read_prompts": prompts,
    "symmetric_product": lambda: (x := torch.randn(3, 72, 140, device=DEVICE).to(DTYPE).mT, x),
    "symmetric_polynomial": lambda: (symmetric(3, 140), 3.4, -4.7, 2.0, torch.full((3,), 140.0, device=DEVICE)),
}
"""Arguments of each operation by name: an operation without an example fails the tests."""
OF_OPTIMIZERS = ("adam_", "momentum_", "descend_")
OF_INFERENCE = ("decode_step", "read_prompts")
IN_8_BITS = ("quantize", "transpose", "float8_product")
OTHERS = ("square_sum", "symmetric_product", "symmetric_polynomial")
WITHOUT_GRADIENT = (*OF_OPTIMIZERS, *OF_INFERENCE, *IN_8_BITS, *OTHERS)


def outcome(name, form):
    """The values of a form of an operation, and the gradients of its inputs."""
    if name in OF_OPTIMIZERS:
        return changed(name, form)
    torch.manual_seed(0)
    arguments = EXAMPLES[name]()
    inputs = [
        x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in arguments
    ]
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    used = [x * 1 if isinstance(x, torch.Tensor) and x.requires_grad else x for x in inputs]  # may be overwritten
    found = form(*used)
    values = list(found) if isinstance(found, tuple) else [found]
    if not leaves or not torch.is_grad_enabled():
        return values
    weights = [torch.randn(v.shape, generator=torch.Generator().manual_seed(i)).to(v) for i, v in enumerate(values)]
    total = sum((v * w).sum() for v, w in zip(values, weights, strict=True))
    return [*values, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_the_fast_form_is_the_plain_form(name):
    assert name in {*EXAMPLES, *OF_OPTIMIZERS}, (
        f"{name} has no example: a fast form without a comparison is not allowed"
    )
    operation = OPERATIONS[name]
    assert operation.fast is not None, f"{name} has no fast form"
    with torch.set_grad_enabled(name not in WITHOUT_GRADIENT):
        plain, fast = (outcome(name, form) for form in (operation.plain, operation.fast))
    for expected, found in zip(plain, fast, strict=True):
        rounding = 1e-2 if found.dtype == torch.bfloat16 else ROUNDING
        assert (found.double() - expected.double()).norm() <= rounding * expected.double().norm()


def kernels_launched_from_python():
    """The Triton kernels of `angpt.fast` that no other kernel calls."""
    found, called = set(), set()
    for path in Path(angpt.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name)
                called |= {
                    n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
                }
    return found - called


@pytest.mark.skipif(ON_GPU, reason="the interpreter's launches are counted")
def test_every_kernel_is_reached_by_an_operation(monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    launched = set()
    call = GridExecutor.__call__
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda self, *a, **k: (launched.add(self.fn.__name__), call(self, *a, **k))[1]
    )
    for name, operation in OPERATIONS.items():
        with torch.set_grad_enabled(name not in WITHOUT_GRADIENT):
            outcome(name, operation.fast)
    for slots in (64, 128):  # many rows have kernels of their own, for slots that are split and that are not
        OPERATIONS["decode_step"].fast(*decoding(rows=5, slots=slots))
    for name, arguments in fused.examples().items():  # which compiler passes put in place of others
        getattr(torch.ops.angpt, name)(*arguments)
    assert launched == kernels_launched_from_python()


def test_the_switch_turns_every_fast_form_off(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a fast form ran")

    for name, operation in OPERATIONS.items():
        monkeypatch.setattr(operation, "fast", fail)
        monkeypatch.setattr(operation, "applies", lambda *args, **kwargs: True)
        with kernels("off"), torch.no_grad():
            outcome(name, operation)
        with kernels("auto"), torch.no_grad(), pytest.raises(AssertionError, match="a fast form ran"):
            outcome(name, operation)


def test_the_environment_variable_wins_over_auto(monkeypatch):
    from angpt import operations
    from angpt.errors import UserError

    monkeypatch.setattr(operations, "_enabled", True)
    monkeypatch.setenv("ANGPT_KERNELS", "off")
    use_kernels("auto")
    assert not operations.kernels_enabled()
    monkeypatch.setenv("ANGPT_KERNELS", "never")
    with pytest.raises(UserError, match="ANGPT_KERNELS must be auto or off, not 'never'"):
        use_kernels("auto")


def test_kernels_start_on_the_device_of_their_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: contextlib.nullcontext(seen.append(x)))
    fast = models.on_its_device(lambda x, y=0: (x, y))
    assert [fast(1, y=2), fast(x=3)] == [(1, 2), (3, 0)]
    assert seen == [1, 3]
