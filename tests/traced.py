"""The backward pass of a block as the compiler gets it for a GPU that need not be there: `python -m tests.traced`.

A process of its own, because tests have Triton interpret kernels. Prints JSON: for each architecture, how often each
operation occurs after the passes of the compiler over the graph, of those that add products to gradients or copy.
"""

import json
import sys
from collections import Counter

import torch
import torch._functorch.config
import triton
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

from angpt.config import ModelConfig
from angpt.models import primitives
from angpt.models.variants import build
from angpt.training.engine import low_precision
from angpt.training.fusion import AddProducts
from tests.compiled import HOPPER


class Driver:
    """What the compiler asks Triton for while it traces."""

    def get_current_target(self):
        return HOPPER


class Stop(Exception):
    """Traced; there is nothing to run it on."""


def operations(architecture: str) -> Counter:
    found = Counter()

    def backward(module, examples):
        with config.patch(post_grad_custom_pre_pass=AddProducts()), V.set_fake_mode(detect_fake_mode(examples)):
            post_grad_passes(module, is_inference=False)
        found.update(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return make_boxed_func(module.forward)

    def forward(module, examples):
        def stop(*inputs):
            raise Stop

        return make_boxed_func(stop)

    size = ModelConfig(architecture=architecture, d_model=128, n_layers=1, n_heads=2, vocab_size=64, context=64)
    model = low_precision(build(size), torch.bfloat16)
    h = torch.zeros(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(model.blocks[0], backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))
    try:
        compiled(h, primitives.make_context(h.float(), size.rotary_dim, size.rotary_base))
    except Stop:
        return found
    raise AssertionError("nothing was compiled")


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    torch._functorch.config.force_non_lazy_backward_lowering = True
    primitives.use_kernels = lambda x: x.dtype == torch.bfloat16
    names = ("angpt.add_product_.default", "aten.clone.default", "aten.mm.default")
    json.dump({name: {n: operations(name)[n] for n in names} for name in sys.argv[1:]}, sys.stdout)
