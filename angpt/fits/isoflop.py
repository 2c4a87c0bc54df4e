"""IsoFLOP minima (Chinchilla's approach 2): at each level of compute, the size with the lowest loss.

Runs of nearly equal compute form a level; their losses are moved to its compute along the slope of the loss. The
optimum of a level is the lowest point of a curve of log loss over log size, if a smaller and a larger size were tried:
the vertex of a parabola around the lowest loss, or the minimum of Akima's interpolant (Porian et al. 2024). The
parabola averages noise; the interpolant follows valleys that are not parabolas.

The laws are fitted to the levels, for the parabola weighted by the precision of the slope or loss at the vertex (delta
method); their intervals are those of a regression over independent levels.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from angpt.fits.compute import Sample
from angpt.fits.interpolate import Curve
from angpt.fits.powerlaw import Floats, Ints, PowerLaw, curvature_notes, fit_power_law
from angpt.fits.saturating import Saturating, fit_saturating
from angpt.present.words import plural
from angpt.stats import edge, quantile

Method = Literal["parabola", "akima"]
WIDEST, NARROW = 0.2, 0.02
"""Relative differences in compute up to which runs belong to one level."""
LINKS = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
"""Relative differences in compute of neighbouring runs that begin a new level; the first that makes levels is taken."""
SCATTER = 0.15
"""Standard deviation of minima around their law, in half ranges of the sizes tried, up to which a law is given."""
WINDOW = 4.0
"""The parabola is fitted to sizes within this factor of the best one; far from it the loss is not parabolic."""


@dataclass(frozen=True)
class Vertex:
    """The lowest point of the curve of a level."""

    parameters: float
    tokens: float
    loss: float
    variance: tuple[float, float] = (1.0, 1.0)
    """For the parabola: variance of the slope and of the log loss at the vertex, relative to that of a run's log loss.

    The position of the vertex also depends on the curvature, which the weights leave out: noise that makes a level look
    sharp would give it more weight.
    """
    coefficients: tuple[float, float, float] | None = None
    """Constant, slope and curvature of the parabola as a function of log(size / center); None for Akima's method."""
    center: float = 1.0
    support: tuple[float, float] = (0.0, 0.0)
    """The smallest and largest size that the curve was fitted to."""


@dataclass(frozen=True)
class Level:
    """The runs of equal compute."""

    compute: float
    parameters: Floats
    tokens: Floats
    losses: Floats
    """Losses at the compute of the level; of several runs of a size the mean."""
    vertex: Vertex | None = None
    problem: str | None = None
    """Why there is no vertex."""

    def curve(self, parameters: Floats) -> Floats:
        """The loss of the fitted curve, for levels with a vertex."""
        assert self.vertex is not None
        if self.vertex.coefficients is None:
            return np.exp(Curve.through(np.log(self.parameters), np.log(self.losses))(np.log(parameters)))
        return np.exp(np.polyval(self.vertex.coefficients[::-1], np.log(parameters / self.vertex.center)))


@dataclass(frozen=True)
class IsoFlop:
    """The levels, and the laws through their optima."""

    levels: tuple[Level, ...]
    loss: PowerLaw
    saturating: Saturating | str
    """L(C) with an irreducible loss, or why there is none."""
    parameters: PowerLaw
    tokens: PowerLaw
    curved: bool
    """True if the power law of the loss does not describe it."""
    notes: tuple[str, ...]


