"""Adam with clipping, decay, the constraint of each parameter, and its low-precision copy: one pass over memory.

A parameter may have a copy, which the model computes with and whose gradient then counts (see `engine`).
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from angpt.config import OptimizerConfig
from angpt.constraints import Constraint, project_, project_columns_
from angpt.models.decoder import Decoder
from angpt.training.parallel import like, local

ALIGNMENT = 16
"""Bytes; the kernels count on it that tensors begin at a multiple."""


@dataclass(frozen=True)
class Part:
    """One parameter and what its step needs."""

    parameter: Tensor
    copy: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    decay: float
    constraint: Constraint | None

    @property
    def weight(self) -> Tensor:
        """The parameter, or the rows of it that this rank holds."""
        return local(self.parameter)

    @property
    def sharded(self) -> bool:
        return self.weight is not self.parameter

    @property
    def across(self) -> bool:
        """Whether other ranks hold parts of the vectors that are constrained."""
        return self.sharded and self.constraint is not None and self.constraint.dim == 0

    def gradient(self) -> Tensor:
        """Of the copy, unless gradients of several passes were gathered in fp32."""
        holder = self.parameter if self.copy is None or self.parameter.grad is not None else self.copy
        if holder.grad is None:
            return torch.zeros_like(local(holder))
        g = local(holder.grad).contiguous()
        return g.clone() if g.data_ptr() % ALIGNMENT else g  # a piece of a larger buffer may begin anywhere


class Adam:
    """Adam on all parameters of a model. Matrices decay where the configuration says so, and are constrained as the
    model declares. Its state is a function of the gradients so far; the number of the step comes from the caller."""

    def __init__(
        self,
        model: Decoder,
        config: OptimizerConfig,
        copies: Mapping[Tensor, Tensor] | None = None,
        sum_shards: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`sum_shards` sums over the ranks that hold the other rows, where matrices are shared out by rows."""
        self.config = config
        self.sum_shards = sum_shards
        declared, copies = model.constraints(), copies or {}
        self.parts = [
            Part(
                parameter=p,
                copy=copies.get(p),
                exp_avg=torch.zeros_like(local(p.detach())),
                exp_avg_sq=torch.zeros_like(local(p.detach())),
                decay=(config.weight_decay or 0.0) if p.ndim == 2 else 0.0,
                constraint=declared.get(name),
            )
            for name, p in model.named_parameters()
        ]
        with torch.no_grad():
            for part in self.parts:
                if part.constraint is not None and not part.across:
                    project_(part.weight, part.constraint)
            self.project_across()
        self.refresh()

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """The moments of each parameter, shared out over ranks as it is."""
        return {
            part.parameter: {
                "exp_avg": like(part.parameter, part.exp_avg),
                "exp_avg_sq": like(part.parameter, part.exp_avg_sq),
            }
            for part in self.parts
        }

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
        norm = self.norm(gradients) / terms
        clip = (self.config.clip / (norm + 1e-6)).clamp(max=1.0) / terms
        self.update(gradients, clip, number, lr)
        self.zero_grad()
        return norm

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of all gradients together, over all ranks."""
        if self.sum_shards is None:
            return total_norm(gradients)
        pairs = list(zip(self.parts, gradients, strict=True))
        here = square_sum([g for part, g in pairs if part.sharded])
        return (self.sum_shards(here) + square_sum([g for part, g in pairs if not part.sharded])).sqrt()

    def project_across(self) -> None:
        """The constraints on vectors of which other ranks hold a part."""
        if self.sum_shards is None:
            return
        chosen = [(part.weight, part.constraint) for part in self.parts if part.across and part.constraint is not None]
        project_columns_([w for w, _ in chosen], [c for _, c in chosen], self.sum_shards)

    def update(self, gradients: Sequence[Tensor], clip: Tensor, number: int, lr: float) -> None:
        c = self.config
        options: dict[str, Any] = {"betas": (c.beta1, c.beta2), "eps": c.eps, "step": number}
        ours: list[tuple[Part, Tensor]] = []
        rest: list[tuple[Part, Tensor]] = []
        for part, g in zip(self.parts, gradients, strict=True):
            (ours if _has_kernel(part) else rest).append((part, g))
        if ours:
            from angpt.fast import optimizer_kernels as kernels

            kernels.adam_([part for part, _ in ours], [g for _, g in ours], clip, lr=lr, **options)
        if rest:
            adam_([part for part, _ in rest], [g for _, g in rest], clip, lr=lr, **options)
        self.project_across()

    @torch.no_grad()
    def compile_kernels(self, gathered: bool) -> None:
        """Run a step on zeros of each shape, so that no kernel is left to be compiled in the first real one.
        `gathered`: gradients come in fp32, a sum over passes."""
        shapes = {(part.weight.shape, part.constraint): part for part in self.parts if _has_kernel(part)}
        trial = copy.copy(self)
        trial.sum_shards = None
        trial.parts = [
            dataclasses.replace(
                part,
                parameter=torch.zeros_like(part.weight),
                copy=None if part.copy is None else torch.zeros_like(part.copy),
                exp_avg=torch.zeros_like(part.exp_avg),
                exp_avg_sq=torch.zeros_like(part.exp_avg_sq),
            )
            for part in shapes.values()
        ]
        gradients = [torch.zeros_like(p.weight if gathered or p.copy is None else p.copy) for p in trial.parts]
        if gradients:
            trial.update(gradients, total_norm(gradients), 1, 0.0)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.parameter.grad = None
            if part.copy is not None:
                part.copy.grad = None


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements together."""
    return square_sum(tensors).sqrt()


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements."""
    large = [x for x in tensors if x.is_cuda and x.ndim == 2 and x.numel()]
    rest = [x for x in tensors if not (x.is_cuda and x.ndim == 2)]
    squares = torch.zeros((), device=tensors[0].device)
    if rest:
        squares = torch.stack(torch._foreach_norm(rest, 2, dtype=torch.float32)).square().sum()
    for dtype in {x.dtype for x in large}:
        from angpt.fast import optimizer_kernels as kernels

        squares = squares + kernels.square_sum([x for x in large if x.dtype == dtype])
    return squares


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
        if part.constraint is not None and not part.across:
            project_(part.weight, part.constraint)
        if part.copy is not None:
            part.copy.copy_(part.weight)


def _has_kernel(part: Part) -> bool:
    if part.sharded and not part.weight.numel():  # fewer rows than ranks
        return False
    return part.weight.is_cuda and part.weight.ndim == 2 and part.weight.dtype == torch.float32
