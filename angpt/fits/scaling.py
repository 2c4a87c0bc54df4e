"""Scaling laws by three approaches, and two architectures beside each other: exponents, and compute at equal loss."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from angpt.errors import UserError, nearest
from angpt.fits.compute import Counting, Sample, make_curves, make_sample
from angpt.fits.frontier import BINS, Frontier, fit_frontier
from angpt.fits.isoflop import IsoFlop, fit_isoflop
from angpt.fits.parametric import Parametric, fit_parametric
from angpt.fits.powerlaw import Floats, PowerLaw
from angpt.fits.records import RunTable
from angpt.present.words import label, quantity
from angpt.stats import Difference, Interval, difference, welch

Approach = Literal["frontier", "isoflop", "parametric"]
APPROACHES: dict[Approach, str] = {
    "frontier": "compute-binned minima",
    "isoflop": "IsoFLOP minima",
    "parametric": "parametric fit",
}
QUANTITIES = {"loss": "L(C)", "parameters": "N_opt(C)", "tokens": "D_opt(C)"}


@dataclass(frozen=True)
class Options:
    """Options of the fit."""

    counting: Counting
    curves: bool = False
    bins: int = BINS
    bootstrap: int = 1000
    seed: int = 0
    huber: float | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("bins", 10, 100_000), ("bootstrap", 0, 100_000), ("seed", 0, 2**63)):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"--{name} {getattr(self, name)}: must be between {low} and {high}")
        if self.huber is not None and not 0 < self.huber < math.inf:
            raise UserError(f"--huber {self.huber}: must be positive and finite")


@dataclass(frozen=True)
class ArchitectureFit:
    """The laws of one architecture. A text in place of a fit says why it is missing."""

    architecture: str
    sample: Sample
    frontier: Frontier | str
    isoflop: IsoFlop | str
    parametric: Parametric | str
    notes: tuple[str, ...]

    def law(self, approach: Approach, name: str) -> PowerLaw | None:
        """A power law of the first or second approach."""
        fit = getattr(self, approach)
        return None if isinstance(fit, str | Parametric) else getattr(fit, name)

    def losses(self, approach: Approach) -> tuple[float, float] | None:
        """The lowest and highest loss that the approach's law of the loss was fitted to."""
        if approach == "parametric":
            if isinstance(self.parametric, str):
                return None
            ends = [math.exp(self.parametric.log_optimum(math.log(c))[2][0]) for c in self.parametric.compute]
        else:
            law = self.law(approach, "loss")
            if law is None:
                return None
            ends = [law.at(c).mean for c in law.x]
        return min(ends), max(ends)


@dataclass(frozen=True)
class Saving:
    """Compute of one architecture over that of the baseline for the same loss: 0.7 is 30 % saved."""

    loss: float
    factor: Interval


@dataclass(frozen=True)
class Exponents:
    """An exponent of two architectures."""

    quantity: str
    baseline: float
    other: float
    difference: Difference


@dataclass(frozen=True)
class Comparison:
    """An architecture beside the baseline, by one approach."""

    approach: Approach
    baseline: str
    other: str
    exponents: tuple[Exponents, ...]
    savings: tuple[Saving, ...]
    problem: str | None
    """Why no compute is compared."""


@dataclass(frozen=True)
class ScalingFit:
    counting: str
    architectures: tuple[ArchitectureFit, ...]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]

    def of(self, architecture: str) -> ArchitectureFit:
        return next(a for a in self.architectures if a.architecture == architecture)


def fit_scaling(table: RunTable, options: Options, baseline: str | None = None) -> ScalingFit:
    """The laws of every architecture of the table, and each beside the baseline: gpt+ where there is one, or the first
    unless given."""
    names = table.architectures()
    if baseline is not None and baseline not in names:
        raise UserError(f"--baseline {baseline}: none of the runs is of this architecture: {nearest(baseline, names)}")
    chosen = baseline or ("gpt+" if "gpt+" in names else names[0])
    fits = tuple(fit_architecture(table, name, options) for name in names)
    base = next(fit for fit in fits if fit.architecture == chosen)
    comparisons = tuple(
        compare(base, other, approach) for other in fits if other is not base for approach in APPROACHES
    )
    notes = (*table.notes, *(f"{label(fit.architecture)}: {note}" for fit in fits for note in fit.notes))
    return ScalingFit(options.counting.describe(), fits, comparisons, notes)


