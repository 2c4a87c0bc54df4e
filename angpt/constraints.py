"""Constraints on weight matrices: vectors along a dimension have length 1 (`unit`) or at most 1 (`bound`).

A model declares them as data, which the optimiser step, sharding, export and analysis read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from angpt.errors import UserError

# Smaller than the square root of any fp32 number, with a finite reciprocal: keeps zero vectors from becoming NaN.
TINY = 1e-30


@dataclass(frozen=True)
class Constraint:
    """The vectors of a matrix along `dim` have length 1 (`unit`, nGPT) or at most 1 (`bound`, anGPT)."""

    kind: Literal["unit", "bound"]
    dim: int


@runtime_checkable
class Constrained(Protocol):
    """A module that declares the constraints of its parameters by name."""

    def constraints(self) -> Mapping[str, Constraint]: ...


def is_matrix(p: Tensor) -> bool:
    """True for a weight matrix, which may be constrained, decayed, and stored in low precision."""
    return p.ndim == 2


def norms(weight: Tensor, dim: int) -> Tensor:
    """Lengths of the vectors along `dim` (keepdim)."""
    return torch.linalg.vector_norm(weight, dim=dim, keepdim=True)


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
    """Violation of the constraint by each vector: | ‖w‖ − 1 | (unit) or max(‖w‖ − 1, 0) (bound)."""
    over = norms(weight, constraint.dim) - 1
    return over.abs() if constraint.kind == "unit" else over.clamp(min=0)


def rows_bounded(module: nn.Module) -> dict[str, Constraint]:
    """The constraint of the paper for any network: each row of a linear map or an embedding has at most length 1."""
    return {
        f"{name}.weight" if name else "weight": Constraint("bound", dim=1)
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.Embedding)
    }


def constraints_of(module: nn.Module) -> Mapping[str, Constraint]:
    """The constraints that the module declares; if it declares none, every row bounded."""
    return module.constraints() if isinstance(module, Constrained) else rows_bounded(module)


def apply_constraints(module: nn.Module, constraints: Mapping[str, Constraint] | None = None) -> None:
    """Project every constrained parameter, in place."""
    for weight, constraint in _resolve(module, constraints):
        project_(weight, constraint)


def largest_violation(module: nn.Module, constraints: Mapping[str, Constraint] | None = None) -> float:
    """Largest violation of a constraint by any vector; 0 if nothing is constrained."""
    return max((float(excess(w, c).max()) for w, c in _resolve(module, constraints)), default=0.0)


def constrain(
    optimizer: torch.optim.Optimizer, module: nn.Module, constraints: Mapping[str, Constraint] | None = None
) -> RemovableHandle:
    """Apply the constraints now and after every step of any PyTorch optimizer."""
    pairs = _resolve(module, constraints)

    def after_step(*_: Any) -> None:
        for weight, constraint in pairs:
            project_(weight, constraint)

    after_step()
    return optimizer.register_step_post_hook(after_step)


def _resolve(module: nn.Module, constraints: Mapping[str, Constraint] | None) -> list[tuple[nn.Parameter, Constraint]]:
    named = dict(module.named_parameters())
    chosen = constraints_of(module) if constraints is None else constraints
    for name, constraint in chosen.items():
        if name not in named:
            raise UserError(f"constraint on {name!r}, which is not a parameter of the {type(module).__name__}")
        if not -named[name].ndim <= constraint.dim < named[name].ndim:
            raise UserError(f"constraint along dimension {constraint.dim} of {name!r}, which has {named[name].ndim}")
    return [(named[name], constraint) for name, constraint in chosen.items()]
