"""Compute-binned minima (Chinchilla's approach 1, the paper's): the best model size at each compute, and its loss.

The range of compute is divided into 1,500 bins of equal logarithmic width. A model size has a value in each bin that
its runs span: that of the run itself, or between two runs their log-linear interpolation. The lowest value is the
minimum of the bin, refined by the parabola through the sizes around it. It is an optimum only if both a smaller and a
larger model were tried at this compute; otherwise it is at an edge and not used.

Intervals: neighbouring bins share runs, so they are not independent. Minima are averaged over blocks as long as the
distance between runs, the law is fitted to the blocks (weighted by the precision that the parabola gives the minima),
and its variance is increased because blocks of interpolated values still share noise.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from angpt.fits.compute import Sample
from angpt.fits.isoflop import WINDOW, scattered
from angpt.fits.powerlaw import Floats, PowerLaw, curvature_notes, fit_power_law

BINS = 1500
SHARED = 2.0
"""Factor by which shared noise raises the variance of the law: block means of linearly interpolated noise have half of
its variance, and share half of that with their neighbours."""
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class Minima:
    """The minimum of each bin that has one, in the order of compute."""

    log_compute: Floats
    log_parameters: Floats
    log_tokens: Floats
    log_loss: Floats
    rank: Ints
    """Rank of the best model size among all sizes."""
    variance: tuple[Floats, Floats]
    """Variance of slope and log loss at the vertex, relative to that of a run's log loss; see `isoflop.Vertex`."""
    reach: Floats
    """Half of the range of log sizes that were tried at this compute."""
    edge: NDArray[np.int8]
    """−1: no smaller model was tried at this compute; 1: no larger one; 0: both were tried."""
    used: NDArray[np.bool_]
    """True where the laws use the minimum."""