def fit_isoflop(sample: Sample, method: Method = "parabola") -> IsoFlop | str:
    """The laws, or the reason why there are none."""
    groups = find_levels(sample.compute, sample.parameters)
    if len(groups) < 2:
        found = "only one level" if groups else "no level"
        return f"{found} of compute (within {WIDEST:.0%}) has three model sizes, and two are needed"
    width = max(float(np.ptp(np.log(sample.compute[g]))) for g in groups)
    levels = tuple(find_vertex(level, method) for level in make_levels(sample, groups))
    good = [(level, level.vertex) for level in levels if level.vertex is not None]
    notes = _problems(levels)
    if len(good) < 2:
        return f"{len(good)} of {len(levels)} levels of compute have an optimum, two are needed ({'; '.join(notes)})"
    if len(good) == 2:
        notes.append("only two levels have an optimum: the laws have no interval")
    if width > math.log1p(NARROW):
        notes.append(f"levels are up to {math.expm1(width):.0%} wide in compute; their losses are moved to the middle")
    compute = [level.compute for level, _ in good]
    sizes, tokens, losses = np.array([(v.parameters, v.tokens, v.loss) for _, v in good]).T
    by_slope, by_loss = 1 / np.array([v.variance for _, v in good]).T
    size_law = fit_power_law(compute, sizes, by_slope)
    off = np.log(sizes / [size_law.at(c).mean for c in compute])
    reach = np.log([level.parameters[-1] / level.parameters[0] for level, _ in good]) / 2
    if problem := scattered(off, reach, by_slope):
        return problem
    curved = curvature_notes(compute, losses)
    token_law = fit_power_law(compute, tokens, by_slope)
    if method == "parabola":
        skew, skewed = find_skew(levels, size_law.exponent)
        notes += skewed
        wider = abs(skew) / quantile(size_law.freedom) if size_law.freedom else 0.0
        size_law, token_law = (
            dataclasses.replace(law, level_error=law.level_error + wider) for law in (size_law, token_law)
        )
    return IsoFlop(
        levels=levels,
        loss=fit_power_law(compute, losses, by_loss),
        saturating=fit_saturating(compute, losses, by_loss),
        parameters=size_law,
        tokens=token_law,
        curved=bool(curved),
        notes=(*notes, *curved),
    )


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


def scattered(off: Floats, reach: Floats, weights: Floats) -> str | None:
    """The reason to refuse a law if the deviations `off` are large compared with the `reach` of the sizes, or None.

    Where noise spreads the minima over much of the range of sizes tried, the range truncates the largest errors, and
    the law follows the choice of sizes rather than the best ones.
    """
    part = math.sqrt(float(np.average(off**2, weights=weights))) / float(np.median(reach))
    if part <= SCATTER:
        return None
    return (
        f"the minima scatter around their law by {part:.0%} of half the range of sizes tried, so that noise and the "
        "choice of sizes decide; train more sizes or seeds at each compute, or use the frontier or the parametric fit"
    )


def find_skew(levels: Sequence[Level], exponent: float) -> tuple[float, list[str]]:
    """How far parabolas misplace log N_opt, because valleys rise faster on one side, and a note if the losses show it.

    The losses show it if a cubic term, the same at all levels, is significant at the 1 % level. Otherwise it is that of
    two power laws (frontier.py), whose cubic term over the quadratic one is k·(2α − 1)/3, with the `exponent` α.
    """
    good = [(level, v) for level in levels if (v := level.vertex) is not None and v.coefficients is not None]
    curvature = np.array([2 * v.coefficients[2] for _, v in good if v.coefficients is not None])
    t, lowest = np.log([(level.compute, v.loss) for level, v in good]).T
    t -= t.mean()
    fall = -np.polyval(np.polyder(np.polyfit(t, lowest, min(2, len(t) - 1))), t)
    cubes, residuals, slopes = [], [], []
    for level, v in good:
        n = level.parameters[(level.parameters >= v.support[0]) & (level.parameters <= v.support[1])]
        x = np.log(n / v.parameters)
        powers = np.vander(x, 3)
        parabola = np.linalg.lstsq(powers, x**3, rcond=None)[0]  # also for sizes that are almost equal
        cubes.append(x**3 - powers @ parabola)
        residuals.append(np.log(level.losses[np.isin(level.parameters, n)] / level.curve(n)))
        # A cubic term takes its share of the slope at the vertex from the parabola, and moves the lowest point.
        slopes.append(parabola[1])
    expected = float(np.median(curvature / fall)) * (2 * exponent - 1) / 6 * float(np.mean(slopes))
    z, r = np.concatenate(cubes), np.concatenate(residuals)
    freedom, square = len(r) - 3 * len(cubes) - 1, float(z @ z)
    if freedom < 1 or square < 1e-9:
        return expected, []
    cubic = float(z @ r) / square
    error = math.sqrt(float(np.sum((r - cubic * z) ** 2)) / freedom / square)
    shift = cubic * float(np.mean(slopes / curvature))
    if abs(shift) < 0.01 or 2 * float(stats.t.sf(abs(cubic) / max(error, 1e-12), freedom)) > 0.01:
        return expected, []
    way = "low" if shift > 0 else "high"
    return shift, [
        f"the valleys are skewed: N_opt of the parabolas is about {math.expm1(abs(shift)):.0%} too {way}, by which its "
        "interval is widened; the frontier regression includes the skew"
    ]


