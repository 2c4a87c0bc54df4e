"""Scaling laws by several approaches, and the comparison of architectures: exponents, and compute at equal loss."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from angpt.errors import UserError, nearest
from angpt.fits.binned import BINS, Binned, fit_binned
from angpt.fits.compute import Counting, Sample, make_curves, make_sample
from angpt.fits.frontier import Frontier, fit_frontier
from angpt.fits.isoflop import IsoFlop, fit_isoflop
from angpt.fits.parametric import DELTA, Parametric, fit_parametric
from angpt.fits.powerlaw import Floats, PowerLaw
from angpt.fits.records import RunTable
from angpt.fits.saturating import Saturating
from angpt.present.words import label, quantity
from angpt.stats import Difference, Interval, difference, welch

Approach = Literal["frontier", "isoflop", "akima", "parametric", "paper"]
APPROACHES: dict[Approach, str] = {
    "frontier": "frontier regression",
    "isoflop": "IsoFLOP parabolas",
    "akima": "IsoFLOP interpolated",
    "parametric": "parametric fit",
    "paper": "the paper's procedure",
}
"""The last one only if it is asked for."""
QUANTITIES = {"loss": "L(C)", "parameters": "N_opt(C)", "tokens": "D_opt(C)"}


@dataclass(frozen=True)
class Options:
    """Options of `fit_scaling`."""

    counting: Counting
    curves: bool = False
    bootstrap: int = 1000
    seed: int = 0
    huber: float = DELTA
    paper: bool = False
    bins: int = BINS

    def __post_init__(self) -> None:
        for name, low, high in (("bootstrap", 0, 100_000), ("seed", 0, 2**63), ("bins", 10, 100_000)):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"--{name} {getattr(self, name)}: must be between {low} and {high}")
        if not 0 < self.huber < math.inf:
            raise UserError(f"--huber {self.huber}: must be positive and finite")


@dataclass(frozen=True)
class LawEstimate:
    """Prefactor and exponent of a law by any of the approaches."""

    quantity: str
    prefactor: Interval | None
    exponent: Interval
    points: int


@dataclass(frozen=True)
class ArchitectureFit:
    """The laws of one architecture. A text in place of a fit says why it is missing."""

    architecture: str
    sample: Sample
    frontier: Frontier | str
    isoflop: IsoFlop | str
    akima: IsoFlop | str
    parametric: Parametric | str
    paper: Binned | str | None
    """None: not asked for."""
    notes: tuple[str, ...]

    def law(self, approach: Approach, name: str) -> PowerLaw | None:
        """A power law of any approach but the parametric one."""
        fit = getattr(self, approach)
        return None if fit is None or isinstance(fit, str | Parametric) else getattr(fit, name)

    def loss_law(self, approach: Approach) -> PowerLaw | Saturating | None:
        """L(C): with an irreducible loss if there is one and the losses need it, otherwise the power law."""
        law, fit = self.law(approach, "loss"), getattr(self, approach)
        saturating = getattr(fit, "saturating", None)
        return saturating if isinstance(saturating, Saturating) and fit.curved else law

    def estimate(self, approach: Approach, name: str) -> LawEstimate | None:
        """Prefactor and exponent of a law; the parametric law of the loss has no single prefactor."""
        if approach != "parametric":
            law = self.law(approach, name)
            return None if law is None else LawEstimate(QUANTITIES[name], law.prefactor, law.slope, law.points)
        p = self.parametric
        if isinstance(p, str):
            return None
        exponent = p.estimate(p.exponents()[name])
        if name == "loss":
            return LawEstimate("L(C) − E", None, exponent, p.points)
        return LawEstimate(QUANTITIES[name], p.estimate(p.log_prefactors()[name]).exp(), exponent, p.points)

    def losses(self, approach: Approach) -> tuple[float, float] | None:
        """The lowest and highest loss that the approach's law of the loss was fitted to."""
        law, curve, p = self.law(approach, "loss"), self.loss_law(approach), self.parametric
        if law is not None and curve is not None:
            ends = [math.exp(curve.log_at(c).mean) for c in law.x]
        elif approach == "parametric" and not isinstance(p, str):
            ends = [math.exp(p.log_optimum(math.log(c))[2][0]) for c in p.compute]
        else:
            return None
        return min(ends), max(ends)


