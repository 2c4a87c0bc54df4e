"""Both passes of a block as the compiler gets them for a GPU that need not be there: `python -m tests.traced fp8 ngpt`.

A process of its own, because tests have Triton interpret kernels. Takes a precision and architectures. Prints JSON: for
each architecture and pass, how often operations that multiply, add or copy what is as large as the residual stream are
left after the compiler's passes over the graph; before these, in 8 bits, its products, and after them the conversions
in passes over memory of their own. A graph break is an error.
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
from torch._inductor.compile_fx import partition_fn
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

from angpt.config import ModelConfig
from angpt.fast import models
from angpt.fast.float8_fusion import _launch
from angpt.fast.float8_kernels import _quantize
from angpt.fast.fusion import OPTIONS
from angpt.fast.precision import low_precision
from angpt.float8 import E4M3
from angpt.models import primitives
from angpt.models.variants import build
from angpt.training.plan import DTYPES
from tests.compiled import HOPPER


class Driver:
    """What the compiler asks Triton for while it traces."""

    def get_current_target(self):
        return HOPPER


class Stop(Exception):
    """Traced; there is nothing to run it on."""


def operations(architecture: str, dtype: torch.dtype) -> dict[str, Counter]:
    found = {}

    def passes(module, examples):
        with V.set_fake_mode(detect_fake_mode(examples)):
            post_grad_passes(module, is_inference=False)
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        small = [n for n in nodes if isinstance(v := n.meta.get("val"), torch.Tensor) and v.numel() < h.numel()]
        names = [str(node.target).rpartition(".")[0] for node in nodes if node not in small]
        launches = [_launch(node) for node in nodes if "kernel_idx" in node.kwargs]
        names += ["convert" for kernel, given in launches if kernel is _quantize.fn and given["CONVERT"]]
        return Counter("product" if name in ("aten.mm", "aten.addmm") else name for name in names)

    def backward(module, examples):
        found["backward"] = passes(module, examples)
        return make_boxed_func(module.forward)

    def forward(module, examples):
        def stop(*inputs):
            raise Stop

        found["forward"] = passes(module, examples)
        return make_boxed_func(stop)

    size = ModelConfig(architecture=architecture, d_model=128, n_layers=1, n_heads=2, vocab_size=64, context=64)
    model = low_precision(build(size), dtype)
    h = torch.zeros(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    differentiate = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition_fn)

    def backend(module, examples):
        OPTIONS["pre_grad_custom_pass"](module.graph)
        module.recompile()
        return differentiate(module, examples)

    compiled = torch.compile(model.blocks[0], backend=backend, fullgraph=True)
    try:
        with config.patch(OPTIONS):
            compiled(h, primitives.make_context(h.float(), size.rotary_dim, size.rotary_base))
    except Stop:
        return found
    raise AssertionError("nothing was compiled")


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    torch._functorch.config.force_non_lazy_backward_lowering = True
    models.bf16_on_gpu = lambda x: x.dtype == torch.bfloat16
    models._e4m3_on_gpu = lambda x: x.dtype == E4M3
    names = ("angpt.add_product_", "product", "aten.add", "aten.mul", "aten.clone")
    if (dtype := DTYPES[sys.argv[1]]) == E4M3:
        names = ("aten._scaled_mm", *names, "convert")
    traced = {name: operations(name, dtype) for name in sys.argv[2:]}
    json.dump({k: {which: [c[n] for n in names] for which, c in v.items()} for k, v in traced.items()}, sys.stdout)
