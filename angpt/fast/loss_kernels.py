"""Triton kernel of the mean cross-entropy of logits (N, V), which overwrites the logits with their gradient.

`models.primitives.cross_entropy` is the plain form."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from angpt.fast import tuning

LANES, EACH, WARPS = tuning.LOSS_LANES, tuning.LOSS_ELEMENTS, tuning.LOSS_WARPS


@triton.jit
def _cross_entropy(
    logits_ptr, targets_ptr, losses_ptr, count_ptr, width,
    GRADIENT: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    place = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    target = tl.load(targets_ptr + row)
    counted = target != -100
    # Each lane has its own maximum and sum of exponentials, combined at the end: warps do not wait for each other.
    largest = tl.full((LANES,), -1e30, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for first in range(0, width, LANES * EACH):
        cols = first + place
        x = tl.load(logits_ptr + cols, cols < width, float("-inf"), eviction_policy="evict_last").to(tl.float32)
        new = tl.maximum(largest, tl.max(x, axis=1))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new[:, None]), axis=1)
        largest = new
    top = tl.max(largest)
    lse = top + tl.log(tl.sum(total * tl.exp(largest - top)))
    valid = (target >= 0) & (target < width)
    at_target = tl.where(valid, tl.load(logits_ptr + target, valid, 0.0).to(tl.float32), float("nan"))
    tl.store(losses_ptr + row, tl.where(counted, lse - at_target, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # no warp overwrites the target's logit before all have read it
        weight = tl.where(counted, 1 / tl.load(count_ptr), 0.0)
        for block in range(tl.cdiv(width, LANES * EACH)):  # from last to first: the last may still be cached
            cols = (tl.cdiv(width, LANES * EACH) - 1 - block) * (LANES * EACH) + place
            x = tl.load(logits_ptr + cols, cols < width, float("-inf"), eviction_policy="evict_first").to(tl.float32)
            gradient = (tl.exp(x - lse) - tl.where(cols == target, 1.0, 0.0)) * weight
            tl.store(logits_ptr + cols, gradient, cols < width, eviction_policy="evict_first")


@triton.jit
def _multiply(x_ptr, factor_ptr, width, BLOCK: tl.constexpr):
    """Multiply in place; a factor of 1, the usual case, costs only the launch."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        x_ptr += tl.program_id(0).to(tl.int64) * width
        for first in range(0, width, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            tl.store(x_ptr + cols, tl.load(x_ptr + cols, cols < width).to(tl.float32) * factor, cols < width)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        n, width = logits.shape
        losses = torch.empty(n, dtype=torch.float32, device=logits.device)
        count = (targets != -100).sum().float()
        gradient = ctx.needs_input_grad[0]
        torch.autograd.graph.increment_version(logits)
        _cross_entropy[(n,)](
            logits, targets, losses, count, width, GRADIENT=gradient, LANES=LANES, EACH=EACH, num_warps=WARPS
        )  # fmt: skip
        ctx.gradient = logits.detach() if gradient else None
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("the gradient of this loss has already been computed, which has overwritten the logits")
        n, width = gradient.shape
        _multiply[(n,)](gradient, gradients[0].contiguous(), width, BLOCK=LANES * EACH)
        return gradient, None


def cross_entropy_(logits: Tensor, targets: Tensor) -> Tensor:
    """primitives.cross_entropy; overwrites the logits."""
    result: Tensor = CrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return result
