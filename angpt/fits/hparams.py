"""The best batch size and learning rate as functions of model size: the two-stage interpolation of the paper.

For each model size and batch size, log loss over log learning rate is interpolated and minimised. The minima are then
interpolated and minimised over log batch size in the same way, and the rate is read off the interpolated curve of the
best rates. A minimum at the edge of its grid does not count: it is flagged and left out of the laws B*(N) and lr*(N).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from angpt.errors import UserError
from angpt.fits.interpolate import Curve
from angpt.fits.powerlaw import PowerLaw, fit_power_law
from angpt.fits.records import Cell, Record, RunTable
from angpt.present.words import label, quantity
from angpt.stats import Interval, edge

T = TypeVar("T")
SAME_BUDGET = 0.05
"""Relative difference in tokens per parameter up to which budgets are the same."""
END = {-1: "low", 1: "high"}
"""Names of the edges of a grid."""


@dataclass(frozen=True)
class Minimum:
    """The minimum over the rates at one batch size (first stage)."""

    lr: float
    loss: float
    bounded: bool = False
    """True if the next higher rate diverged, so that the lowest point itself is the minimum."""


@dataclass(frozen=True)
class Optimum:
    """The optimum over the batch sizes at one model size (second stage)."""

    batch_tokens: float
    lr: float
    loss: float


@dataclass(frozen=True)
class Sweep:
    """The learning rates tried at one model size and batch size."""

    batch_tokens: float
    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: tuple[float, ...]
    """Rates at which a run diverged."""
    minimum: Minimum | None
    problem: str | None
    """Why there is no minimum inside the grid."""

    def curve(self) -> Curve | None:
        """Interpolated log loss over log learning rate, for figures; None without a minimum inside the grid."""
        if self.minimum is None or self.minimum.bounded:
            return None
        return Curve.through(np.log(self.lrs), np.log(self.losses))


@dataclass(frozen=True)
class SizeFit:
    """The sweeps and the optimum of one model size of one architecture."""

    architecture: str
    parameters: float
    tokens: float
    sweeps: tuple[Sweep, ...]
    optimum: Optimum | None
    problem: str | None
    """Why there is no optimum."""
    flags: tuple[str, ...]
    """Notes on the sweeps and on the optimum."""


@dataclass(frozen=True)
class LeftOut:
    """Prediction for one size from the laws of the others, divided by the optimum found there."""

    parameters: float
    batch_tokens: Interval
    lr: Interval


@dataclass(frozen=True)
class Trend:
    """The laws B*(N) and lr*(N) of one architecture."""

    architecture: str
    batch_tokens: PowerLaw
    lr: PowerLaw
    sizes: tuple[float, ...]
    leave_one_out: tuple[LeftOut, ...]


@dataclass(frozen=True)
class HparamFit:
    notes: tuple[str, ...]
    trends: tuple[Trend, ...]
    sizes: tuple[SizeFit, ...]

    def of(self, architecture: str) -> list[SizeFit]:
        return [size for size in self.sizes if size.architecture == architecture]


def fit_hparams(table: RunTable, multiple: float | None = None) -> HparamFit:
    """The optimum of every size and the laws through them; `multiple` selects the budget in tokens per parameter."""
    all_cells, lost = _one_budget(table, multiple)
    cells, chosen = _best_settings(all_cells)
    notes = list(table.notes)
    if chosen:
        notes.append(f"{chosen:,} points were run with several other settings (such as β₂); the best of each is taken")
    sizes: list[SizeFit] = []
    trends: list[Trend] = []
    for architecture in dict.fromkeys(cell.record.architecture for cell in all_cells):
        mine = [c for c in cells if c.record.architecture == architecture]
        diverged = [r for r in lost if r.architecture == architecture]
        counts = sorted({c.record.parameters for c in mine})
        found = [fit_size([c for c in mine if c.record.parameters == n], diverged) for n in counts]
        sizes += found
        optima = [(size.parameters, size.optimum) for size in found if size.optimum is not None]
        if len(optima) >= 2:
            trends.append(fit_trend(architecture, optima))
        if len(counts) < 2:
            note = f"all runs have {quantity(counts[0])} parameters; a law needs at least two sizes, an interval three"
        elif len(optima) < 2:
            note = f"{len(optima)} of {len(counts)} sizes have an optimum inside their grid, two are needed: no law"
        elif len(optima) == 2:
            note = "only two sizes have an optimum: the law has no interval"
        else:
            continue
        notes.append(f"{label(architecture)}: {note}")
    for size in sizes:
        name = f"{label(size.architecture)} {quantity(size.parameters)}"
        notes += [f"{name}: {text}" for text in (size.problem, *size.flags) if text]
    return HparamFit(tuple(notes), tuple(trends), tuple(sizes))


def _one_budget(table: RunTable, multiple: float | None) -> tuple[list[Cell], list[Record]]:
    """The cells and diverged runs of one budget per size."""

    def ratio(record: Record) -> float:
        return record.tokens / record.parameters

    if multiple is not None:

        def near(record: Record) -> bool:
            return abs(math.log(ratio(record) / multiple)) <= SAME_BUDGET

        cells = [c for c in table.cells if near(c.record)]
        if not cells:
            tried = sorted({float(f"{ratio(c.record):.3g}") for c in table.cells})
            raise UserError(f"--multiple {multiple:g}: no run has this many tokens per parameter; there are {tried}")
        return cells, [r for r in table.diverged if near(r)]
    by_size: dict[tuple[str, float], list[float]] = {}
    for cell in table.cells:
        by_size.setdefault((cell.record.architecture, cell.record.parameters), []).append(ratio(cell.record))
    for (architecture, parameters), ratios in by_size.items():
        if math.log(max(ratios) / min(ratios)) > 2 * SAME_BUDGET:
            found = sorted({float(f"{r:.2g}") for r in ratios})
            raise UserError(
                f"{label(architecture)} {quantity(parameters)} was trained on several budgets, {found} tokens per "
                f"parameter; the best rate depends on it: choose one with --multiple, such as --multiple {found[0]:g}"
            )
    return list(table.cells), list(table.diverged)


def _best_settings(cells: Sequence[Cell]) -> tuple[list[Cell], int]:
    """The best cell for each size, batch size and rate, and for how many of these there were several cells."""

    def key(cell: Cell) -> tuple[object, ...]:
        return cell.record.architecture, cell.record.parameters, cell.record.batch_tokens, cell.record.lr

    best: dict[tuple[object, ...], Cell] = {}
    for cell in sorted(cells, key=lambda c: c.log_loss):
        best.setdefault(key(cell), cell)
    return list(best.values()), sum(count > 1 for count in Counter(map(key, cells)).values())


def _or_problem(found: T | str) -> tuple[T | None, str | None]:
    return (None, found) if isinstance(found, str) else (found, None)


def fit_size(cells: Sequence[Cell], diverged: Sequence[Record]) -> SizeFit:
    """The optimum of one model size. Settings at which any seed diverged count as diverged."""
    first = cells[0].record
    sweeps = []
    for batch in sorted({c.record.batch_tokens or 0.0 for c in cells}):
        mine = [c for c in cells if c.record.batch_tokens == batch]
        tried = {r.lr or 0.0 for r in diverged if (r.parameters, r.batch_tokens) == (first.parameters, batch)}
        lost = {c.record.lr or 0.0 for c in mine if c.diverged} | tried - {c.record.lr for c in mine}
        good = sorted((c.record.lr or 0.0, math.exp(c.log_loss)) for c in mine if not c.diverged)
        sweeps.append(fit_sweep(batch, good, sorted(lost)))
    flags = [f"batch of {quantity(s.batch_tokens)} tokens: {s.problem}" for s in sweeps if s.problem]
    flags += [
        f"batch of {quantity(s.batch_tokens)} tokens: the next higher rate diverged, so the best one itself is taken"
        for s in sweeps
        if s.minimum is not None and s.minimum.bounded
    ]
    tokens = float(np.median([c.record.tokens for c in cells]))
    optimum, problem = _or_problem(_optimum(sweeps))
    return SizeFit(first.architecture, first.parameters, tokens, tuple(sweeps), optimum, problem, tuple(flags))


def _optimum(sweeps: Sequence[Sweep]) -> Optimum | str:
    """The second stage: the minimum over the batch sizes, or why it does not exist."""
    usable = [(s.batch_tokens, s.minimum) for s in sweeps if s.minimum is not None]
    if len(usable) < 3:
        found = f"{len(usable)} of {len(sweeps)} batch sizes"
        return f"{found} have a best rate inside their grid, three are needed: no optimum"
    batches, losses = [math.log(batch) for batch, _ in usable], [math.log(m.loss) for _, m in usable]
    best, side = edge(losses)
    if side:
        return (
            f"the best batch size, {quantity(usable[best][0])} tokens, is at the {END[side]} edge of the grid: no "
            f"optimum; try {'smaller' if side < 0 else 'larger'} ones"
        )
    curve = Curve.through(batches, losses)
    at = curve.minimiser()
    value = float(curve(at))
    for sweep in sweeps:
        if sweep.minimum is None and sweep.losses and math.log(min(sweep.losses)) < value:
            return (
                f"the batch of {quantity(sweep.batch_tokens)} tokens has a lower loss, but its best rate is not inside "
                "its grid: no optimum; extend that grid"
            )
    rate = float(Curve.through(batches, [math.log(m.lr) for _, m in usable])(at))
    return Optimum(math.exp(at), math.exp(rate), math.exp(value))


def fit_sweep(batch: float, points: Sequence[tuple[float, float]], diverged: Sequence[float]) -> Sweep:
    """The first stage at one batch size; `points` are (rate, loss) in the order of rates."""
    lrs, losses = tuple(p[0] for p in points), tuple(p[1] for p in points)
    return Sweep(batch, lrs, losses, tuple(diverged), *_or_problem(_minimum(lrs, losses, diverged)))


def _minimum(lrs: Sequence[float], losses: Sequence[float], diverged: Sequence[float]) -> Minimum | str:
    """The minimum over the learning rates, or why it does not exist."""
    if not lrs:
        return f"all {len(diverged)} rates diverged; try lower ones"
    best, side = edge(losses)
    if side > 0 and any(lr > lrs[best] for lr in diverged):
        return Minimum(lrs[best], losses[best], bounded=True)
    if len(lrs) < 3:
        return f"{len(lrs)} rates are too few for a minimum; try at least three"
    if side:
        way = "lower" if side < 0 else "higher"
        return f"the best rate, {lrs[best]:g}, is at the {END[side]} edge of the grid; try {way} ones"
    curve = Curve.through(np.log(lrs), np.log(losses))
    at = curve.minimiser()
    return Minimum(math.exp(at), math.exp(float(curve(at))))


def fit_trend(architecture: str, optima: Sequence[tuple[float, Optimum]]) -> Trend:
    """The laws through the optima (parameters, optimum), and the prediction for each size from the others."""
    n, batches, rates = np.array([(size, o.batch_tokens, o.lr) for size, o in optima]).T

    def left_out(i: int) -> LeftOut:
        others = np.arange(len(n)) != i
        predictions = (fit_power_law(n[others], y[others]).at(n[i], new=True).times(1 / y[i]) for y in (batches, rates))
        return LeftOut(float(n[i]), *predictions)

    checks = tuple(map(left_out, range(len(n)))) if len(n) >= 3 else ()
    return Trend(architecture, fit_power_law(n, batches), fit_power_law(n, rates), tuple(n.tolist()), checks)