class Bins:
    """The bins in which each curve (a model size, or a single run) has a value, and the points that determine it.

    Entries are sorted by bin and size. A pair is a size in a bin; it has one entry for each curve of this size.
    """

    def __init__(self, sample: Sample, curve_of: Ints, bins: int = BINS) -> None:
        """`curve_of` is the number of the curve that each point of the sample belongs to."""
        x, d = np.log(sample.compute), np.log(sample.tokens)
        sizes, size_of = np.unique(sample.parameters, return_inverse=True)
        low, width = float(x.min()), max(float(np.ptp(x)) / bins, 1e-12)
        order = np.lexsort((x, curve_of))
        entries: list[tuple[Floats | Ints, ...]] = []
        self.spacings: list[float] = []
        for points in np.split(order, np.flatnonzero(np.diff(curve_of[order])) + 1):
            place = (x[points] - low) / width
            inner = np.arange(math.ceil(place[0] - 0.5), min(math.floor(place[-1] - 0.5), bins - 1) + 1)
            ends = points[[0, -1]] if len(points) > 1 else points
            own = np.minimum((x[ends] - low) / width, bins - 1).astype(np.intp)
            ends, own = ends[~np.isin(own, inner)], own[~np.isin(own, inner)]
            if len(points) > 1:
                self.spacings.append(float(x[points[-1]] - x[points[0]]) / (len(points) - 1))
                center = low + (inner + 0.5) * width
                right = np.clip(np.searchsorted(x[points], center), 1, len(points) - 1)
                a, b = points[right - 1], points[right]
                share = (center - x[a]) / np.maximum(x[b] - x[a], 1e-12)
                entries.append((inner, a, b, share, center, d[a] + share * (d[b] - d[a])))
            entries.append((own, ends, ends, np.zeros(len(ends)), x[ends], d[ends]))
        bin_, left, right, share, log_compute, log_tokens = (
            np.concatenate([entry[i] for entry in entries]) for i in range(6)
        )
        order = np.lexsort((size_of[left], bin_))
        self.left, self.right, self.share = left[order], right[order], share[order]
        self.log_compute, self.log_tokens = log_compute[order], log_tokens[order]
        bin_, size = bin_[order], size_of[left[order]]
        self.pairs = np.flatnonzero(np.r_[True, (bin_[1:] != bin_[:-1]) | (size[1:] != size[:-1])])
        self.pair_lengths = np.diff(np.r_[self.pairs, len(bin_)])
        self.rank = size[self.pairs]
        self.log_parameters = np.log(sizes)[self.rank]
        bin_ = bin_[self.pairs]
        self.starts = np.flatnonzero(np.r_[True, bin_[1:] != bin_[:-1]])
        self.lengths = np.diff(np.r_[self.starts, len(bin_)])
        # The most sizes that the window of the parabola can have on one side.
        near = np.searchsorted(np.log(sizes), np.log(sizes) + math.log(WINDOW) + 1e-9) - np.arange(len(sizes))
        self.reach = int(min(near.max(), self.lengths.max()))

    def minima(self, log_loss: Floats) -> Minima:
        """The minimum of each bin for these losses of the sample's points, refined by a parabola."""
        values = log_loss[self.left] + self.share * (log_loss[self.right] - log_loss[self.left])
        entry = _first_lowest(values, self.pairs, self.pair_lengths)
        value, log_tokens, log_compute = values[entry], self.log_tokens[entry], self.log_compute[entry]
        best = _first_lowest(value, self.starts, self.lengths)
        first, last = best == self.starts, best == self.starts + self.lengths - 1
        edge = np.where(first, -1, np.where(last, 1, 0)).astype(np.int8)
        n, d, y = self.log_parameters[best], log_tokens[best], value[best]
        of_slope, of_loss = np.ones(len(best)), np.ones(len(best))
        inner = np.flatnonzero(edge == 0)
        if len(inner):
            refined = self._refine(best[inner], inner, log_tokens, value)
            n[inner], d[inner], y[inner], of_slope[inner], of_loss[inner] = refined
        reach = (self.log_parameters[self.starts + self.lengths - 1] - self.log_parameters[self.starts]) / 2
        order = np.argsort(log_compute[best], kind="stable")
        best, edge, variance = best[order], edge[order], (of_slope[order], of_loss[order])
        x, rank, used = log_compute[best], self.rank[best], between(edge)
        return Minima(x, n[order], d[order], y[order], rank, variance, reach[order], edge, used)

    def _refine(self, best: Ints, bins: Ints, log_tokens: Floats, value: Floats) -> tuple[Floats, ...]:
        """Size, tokens and loss at the vertex of a parabola around the best pair of each bin, and their variances.

        The parabola uses the pairs within WINDOW, equally far on both sides, and always the two neighbours.
        """
        n, first, end = self.log_parameters, self.starts[bins], self.starts[bins] + self.lengths[bins]
        offsets = np.arange(-self.reach, self.reach + 1)
        index = best[:, None] + offsets
        inside = (index >= first[:, None]) & (index < end[:, None])
        index = np.where(inside, index, best[:, None])
        x = n[index] - n[best][:, None]
        reach = np.minimum(math.log(WINDOW), np.minimum(n[best] - n[first], n[end - 1] - n[best])) + 1e-9
        weight = (inside & ((np.abs(x) <= reach[:, None]) | (np.abs(offsets) <= 1))).astype(float)
        (loss, tokens), covariance = parabolas(x, weight, value[index], log_tokens[index])
        curvature = np.maximum(loss[:, 2], 1e-9)
        used = np.where(weight > 0, x, 0.0)
        step = np.clip(-loss[:, 1] / (2 * curvature), used.min(1), used.max(1))
        powers = np.stack([np.ones_like(step), step, step**2], axis=1)
        slope = np.stack([np.zeros_like(step), np.ones_like(step), 2 * step], axis=1)
        of_slope, of_loss = (np.einsum("ri,rij,rj->r", j, covariance, j) for j in (slope, powers))
        return n[best] + step, np.sum(tokens * powers, axis=1), np.sum(loss * powers, axis=1), of_slope, of_loss


def parabolas(x: Floats, weight: Floats, *ys: Floats) -> tuple[list[Floats], Floats]:
    """(constant, slope, curvature) of each y by least squares in each row, and their covariance for unit variance.

    Each row needs at least three points.
    """
    powers = [weight, weight * x]
    powers += [powers[1] * x, powers[1] * x * x, powers[1] * x * x * x]
    moments = [p.sum(axis=1) for p in powers]
    covariance = np.linalg.inv(np.stack([np.stack(moments[i : i + 3], axis=1) for i in range(3)], axis=1))
    sides = [np.stack([np.sum(p * y, axis=1) for p in powers[:3]], axis=1) for y in ys]
    return [np.einsum("rij,rj->ri", covariance, side) for side in sides], covariance


