"""Averages gradients over ranks in buckets during the backward pass."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
"""Size of an all-reduce message: large enough to use the links well, small enough to start early."""


class GradientReducer:
    """Averages the gradients of parameters over all ranks; a bucket is sent as soon as it is full."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], masters: Mapping[Tensor, Tensor], size: int, wide: bool
    ) -> None:
        """`masters`: the fp32 parameter of each low-precision copy. It receives the copy's gradient if several passes
        are summed, and always if `wide`."""
        self.masters, self.size, self.wide = masters, size, wide
        self.waiting: dict[torch.dtype, list[Tensor]] = {}
        self.sent: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        self.active = self.summing = False
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def begin_pass(self, last: bool, passes: int) -> None:
        """Call before each backward pass; gradients are averaged in the last one of a step."""
        self.active, self.summing = last, passes > 1

    def _ready(self, parameter: Tensor) -> None:
        if not self.active:
            return
        holder, gradient = parameter, parameter.grad
        assert gradient is not None
        if parameter in self.masters and (self.summing or self.wide):
            holder = self.masters[parameter]
            holder.grad = gradient.float() if holder.grad is None else holder.grad.add_(gradient)
            parameter.grad, gradient = None, holder.grad
        bucket = self.waiting.setdefault(gradient.dtype, [])
        bucket.append(holder)
        if sum(p.numel() for p in bucket) * gradient.element_size() >= BUCKET_BYTES:
            self._send(gradient.dtype)

    def _send(self, dtype: torch.dtype) -> None:
        bucket = self.waiting.pop(dtype)
        flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self.sent.append((work, flat, bucket))

    def finish(self) -> None:
        """Call after the last pass: send the remaining gradients, and wait for all."""
        for dtype in list(self.waiting):
            self._send(dtype)
        for work, flat, bucket in self.sent:
            work.wait()
            flat.div_(self.size)
            for p, gradient in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                p.grad = gradient.view_as(p)
        self.sent.clear()
