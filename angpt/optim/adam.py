"""Adam with clipping, decay, the constraint of each parameter, and its low-precision copy."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from angpt.config import OptimizerConfig
from angpt.constraints import Constraint, is_matrix, project_, project_columns_
from angpt.operations import Operation, operation

ALIGNMENT = 16
"""Base-pointer alignment of tensors that the kernels assume, in bytes."""


@dataclass(frozen=True)
class ParameterState:
    """A parameter with its moments, low-precision copy, weight decay and constraint."""

    parameter: Tensor
    weight: Tensor
    """The rows of the parameter that this process holds."""
    copy: Tensor | None
    """Copy in low precision, which the model computes with and which receives the gradient."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    decay: float
    constraint: Constraint | None
    """Constraint on vectors that lie in `weight` as a whole."""

    @property
    def sharded(self) -> bool:
        """True if other processes hold the other rows."""
        return self.weight is not self.parameter


class Shards:
    """How the rows of matrices are sharded over processes. Here: one process holds all rows."""

    def local(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor that this process holds; the tensor itself if it is not sharded."""
        return tensor

    def sum_shards(self, value: Tensor) -> Tensor:
        """The sum over the processes that together hold one copy of the parameters."""
        return value


UNSHARDED = Shards()


class Adam:
    """Adam on named parameters: matrices may decay, constraints hold after each step, the caller counts steps."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constraints: Mapping[str, Constraint],
        config: OptimizerConfig,
        copies: Mapping[Tensor, Tensor] | None = None,
        shards: Shards = UNSHARDED,
    ) -> None:
        self.config, self.shards = config, shards
        copies = copies or {}
        self.states: list[ParameterState] = []
        self.spread: list[tuple[Tensor, Constraint]] = []
        """Weights with constrained vectors whose other entries are on other processes."""
        with torch.no_grad():
            for name, p in parameters.items():
                weight, constraint = shards.local(p), constraints.get(name)
                if constraint is not None and constraint.dim == 0 and weight is not p:
                    self.spread.append((weight, constraint))
                    constraint = None
                elif constraint is not None:
                    project_(weight, constraint)
                decay = (config.weight_decay or 0.0) if is_matrix(p) else 0.0
                moments = torch.zeros_like(weight), torch.zeros_like(weight)
                self.states.append(ParameterState(p, weight, copies.get(p), *moments, decay, constraint))
            self.project_spread()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the copies to the parameters; call it after parameters were changed by others."""
        for state in self.states:
            if state.copy is not None:
                state.copy.copy_(state.weight)

    @torch.no_grad()
    def step(self, number: int, lr: float, terms: int = 1) -> Tensor:
        """Take step `number` (from 1), drop the gradients, and return their norm before clipping.

        Gradients are divided by `terms`, the number of passes that they are sums of. Does not wait for the device.
        """
        gradients = self.gradients()
        norm = self.norm(gradients) / terms
        clip = (self.config.clip / (norm + 1e-6)).clamp(max=1.0) / terms
        self.update(gradients, clip, number, lr)
        self.zero_grad()
        return norm

    def gradients(self) -> list[Tensor]:
        """The gradient of the rows of each parameter: that of its copy, unless passes were summed in fp32."""
        found = []
        for state in self.states:
            holder = state.parameter if state.copy is None or state.parameter.grad is not None else state.copy
            g = torch.zeros_like(holder) if holder.grad is None else holder.grad
            g = self.shards.local(g).contiguous()
            found.append(g.clone() if g.data_ptr() % ALIGNMENT else g)  # a view of a buffer may not be aligned
        return found

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together, on all processes."""
        pairs = list(zip(self.states, gradients, strict=True))
        square = total_square([g for state, g in pairs if not state.sharded])
        if sharded := [g for state, g in pairs if state.sharded]:
            square = square + self.shards.sum_shards(total_square(sharded))
        return square.sqrt()

    def project_spread(self) -> None:
        """Apply the constraints on vectors that are split over processes."""
        project_columns_([w for w, _ in self.spread], [c for _, c in self.spread], self.shards.sum_shards)

    def update(self, gradients: Sequence[Tensor], clip: Tensor, number: int, lr: float) -> None:
        """Take step `number` (from 1) with these gradients, multiplied by `clip`."""
        c = self.config
        for states, of_states in by_form(adam_, self.states, gradients):
            adam_(states, of_states, clip, lr=lr, betas=(c.beta1, c.beta2), eps=c.eps, step=number)
        self.project_spread()

    @torch.no_grad()
    def compile_kernels(self, gathered: bool) -> None:
        """Compile the kernels by a step on zeros of each shape. `gathered`: gradients are sums over passes, in fp32."""
        shapes = {(s.weight.shape, s.constraint): s for s in self.states if adam_.applies([s])}
        trial = copy.copy(self)
        trial.spread, trial.states = [], []
        for state in shapes.values():
            weight, m, v = (torch.zeros_like(state.weight) for _ in range(3))
            low = None if state.copy is None else torch.zeros_like(state.copy)
            trial.states.append(dataclasses.replace(state, weight=weight, copy=low, exp_avg=m, exp_avg_sq=v))
        if gradients := [torch.zeros_like(s.weight if gathered or s.copy is None else s.copy) for s in trial.states]:
            trial.update(gradients, total_norm(gradients), 1, 0.0)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for state in self.states:
            state.parameter.grad = None
            if state.copy is not None:
                state.copy.grad = None


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements together."""
    return total_square(tensors).sqrt()


def total_square(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements; 0 for no tensors."""
    first, *rest = [square_sum(*group) for group in by_form(square_sum, tensors)] or [torch.zeros(())]
    return sum(rest, first)


def by_form(op: Operation[..., Any], *lists: Sequence[Any]) -> Iterator[list[list[Any]]]:
    """Split parallel lists into the entries that the fast form of an operation can take, and the others."""
    rows = list(zip(*lists, strict=True))
    fast = [op.applies(*([entry] for entry in row)) for row in rows]
    for wanted in (True, False):
        if chosen := [row for row, applies in zip(rows, fast, strict=True) if applies is wanted]:
            yield [list(column) for column in zip(*chosen, strict=True)]


@operation
def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32)).square().sum()


@operation
def adam_(
    states: Sequence[ParameterState],
    gradients: Sequence[Tensor],
    clip: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> None:
    """Take step `step` (from 1) of Adam on many parameters, in place.

    Gradients are multiplied by `clip` (in place if they are fp32). Weight decay is decoupled. The constraint is applied
    to the result, which is also written to the copy.
    """
    scaled = [g.to(s.weight.dtype) for s, g in zip(states, gradients, strict=True)]
    torch._foreach_mul_(scaled, clip)
    number = torch.full((), float(step), device=clip.device)
    options: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "amsgrad": False, "maximize": False}
    for decay in {s.decay for s in states}:
        rows = [(s.weight, g, s.exp_avg, s.exp_avg_sq) for s, g in zip(states, scaled, strict=True) if s.decay == decay]
        weights, terms, first, second = map(list, zip(*rows, strict=True))
        steps = [number] * len(rows)
        torch._fused_adamw_(weights, terms, first, second, [], steps, lr=lr, weight_decay=decay, **options)
    for state in states:
        if state.constraint is not None:
            project_(state.weight, state.constraint)
        if state.copy is not None:
            state.copy.copy_(state.weight)
