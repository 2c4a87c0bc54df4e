"""Products and gradients are added where that saves a sum, and the results are those of the sum."""

import json
import operator
import os
import subprocess
import sys

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import custom_op

pytest.importorskip("triton", reason="Triton is not installed (it is there for Linux only)")

from angpt.fast import block_kernels as kernels
from angpt.fast import models
from angpt.fast.block_kernels import scaled_rms
from angpt.fast.fusion import OPTIONS, AddProducts, FindSums, MergeLines
from angpt.models.primitives import attend, lerp, make_context, norm, nu_lerp, product, residual_update
from angpt.operations import kernels as switch
from tests.triton_anywhere import DEVICE, DTYPE, ON_GPU, kernels_apply  # noqa: F401

ROUNDING = 1e-2 if ON_GPU else 1e-6  # a few roundings to bf16, or to fp32


@custom_op("tests::pair", mutates_args=())
def pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return 2 * x, 3 * y


@pair.register_fake
def _(x, y):
    return torch.empty_like(x), torch.empty_like(y)


def once(x, y, a, b):
    c, d = pair(x, y)
    return c + (a.flatten(0, 1) @ b).view(c.shape), d


def swapped(x, y, a, b):
    c, d = pair(x, y)
    return (a.flatten(0, 1) @ b).view(c.shape) + c, d


def with_a_factor(x, y, a, b):
    c, d = pair(x, y)
    return c + product(a.flatten(0, 1), b, 0.3).view(c.shape), d


def needed_later(x, y, a, b):
    c, d = pair(x, y)
    return c + (a.flatten(0, 1) @ b).view(c.shape), c * d


def product_needed_later(x, y, a, b):
    c, d = pair(x, y)
    product = (a.flatten(0, 1) @ b).view(c.shape)
    return c + product, d * product


def scaled(x, y, a, b):
    c, d = pair(x, y)
    return torch.add(c, (a.flatten(0, 1) @ b).view(c.shape), alpha=2), d


def of_an_input(x, y, a, b):
    return x + (a.flatten(0, 1) @ b).view(x.shape), y


def of_a_view_of_an_input(x, y, a, b):
    return x.view(8, 8) + a.flatten(0, 1) @ b, y


def of_an_operand(x, y, a, b):
    c, d = pair(x.view(8, 8), y)
    return c + b[8:] @ c, d


def of_a_view_of_an_operand(x, y, a, b):
    c, d = pair(x.view(8, 8), y)
    return c.view(4, 2, 8) + (b[8:] @ c).view(4, 2, 8), d


def of_an_operand_turned(x, y, a, b):
    c, d = pair(x.view(8, 8), y)
    return c.view(4, 2, 8) + (c.t() @ b[:8]).view(4, 2, 8), d


def of_two_products(x, y, a, b):
    return a.flatten(0, 1) @ b + x.flatten(0, 1) @ b[:8], y


def wider(x, y, a, b):
    c, d = pair(x, y)
    return c[:1] + (a.flatten(0, 1) @ b).view(x.shape), d


def smaller(x, y, a, b):
    c, d = pair(x, y)
    return c + a[0] @ b, d


def one_row(x, y, a, b):
    c, d = pair(x, y)
    return c + a[0, :1] @ b, d


def other_rows(x, y, a, b):
    c, d = pair(x, y)
    return c + (a.view(16, 8) @ b[:8, :4]).view(c.shape), d


def other_precision(x, y, a, b):
    c, d = pair(x, y)
    return c + (a.flatten(0, 1).bfloat16() @ b.bfloat16()).view(c.shape), d


class Seen:
    """The passes, and what they leave in each graph."""

    def __init__(self) -> None:
        self.adds, self.copies, seen = [], [], self

        class Find(FindSums):
            def uuid(self):
                return None  # not from the cache

        class Add(AddProducts):
            def change(self, graph):
                super().change(graph)
                names = [str(node.target) for node in graph.nodes]
                seen.adds.append(names.count("auto_functionalized"))
                seen.copies.append(names.count("aten.clone.default"))

            def uuid(self):
                return None

        assert OPTIONS.keys() >= {"joint_custom_pre_pass", "post_grad_custom_post_pass"}
        self.options = {"joint_custom_pre_pass": Find(), "post_grad_custom_post_pass": Add()}


