"""Muon for any network, as an optimizer of PyTorch."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, overload, runtime_checkable

import torch
from torch import Tensor, nn

from angpt.constraints import is_matrix
from angpt.errors import UserError
from angpt.optim.adam import adam_
from angpt.optim.muon import muon_
from angpt.optim.states import ParameterState, by_form


@runtime_checkable
class HasHiddenMatrices(Protocol):
    """A module that declares its hidden matrices by name, each with the number of maps that are stacked in it."""

    def hidden_matrices(self) -> Mapping[str, int]: ...


def hidden_matrices(module: nn.Module) -> dict[str, int]:
    """The names of the matrices of hidden layers, each with the number of linear maps that are stacked in it.

    Those that the module declares by a method of this name; if it has none, the weights of all linear layers and
    attention layers except the last linear layer, which is taken for the head.
    """
    if isinstance(module, HasHiddenMatrices):
        return dict(module.hidden_matrices())
    found: dict[str, int] = {}
    last: str | None = None
    for prefix, part in module.named_modules():
        for name, p in part.named_parameters(prefix, recurse=False):
            if name.endswith("in_proj_weight") and isinstance(part, nn.MultiheadAttention):
                found[name] = 3
            elif isinstance(part, nn.Linear | nn.MultiheadAttention) and is_matrix(p):
                found[name] = 1
                last = name if isinstance(part, nn.Linear) else last
    if last is not None:
        del found[last]
    return found


class Muon(torch.optim.Optimizer):
    """Muon on the matrices of hidden layers, Adam on all other parameters: `Muon(model)`.

    `angpt.constrain(optimizer, model)` adds the bound on weight rows. Schedulers scale both learning rates.
    """

    def __init__(
        self,
        module: nn.Module,
        lr: float = 0.03,
        adam_lr: float = 0.008,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-9,
        weight_decay: float = 0.0,
        hidden: Mapping[str, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`lr` is the rate of Muon, for matrices with rows of length 1 the angle by which a row turns per step.

        Args:
            module: The network whose parameters are optimized.
            lr: Learning rate of Muon.
            adam_lr: Learning rate of Adam.
            momentum: Decay of the first moment in Muon.
            betas: Decay of the moments in Adam.
            eps: Added to the root of the second moment in Adam.
            weight_decay: Decoupled weight decay of matrices.
            hidden: Names of the parameters for Muon, each with the number of linear maps that are stacked in it;
                those of `hidden_matrices(module)` unless given.
            dtype: Precision of the orthogonalization; bf16 on a GPU and that of the parameter elsewhere unless given.
        """
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        chosen = hidden_matrices(module) if hidden is None else dict(hidden)
        if hidden is None:
            chosen = {name: maps for name, maps in chosen.items() if name in named}
        for name, maps in chosen.items():
            if name not in named:
                raise UserError(f"hidden: {name!r} is not a trainable parameter of the {type(module).__name__}")
            if not is_matrix(named[name]) or maps < 1 or len(named[name]) % maps:
                raise UserError(f"hidden: {name!r} of shape {tuple(named[name].shape)} is no stack of {maps} matrices")
        groups: list[dict[str, Any]] = [
            {"params": [named[n] for n, m in chosen.items() if m == maps], "lr": lr, "maps": maps}
            for maps in sorted(set(chosen.values()))
        ]
        others = [p for name, p in named.items() if name not in chosen]
        for members, decay in (
            ([p for p in others if is_matrix(p)], weight_decay),
            ([p for p in others if not is_matrix(p)], 0.0),
        ):
            if members:
                groups.append({"params": members, "lr": adam_lr, "maps": 0, "weight_decay": decay})
        defaults = {"momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay, "dtype": dtype}
        super().__init__(groups, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step; `closure` computes the loss and the gradients again, and its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_step: dict[int, list[tuple[ParameterState, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    state = self._state(p, group)
                    by_step.setdefault(self.state[p]["step"], []).append((state, p.grad.contiguous()))
            for number, pairs in by_step.items():
                self._update(group, number, [s for s, _ in pairs], [g for _, g in pairs])
        return loss

    def _state(self, p: Tensor, group: dict[str, Any]) -> ParameterState:
        state = self.state[p]
        if not state:
            if hasattr(p, "to_local"):
                raise UserError("Muon needs whole matrices, but a parameter is sharded (DTensor); use DDP")
            state |= {"step": 0, "exp_avg": torch.zeros_like(p)} | (
                {} if group["maps"] else {"exp_avg_sq": torch.zeros_like(p)}
            )
        state["step"] += 1
        moments = state["exp_avg"], state.get("exp_avg_sq")
        return ParameterState(p, p, None, *moments, group["weight_decay"], None, group["maps"])

    def _update(
        self, group: dict[str, Any], number: int, states: list[ParameterState], gradients: list[Tensor]
    ) -> None:
        weight = states[0].weight
        one = torch.ones((), device=weight.device)
        if group["maps"]:
            dtype = group["dtype"] or (torch.bfloat16 if weight.is_cuda else weight.dtype)
            muon_(states, gradients, one, lr=group["lr"], momentum=group["momentum"], dtype=dtype)
            return
        for form, of_form in by_form(adam_, states, gradients):
            adam_(form, of_form, one, lr=group["lr"], betas=group["betas"], eps=group["eps"], step=number)
