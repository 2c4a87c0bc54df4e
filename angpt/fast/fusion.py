"""Compiler passes that fuse operations which the models write as separate lines, for compiled code on a GPU.

Before differentiation, `lerp(h, norm(x), α, ν(α))`, and the norm of that, become one residual update, and the gain of
attention becomes part of the kernel that computes q.

After it, separate additions to the residual stream and its gradient are removed, each of which would read two tensors
and write one. A matrix product is accumulated in place at no cost, in the stream of GPT+ and in the gradient of the
stream of the other architectures; a total that is needed later is copied first. The gradient of a norm is added to that
of the stream in the kernel that computes it. In 8 bits, kernels write what the next product reads (`float8_fusion`).
"""

import inspect
import operator
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from angpt.fast import block_kernels, float8_fusion, float8_kernels, head_kernels, models, tuning
from angpt.fast.float8_fusion import VIEWS
from angpt.models.primitives import attend, lerp, norm, nu_lerp, residual_update
from angpt.operations import kernels_enabled

aten, ours = torch.ops.aten, torch.ops.angpt

for function in (norm, lerp, nu_lerp, attend, models.normed_heads):  # one node each in the graph
    torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]


def add_product_(total: Tensor, a: Tensor, b: Tensor, alpha: float) -> None:
    """total += a b · alpha, with all dimensions of `total` but the last flattened."""
    total.view(-1, total.shape[-1]).addmm_(a, b, alpha=alpha)


torch.library.define("angpt::add_product_", "(Tensor(a!) total, Tensor a, Tensor b, float alpha) -> ()")
torch.library.impl("angpt::add_product_", "CompositeExplicitAutograd", add_product_)
torch.library.register_fake("angpt::add_product_", lambda total, a, b, alpha: None)

# Placeholder in the graph between the passes `FindSums` and `AddProducts`; never executed.
torch.library.define("angpt::add_product", "(Tensor total, Tensor a, Tensor b, float alpha) -> Tensor")
torch.library.register_fake("angpt::add_product", lambda total, a, b, alpha: torch.empty_like(total))