@pytest.mark.parametrize(
    ("function", "adds", "copies"),
    [
        *((function, 1, 0) for function in (once, swapped, of_two_products, with_a_factor)),
        *((function, 1, 1) for function in (needed_later, of_an_input, of_an_operand)),
        *((function, 1, 1) for function in (of_a_view_of_an_operand, of_an_operand_turned)),
        (of_a_view_of_an_input, 1, 0),  # the compiler sees that itself
        *((function, 0, 0) for function in (product_needed_later, scaled, wider, smaller, one_row, other_rows)),
        (other_precision, 0, 0),
    ],
)
def test_sums_with_products(function, adds, copies):
    torch.compiler.reset()
    seen, rng = Seen(), torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=rng) for shape in ((2, 4, 8), (2, 4, 8), (2, 4, 16), (16, 8))]
    before = [x.clone() for x in inputs]
    found = torch.compile(function, options=seen.options)(*inputs)
    assert (seen.adds, seen.copies) == ([adds], [copies])
    for a, b in zip((*found, *inputs), (*function(*before), *before), strict=True):
        torch.testing.assert_close(a, b)


def branch(h, gain, weight):
    return h + (scaled_rms(h, gain).flatten(0, 1) @ weight).view(h.shape)


def branch_used_twice(h, gain, weight):
    return branch(2 * h, gain, weight) + scaled_rms(h, gain)


def only_normed(h, gain, weight):
    return (scaled_rms(h, gain).flatten(0, 1) @ weight).view(h.shape)


@pytest.mark.parametrize(("function", "sums"), [(branch, [1]), (branch_used_twice, [1, 0]), (only_normed, [0])])
def test_sums_with_gradients_of_norms(function, sums, monkeypatch):
    torch.compiler.reset()
    seen, calls, kernel = Seen(), [], kernels._rms_backward

    class Launched:
        def __getitem__(self, grid):
            return lambda *args, ADD, **options: calls.append(int(ADD)) or kernel[grid](*args, ADD=ADD, **options)

    monkeypatch.setattr(kernels, "_rms_backward", Launched())
    rng = torch.Generator(DEVICE).manual_seed(0)
    drawn = [torch.randn(*shape, generator=rng, device=DEVICE) for shape in ((2, 4, 8), (8,), (8, 8), (2, 4, 8))]
    h, gain, weight, dy = (x if x.ndim == 1 else x.to(DTYPE) for x in drawn)
    inputs, copies = ([x.clone().requires_grad_() for x in (h, gain, weight)] for _ in range(2))
    torch.compile(function, options=seen.options)(*inputs).backward(dy)
    assert sorted(calls) == sorted(sums)
    monkeypatch.undo()
    function(*copies).backward(dy)
    for a, b in zip(inputs, copies, strict=True):
        assert (a.grad - b.grad).norm() <= ROUNDING * b.grad.norm()


