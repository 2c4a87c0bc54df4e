"""The optimizer of a run: clipping, then Adam on all parameters, or Muon on hidden matrices and Adam on the others."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from angpt.config import OptimizerConfig
from angpt.constraints import Constraint, is_matrix, project_, project_columns_
from angpt.operations import operation
from angpt.optim.adam import adam_
from angpt.optim.muon import muon_
from angpt.optim.states import ALIGNMENT, UNSHARDED, ParameterState, Shards, by_form


class Optimizer:
    """Updates named parameters: matrices may decay, constraints hold after each step, the caller counts steps."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constraints: Mapping[str, Constraint],
        config: OptimizerConfig,
        copies: Mapping[Tensor, Tensor] | None = None,
        shards: Shards = UNSHARDED,
        hidden: Mapping[str, int] | None = None,
        dtype: torch.dtype = torch.float32,
        values: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """`copies`: for each parameter with a low-precision copy, the tensor that receives its gradient.
        `values`: for such a tensor, the copy in e4m3; without an entry, the tensor itself is the copy.
        `hidden`: for Muon, the names of hidden matrices, each with the number of maps that are stacked in it.
        `dtype`: precision of Muon's matrix products."""
        self.config, self.shards, self.dtype = config, shards, dtype
        copies, values, hidden = copies or {}, values or {}, (hidden or {}) if config.name == "muon" else {}
        self.states: list[ParameterState] = []
        self.spread: list[tuple[Tensor, Constraint]] = []
        """Weights with constrained vectors whose other entries are on other processes."""
        with torch.no_grad():
            for name, p in parameters.items():
                weight, constraint, maps = shards.local(p), constraints.get(name), hidden.get(name, 0)
                by_columns = constraint is not None and constraint.dim == 0
                if constraint is not None and by_columns and weight is not p:
                    self.spread.append((weight, constraint))
                    constraint = None
                elif constraint is not None:
                    project_(weight, constraint)
                decay = (config.weight_decay or 0.0) if is_matrix(p) else 0.0
                first, second = torch.zeros_like(weight), None if maps else torch.zeros_like(weight)
                leaf = copies.get(p)
                low = None if leaf is None else values.get(leaf, leaf)
                rest = decay, constraint, maps, by_columns, leaf
                self.states.append(ParameterState(p, weight, low, first, second, *rest))
            self.project_spread()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the copies to the parameters; call it after parameters were changed by others."""
        for state in self.states:
            state.write_copy()

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
            holder = state.holder if state.parameter.grad is None else state.parameter
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
        c, pairs = self.config, list(zip(self.states, gradients, strict=True))
        hidden, others = ([(s, g) for s, g in pairs if bool(s.maps) is of_muon] for of_muon in (True, False))
        adam_lr = lr if c.adam_lr is None or c.lr is None else lr * c.adam_lr / c.lr
        for states, of_states in by_form(adam_, *_unzipped(others)):
            adam_(states, of_states, clip, lr=adam_lr, betas=(c.beta1, c.beta2), eps=c.eps, step=number)
        if hidden:
            muon_(*_unzipped(hidden), clip, lr=lr, momentum=c.momentum, dtype=self.dtype, shards=self.shards)
        self.project_spread()

    @torch.no_grad()
    def compile_kernels(self, gathered: bool) -> None:
        """Compile the kernels by a step on zeros of each shape. `gathered`: gradients are sums over passes, in fp32."""
        shapes = {(s.weight.shape, s.constraint, s.maps): s for s in self.states if adam_.applies([s])}
        trial = copy.copy(self)
        trial.spread, trial.states, trial.shards = [], [], UNSHARDED
        for state in shapes.values():
            shape = state.parameter.shape if state.maps else state.weight.shape  # Muon works on whole matrices
            weight, m, v = (state.weight.new_zeros(shape) for _ in range(3))
            second = None if state.exp_avg_sq is None else v
            low, leaf = (None if x is None else x.new_zeros(shape) for x in (state.copy, state.leaf))
            zeros = replace(state, parameter=weight, weight=weight, copy=low, exp_avg=m, exp_avg_sq=second, leaf=leaf)
            trial.states.append(zeros)
        if gradients := [torch.zeros_like(s.weight if gathered else s.holder) for s in trial.states]:
            trial.update(gradients, total_norm(gradients), 1, 0.0)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for state in self.states:
            state.parameter.grad = state.holder.grad = None


def _unzipped(pairs: Sequence[tuple[ParameterState, Tensor]]) -> tuple[list[ParameterState], list[Tensor]]:
    return [state for state, _ in pairs], [gradient for _, gradient in pairs]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements together."""
    return total_square(tensors).sqrt()


def total_square(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements; 0 for no tensors."""
    first, *rest = [square_sum(*group) for group in by_form(square_sum, tensors)] or [torch.zeros(())]
    return sum(rest, first)


@operation
def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32)).square().sum()
