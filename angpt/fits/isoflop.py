"""IsoFLOP minima (Chinchilla's approach 2): at each level of compute, a parabola of log loss over log size.

Runs whose compute agrees to within 2 % are a level; what is left of the difference is taken off along the slope of the
lowest losses. The vertex of the parabola through the sizes around the lowest is the optimum of the level, if a smaller
and a larger size were tried there. The laws are fitted to the levels, each weighted by how well its parabola fixes the
vertex (delta method); their intervals are those of a regression over independent levels.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from angpt.fits.compute import Sample
from angpt.fits.powerlaw import Floats, PowerLaw, bend, fit_power_law
from angpt.present.words import plural
from angpt.stats import edge

SAME = 0.02
"""Part of the compute by which runs of one level differ at most."""
SCATTER = 0.15
"""Standard deviation of minima about their law, in half ranges of the sizes tried, up to which a law is given."""
WINDOW = 4.0
"""Sizes within this factor of the best one shape the parabola; far from it the loss is not parabolic."""


@dataclass(frozen=True)
class Vertex:
    """The lowest point of the parabola of a level."""

    parameters: float
    tokens: float
    loss: float
    variance: tuple[float, float]
    """Variance of the slope and of the log loss here, in units of that of a run's log loss.

    The vertex moves by the slope over twice the bend; the bend is left out of the weights, since a level that noise
    makes seem sharp would count more.
    """
    coefficients: tuple[float, float, float]
    """Constant, slope and bend of the log loss as a function of log(size / center)."""
    center: float
    support: tuple[float, float]
    """The smallest and largest size that shaped it."""


@dataclass(frozen=True)
class Level:
    """The runs at one compute."""

    compute: float
    parameters: Floats
    losses: Floats
    """Brought to the compute of the level."""
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
    """The laws, or why there are none."""
    groups = find_levels(sample.compute, sample.parameters)
    if len(groups) < 2:
        return (
            f"{'one level' if groups else 'no level'} of compute at which three model sizes were trained (to within "
            f"{SAME:.0%}), and two are needed"
        )
    # The slope along which losses are brought to the compute of their level.
    x = np.array([np.mean(np.log(sample.compute[g])) for g in groups])
    lowest = np.array([sample.log_loss[g].min() for g in groups])
    slope = float(np.polyfit(x, lowest, 1)[0])
    levels = tuple(fit_level(sample.take(g), slope) for g in groups)
    good = [(level.compute, level.vertex) for level in levels if level.vertex is not None]
    notes = _problems(levels)
    if len(good) < 2:
        return f"{len(good)} of {len(levels)} levels of compute have an optimum, two are needed ({'; '.join(notes)})"
    if len(good) == 2:
        notes.append("two levels fix the laws, but leave no interval")
    compute, vertices = [c for c, _ in good], [v for _, v in good]
    by_size, by_loss = ([1 / v.variance[i] for v in vertices] for i in (0, 1))
    sizes = fit_power_law(compute, [v.parameters for v in vertices], by_size)
    off = np.log([v.parameters / sizes.at(c).mean for c, v in good])
    reach = np.log([level.parameters[-1] / level.parameters[0] for level in levels if level.vertex is not None]) / 2
    if problem := scattered(off, reach):
        return problem
    if ends := bend(compute, [v.loss for v in vertices]):
        notes.append(bent(ends))
    return IsoFlop(
        levels,
        loss=fit_power_law(compute, [v.loss for v in vertices], by_loss),
        parameters=sizes,
        tokens=fit_power_law(compute, [v.tokens for v in vertices], by_size),
        notes=tuple(notes),
    )


def _problems(levels: Sequence[Level]) -> list[str]:
    """Notes on the levels that are not used, with the reason."""
    reasons: dict[str, list[str]] = {}
    for level in levels:
        if level.problem is not None:
            reasons.setdefault(level.problem, []).append(f"{level.compute:.3g}")
    return [
        f"{plural(len(at), 'level')} not used, since {problem} (at {', '.join(at[:3])}"
        f"{', …' if len(at) > 3 else ''} FLOPs)"
        for problem, at in reasons.items()
    ]


def bent(ends: tuple[float, float]) -> str:
    return (
        f"L(C) is no power law over this range: its exponent goes from {ends[0]:.3f} to {ends[1]:.3f}, as it does "
        "above an irreducible loss; the one given is a mean, and the parametric fit has that loss"
    ).replace("-", "−")


def scattered(off: Floats, reach: Floats) -> str | None:
    """The reason to refuse a law from which minima lie this far `off`, given the `reach` of the sizes, or None.

    A minimum cannot be found outside the sizes tried. Where noise spreads minima over much of that range, the range
    cuts off the largest errors, and the law follows the sizes that were chosen rather than the best ones.
    """
    part = float(np.std(off)) / float(np.median(reach))
    if part <= SCATTER:
        return None
    return (
        f"the minima scatter about their law by {part:.0%} of half the range of sizes tried, so that noise and the "
        "choice of sizes decide; train more sizes or seeds at each compute, or take the parametric fit"
    )


def find_levels(compute: Floats, parameters: Floats) -> list[NDArray[np.intp]]:
    """Indices of the runs of each level with three sizes or more, the lowest compute first."""
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
    """The parabola of one level; of several runs of one size the best."""
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
    # As far on the one side as on the other: the loss is no exact parabola, and rises faster on one side.
    reach = min(math.log(WINDOW), n[best] - n[0], n[-1] - n[best])
    near = np.abs(n - n[best]) <= reach + 1e-9
    near[best - 1 : best + 2] = True
    x = n[near] - n[best]
    (bend, linear, constant), inverse = np.polyfit(x, y[near], 2, cov="unscaled")
    step = -linear / (2 * bend) if bend > 0 else math.inf
    if not x[0] < step < x[-1]:
        return dataclasses.replace(level, problem="the losses have no minimum inside the sizes tried")
    # The slope and the loss at the vertex as functions of (bend, linear, constant).
    of_slope, of_loss = np.array([2 * step, 1.0, 0.0]), np.array([step**2, step, 1.0])
    vertex = Vertex(
        parameters=math.exp(n[best] + step),
        tokens=math.exp(float(np.polyval(np.polyfit(x, d[near], 1), step))),
        loss=math.exp(constant + linear * step + bend * step**2),
        variance=(float(of_slope @ inverse @ of_slope), float(of_loss @ inverse @ of_loss)),
        coefficients=(float(constant), float(linear), float(bend)),
        center=math.exp(n[best]),
        support=(math.exp(n[near][0]), math.exp(n[near][-1])),
    )
    return dataclasses.replace(level, vertex=vertex)
