"""Adam with clipping, decay, the constraint of each parameter, and its low-precision copy: one pass over memory.

A parameter may have a copy, which the model computes with and whose gradient then counts (see `engine`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angpt.config import OptimizerConfig
from angpt.models.constraints import Constraint, project_
from angpt.models.decoder import Decoder


@dataclass(frozen=True)
class Part:
    """One parameter and what its step needs."""

    weight: Tensor
    copy: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    decay: float
    constraint: Constraint | None

    def gradient(self) -> Tensor:
        """Of the copy, unless gradients of several passes were gathered in fp32."""
        holder = self.weight if self.copy is None or self.weight.grad is not None else self.copy
        return torch.zeros_like(holder) if holder.grad is None else holder.grad.contiguous()


class Adam:
    """Adam on all parameters of a model. Matrices decay where the configuration says so, and are constrained as the
    model declares. Its state is a function of the gradients so far; the number of the step comes from the caller."""

    def __init__(self, model: Decoder, config: OptimizerConfig, copies: Mapping[Tensor, Tensor] | None = None) -> None:
        self.config = config
        declared, copies = model.constraints(), copies or {}
        self.parts = [
            Part(
                weight=p,
                copy=copies.get(p),
                exp_avg=torch.zeros_like(p, requires_grad=False),
                exp_avg_sq=torch.zeros_like(p, requires_grad=False),
                decay=(config.weight_decay or 0.0) if p.ndim == 2 else 0.0,
                constraint=declared.get(name),
            )
            for name, p in model.named_parameters()
        ]
        for part in self.parts:
            if part.constraint is not None:
                project_(part.weight, part.constraint)
        self.refresh()

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """The moments of each parameter."""
        return {part.weight: {"exp_avg": part.exp_avg, "exp_avg_sq": part.exp_avg_sq} for part in self.parts}

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copies up to date with parameters that were set from outside."""
        for part in self.parts:
            if part.copy is not None:
                part.copy.copy_(part.weight)

    @torch.no_grad()
    def step(self, number: int, lr: float, terms: int = 1) -> Tensor:
        """Step `number` (from 1) with the gradients at hand, a sum of so many terms of which the mean counts; they are
        dropped. Returns the norm of the mean before clipping, without waiting for the device."""
        gradients = [part.gradient() for part in self.parts]
        norm = total_norm(gradients) / terms
        clip = (self.config.clip / (norm + 1e-6)).clamp(max=1.0) / terms
        self.update(gradients, clip, number, lr)
        self.zero_grad()
        return norm

    def update(self, gradients: Sequence[Tensor], clip: Tensor, number: int, lr: float) -> None:
        c = self.config
        betas = (c.beta1, c.beta2)
        rest: list[Part] = []
        rest_gradients: list[Tensor] = []
        for part, g in zip(self.parts, gradients, strict=True):
            if _has_kernel(part):
                from angpt.training import kernels

                kernels.adam_(
                    part.weight, part.copy, part.exp_avg, part.exp_avg_sq, g, clip,
                    lr=lr, decay=part.decay, betas=betas, eps=c.eps, step=number, constraint=part.constraint,
                )  # fmt: skip
            else:
                rest.append(part)
                rest_gradients.append(g)
        adam_(rest, rest_gradients, clip, lr=lr, betas=betas, eps=c.eps, step=number)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.weight.grad = None
            if part.copy is not None:
                part.copy.grad = None


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements together."""
    large = [x for x in tensors if x.is_cuda and x.ndim == 2]
    rest = [x for x in tensors if not (x.is_cuda and x.ndim == 2)]
    squares = torch.stack(torch._foreach_norm(rest, 2, dtype=torch.float32)).square().sum()
    if large:
        from angpt.training import kernels

        squares = squares + kernels.square_sum(large)
    return squares.sqrt()


def adam_(
    parts: Sequence[Part],
    gradients: Sequence[Tensor],
    clip: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> None:
    """Step `step` (from 1) of Adam on many parameters, with gradients multiplied by `clip` (in place), decoupled weight
    decay, and each constraint applied to the result, which is written to the copy as well."""
    scaled = [g.to(p.weight.dtype) for p, g in zip(parts, gradients, strict=True)]
    torch._foreach_mul_(scaled, clip)
    number = torch.full((), float(step), device=clip.device)
    for decay in {p.decay for p in parts}:
        group = [i for i, p in enumerate(parts) if p.decay == decay]
        torch._fused_adamw_(
            [parts[i].weight for i in group],
            [scaled[i] for i in group],
            [parts[i].exp_avg for i in group],
            [parts[i].exp_avg_sq for i in group],
            [],
            [number] * len(group),
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
    for part in parts:
        if part.constraint is not None:
            project_(part.weight, part.constraint)
        if part.copy is not None:
            part.copy.copy_(part.weight)


def _has_kernel(part: Part) -> bool:
    return part.weight.is_cuda and part.weight.ndim == 2 and part.weight.dtype == torch.float32
