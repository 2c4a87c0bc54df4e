"""Muon: momentum, orthogonalized by Newton–Schulz iterations, for the matrices of hidden layers.

The update of a matrix W with momentum M is the orthogonal factor of M, as torch.optim.Muon computes it (Jordan et al.
2024), times √max(1, rows / columns): each row of the update then has about length 1, so that for a matrix with rows of
length 1 the learning rate is the angle by which a row turns per step. Where the columns are what has length 1, as in
two matrices of nGPT, it is √max(1, columns / rows), and the learning rate is the angle of a column.

It differs from torch.optim.Muon in what surrounds the formula: matrices of one shape are orthogonalized in one batch,
maps that are stacked in one matrix (q, k, v) one by one, the symmetric products of an iteration are computed once, and
the constraint and the low-precision copy are part of the pass that writes the weight. Processes share the matrices.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from angpt.operations import operation
from angpt.optim.adam import finish_
from angpt.optim.states import UNSHARDED, ParameterState, Shards, by_form

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the iteration X ← (a + b XXᵀ + c (XXᵀ)²) X, steep at 0. After five of them the singular values above 1/400
of the Frobenius norm lie between 0.68 and 1.21."""
EPS = 1e-7
"""Smallest norm that a matrix is divided by: the update of a matrix whose gradients stay zero fades."""
SQUARE_GROUPS, RECTANGULAR_GROUPS = (1, 1, 1, 1, 1), (1, 2, 2)  # the first alone: it normalizes
"""The five iterations, in groups in which XXᵀ and its polynomials are computed from each other, and X only at the end:
less work where X is not square. In bf16 groups of up to two are as accurate as single iterations; one of five
diverges."""


def muon_(
    states: Sequence[ParameterState],
    gradients: Sequence[Tensor],
    clip: Tensor,
    *,
    lr: float,
    momentum: float,
    dtype: torch.dtype,
    shards: Shards = UNSHARDED,
) -> None:
    """Take a step of Muon on many matrices, in place. Gradients are multiplied by `clip`.

    `dtype` is the precision of the Newton–Schulz iterations. Weight decay is decoupled.
    """
    shapes: dict[tuple[torch.Size, int, bool], list[tuple[ParameterState, Tensor]]] = {}
    for state, gradient in zip(states, gradients, strict=True):
        shapes.setdefault((state.parameter.shape, state.maps, state.by_columns), []).append((state, gradient))
    for ((rows, columns), maps, by_columns), chosen in shapes.items():
        ours, theirs = [state for state, _ in chosen], [gradient for _, gradient in chosen]
        of_map = rows // maps, columns
        scale = row_scale(*reversed(of_map)) if by_columns else row_scale(*of_map)
        padded = math.ceil(len(ours) / shards.workers) * shards.workers
        batch = ours[0].weight.new_empty((padded, shards.rows_each(rows), columns), dtype=dtype)
        if shards.workers > 1:
            batch.zero_()  # matrices and rows that fill it up
        for some, of_some, into in by_form(momentum_, ours, theirs, _rows(batch, ours)):
            momentum_(some, of_some, into, clip, momentum)
        share = shards.take_share(batch, rows)
        share = orthogonalize(share.reshape(-1, *of_map)).view_as(share)
        batch = shards.return_shares(share)
        for some, updates in by_form(descend_, ours, _rows(batch, ours)):
            descend_(some, updates, lr, scale)


def _rows(batch: Tensor, states: Sequence[ParameterState]) -> list[Tensor]:
    """The rows of a padded batch that belong to each weight."""
    return [batch[i, : len(state.weight)] for i, state in enumerate(states)]


def row_scale(rows: int, columns: int) -> float:
    """Factor that gives the rows of an orthogonal matrix of this shape about length 1."""
    return math.sqrt(max(1.0, rows / columns))


def iteration_groups(rows: int, columns: int) -> tuple[int, ...]:
    """The number of iterations in each group, for matrices of this shape."""
    return RECTANGULAR_GROUPS if max(rows, columns) >= 2 * min(rows, columns) else SQUARE_GROUPS


def orthogonalize(x: Tensor) -> Tensor:
    """The orthogonal factor U Vᵀ of each matrix U S Vᵀ of a batch, with singular values near 1. 0 stays 0.

    The first iteration divides each matrix by its Frobenius norm, so that singular values are at most 1. The square of
    the norm is the trace of XXᵀ, which overflows for norms above 10¹⁹; the kernels also square XXᵀ before they divide,
    which overflows for norms above 10⁹.
    """
    rows, columns = x.shape[-2:]
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    for group, iterations in enumerate(iteration_groups(rows, columns)):
        short = x if rows <= columns else x.mT
        gram = symmetric_product(short, short)
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1, dtype=wide_dtype) if group == 0 else None
        squares = None if trace is None else trace.clamp(min=EPS**2)
        factor = polynomial = symmetric_polynomial(gram, *COEFFICIENTS, squares)
        for _ in range(iterations - 1):  # all are polynomials of one symmetric matrix: they commute
            gram = symmetric_product(polynomial, symmetric_product(gram, polynomial))
            polynomial = symmetric_polynomial(gram, *COEFFICIENTS)
            factor = symmetric_product(polynomial, factor)
        x = factor @ x if rows <= columns else x @ factor
    return x


@operation
def symmetric_product(x: Tensor, y: Tensor) -> Tensor:
    """x yᵀ for each pair of matrices of two batches, where it is symmetric."""
    return x @ y.mT


@operation
def symmetric_polynomial(x: Tensor, a: float, b: float, c: float, squares: Tensor | None = None) -> Tensor:
    """a + b x + c x² for each symmetric matrix x of a batch; with `squares`, that of x / squares, over √squares."""
    if squares is not None:
        squares = squares[:, None, None]
        x = (x / squares).to(x.dtype)
    result = torch.baddbmm(x, x, x, beta=b, alpha=c)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result if squares is None else (result / squares.sqrt()).to(x.dtype)


@operation
def momentum_(
    states: Sequence[ParameterState],
    gradients: Sequence[Tensor],
    updates: Sequence[Tensor],
    clip: Tensor,
    momentum: float,
) -> None:
    """Update the momentum, an average of gradients times `clip` by lerp; write Nesterov's look-ahead to `updates`."""
    for state, gradient, update in zip(states, gradients, updates, strict=True):
        scaled = gradient.to(state.exp_avg.dtype) * clip
        state.exp_avg.lerp_(scaled, 1 - momentum)
        update.copy_(scaled.lerp_(state.exp_avg, momentum))


@operation
def descend_(states: Sequence[ParameterState], updates: Sequence[Tensor], lr: float, scale: float) -> None:
    """Subtract lr · scale · update and the decoupled weight decay from weights; apply constraints, write copies."""
    for state, update in zip(states, updates, strict=True):
        state.weight.mul_(1 - lr * state.decay).sub_(update, alpha=lr * scale)
    finish_(states)
