"""IsoFLOP minima (Chinchilla's approach 2): at each level of compute, a parabola of log loss over log size.

Runs whose compute agrees within 2 % form a level; their losses are corrected to its compute along the slope of the
lowest losses. The optimum of a level is the vertex of the parabola around its lowest loss, if a smaller and a larger
size were tried. The laws are fitted to the levels, weighted by the precision of the slope or loss at the vertex (delta
method); their intervals are those of a regression over independent levels.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from angpt.fits.compute import Sample
from angpt.fits.powerlaw import Floats, PowerLaw, curvature_notes, fit_power_law
from angpt.present.words import plural
from angpt.stats import edge

SAME = 0.02
"""Relative difference in compute up to which runs belong to one level."""
SCATTER = 0.15
"""Standard deviation of minima around their law, in half ranges of the sizes tried, up to which a law is given."""
WINDOW = 4.0
"""The parabola is fitted to sizes within this factor of the best one; far from it the loss is not parabolic."""


@dataclass(frozen=True)
class Vertex:
    """The lowest point of the parabola of a level."""

    parameters: float
    tokens: float
    loss: float
    variance: tuple[float, float]
    """Variance of the slope and of the log loss at the vertex, relative to that of a run's log loss.

    The position of the vertex also depends on the curvature, which the weights leave out: noise that makes a level look
    sharp would give it more weight.
    """
    coefficients: tuple[float, float, float]
    """Constant, slope and curvature of the log loss as a function of log(size / center)."""
    center: float
    support: tuple[float, float]
    """The smallest and largest size that the parabola was fitted to."""


@dataclass(frozen=True)
class Level:
    """The runs of equal compute."""

    compute: float
    parameters: Floats
    losses: Floats
    """Losses, corrected to the compute of the level."""
    vertex: Vertex | None
    problem: str | None
    """Why there is no vertex."""


@dataclass(frozen=True)
class IsoFlop:
    """The levels, and the laws through their optima."""

    levels: tuple[Level, ...]
    loss: PowerLaw
    parameters: PowerLaw
    tokens: PowerLaw
    notes: tuple[str, ...]


def fit_isoflop(sample: Sample) -> IsoFlop | str:
    """The laws, or the reason why there are none."""
    groups = find_levels(sample.compute, sample.parameters)
    if len(groups) < 2:
        found = "only one level" if groups else "no level"
        return f"{found} of compute (within {SAME:.0%}) has three model sizes, and two are needed"
    # The slope along which losses are corrected to the compute of their level.
    x = np.array([np.mean(np.log(sample.compute[g])) for g in groups])
    lowest = np.array([sample.log_loss[g].min() for g in groups])
    slope = float(np.polyfit(x, lowest, 1)[0])
    levels = tuple(fit_level(sample.take(g), slope) for g in groups)
    good = [(level, level.vertex) for level in levels if level.vertex is not None]
    notes = _problems(levels)
    if len(good) < 2:
        return f"{len(good)} of {len(levels)} levels of compute have an optimum, two are needed ({'; '.join(notes)})"
    if len(good) == 2:
        notes.append("only two levels have an optimum: the laws have no interval")
    compute = [level.compute for level, _ in good]
    sizes, tokens, losses = np.array([(v.parameters, v.tokens, v.loss) for _, v in good]).T
    by_slope, by_loss = 1 / np.array([v.variance for _, v in good]).T
    size_law = fit_power_law(compute, sizes, by_slope)
    off = np.log(sizes / [size_law.at(c).mean for c in compute])
    reach = np.log([level.parameters[-1] / level.parameters[0] for level, _ in good]) / 2
    if problem := scattered(off, reach):
        return problem
    notes += curvature_notes(compute, losses)
    token_law, loss_law = fit_power_law(compute, tokens, by_slope), fit_power_law(compute, losses, by_loss)
    return IsoFlop(levels, loss_law, size_law, token_law, tuple(notes))


def _problems(levels: Sequence[Level]) -> list[str]:
    """Notes on the levels that are not used, by reason."""
    reasons: dict[str, list[str]] = {}
    for level in levels:
        if level.problem is not None:
            reasons.setdefault(level.problem, []).append(f"{level.compute:.3g}")
    return [
        f"{plural(len(at), 'level')} not used, since {problem} (at {', '.join(at[:3])}"
        f"{', …' if len(at) > 3 else ''} FLOPs)"
        for problem, at in reasons.items()
    ]


def scattered(off: Floats, reach: Floats) -> str | None:
    """The reason to refuse a law if the deviations `off` are large compared with the `reach` of the sizes, or None.

    Where noise spreads the minima over much of the range of sizes tried, the range truncates the largest errors, and
    the law follows the choice of sizes rather than the best ones.
    """
    part = float(np.std(off)) / float(np.median(reach))
    if part <= SCATTER:
        return None
    return (
        f"the minima scatter around their law by {part:.0%} of half the range of sizes tried, so that noise and the "
        "choice of sizes decide; train more sizes or seeds at each compute, or use the parametric fit"
    )


def find_levels(compute: Floats, parameters: Floats) -> list[NDArray[np.intp]]:
    """Indices of the runs of each level with at least three sizes, the lowest compute first."""
    order = np.argsort(compute, kind="stable")
    levels, start = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or compute[order[i]] > compute[order[start]] * (1 + SAME):
            group = order[start:i]
            if len(np.unique(parameters[group])) >= 3:
                levels.append(group)
            start = i
    return levels


def fit_level(runs: Sample, slope: float) -> Level:
    """The parabola of one level, through the best run of each size."""
    center = float(np.mean(np.log(runs.compute)))
    y = runs.log_loss - slope * (np.log(runs.compute) - center)
    order = np.lexsort((y, runs.parameters))
    order = order[np.r_[True, np.diff(runs.parameters[order]) > 0]]
    n, y, d = np.log(runs.parameters[order]), y[order], np.log(runs.tokens[order])
    best, side = edge(y)
    level = Level(math.exp(center), np.exp(n), np.exp(y), None, None)
    if side:
        size = "smallest" if side < 0 else "largest"
        return dataclasses.replace(level, problem=f"the best size is the {size} one tried")
    # Equally far on both sides: the loss is not exactly a parabola, and rises faster on one side.
    reach = min(math.log(WINDOW), n[best] - n[0], n[-1] - n[best])
    near = np.abs(n - n[best]) <= reach + 1e-9
    near[best - 1 : best + 2] = True
    x = n[near] - n[best]
    (curvature, linear, constant), inverse = np.polyfit(x, y[near], 2, cov="unscaled")
    step = -linear / (2 * curvature) if curvature > 0 else math.inf
    if not x[0] < step < x[-1]:
        return dataclasses.replace(level, problem="the losses have no minimum inside the sizes tried")
    # Gradients of the slope and the loss at the vertex with respect to (curvature, linear, constant).
    of_slope, of_loss = np.array([2 * step, 1.0, 0.0]), np.array([step**2, step, 1.0])
    vertex = Vertex(
        parameters=math.exp(n[best] + step),
        tokens=math.exp(float(np.polyval(np.polyfit(x, d[near], 1), step))),
        loss=math.exp(constant + linear * step + curvature * step**2),
        variance=(float(of_slope @ inverse @ of_slope), float(of_loss @ inverse @ of_loss)),
        coefficients=(float(constant), float(linear), float(curvature)),
        center=math.exp(n[best]),
        support=(math.exp(n[near][0]), math.exp(n[near][-1])),
    )
    return dataclasses.replace(level, vertex=vertex)
