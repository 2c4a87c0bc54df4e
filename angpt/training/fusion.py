"""A pass of the compiler: where one of several outputs of something, a kernel say, is added to a matrix product, the
product is added to it in place. A product that adds costs what one that does not costs; a sum of its own reads two
tensors and writes one.

This is how the two gradients of the residual stream meet, that of the update and that of the next matrix.
"""

import operator

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten = torch.ops.aten
functional = torch.ops.higher_order.auto_functionalized
torch.library.define("angpt::add_product_", "(Tensor(a!) total, Tensor a, Tensor b) -> ()")


@torch.library.impl("angpt::add_product_", "CompositeExplicitAutograd")
def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, with all dimensions of `total` but the last taken as one."""
    total.view(-1, total.shape[-1]).addmm_(a, b)


@torch.library.register_fake("angpt::add_product_")  # type: ignore[untyped-decorator]
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    pass


class AddProducts(CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            for total, term in (node.args[:2], node.args[1::-1]):
                product = _unviewed(term)
                if product is not None and _only_summed(total) and _alike(total, product, node):
                    _replace(graph, node, total, product)
                    break
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


ADD_PRODUCTS = AddProducts()
"""One for all: the compiler takes code that it has made with another one for code made otherwise."""


def _unviewed(node: object) -> Node | None:
    """The matrix product of which this is a view, if nobody else uses it."""
    while isinstance(node, Node) and len(node.users) == 1:
        if node.target is aten.mm.default:
            return node
        if node.target not in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
            break
        node = node.args[0]
    return None


def _only_summed(node: object) -> bool:
    """Whether it is one of several outputs of something, and used by the sum alone."""
    return isinstance(node, Node) and node.target is operator.getitem and len(node.users) == 1


def _alike(total: Node, product: Node, node: Node) -> bool:
    """Whether all three have the same entries in the same order, and the sum no factor."""
    a, b, c = (n.meta["val"] for n in (total, product, node))
    shapes = a.shape == c.shape and a.shape[-1] == b.shape[-1] and a.numel() == b.numel()
    return shapes and a.dtype == b.dtype == c.dtype and a.is_contiguous() and not node.kwargs


def _replace(graph: Graph, node: Node, total: Node, product: Node) -> None:
    a, b = product.args
    with graph.inserting_before(node):
        op = torch.ops.angpt.add_product_.default
        call = graph.call_function(functional, (op,), {"total": total, "a": a, "b": b})
        call.meta["val"] = (None, node.meta["val"])
        result = graph.call_function(operator.getitem, (call, 1))
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
