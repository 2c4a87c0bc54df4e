"""Averages gradients over ranks in buckets, while the backward pass goes on."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import Work

BUCKET_BYTES = 25 * 2**20
"""Size of an all-reduce message: enough to use the links well, little enough to start early."""


class GradientReducer:
    """Averages the gradients of parameters over all ranks; a bucket is sent as soon as it is full."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], masters: Mapping[Tensor, Tensor], size: int, wide: bool
    ) -> None:
        """`masters`: the fp32 parameter of each low-precision copy; it receives the copy's gradient where several
        passes are summed, and always with `wide`."""
        self.masters, self.size, self.wide = masters, size, wide
        self.waiting: dict[torch.dtype, list[Tensor]] = {}
        self.sent: list[tuple[Work, Tensor, list[Tensor]]] = []
        self.active = self.summing = False
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def begin_pass(self, last: bool, passes: int) -> None:
        """Call before each backward pass: gradients are reduced in the last one of a step."""
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
        import torch.distributed as dist

        bucket = self.waiting.pop(dtype)
        flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self.sent.append((work, flat, bucket))

    def finish(self) -> None:
        """Call after the last pass: send what is left, and wait for all buckets."""
        for dtype in list(self.waiting):
            self._send(dtype)
        for work, flat, bucket in self.sent:
            work.wait()
            flat.div_(self.size)
            for p, gradient in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                p.grad = gradient.view_as(p)
        self.sent.clear()
