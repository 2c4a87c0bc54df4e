"""Passes of the compiler that save sums of tensors as large as the residual stream: each reads two and writes one.

A matrix product that is added to something is added in place; that costs what the product costs. So the stream of GPT+
meets its branches, and so, in the other architectures, the gradients of the stream meet: those of the update and those
of the next matrix. What is still needed as it was is copied first: a write, where a norm reads it anyway. And the
gradient of a norm is added to that of the stream in the kernel that computes it.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from angpt.fast import block_kernels as kernels

aten, ours = torch.ops.aten, torch.ops.angpt


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, with all dimensions of `total` but the last taken as one."""
    total.view(-1, total.shape[-1]).addmm_(a, b)


torch.library.define("angpt::add_product_", "(Tensor(a!) total, Tensor a, Tensor b) -> ()")
torch.library.impl("angpt::add_product_", "CompositeExplicitAutograd", add_product_)
torch.library.register_fake("angpt::add_product_", lambda total, a, b: None)

# What stands in the graph from the first pass to the second, and is never run.
torch.library.define("angpt::add_product", "(Tensor total, Tensor a, Tensor b) -> Tensor")
torch.library.register_fake("angpt::add_product", lambda total, a, b: torch.empty_like(total))


class _Pass(CustomGraphPass):
    def uuid(self) -> bytes:
        # Compiled code holds the shapes of what rms_backward returns.
        return get_hash_for_files((__file__, kernels.__file__))


class FindSums(_Pass):
    """Before the compiler decides what to keep for the backward pass: the sum, then, and neither of its terms."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            for total, term in (node.args[:2], node.args[1::-1]):
                found = _with_product(graph, node, total, term) or _with_gradient_of_norm(node, total, term)
                if found is not None:
                    node.replace_all_uses_with(found)
                    graph.erase_node(node)
                    break


class AddProducts(_Pass):
    """After the compiler has removed copies that look needless, and before it looks where it may work in place."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=ours.add_product.default):
            total, a, b = node.args
            with graph.inserting_before(node):
                if total.op == "placeholder" or len(total.users) > 1 or _storage(total) in (_storage(a), _storage(b)):
                    copy = graph.call_function(aten.clone.default, (total,))
                    copy.meta["val"] = total.meta["val"].clone()
                    total = copy
                # The compiler copies once more, should a view of the total be an input, or be used later.
                call = graph.call_function(
                    torch.ops.higher_order.auto_functionalized,
                    (ours.add_product_.default,),
                    {"total": total, "a": a, "b": b},
                )
                call.meta["val"] = (None, node.meta["val"])
                result = graph.call_function(operator.getitem, (call, 1))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
            graph.erase_node(node)


OPTIONS = {"joint_custom_pre_pass": FindSums(), "post_grad_custom_post_pass": AddProducts()}
"""One of each for all: the compiler takes code that it has made with another one for code made otherwise."""


def _with_product(graph: Graph, node: Node, total: Any, term: Any) -> Node | None:
    """total + a b in one, where the term is the product, or a view of it, and used for nothing else."""
    while isinstance(term, Node) and len(term.users) == 1 and term.target in _VIEWS:
        term = term.args[0]
    if not isinstance(term, Node) or term.target is not aten.mm.default or len(term.users) > 1:
        return None
    if not _alike(total, term, node):
        return None
    with graph.inserting_before(node):
        found = graph.call_function(ours.add_product.default, (total, *term.args))
    found.meta = dict(node.meta)
    return found


def _with_gradient_of_norm(node: Node, total: Any, term: Any) -> Node | None:
    """total + gradient in one, where the term is that of a vector that was normed, and used for nothing else."""
    if not isinstance(term, Node) or term.target is not operator.getitem or term.args[1] != 0 or len(term.users) > 1:
        return None
    kernel: Any = term.args[0]
    if kernel.target is not ours.rms_backward.default or kernel.args[3] is not None:
        return None
    if not _alike(total, term, node) or term.meta["val"].shape != node.meta["val"].shape:
        return None
    if not total < kernel:  # it must be there when the kernel runs
        return None
    kernel.update_arg(3, total)
    return term


def _storage(node: Node) -> int:
    address: int = node.meta["val"].untyped_storage()._cdata
    return address


_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def _alike(total: Any, term: Node, node: Node) -> bool:
    """Whether all three have the same entries in the same order, and the sum no factor."""
    if not isinstance(total, Node):
        return False
    a, b, c = (n.meta["val"] for n in (total, term, node))
    shapes = a.shape == c.shape and a.shape[-1] == b.shape[-1] and a.numel() == b.numel()
    return shapes and a.dtype == b.dtype == c.dtype and a.is_contiguous() and not node.kwargs