@dataclass(frozen=True)
class Saving:
    """Compute of one architecture divided by that of the baseline for the same loss: 0.7 is 30 % saved."""

    loss: float
    factor: Interval


@dataclass(frozen=True)
class Exponents:
    """An exponent of two architectures, and the test of their difference."""

    quantity: str
    baseline: float
    other: float
    difference: Difference


@dataclass(frozen=True)
class Comparison:
    """An architecture compared with the baseline, by one approach."""

    approach: Approach
    baseline: str
    other: str
    exponents: tuple[Exponents, ...]
    savings: tuple[Saving, ...]
    problem: str | None
    """Why there are no savings."""


@dataclass(frozen=True)
class ScalingFit:
    counting: str
    notes: tuple[str, ...]
    architectures: tuple[ArchitectureFit, ...]
    comparisons: tuple[Comparison, ...]

    def of(self, architecture: str) -> ArchitectureFit:
        return next(a for a in self.architectures if a.architecture == architecture)


def fit_scaling(table: RunTable, options: Options, baseline: str | None = None) -> ScalingFit:
    """The laws of every architecture, and the comparison of each with the baseline (default: gpt+, or the first)."""
    names = table.architectures()
    if baseline is not None and baseline not in names:
        raise UserError(f"--baseline {baseline}: no run has this architecture: {nearest(baseline, names)}")
    chosen = baseline or ("gpt+" if "gpt+" in names else names[0])
    fits = tuple(fit_architecture(table, name, options) for name in names)
    base = next(fit for fit in fits if fit.architecture == chosen)
    comparisons = tuple(
        compare(base, other, approach)
        for other in fits
        if other is not base
        for approach in APPROACHES
        if getattr(base, approach) is not None
    )
    notes = (*table.notes, *(f"{label(fit.architecture)}: {note}" for fit in fits for note in fit.notes))
    return ScalingFit(options.counting.describe(), notes, fits, comparisons)


def fit_architecture(table: RunTable, architecture: str, options: Options) -> ArchitectureFit:
    """The laws of one architecture by all approaches."""
    cells = [cell for cell in table.cells if cell.record.architecture == architecture]
    sizes = {cell.record.parameters for cell in cells}
    if len(sizes) == 1:
        instead = "leave it out with --architectures" if len(table.architectures()) > 1 else "see `angpt compare`"
        raise UserError(
            f"{label(architecture)}: all runs have {quantity(sizes.pop())} parameters; a scaling law needs several "
            f"model sizes ({instead})"
        )
    sample, notes = make_sample(cells, options.counting)
    if options.curves:
        points, run_of = make_curves(cells, options.counting)
        notes.append(f"frontier regression: {len(points):,} evaluations during runs, less what their schedules leave")
    else:
        points, run_of = sample, np.arange(len(sample))
    # Each architecture has its own seed: with the same draws their bootstrap samples would not be independent.
    seed = (options.seed, zlib.crc32(architecture.encode()))
    frontier = fit_frontier(points, run_of)
    isoflop, akima = fit_isoflop(sample, "parabola"), fit_isoflop(sample, "akima")
    parametric = fit_parametric(sample, options.bootstrap, seed, options.huber)
    paper = fit_binned(sample, options.bins) if options.paper else None
    for title, fit in zip(APPROACHES.values(), (frontier, isoflop, akima, parametric, paper), strict=True):
        if fit is not None:
            notes += [f"{title}: {note}" for note in ((f"none: {fit}",) if isinstance(fit, str) else fit.notes)]
    return ArchitectureFit(architecture, sample, frontier, isoflop, akima, parametric, paper, tuple(notes))