class _Pass(CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        if kernels_enabled():
            self.change(graph)

    @abstractmethod
    def change(self, graph: Graph) -> None: ...

    def uuid(self) -> bytes:
        # Compiled code depends on the shapes that rms_backward and kernels in 8 bits return.
        modules = (block_kernels, head_kernels, float8_kernels, float8_fusion, tuning)
        return get_hash_for_files((__file__, *(str(m.__file__) for m in modules)), str(kernels_enabled()))


class MergeLines(_Pass):
    """Fuse norm, lerp and norm into one residual update, and the gain of attention into the kernel of the heads."""

    def change(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=lerp):
            _merge_update(graph, node)
        for node in graph.find_nodes(op="call_function", target=attend):
            _move_gain(node)


def _merge_update(graph: Graph, node: Node) -> None:
    """Replace lerp(h, norm(x), α, ν), and the norm of that, by one residual update if its fast form applies."""
    bound = inspect.signature(lerp).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    h, x, alpha, nu = bound.args
    factor = _lerp_factor(nu, alpha)
    if factor is None or not _is_call(x, norm) or not x.args or len(x.users) > 1:
        return
    values = [n.meta["example_value"] for n in (h, x.args[0], alpha)]
    if residual_update.fast is None or not residual_update.applies(*values):
        return
    last, users = node, list(node.users)
    normed = len(users) == 1 and _is_call(users[0], norm)
    if normed:
        last = users[0]
    with graph.inserting_before(last):
        merged = graph.call_function(residual_update.fast, (h, x.args[0], alpha, *factor, normed))
    merged.meta = dict(last.meta)
    last.replace_all_uses_with(merged)
    for dead in dict.fromkeys((last, node, x)):
        if not dead.users:
            graph.erase_node(dead)


def _lerp_factor(nu: Any, alpha: Any) -> tuple[bool, float] | None:
    """True if ν(α) is a factor of the update, and the constant factor; None if ν has another form."""
    if isinstance(nu, int | float):
        return False, float(nu)
    if _is_call(nu, nu_lerp):
        return (True, 1.0) if nu.args[0] is alpha else None
    if _is_call(nu, operator.mul) and _is_call(nu.args[0], nu_lerp) and isinstance(nu.args[1], int | float):
        return (True, float(nu.args[1])) if nu.args[0].args[0] is alpha else None
    return None


def _move_gain(node: Node) -> None:
    """Move the gain of attend(q, …, gain) into the kernel of the heads, if that computes q."""
    q: Any = node.args[0]
    gain: Any = node.args[4] if len(node.args) > 4 else node.kwargs.get("gain")
    if not isinstance(gain, Node) or not _is_call(q, operator.getitem) or q.args[1] != 0 or len(q.users) > 1:
        return
    heads = q.args[0]
    if not _is_call(heads, models.normed_heads) or len(heads.args) < 6 or heads.args[4] is not None:
        return
    if gain.meta["example_value"].numel() != 1:  # the kernel takes one number for all, or one per head and dimension
        return
    if heads < gain:  # it must exist when the kernel runs
        if gain.op != "call_function" or any(heads < source for source in gain.all_input_nodes):
            return
        heads.prepend(gain)
    heads.update_arg(4, gain)
    node.args, node.kwargs = node.args[:4], {}


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is target


class FindSums(_Pass):
    """Fuse sums before the compiler chooses what to save for the backward pass: the sum, not its terms."""

    def change(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            for total, term in (node.args[:2], node.args[1::-1]):
                found = _with_product(graph, node, total, term) or _with_gradient_of_norm(node, total, term)
                if found is not None:
                    node.replace_all_uses_with(found)
                    graph.erase_node(node)
                    break


class FuseConversions(_Pass):
    """Let kernels write their results in 8 bits where a conversion follows."""

    def change(self, graph: Graph) -> None:
        float8_fusion.fuse_conversions(graph)


class AddProducts(_Pass):
    """Accumulate products in place, after the compiler has removed redundant copies and before its in-place pass."""

    def change(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=ours.add_product.default):
            total, a, b, alpha = node.args
            with graph.inserting_before(node):
                if total.op == "placeholder" or len(total.users) > 1 or _storage(total) in (_storage(a), _storage(b)):
                    copy = graph.call_function(aten.clone.default, (total,))
                    copy.meta["val"] = total.meta["val"].clone()
                    total = copy
                # The compiler copies again if a view of the total is an input or is used later.
                call = graph.call_function(
                    torch.ops.higher_order.auto_functionalized,
                    (ours.add_product_.default,),
                    {"total": total, "a": a, "b": b, "alpha": alpha},
                )
                call.meta["val"] = (None, node.meta["val"])
                result = graph.call_function(operator.getitem, (call, 1))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
            graph.erase_node(node)


OPTIONS: dict[str, Any] = {
    "pre_grad_custom_pass": MergeLines(),
    "joint_custom_pre_pass": FindSums(),
    "joint_custom_post_pass": FuseConversions(),
    "post_grad_custom_post_pass": AddProducts(),
    "score_fusion_memory_threshold": 1,  # bytes: multiples of one scale are computed in one kernel
}
"""Options of `torch.compile`. Singletons: a new instance would force recompilation."""


def _with_product(graph: Graph, node: Node, total: Any, term: Any) -> Node | None:
    """total + a b · alpha as one node, if the term is that product, or a view of it, and has no other user."""
    while isinstance(term, Node) and len(term.users) == 1 and term.target in VIEWS:
        term = term.args[0]
    if not isinstance(term, Node) or len(term.users) > 1 or not _alike(total, term, node):
        return None
    alpha: Any
    if term.target is aten.mm.default:
        a, b, alpha = *term.args, 1.0
    elif term.target is aten.addmm.default and term.kwargs.get("beta") == 0:
        a, b, alpha = *term.args[1:], term.kwargs.get("alpha", 1.0)
    else:
        return None
    with graph.inserting_before(node):
        found = graph.call_function(ours.add_product.default, (total, a, b, alpha))
    found.meta = dict(node.meta)
    return found


def _with_gradient_of_norm(node: Node, total: Any, term: Any) -> Node | None:
    """total + gradient as one node, if the term is the gradient of a norm and has no other user."""
    if not isinstance(term, Node) or term.target is not operator.getitem or term.args[1] != 0 or len(term.users) > 1:
        return None
    kernel: Any = term.args[0]
    if kernel.target is not ours.rms_backward.default or kernel.args[3] is not None:
        return None
    if not _alike(total, term, node) or term.meta["val"].shape != node.meta["val"].shape:
        return None
    if not total < kernel:  # the total must exist when the kernel runs
        return None
    kernel.update_arg(3, total)
    return term


def _storage(node: Node) -> int:
    address: int = node.meta["val"].untyped_storage()._cdata
    return address


def _alike(total: Any, term: Node, node: Node) -> bool:
    """True if all three have the same entries in the same order, and the sum has no factor."""
    if not isinstance(total, Node):
        return False
    a, b, c = (n.meta["val"] for n in (total, term, node))
    shapes = a.shape == c.shape and a.shape[-1] == b.shape[-1] and a.numel() == b.numel()
    return shapes and a.dtype == b.dtype == c.dtype and a.is_contiguous() and not node.kwargs
