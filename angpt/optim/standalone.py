"""Muon for any network, as an optimizer of PyTorch."""

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from angpt.constraints import constraints_of, is_matrix
from angpt.errors import UserError
from angpt.optim.adam import adam_
from angpt.optim.muon import muon_
from angpt.optim.states import ParameterState, by_form


def hidden_matrices(module: nn.Module) -> dict[str, int]:
    """The names of the matrices of hidden layers, each with the number of linear maps that are stacked in it.

    A part of the module that has a method of this name, such as the models of this package, declares its own. In the
    rest, they are the weights of linear and attention layers except the last linear layer, which is taken for the head
    unless a part that declares its own comes after it.
    """
    found: dict[str, int] = {}
    layers: dict[int, tuple[str, int]] = {}  # by identity: a tied weight has one name
    declared: list[str] = []
    head: int | None = None
    for prefix, part in module.named_modules():
        if any(outer in ("", prefix) or prefix.startswith(f"{outer}.") for outer in declared):
            continue
        if hasattr(type(part), "hidden_matrices"):  # of the class: wrappers pass attributes on
            declared.append(prefix)
            head = None  # a linear layer before it is not the last of the network
            found |= {f"{prefix}.{name}" if prefix else name: n for name, n in part.hidden_matrices().items()}
            continue
        for name, p in part.named_parameters(prefix, recurse=False):
            known = isinstance(part, nn.Linear | nn.MultiheadAttention) or type(part).__name__ == "Conv1D"
            if known and is_matrix(p):
                layers.setdefault(id(p), (name, 3 if name.endswith("in_proj_weight") else 1))
                head = id(p) if isinstance(part, nn.Linear) else head
    if head is not None:
        del layers[head]
    return found | dict(layers.values())


class Muon(torch.optim.Optimizer):
    """Muon on the matrices of hidden layers, Adam on all other parameters: `Muon(model)`.

    `angpt.constrain(optimizer, model)` adds the bound on weight rows. A scheduler that multiplies the learning rate
    (LambdaLR) scales both rates.
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
            dtype: Precision of the orthogonalization; bf16 on a GPU and fp32 (fp64 for parameters in fp64) elsewhere
                unless given. fp16 has too small a range.
        """
        if not isinstance(module, nn.Module) or not isinstance(hidden, Mapping | None):
            raise UserError("Muon takes a network (nn.Module), not parameters, and `hidden` as a dictionary by names")
        named = dict(module.named_parameters())  # also frozen ones, which may be trained later
        chosen = hidden_matrices(module) if hidden is None else dict(hidden)
        if not chosen:
            raise UserError(f"the {type(module).__name__} has no hidden matrix for Muon; name them with hidden=…")
        columns = {name for name, constraint in constraints_of(module).items() if constraint.dims in ((0,), (-2,))}
        for name, maps in chosen.items():
            if name not in named:
                raise UserError(f"hidden: {name!r} is not a parameter of the {type(module).__name__}")
            shape = tuple(named[name].shape)
            if not is_matrix(named[name]) or not isinstance(maps, int) or maps < 1 or shape[0] % maps:
                raise UserError(f"hidden: {name!r} of shape {shape} is not a stack of {maps} matrices")
            if maps > 1 and name in columns:
                raise UserError(f"hidden: {name!r} has its outputs in columns, where no matrices are stacked; give 1")
        if dtype == torch.float16:
            raise UserError("dtype: the range of float16 is too small for Muon; use torch.bfloat16 or torch.float32")
        fractions = (momentum, *betas)
        if min(lr, adam_lr, eps, weight_decay) < 0 or not all(0 <= x < 1 for x in fractions):
            raise UserError("rates, eps and weight_decay must not be negative; momentum and betas must be in [0, 1)")
        kinds: dict[tuple[int, bool], list[Tensor]] = {}
        for name, maps in chosen.items():
            kinds.setdefault((maps, name in columns), []).append(named[name])
        groups: list[dict[str, Any]] = [
            {"params": members, "lr": lr, "maps": maps, "by_columns": by_columns}
            for (maps, by_columns), members in kinds.items()
        ]
        others = [p for name, p in named.items() if name not in chosen]
        for members, decay in (
            ([p for p in others if is_matrix(p)], weight_decay),
            ([p for p in others if not is_matrix(p)], 0.0),
        ):
            if members:
                groups.append({"params": members, "lr": adam_lr, "maps": 0, "weight_decay": decay})
        defaults = {"momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay, "dtype": dtype}
        super().__init__(groups, defaults | {"lr": adam_lr, "maps": 0, "by_columns": False})  # added ones: for Adam

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the count of steps would be a constant of the code
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step; `closure` computes the loss and the gradients again, and its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple[Any, ...], list[tuple[ParameterState, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    state = self._state(p, group)
                    number = 0 if group["maps"] else self.state[p]["step"]  # Muon does not need it
                    alike.setdefault((p.device, p.dtype, number), []).append((state, _laid_out(p.grad, p)))
            for (_, _, number), pairs in alike.items():
                self._update(group, number, [s for s, _ in pairs], [g for _, g in pairs])
        return loss

    def _state(self, p: Tensor, group: dict[str, Any]) -> ParameterState:
        state = self.state[p]
        if not state:
            if hasattr(p, "to_local"):
                raise UserError("Muon needs whole matrices, but a parameter is sharded (DTensor); use DDP")
            if p.grad is not None and p.grad.is_sparse:
                raise UserError(f"Muon: a parameter of shape {tuple(p.shape)} has a sparse gradient; use dense ones")
            state |= {"step": 0, "exp_avg": torch.zeros_like(p)} | (
                {} if group["maps"] else {"exp_avg_sq": torch.zeros_like(p)}
            )
        state["step"] += 1
        for name in ("exp_avg", "exp_avg_sq")[: len(state) - 1]:
            state[name] = _laid_out(state[name], p)  # that of a loaded state may differ
        moments = state["exp_avg"], state.get("exp_avg_sq")
        return ParameterState(p, p, None, *moments, group["weight_decay"], None, group["maps"], group["by_columns"])

    def _update(
        self, group: dict[str, Any], number: int, states: list[ParameterState], gradients: list[Tensor]
    ) -> None:
        weight = states[0].weight
        one = torch.ones((), device=weight.device)
        if group["maps"]:
            wide = torch.promote_types(weight.dtype, torch.float32)
            dtype = group["dtype"] or (torch.bfloat16 if weight.is_cuda else wide)
            muon_(states, gradients, one, lr=group["lr"], momentum=group["momentum"], dtype=dtype)
            return
        for form, of_form in by_form(adam_, states, gradients):
            adam_(form, of_form, one, lr=group["lr"], betas=group["betas"], eps=group["eps"], step=number)


def _laid_out(x: Tensor, p: Tensor) -> Tensor:
    """A gradient or moment with its numbers in memory in the order of those of its parameter, as PyTorch's fused Adam
    expects."""
    return x if x.stride() == p.stride() else torch.empty_like(p, dtype=x.dtype).copy_(x)
