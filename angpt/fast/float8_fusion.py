"""Fuses kernels with the conversion of their result to 8 bits, in a graph of the compiler.

A kernel is recognised by its function, and its arguments are read by their names in the kernel.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch.fx import Graph, Node

from angpt.fast import block_kernels, float8_kernels, head_kernels

aten, ours = torch.ops.aten, torch.ops.angpt

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class Fused(NamedTuple):
    """The form of a kernel that writes its result in e4m3, and the transpose."""

    operation: Any
    arguments: Callable[[dict[str, Any]], tuple[Any, ...]]
    """Function from the arguments of the kernel, by name, to those of `operation` without the scale."""
    result: str
    """Name of the argument that receives the result which is converted."""
    others: tuple[str, ...] = ()
    """Names of the arguments that receive what `operation` returns after the matrix in e4m3 and its transpose."""


def _heads(k: dict[str, Any]) -> tuple[Any, ...]:
    gains = (k["q_gain_ptr"] if k["Q_GAIN"] else None, k["k_gain_ptr"] if k["K_GAIN"] else None)
    return k["qkv_ptr"], k["cos_ptr"], k["sin_ptr"], *gains, k["dq_ptr"], k["dk_ptr"], k["dv_ptr"]


FUSED = {
    block_kernels._swiglu.fn: Fused(ours.swiglu_e4m3.default, lambda k: (k["uz_ptr"], k["FACTOR"]), "h_ptr"),
    block_kernels._swiglu_backward.fn: Fused(
        ours.swiglu_backward_e4m3.default, lambda k: (k["uz_ptr"], k["dh_ptr"], k["FACTOR"]), "duz_ptr"
    ),
    head_kernels._heads_backward.fn: Fused(
        ours.heads_backward_e4m3.default, _heads, "dqkv_ptr", ("q_terms_ptr", "k_terms_ptr")
    ),
}
"""Fused forms by the function of the kernel. Those of the residual update and of its gradient were no faster than two
kernels (docs/fp8.md)."""


def fuse_conversions(graph: Graph) -> None:
    """Replace kernels whose result is converted to 8 bits, and the conversion, by their fused forms."""
    for node in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        function, arguments = _launch(node)
        if function is float8_kernels._quantize.fn and arguments["CONVERT"]:
            _fuse(graph, node, arguments)


def _launch(node: Node) -> tuple[Any, dict[str, Any]]:
    """The Python function of the kernel that a node launches, and its arguments by name."""
    given: dict[str, Any] = dict(node.kwargs)
    kernel: Any = kernel_side_table.get_kernel(given["kernel_idx"])
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel, given["kwargs"] | kernel_side_table.get_constant_args(given["constant_args_idx"])


def _fuse(graph: Graph, conversion: Node, arguments: dict[str, Any]) -> None:
    result, scale = arguments["x_ptr"], arguments["scale_ptr"]
    chain = [result]
    while result.target in VIEWS:
        result = result.args[0]
        chain.append(result)
    kernel = result.args[0] if result.target is operator.getitem else None
    if not isinstance(kernel, Node) or kernel.target is not triton_kernel_wrapper_functional:
        return
    function, given = _launch(kernel)
    fused = FUSED.get(function)
    if fused is None or result.args[1] != fused.result or not scale < kernel:
        return
    if any(len(node.users) > 1 for node in chain):
        return
    operands = (*fused.arguments(given), scale)
    values = fused.operation(*(x.meta["val"] if isinstance(x, Node) else x for x in operands))
    if values[0].shape != chain[0].meta["val"].shape:
        return
    rest = {key: value for key, value in kernel.meta.items() if key not in ("val", "tensor_meta", "eager_input_vals")}
    with graph.inserting_before(kernel):
        call = graph.call_function(fused.operation, operands)
        items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(values))]
    for node, value in zip((call, *items), (values, *values), strict=True):
        node.meta = rest | {"val": value}
    _replace(graph, conversion, dict(zip(("y_ptr", "t_ptr"), items[:2], strict=True)))
    _replace(graph, kernel, dict(zip(fused.others, items[2:], strict=True)))


def _replace(graph: Graph, kernel: Node, results: dict[str, Node]) -> None:
    """Use these results in place of those of a kernel, and remove it if no other is used."""
    for item in list(kernel.users):
        name: Any = item.args[1]
        if name in results:
            item.replace_all_uses_with(results[name])
        _erase(graph, item)
    _erase(graph, kernel)


def _erase(graph: Graph, node: Node) -> None:
    """Remove a node that is not used, and views that only it used."""
    if node.users:
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        if source.target in VIEWS or source.target is operator.getitem:
            _erase(graph, source)
