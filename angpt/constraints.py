"""Constraints on weight matrices: vectors along a dimension have length 1 (`unit`) or at most 1 (`bound`).

A model declares them as data, which the optimiser step, sharding, export and analysis read. `constrain` holds them, and
those of any other network, under any PyTorch optimizer.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from angpt.errors import UserError

TINY = 1e-18
"""Shorter vectors are scaled as if they had this length. The squares of their entries are zero in fp32, or nearly: zero
vectors stay zero, and others do not become long."""

MAPS = (
    nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention,
    nn.RNNBase, nn.RNNCellBase,
)  # fmt: skip
"""Modules whose weights have one vector for each index of their first dimension: an output, a filter or a token."""
FROZEN = "left as they are, because they are frozen"
NAMES = 20
"""Most names in a warning."""


@dataclass(frozen=True)
class Constraint:
    """The vectors of a matrix along `dim` have length 1 (`unit`, nGPT) or at most 1 (`bound`, anGPT)."""

    kind: Literal["unit", "bound"]
    dim: int | tuple[int, ...]
    """The dimensions that one vector spans: one of a matrix, all but the first of the filters of a convolution."""

    def __post_init__(self) -> None:
        if self.kind not in ("unit", "bound"):
            raise UserError(f"unknown kind of constraint {self.kind!r}: known: bound, unit")
        if not self.dims or not all(isinstance(d, int) for d in self.dims):
            raise UserError(f"the dimension of a constraint must be a number or several, not {self.dim!r}")

    @property
    def dims(self) -> tuple[int, ...]:
        return self.dim if isinstance(self.dim, tuple) else (self.dim,)


Constraints = Mapping[str, Constraint | tuple[Literal["unit", "bound"], int | tuple[int, ...]]]
"""Constraints by names of parameters; a tuple such as ("bound", 1) stands for a `Constraint`."""


def is_matrix(p: Tensor) -> bool:
    """True for a weight matrix, which may be constrained, decayed, and stored in low precision."""
    return p.ndim == 2


def norms(weight: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Lengths of the vectors along `dim` (keepdim), at least in fp32: squares of small weights are zero in fp16."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.linalg.vector_norm(weight, dim=dim, keepdim=True, dtype=dtype)


@torch.no_grad()
def project_(weight: Tensor, constraint: Constraint) -> Tensor:
    """Project a matrix onto its constraint, in place. A zero vector stays zero."""
    return weight.mul_(scale(norms(weight, constraint.dim), constraint))


def scale(lengths: Tensor, constraint: Constraint) -> Tensor:
    """Factors that bring vectors of these lengths to their constraint."""
    factor = lengths.clamp(min=TINY).reciprocal()
    return factor.clamp(max=1.0) if constraint.kind == "bound" else factor


@torch.no_grad()
def project_columns_(
    weights: Sequence[Tensor], constraints: Sequence[Constraint], sum_shards: Callable[[Tensor], Tensor]
) -> None:
    """Project the columns of matrices of which this process has only some rows, in place. One call of `sum_shards`, a
    sum over the processes that have the other rows, gives the lengths of all columns."""
    if not weights:
        return
    squares = sum_shards(torch.cat([w.square().sum(dim=0) for w in weights]))
    lengths = torch.split(squares.sqrt(), [w.shape[1] for w in weights])
    for weight, length, constraint in zip(weights, lengths, constraints, strict=True):
        weight.mul_(scale(length, constraint))


@torch.no_grad()
def excess(weight: Tensor, constraint: Constraint) -> Tensor:
    """Violation of the constraint by each vector: | ‖w‖ − 1 | (unit) or max(‖w‖ − 1, 0) (bound); infinite for NaN."""
    lengths = norms(weight, constraint.dim)
    over = (lengths.full_tensor() if hasattr(lengths, "full_tensor") else lengths) - 1  # a DTensor is sharded
    return (over.abs() if constraint.kind == "unit" else over.clamp(min=0)).nan_to_num(math.inf, math.inf)


def constraints_of(module: nn.Module) -> dict[str, Constraint]:
    """The constraints of a network, by the names of its parameters.

    A part of the network with a method `constraints`, like the models of this package, declares its own. Elsewhere the
    paper's bound applies: the vector of each output of a linear map (also inside attention and recurrent layers), of
    each filter of a convolution, and of each token of an embedding has at most length 1.
    """
    return {name: constraint for name, constraint in _find(module) if constraint is not None}


def left_out(module: nn.Module) -> list[str]:
    """The parameters of at least two dimensions for which `constraints_of` knows no constraint."""
    constrained = {p for _, p, _ in _resolve(module, constraints_of(module))}
    named = dict(module.named_parameters(remove_duplicate=False))
    return [name for name, constraint in _find(module) if constraint is None and named[name] not in constrained]


def apply_constraints(module: nn.Module, constraints: Constraints | None = None) -> None:
    """Project every constrained parameter, in place, except frozen ones, which a warning names."""
    targets = _resolve(module, constraints)
    _warn(FROZEN, [t.name for t in targets if not t.weight.requires_grad])
    for _, weight, constraint in targets:
        if weight.requires_grad:
            project_(weight, constraint)


def largest_violation(module: nn.Module, constraints: Constraints | None = None) -> float:
    """Largest violation of a constraint by any vector, also of frozen parameters; infinite if one has a NaN, 0 if
    nothing is constrained."""
    found = (excess(weight, constraint) for _, weight, constraint in _resolve(module, constraints))
    return max((float(x.max()) for x in found if x.numel()), default=0.0)


def constrain(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    module: nn.Module,
    constraints: Constraints | None = None,
) -> "Constrained":
    """Apply the constraints now and after every step of any PyTorch optimizer. A further call replaces those of the
    same parameters.

    Only parameters that the optimizer updates are changed: those in its groups that are not frozen. A warning names
    constrained parameters that are frozen or belong to no group, and those that `constraints_of` leaves out.

    Args:
        optimizer: One, or all that train the network. Copies by `copy.deepcopy` and `pickle` apply the constraints
            too; those by `copy.copy` do not.
        module: The network, also inside DDP, `fully_shard`, `torch.compile` or a larger network.
        constraints: By names of parameters; those of `constraints_of` unless given.

    Returns:
        A handle; its method `remove` ends the constraints.
    """
    optimizers = [_unwrapped(each) for each in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    targets = _resolve(module, constraints)
    owned = {p for each in optimizers for p in _parameters(each)}
    _warn(FROZEN, [t.name for t in targets if not t.weight.requires_grad])
    if owned.difference(module.parameters()):
        what = "not trained by this optimizer, which has others that the network does not (make it after `convert`)"
        named = module.named_parameters()
        _warn(what, [name for name, p in named if p.ndim < 2 and p.requires_grad and p not in owned])
    others = [t.name for t in targets if t.weight.requires_grad and t.weight not in owned]
    _warn("left as they are, because this optimizer does not update them", others)
    handles = []
    for each in optimizers:
        for earlier in _projections(each):
            earlier.leave_out({t.weight for t in targets})
        projection = _Projection([(t.weight, t.constraint) for t in targets], _parameters(each))
        projection(each)
        handles.append(_attach(projection, each))
    return Constrained(handles)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """An optimizer without the wrapper of accelerate or Lightning."""
    if "_optimizer_step_post_hooks" not in getattr(optimizer, "__dict__", {}):
        optimizer = getattr(optimizer, "optimizer", optimizer)
    if not hasattr(optimizer, "register_step_post_hook"):
        raise UserError(f"constrain needs an optimizer of PyTorch, not {type(optimizer).__name__}")
    return optimizer


@dataclass(frozen=True)
class Constrained:
    """Constraints that are applied after every step."""

    handles: Sequence[RemovableHandle]

    def remove(self) -> None:
        """End the constraints."""
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Target(NamedTuple):
    name: str
    weight: nn.Parameter
    constraint: Constraint


class _Projection:
    """Hook of an optimizer that projects the parameters which the optimizer updates."""

    def __init__(self, pairs: list[tuple[nn.Parameter, Constraint]], known: set[Tensor]) -> None:
        """`known`: the parameters of the optimizer at the beginning."""
        self.pairs, self.known = pairs, known

    def leave_out(self, weights: set[nn.Parameter]) -> None:
        self.pairs = [(weight, constraint) for weight, constraint in self.pairs if weight not in weights]

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        owned = _parameters(optimizer)  # may grow, and parameters may be frozen, from one step to the next
        gone = any(weight in self.known and weight not in owned for weight, _ in self.pairs)
        if gone and not owned <= self.known:
            raise UserError(
                "parameters of the optimizer were replaced after `constrain`, so it no longer sees them: call it after "
                "`fully_shard` or the `prepare` of accelerate"
            )
        for weight, constraint in self.pairs:
            if weight.requires_grad and weight in owned:
                project_(weight, constraint)


def _projections(optimizer: torch.optim.Optimizer) -> list[_Projection]:
    return [hook for hook in optimizer._optimizer_step_post_hooks.values() if isinstance(hook, _Projection)]


def _parameters(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}


def _attach(projection: _Projection, optimizer: torch.optim.Optimizer) -> RemovableHandle:
    # PyTorch drops the hooks of an optimizer that is copied. deepcopy and pickle look for this method in the instance.
    optimizer.__reduce_ex__ = partial(_reduce, optimizer)  # type: ignore[method-assign]
    return optimizer.register_step_post_hook(projection)


def _reduce(optimizer: torch.optim.Optimizer, protocol: Any) -> tuple[Any, ...]:
    return _rebuild, (_projections(optimizer), *type(optimizer).__reduce_ex__(optimizer, protocol))


def _rebuild(
    projections: list[_Projection],
    make: Callable[..., torch.optim.Optimizer],
    arguments: Any,
    state: Any = None,
    *_: Any,
) -> torch.optim.Optimizer:
    optimizer = make(*arguments)
    if state is not None:
        optimizer.__setstate__(state)
    for projection in projections:
        _attach(projection, optimizer)
    return optimizer


def _find(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Constraint | None]]:
    """The constraint of each parameter; None for one of at least two dimensions that is left out."""
    if callable(inspect.getattr_static(module, "constraints", None)):  # wrappers pass on attributes, not names
        for name, found in module.constraints().items():  # type: ignore[operator]
            yield prefix + name, found if isinstance(found, Constraint) else Constraint(*found)
        return
    for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
        if isinstance(p, nn.UninitializedParameter):
            raise UserError(f"{prefix}{name} has no shape yet: run a forward pass before it is constrained")
        if p.ndim > 1:
            transposed = type(module).__name__ == "Conv1D"  # a linear map of transformers, whose columns are outputs
            known = (isinstance(module, MAPS) or transposed) and "weight" in name
            known = known and not (isinstance(module, nn.Embedding) and is_table_of_scalars(module, prefix))
            dim = tuple(range(1, p.ndim)) if p.ndim > 2 else 0 if transposed else 1
            yield prefix + name, Constraint("bound", dim) if known else None
    for name, part in module.named_children():
        yield from _find(part, f"{prefix}{name}.")


def is_table_of_scalars(embedding: nn.Embedding, prefix: str) -> bool:
    """True for an embedding whose entries are scalars, such as biases of attention, one for each head."""
    return embedding.embedding_dim == 1 or prefix.removesuffix(".").rpartition(".")[2].endswith("bias")


def _resolve(module: nn.Module, constraints: Constraints | None) -> list[_Target]:
    """The constrained parameters, those under several names once. Warns of parameters left out by default."""
    if not isinstance(module, nn.Module):
        raise UserError(f"constraints are those of a network (nn.Module), not of {type(module).__name__}")
    if not isinstance(constraints, Mapping | None):
        raise UserError(f"constraints must be a dictionary by names of parameters, not {type(constraints).__name__}")
    for part in module.modules():
        if type(part).__name__ == "FullyShardedDataParallel" and not (
            part._use_orig_params and part.sharding_strategy.name == "NO_SHARD"  # type: ignore[union-attr]
        ):
            raise UserError("FullyShardedDataParallel flattens matrices, so no row is known: use fully_shard instead")
    if constraints is None:
        constraints = constraints_of(module)
        _warn("without a constraint (give them one, or none, with `constraints`)", left_out(module), stacklevel=4)
    named, found = dict(module.named_parameters(remove_duplicate=False)), dict[Tensor, _Target]()
    for name, constraint in constraints.items():
        if name not in named:
            raise UserError(f"constraint on {name!r}, which is not a parameter of the {type(module).__name__}")
        if not isinstance(constraint, Constraint):
            if not (isinstance(constraint, tuple | list) and len(constraint) == 2):
                raise UserError(f"the constraint on {name!r} must be one such as ('bound', 1), not {constraint!r}")
            constraint = Constraint(*constraint)
        weight, size = named[name], named[name].ndim
        if wrong := [d for d in constraint.dims if not -size <= d < size]:
            raise UserError(f"constraint along dimension {wrong[0]} of {name!r}, which has {size}")
        target = _Target(name, weight, Constraint(constraint.kind, tuple(d % size for d in constraint.dims)))
        same = found.setdefault(weight, target)
        if same.constraint != target.constraint:
            raise UserError(f"{same.name} and {name} are one tensor with two constraints: give one with `constraints`")
    return list(found.values())


def _warn(what: str, names: Sequence[str], stacklevel: int = 3) -> None:
    """Warn of parameters, in one line, in the name of the caller's caller."""
    if names:
        more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
        warnings.warn(f"{what}: {', '.join(names[:NAMES])}{more}", stacklevel=stacklevel)
