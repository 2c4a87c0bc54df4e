"""Products are added to gradients in place where that is what the sum means, and only there."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.library import custom_op

from angpt.training.fusion import AddProducts

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


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


@pytest.mark.parametrize(
    ("function", "replaced"),
    [
        *((function, 1) for function in (once, swapped)),
        *((function, 0) for function in (needed_later, product_needed_later, scaled, of_an_input)),
        *((function, 0) for function in (wider, smaller, one_row, other_rows, other_precision)),
    ],
)
def test_sums_in_place(function, replaced):
    torch.compiler.reset()
    calls = []

    class Counted(AddProducts):
        def __call__(self, graph):
            super().__call__(graph)
            calls.append(sum("auto_functionalized" in node.name for node in graph.nodes))

        def uuid(self):
            return None  # not from the cache

    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=rng) for shape in ((2, 4, 8), (2, 4, 8), (2, 4, 16), (16, 8))]
    copies = [x.clone() for x in inputs]
    found = torch.compile(function, options={"post_grad_custom_pre_pass": Counted()})(*inputs)
    assert calls == [replaced]
    for a, b in zip((*found, *inputs), (*function(*copies), *copies), strict=True):
        torch.testing.assert_close(a, b)


def test_the_gradients_of_the_residual_stream_meet_in_products():
    pytest.importorskip("triton", reason="Triton is not installed (it is there for Linux only)")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.traced", "gpt+", "ngpt", "angpt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for architecture in ("ngpt", "angpt"):  # twice the stream and its branch: before attention, before the MLP
        assert found[architecture]["angpt.add_product_.default"] == 2
        assert found[architecture]["aten.mm.default"] == 6  # of eight, the other two add
        assert found[architecture]["aten.clone.default"] == 0  # which they would be added to, could it not be in place
    assert found["gpt+"]["angpt.add_product_.default"] == 0  # there the sum is part of a norm's gradient
    assert found["gpt+"]["aten.mm.default"] == 8
