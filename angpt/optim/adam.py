"""Adam with decoupled weight decay, the constraint of each parameter, and its low-precision copy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from angpt.constraints import project_
from angpt.operations import operation
from angpt.optim.states import ParameterState


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
    finish_(states)


def finish_(states: Sequence[ParameterState]) -> None:
    """Apply the constraint of each weight, and write the weight to its copy."""
    for state in states:
        if state.constraint is not None:
            project_(state.weight, state.constraint)
        state.write_copy()