def find_levels(compute: Floats, parameters: Floats) -> list[Ints]:
    """Indices of the runs of each level with at least three sizes, the lowest compute first.

    Runs that are closer to each other than to others in compute, and differ by up to WIDEST, form a level. If there are
    no such groups, levels are runs that differ by up to NARROW.
    """
    order = np.argsort(compute, kind="stable")
    x = np.log(compute[order])
    for link in LINKS:
        groups = np.split(order, np.flatnonzero(np.diff(x) > math.log1p(link)) + 1)
        levels = [g for g in groups if compute[g[-1]] <= compute[g[0]] * (1 + WIDEST)]
        if sum(map(len, levels)) >= 0.9 * len(order):
            break
    else:
        levels, start = [], 0
        for i in range(1, len(order) + 1):
            if i == len(order) or compute[order[i]] > compute[order[start]] * (1 + NARROW):
                levels.append(order[start:i])
                start = i
    return [level for level in levels if len(np.unique(parameters[level])) >= 3]


def make_levels(sample: Sample, groups: Sequence[Ints]) -> list[Level]:
    """The levels with their losses moved to the mean compute of each.

    At a fixed size the slope of log loss over log compute is that of the lowest losses, f′, less κ·α·u: κ is the
    curvature of the valley, α the exponent of its lowest point, and u the distance from it. The second part, from the
    parabolas of a first pass, matters for wide levels only.
    """
    centers = np.array([float(np.mean(np.log(sample.compute[g]))) for g in groups])
    t = centers - centers.mean()
    lowest = [float(sample.log_loss[g].min()) for g in groups]
    slopes = np.polyval(np.polyder(np.polyfit(t, lowest, min(2, len(groups) - 1))), t)

    def levels(curvature: float, law: PowerLaw | None) -> list[Level]:
        found = []
        for group, center, slope in zip(groups, centers, slopes, strict=True):
            runs, n = sample.take(group), np.log(sample.parameters[group])
            x = np.log(runs.compute)
            tilt = curvature * law.exponent * (n - law.log_at(math.exp(center)).mean) if law else 0.0
            y = runs.log_loss - (slope - tilt) * (x - center)
            sizes = np.unique(n)
            means = [
                [np.average(v[n == s], weights=runs.seeds[n == s]) for s in sizes] for v in (y, np.log(runs.tokens))
            ]
            found.append(Level(math.exp(center), np.exp(sizes), np.exp(means[1]), np.exp(means[0])))
        return found

    first = levels(0.0, None)
    vertices = [(level.compute, v) for level in first if (v := find_vertex(level, "parabola").vertex) is not None]
    if len(vertices) < 2:
        return first
    curvature = float(np.median([2 * v.coefficients[2] for _, v in vertices if v.coefficients is not None]))
    return levels(curvature, fit_power_law([c for c, _ in vertices], [v.parameters for _, v in vertices]))


def find_vertex(level: Level, method: Method) -> Level:
    """The level with the lowest point of its curve, or with the reason why there is none."""
    n, y, d = np.log(level.parameters), np.log(level.losses), np.log(level.tokens)
    best, side = edge(y)
    if side:
        size = "smallest" if side < 0 else "largest"
        return dataclasses.replace(level, problem=f"the best size is the {size} one tried")
    if method == "akima":
        at = Curve.through(n, y).minimiser()
        tokens, loss = math.exp(float(np.interp(at, n, d))), math.exp(float(Curve.through(n, y)(at)))
        vertex = Vertex(math.exp(at), tokens, loss, support=(float(level.parameters[0]), float(level.parameters[-1])))
        return dataclasses.replace(level, vertex=vertex)
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