def compare(base: ArchitectureFit, other: ArchitectureFit, approach: Approach) -> Comparison:
    """The exponents of two architectures, and the compute for equal losses that both reached."""
    exponents = tuple(e for name in QUANTITIES if (e := _exponents(base, other, approach, name)) is not None)
    ranges = [r for r in (base.losses(approach), other.losses(approach)) if r is not None]
    savings: tuple[Saving, ...] = ()
    problem = None
    if len(ranges) < 2:
        problem = "one of the two has no law"
    elif approach != "parametric" and loss_laws(base, other, approach) is None:
        problem = "the losses are curved, and one of the two has no law with an irreducible loss"
    elif (low := max(r[0] for r in ranges)) >= (high := min(r[1] for r in ranges)):
        problem = "the two reached no common loss; nothing is extrapolated"
    else:
        losses = [math.exp((1 - part) * math.log(high) + part * math.log(low)) for part in (0.1, 0.5, 0.9)]
        savings = tuple(Saving(loss, saving(base, other, approach, loss)) for loss in losses)
    return Comparison(approach, base.architecture, other.architecture, exponents, savings, problem)


def loss_laws(base: ArchitectureFit, other: ArchitectureFit, approach: Approach) -> list[PowerLaw | Saturating] | None:
    """L(C) of both in one form, with an irreducible loss if the losses of either are curved; None if one lacks it."""
    fits = getattr(base, approach), getattr(other, approach)
    form = "saturating" if any(getattr(fit, "curved", False) for fit in fits) else "loss"
    laws = [law for fit in fits if isinstance(law := getattr(fit, form, None), PowerLaw | Saturating)]
    return laws if len(laws) == 2 else None


def _exponents(base: ArchitectureFit, other: ArchitectureFit, approach: Approach, name: str) -> Exponents | None:
    one, two = base.estimate(approach, name), other.estimate(approach, name)
    if one is None or two is None:
        return None
    if name == "loss" and approach != "parametric":
        curves = loss_laws(base, other, approach)
        if curves is None:
            return None
        if isinstance(curves[0], Saturating) and isinstance(curves[1], Saturating):
            exponents = curves[0].exponent, curves[1].exponent
            return Exponents("L(C) − E", exponents[0][0], exponents[1][0], difference(*exponents))
    laws = base.law(approach, name), other.law(approach, name)
    if laws[0] is not None and laws[1] is not None:
        found = difference(*((law.exponent, law.exponent_error, law.freedom) for law in laws if law is not None))
    else:
        values, estimate, fewer = _paired(base, other, lambda p: p.exponents()[name])
        error = float(np.std(values[1:])) * math.sqrt(fewer.points / max(1, fewer.freedom)) if len(values) > 2 else 0.0
        p = 2 * float(stats.t.sf(abs(estimate.mean) / error, fewer.freedom)) if error and fewer.freedom > 0 else None
        found = Difference(estimate, p)
    return Exponents(one.quantity, one.exponent.mean, two.exponent.mean, found)


def saving(base: ArchitectureFit, other: ArchitectureFit, approach: Approach, loss: float) -> Interval:
    """Compute of `other` divided by that of `base` at a loss, by the laws of both (which must exist)."""
    if approach == "parametric":
        return _paired(base, other, lambda p: p.log_compute(loss))[1].exp()
    laws = loss_laws(base, other, approach)
    assert laws is not None
    (one, one_error), (two, two_error) = (law.log_inverse(loss) for law in laws)
    error, freedom = welch([(one_error, laws[0].freedom), (two_error, laws[1].freedom)])
    return Interval.around(two - one, error, freedom).exp()


def _paired(
    base: ArchitectureFit, other: ArchitectureFit, function: Callable[[Parametric], Floats]
) -> tuple[Floats, Interval, Parametric]:
    """The difference of a function of two parametric laws: its values, its estimate, and the law with fewer points.

    Bootstrap samples are independent, so any pairing will do. The law with fewer points gives the wider interval.
    """
    one, two = base.parametric, other.parametric
    assert not isinstance(one, str)
    assert not isinstance(two, str)
    count = min(len(one.theta), len(two.theta))
    with np.errstate(invalid="ignore"):
        values = function(two)[:count] - function(one)[:count]
    fewer = min(one, two, key=lambda p: p.freedom)
    return values, fewer.estimate(values), fewer