def fit_architecture(table: RunTable, architecture: str, options: Options) -> ArchitectureFit:
    cells = [cell for cell in table.cells if cell.record.architecture == architecture]
    sizes = {cell.record.parameters for cell in cells}
    if len(sizes) == 1:
        raise UserError(
            f"{label(architecture)}: all runs have {quantity(sizes.pop())} parameters; a scaling law needs several "
            "model sizes (`angpt compare` compares budgets at one size)"
        )
    sample, notes = make_sample(cells, options.counting)
    if options.curves:
        points, curve_of = make_curves(cells, options.counting)
        notes.append(f"minima over {len(points):,} evaluations within runs, whose schedules had not ended there")
    else:
        points, curve_of = sample, np.unique(sample.parameters, return_inverse=True)[1]
    frontier = fit_frontier(points, curve_of, options.bins, options.curves)
    isoflop = fit_isoflop(sample)
    # A seed of its own for each architecture: the same draws would make their bootstrap samples depend on each other.
    seed = (options.seed, zlib.crc32(architecture.encode()))
    parametric = fit_parametric(sample, options.bootstrap, seed, options.huber)
    for approach, fit in (("frontier", frontier), ("isoflop", isoflop), ("parametric", parametric)):
        title = APPROACHES[approach]  # type: ignore[index]
        notes += [f"{title}: {note}" for note in ((f"none: {fit}",) if isinstance(fit, str) else _notes(fit))]
    return ArchitectureFit(architecture, sample, frontier, isoflop, parametric, tuple(notes))


def _notes(fit: Frontier | IsoFlop | Parametric) -> Sequence[str]:
    if not isinstance(fit, Parametric):
        return fit.notes
    notes = []
    if fit.agreeing < 2:
        notes.append(f"only one of {fit.tried} starts reached the lowest loss; it may not be the lowest there is")
    if fit.reducible:
        notes.append("the irreducible loss E is not told apart from zero")
    if fit.freedom < 1:
        notes.append("as many parameters as points: no intervals")
    return notes


def compare(base: ArchitectureFit, other: ArchitectureFit, approach: Approach) -> Comparison:
    """The exponents of two architectures, and the compute for equal losses where both reached them."""
    exponents = tuple(e for name in QUANTITIES if (e := _exponents(base, other, approach, name)) is not None)
    ranges = base.losses(approach), other.losses(approach)
    names = base.architecture, other.architecture
    if ranges[0] is None or ranges[1] is None:
        return Comparison(approach, *names, exponents, (), "one of the two has no law")
    low, high = max(r[0] for r in ranges if r), min(r[1] for r in ranges if r)
    if low >= high:
        return Comparison(approach, *names, exponents, (), "no loss was reached by both; nothing is extrapolated")
    losses = [math.exp((1 - part) * math.log(high) + part * math.log(low)) for part in (0.1, 0.5, 0.9)]
    savings = tuple(Saving(loss, saving(base, other, approach, loss)) for loss in losses)
    return Comparison(approach, *names, exponents, savings, None)


def _exponents(base: ArchitectureFit, other: ArchitectureFit, approach: Approach, name: str) -> Exponents | None:
    quantity = QUANTITIES[name]
    if approach == "parametric":
        if isinstance(base.parametric, str) or isinstance(other.parametric, str):
            return None
        one, two = _together(base.parametric.exponents()[name], other.parametric.exponents()[name])
        freedom = min(base.parametric.freedom, other.parametric.freedom)
        estimate = _paired(base.parametric, other.parametric, two - one)
        error = float(np.std((two - one)[1:])) if len(one) > 2 else 0.0
        p = 2 * float(stats.t.sf(abs(estimate.mean) / error, freedom)) if error and freedom > 0 else None
        what = quantity if name != "loss" else "L(C) − E"
        return Exponents(what, float(one[0]), float(two[0]), Difference(estimate, p))
    laws = base.law(approach, name), other.law(approach, name)
    if laws[0] is None or laws[1] is None:
        return None
    parts = [(law.exponent, law.exponent_error, law.freedom) for law in laws if law is not None]
    return Exponents(quantity, laws[0].exponent, laws[1].exponent, difference(*parts))


def saving(base: ArchitectureFit, other: ArchitectureFit, approach: Approach, loss: float) -> Interval:
    """Compute of `other` over that of `base` at a loss, both by their laws (which must be there)."""
    if approach == "parametric":
        assert not isinstance(base.parametric, str)
        assert not isinstance(other.parametric, str)
        one, two = _together(base.parametric.log_compute(loss), other.parametric.log_compute(loss))
        with np.errstate(invalid="ignore"):
            return _paired(base.parametric, other.parametric, two - one).exp()
    laws = base.law(approach, "loss"), other.law(approach, "loss")
    assert laws[0] is not None
    assert laws[1] is not None
    (one_at, one_error), (two_at, two_error) = laws[0].log_inverse(loss), laws[1].log_inverse(loss)
    error, freedom = welch([(one_error, laws[0].freedom), (two_error, laws[1].freedom)])
    return Interval.around(two_at - one_at, error, freedom).exp()


def _together(one: Floats, two: Floats) -> tuple[Floats, Floats]:
    """The values and as many bootstrap samples of both; the samples are independent, so they pair at random."""
    count = min(len(one), len(two))
    return one[:count], two[:count]


def _paired(one: Parametric, two: Parametric, values: Floats) -> Interval:
    """The estimate of a difference, with the fewer degrees of freedom of the two, which is the wider interval."""
    return (one if one.freedom <= two.freedom else two).estimate(values)