def graph(build):
    """A graph as the compiler has it, of (x, dy, g, g) (2, 4, 8) and a gain, and what it computes."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn(*shape, generator=rng, device=DEVICE) for shape in ((2, 4, 8), (8,), *[(2, 4, 8)] * 3)]
    traced = make_fx(build)(*inputs)
    before = traced(*inputs)
    FindSums()(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), before)
    return [str(node.target) for node in traced.graph.nodes].count("aten.add.Tensor")


def test_a_kernel_adds_to_one_gradient_only():
    def both(x, gain, dy, g1, g2):
        dx, _ = torch.ops.angpt.rms_backward(x, gain, dy, None)
        return (dx + g1) + g2

    assert graph(both) == 1


def test_a_kernel_adds_to_the_gradient_of_the_vector_only():
    def terms(x, gain, dy, g1, g2):
        total = g1[0, :1].clone()
        dx, terms = torch.ops.angpt.rms_backward(x, gain, dy, None)
        return dx, terms + total

    assert graph(terms) == 1


def test_a_kernel_does_not_add_what_is_not_there_yet_or_of_another_shape():
    def late(x, gain, dy, g1, g2):
        dx, _ = torch.ops.angpt.rms_backward(x, gain, dy, None)
        return dx + g1.exp(), g2

    def wider(x, gain, dy, g1, g2):
        total = g1[:1].clone()
        dx, _ = torch.ops.angpt.rms_backward(x[0], gain, dy[0], None)
        return dx + total, g2

    def turned(x, gain, dy, g1, g2):
        total = g1.view(4, 2, 8).transpose(0, 1)
        dx, _ = torch.ops.angpt.rms_backward(x, gain, dy, None)
        return dx + total, g2

    assert [graph(build) for build in (late, wider, turned)] == [1, 1, 1]


def interpolated(h, x, alpha):
    return lerp(h, norm(x), alpha, nu_lerp(alpha))


def interpolated_and_scaled(h, x, alpha):
    return lerp(h, norm(x), alpha, nu_lerp(alpha) * 2.0)


def interpolated_without_factor(h, x, alpha):
    return lerp(h, norm(x), alpha)


def interpolated_and_normed(h, x, alpha):
    return norm(lerp(h, norm(x), alpha))


def norm_needed_later(h, x, alpha):
    unit = norm(x)
    return lerp(h, unit, alpha) + unit


def update_needed_before_its_norm(h, x, alpha):
    y = lerp(h, norm(x), alpha)
    return norm(y) + y


def not_normed(h, x, alpha):
    return lerp(h, x, alpha, nu_lerp(alpha))


def factor_of_another_alpha(h, x, alpha):
    return lerp(h, norm(x), alpha, nu_lerp(alpha + 1))


def factor_of_another_kind(h, x, alpha):
    return lerp(h, norm(x), alpha, alpha + 1)


def one_alpha_for_all(h, x, alpha):
    return lerp(h, norm(x), alpha[:1])


def alpha_per_token(h, x, alpha):
    return lerp(h, norm(x), h[:, :1].float())


def one_vector_for_all_rows(h, x, alpha):
    return lerp(h, norm(x[:1]), alpha)


def with_keywords(h, x, alpha):
    return lerp(h, norm(x), nu=1.5, alpha=alpha)


def captured(function, *inputs):
    """Value before and after the pass, and the names of the functions that it leaves, in order."""
    names = []

    def backend(module, examples):
        MergeLines()(module.graph)
        module.graph.lint()
        module.recompile()
        names.extend(n.target.__name__ for n in module.graph.nodes if n.op == "call_function")
        return module.forward

    torch.compiler.reset()
    return function(*inputs), torch.compile(function, backend=backend)(*inputs), names


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (interpolated, ["residual_update"]),
        (interpolated_and_scaled, ["residual_update"]),
        (interpolated_without_factor, ["residual_update"]),
        (interpolated_and_normed, ["residual_update"]),
        (update_needed_before_its_norm, ["residual_update", "norm"]),
        (norm_needed_later, ["norm", "lerp"]),
        (not_normed, ["lerp"]),
        (factor_of_another_alpha, ["norm", "lerp"]),
        (factor_of_another_kind, ["norm", "lerp"]),
        (one_alpha_for_all, ["norm", "lerp"]),
        (alpha_per_token, ["norm", "lerp"]),
        (one_vector_for_all_rows, ["norm", "lerp"]),
        (with_keywords, ["residual_update"]),
    ],
)
@pytest.mark.usefixtures("kernels_apply")
def test_lines_of_a_residual_update_are_merged(function, left):
    h, x, alpha = (torch.randn(*shape, device=DEVICE) for shape in ((5, 64), (5, 64), (64,)))
    before, after, names = captured(function, h.to(DTYPE), x.to(DTYPE), alpha)
    assert [name for name in names if name in ("residual_update", "norm", "lerp")] == left
    assert (after - before).norm() <= ROUNDING * before.norm()


@pytest.mark.usefixtures("kernels_apply")
def test_lines_stay_as_they_are_without_a_kernel(monkeypatch):
    inputs = (draw(5, 64), draw(5, 64), torch.randn(64, device=DEVICE))
    with switch("off"):
        assert "residual_update" not in captured(interpolated, *inputs)[2]
    monkeypatch.setattr(residual_update, "applies", lambda *args: False)
    assert "residual_update" not in captured(interpolated, *inputs)[2]


def plain_gain(graph, stored):
    return graph.call_function(operator.mul, (stored, 3.0))


def input_as_gain(graph, stored):
    return stored


@pytest.mark.parametrize("make", [plain_gain, input_as_gain])
@pytest.mark.parametrize(("numel", "again", "moved"), [(1, False, True), (1, True, False), (9, False, False)])
@pytest.mark.usefixtures("kernels_apply")
def test_the_gain_of_attention_goes_to_the_kernel_of_the_heads(make, numel, again, moved):
    """Not if it varies by position, nor if q is used elsewhere; the order of the inputs stays."""
    ctx = make_context(torch.zeros(2, 9, 1, device=DEVICE), 16, 1e4)
    graph = Graph()
    qkv, cos, sin = (graph.placeholder(name) for name in ("qkv", "cos", "sin"))
    stored = graph.placeholder("stored")
    heads = graph.call_function(models.normed_heads, (qkv, 32, cos, sin, None, None))
    q, k, v = (graph.call_function(operator.getitem, (heads, i)) for i in range(3))
    gain = make(graph, stored)
    value = torch.rand(numel, 1, device=DEVICE) if numel > 1 else torch.rand(1, device=DEVICE)
    gain.meta["example_value"] = value
    out = graph.call_function(attend, (q, k, v, None, gain))
    graph.output((out, q) if again else (out,))
    module = GraphModule({}, graph)
    inputs = (draw(2, 9, 3 * 64), ctx.cos, ctx.sin, value)
    before = module(*inputs)[0]
    MergeLines()(graph)
    graph.lint()
    module.recompile()
    assert len(out.args) == (4 if moved else 5)
    assert [node.name for node in graph.nodes if node.op == "placeholder"] == ["qkv", "cos", "sin", "stored"]
    assert (module(*inputs)[0] - before).norm() <= ROUNDING * before.norm()


def draw(*shape):
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def traced(precision):
    """What tests/traced.py prints of the three architectures."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.traced", precision, "gpt+", "ngpt", "angpt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_left_of_the_sums_of_a_block():
    # Products that add, products that do not, sums, multiplications, copies. GPT+ multiplies in its norms alone.
    update = {"forward": [0, 4, 0, 0, 0], "backward": [2, 6, 0, 0, 0]}
    gptplus = {"forward": [2, 2, 0, 4, 2], "backward": [0, 8, 0, 0, 0]}
    assert traced("bf16") == {"gpt+": gptplus, "ngpt": update, "angpt": update}


def test_all_products_of_a_block_are_in_8_bits():
    """Four forward, eight backward, none of them left to another precision; they cannot add.

    Five of the eight tensors that anGPT converts have passes of their own: h, twice, A·v, and the gradients of the
    outputs of both blocks.
    """
    # Products in 8 bits, in place, others; sums, multiplications, copies; conversions. nGPT multiplies u and z by
    # learned gains and norms its stream; GPT+ multiplies its matrices by their scales and converts them, too.
    gptplus = {"forward": [4, 0, 0, 2, 8, 0, 4], "backward": [8, 0, 0, 0, 0, 0, 8]}
    ngpt = {"forward": [4, 0, 0, 0, 1, 0, 3], "backward": [8, 0, 0, 2, 2, 0, 3]}
    angpt = {"forward": [4, 0, 0, 0, 0, 0, 3], "backward": [8, 0, 0, 2, 0, 0, 2]}
    assert traced("fp8") == {"gpt+": gptplus, "ngpt": ngpt, "angpt": angpt}