def _first_lowest(values: Floats, starts: Ints, lengths: Ints) -> Ints:
    """The index of the first lowest value of each group."""
    lowest = np.repeat(np.minimum.reduceat(values, starts), lengths)
    return np.minimum.reduceat(np.where(values == lowest, np.arange(len(values)), len(values)), starts)


def between(edge: NDArray[np.int8]) -> NDArray[np.bool_]:
    """True for the minima that count: those not at an edge, in the range of compute where most are not at an edge.

    Where noise decides between the smallest model and the next, the bins that the next one wins are those with large
    errors. So the range begins where the fewest interior minima lie below it and the fewest edge minima above it, and
    ends in the same way.
    """
    low = np.cumsum(np.r_[0, edge == 0]) + np.cumsum(np.r_[0, (edge < 0)[::-1]])[::-1]
    high = np.cumsum(np.r_[0, edge > 0]) + np.cumsum(np.r_[0, (edge == 0)[::-1]])[::-1]
    first, last = int(np.flatnonzero(low == low.min())[-1]), int(np.flatnonzero(high == high.min())[0])
    place = np.arange(len(edge))
    return (edge == 0) & (first <= place) & (place < last)


@dataclass(frozen=True)
class Frontier:
    """The laws of the compute-binned minima."""

    minima: Minima
    loss: PowerLaw
    parameters: PowerLaw | None
    tokens: PowerLaw | None
    blocks: int
    """Independent points that the laws were fitted to."""
    optimal: bool
    """True if the minima are optima; otherwise L(C) is that of the best runs, an upper bound."""
    notes: tuple[str, ...]


def fit_frontier(sample: Sample, curve_of: Ints, bins: int = BINS, curves: bool = False) -> Frontier | str:
    """The laws, or the reason why there are none; with `curves`, the points are evaluations during the runs."""
    grid = Bins(sample, curve_of, bins)
    minima = grid.minima(sample.log_loss)
    chosen, optimal, notes = minima.used, True, []
    count, edges = int(chosen.sum()), int(np.sum(minima.edge != 0))
    if edges:
        notes.append(f"{edges:,} of {len(chosen):,} minima are at the smallest or largest size tried and not used")
    if count < 3 or np.ptp(minima.log_compute[chosen]) == 0:
        optimal = False
        chosen = minima.log_loss <= np.minimum.accumulate(minima.log_loss)  # no cheaper run is better
        notes.append(
            "too few values of compute have both a smaller and a larger model than the best one: no N_opt(C), no "
            "D_opt(C), and L(C) is that of the best runs, an upper bound of the optimum; train more sizes"
        )
        if chosen.sum() < 3:
            return "fewer than three runs improve on all cheaper ones; train at more budgets"
    x = minima.log_compute[chosen]
    blocks, shared = len(x), 1.0
    if grid.spacings:  # bins share values; evaluations of one run also share its noise
        steps = np.ptp(x) / max(float(np.median(grid.spacings)), 1e-12)
        independent = len(np.unique(minima.rank[chosen])) if curves else int(steps)
        blocks, shared = min(max(independent, 2), len(x)), SHARED
    if blocks < 3:
        notes.append("the minima span fewer than three distances between runs: no intervals")
    groups = np.array_split(np.flatnonzero(chosen), blocks)

    def mean(values: Floats) -> Floats:
        return np.array([np.mean(values[group]) for group in groups])

    def law(y: Floats, variance: Floats) -> PowerLaw:
        fitted = fit_power_law(np.exp(mean(minima.log_compute)), np.exp(mean(y)), 1 / mean(variance))
        return dataclasses.replace(
            fitted,
            x=(math.exp(float(x.min())), math.exp(float(x.max()))),
            level_error=fitted.level_error * math.sqrt(shared),
            exponent_error=fitted.exponent_error * math.sqrt(shared),
        )

    of_slope, of_loss = minima.variance
    notes += curvature_notes(np.exp(mean(minima.log_compute)), np.exp(mean(minima.log_loss)))
    size, tokens = None, None
    if optimal:
        size, tokens = law(minima.log_parameters, of_slope), law(minima.log_tokens, of_slope)
        off = minima.log_parameters[chosen] - size.level - size.exponent * (x - size.center)
        if problem := scattered(off, minima.reach[chosen]):
            notes.append(f"no N_opt(C), no D_opt(C): {problem}")
            size, tokens = None, None
    minima = dataclasses.replace(minima, used=chosen)
    return Frontier(minima, law(minima.log_loss, of_loss), size, tokens, blocks, optimal, tuple(notes))
