"""The best batch size and learning rate as functions of model size: the two-stage interpolation of the paper.

For each model size and batch size, the log loss over the log rate is interpolated and minimised; then the minima over
the log batch size likewise, and the rate is read off the interpolated curve of the best rates. A minimum at the edge of
its grid does not count: it is flagged with what to try, and is left out of the laws B*(N) and lr*(N).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from angpt.errors import UserError
from angpt.fits.interpolate import Curve
from angpt.fits.powerlaw import PowerLaw, fit_power_law
from angpt.fits.records import Cell, Record, RunTable
from angpt.present.words import label, quantity
from angpt.stats import Interval, edge

SAME_BUDGET = 0.05
"""Budgets, as multiples of the parameters, within this part of each other are the same."""
END = {-1: "low", 1: "high"}
"""Names of the edges of a grid."""


@dataclass(frozen=True)
class Minimum:
    """The minimum over the rates at one batch size (first stage)."""

    lr: float
    loss: float
    method: Literal["akima", "parabola", "bounded"]
    """bounded: the next higher rate diverged, and the lowest point itself is taken."""


@dataclass(frozen=True)
class Optimum:
    """The optimum over the batch sizes at one model size (second stage)."""

    batch_tokens: float
    lr: float
    loss: float
    method: Literal["akima", "parabola"]


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
        """log loss over log lr, for figures."""
        if self.minimum is None or self.minimum.method == "bounded":
            return None
        return Curve.through(np.log(self.lrs), np.log(self.losses), edge(self.losses)[0])


@dataclass(frozen=True)
class SizeFit:
    """One model size of one architecture."""

    architecture: str
    parameters: float
    tokens: float
    sweeps: tuple[Sweep, ...]
    optimum: Optimum | None
    problem: str | None
    """Why there is no optimum."""
    flags: tuple[str, ...]
    """Remarks on the optimum."""


@dataclass(frozen=True)
class LeftOut:
    """The prediction for one size by the law of the others, divided by what was found there."""

    parameters: float
    batch_tokens: Interval
    lr: Interval


@dataclass(frozen=True)
class Trend:
    """The laws of one architecture."""

    architecture: str
    batch_tokens: PowerLaw
    lr: PowerLaw
    sizes: tuple[float, ...]
    leave_one_out: tuple[LeftOut, ...]


@dataclass(frozen=True)
class HparamFit:
    sizes: tuple[SizeFit, ...]
    trends: tuple[Trend, ...]
    notes: tuple[str, ...]

    def of(self, architecture: str) -> list[SizeFit]:
        return [size for size in self.sizes if size.architecture == architecture]


def fit_hparams(table: RunTable, multiple: float | None = None) -> HparamFit:
    """The optima of every size and the laws through them; `multiple` chooses the budget in tokens per parameter."""
    cells, lost = _one_budget(table, multiple)
    notes = list(table.notes)
    cells, chosen = _best_settings(cells)
    if chosen:
        notes.append(f"{chosen:,} points were run with several other settings (such as β₂); the best of each is taken")
    sizes: list[SizeFit] = []
    trends: list[Trend] = []
    for architecture in dict.fromkeys(cell.record.architecture for cell in cells):
        mine = [c for c in cells if c.record.architecture == architecture]
        theirs = [r for r in lost if r.architecture == architecture]
        counts = sorted({c.record.parameters for c in mine})
        found = [fit_size([c for c in mine if c.record.parameters == n], theirs) for n in counts]
        sizes += found
        optima = [(size.parameters, size.optimum) for size in found if size.optimum is not None]
        if len(counts) < 2:
            notes.append(
                f"{label(architecture)}: all runs have {quantity(counts[0])} parameters; a law in the size of the "
                "model needs two sizes at least, and three for an interval: no law"
            )
            continue
        if len(optima) < 2:
            notes.append(f"{label(architecture)}: {_count(len(optima))} with an optimum inside its grid: no law")
            continue
        if len(optima) == 2:
            notes.append(f"{label(architecture)}: two sizes with an optimum fix the law, but leave no interval")
        trends.append(fit_trend(architecture, optima))
    for size in sizes:
        name = f"{label(size.architecture)} {quantity(size.parameters)}"
        notes += [f"{name}: {text}" for text in ((size.problem,) if size.problem else ()) + size.flags]
    return HparamFit(tuple(sizes), tuple(trends), tuple(notes))


def _count(sizes: int) -> str:
    return "no size" if sizes == 0 else "only one size"


def _one_budget(table: RunTable, multiple: float | None) -> tuple[list[Cell], list[Record]]:
    """The cells and diverged runs of one budget per size."""

    def ratio(record: Record) -> float:
        return record.tokens / record.parameters

    if multiple is not None:
        near: Callable[[Record], bool] = lambda r: abs(math.log(ratio(r) / multiple)) <= SAME_BUDGET  # noqa: E731
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
    """One cell for each size, batch size and rate, and how many of them were a choice between settings."""
    best: dict[tuple[Any, ...], Cell] = {}
    several: set[tuple[Any, ...]] = set()
    for cell in cells:
        r = cell.record
        key = (r.architecture, r.parameters, r.batch_tokens, r.lr)
        if key in best:
            several.add(key)
        if key not in best or cell.log_loss < best[key].log_loss:
            best[key] = cell
    return list(best.values()), len(several)


def fit_size(cells: Sequence[Cell], diverged: Sequence[Record]) -> SizeFit:
    """The optimum of one model size. A point at which any seed diverged counts as diverged."""
    first = cells[0].record
    sweeps = []
    for batch in sorted({c.record.batch_tokens or 0.0 for c in cells}):
        mine = [c for c in cells if c.record.batch_tokens == batch]
        tried = {r.lr or 0.0 for r in diverged if (r.parameters, r.batch_tokens) == (first.parameters, batch)}
        lost = {c.record.lr or 0.0 for c in mine if c.diverged} | tried - {c.record.lr for c in mine}
        good = sorted((c.record.lr or 0.0, math.exp(c.log_loss)) for c in mine if not c.diverged)
        sweeps.append(fit_sweep(batch, good, sorted(lost)))
    tokens = float(np.median([c.record.tokens for c in cells]))
    flags = [f"batch of {quantity(s.batch_tokens)} tokens: {s.problem}" for s in sweeps if s.problem]
    flags += [
        f"batch of {quantity(s.batch_tokens)} tokens: the next higher rate diverged, so the best one itself is taken"
        for s in sweeps
        if s.minimum is not None and s.minimum.method == "bounded"
    ]
    usable = [(s.batch_tokens, s.minimum) for s in sweeps if s.minimum is not None]

    def refused(problem: str) -> SizeFit:
        return SizeFit(first.architecture, first.parameters, tokens, tuple(sweeps), None, problem, tuple(flags))

    if len(usable) < 3:
        return refused(
            f"{len(usable)} of {len(sweeps)} batch sizes have a best rate inside their grid, three are needed: no "
            "optimum"
        )
    batches, losses = [math.log(batch) for batch, _ in usable], [math.log(m.loss) for _, m in usable]
    best, side = edge(losses)
    if side:
        way = "smaller" if side < 0 else "larger"
        return refused(
            f"the best batch size, {quantity(usable[best][0])} tokens, is at the {END[side]} edge of the grid: no "
            f"optimum; try {way} ones"
        )
    curve = Curve.through(batches, losses, best)
    at = curve.minimiser()
    value = float(curve(at))
    for sweep in sweeps:
        if sweep.minimum is None and sweep.losses and math.log(min(sweep.losses)) < value:
            return refused(
                f"the batch of {quantity(sweep.batch_tokens)} tokens is better still, but its best rate is not inside "
                "of its grid: no optimum; extend that grid"
            )
    rate = float(Curve.through(batches, [math.log(m.lr) for _, m in usable], best)(at))
    if curve.method == "parabola":
        flags.append(f"{len(usable)} batch sizes are fewer than Akima's interpolation needs: parabola")
    if few := [quantity(batch) for batch, m in usable if m.method == "parabola"]:
        flags.append(f"fewer rates than Akima's interpolation needs at a batch of {', '.join(few)} tokens: parabola")
    return SizeFit(
        architecture=first.architecture,
        parameters=first.parameters,
        tokens=tokens,
        sweeps=tuple(sweeps),
        optimum=Optimum(math.exp(at), math.exp(rate), math.exp(value), curve.method),
        problem=None,
        flags=tuple(flags),
    )


def fit_sweep(batch: float, points: Sequence[tuple[float, float]], diverged: Sequence[float]) -> Sweep:
    """The first stage at one batch size: (rate, loss) in the order of rates."""
    lrs, losses = tuple(p[0] for p in points), tuple(p[1] for p in points)

    def sweep(found: Minimum | str) -> Sweep:
        minimum, problem = (None, found) if isinstance(found, str) else (found, None)
        return Sweep(batch, lrs, losses, tuple(diverged), minimum, problem)

    if not points:
        return sweep(f"all {len(diverged)} rates diverged; try lower ones")
    best, side = edge(losses)
    if side > 0 and any(lr > lrs[best] for lr in diverged):
        return sweep(Minimum(lrs[best], losses[best], "bounded"))
    if len(points) < 3:
        return sweep(f"{len(points)} rates are too few for a minimum; try three at least")
    if side:
        way = "lower" if side < 0 else "higher"
        return sweep(f"the best rate, {lrs[best]:g}, is at the {END[side]} edge of the grid; try {way} ones")
    curve = Curve.through(np.log(lrs), np.log(losses), best)
    at = curve.minimiser()
    return sweep(Minimum(math.exp(at), math.exp(float(curve(at))), curve.method))


def fit_trend(architecture: str, optima: Sequence[tuple[float, Optimum]]) -> Trend:
    """The laws through the optima (parameters, optimum), and for each size what the others say of it."""
    n, batches, rates = zip(*((size, o.batch_tokens, o.lr) for size, o in optima), strict=True)
    left_out = []
    for i in range(len(n) if len(n) >= 3 else 0):
        others = [j for j in range(len(n)) if j != i]

        def ratio(y: Sequence[float], i: int = i, others: Sequence[int] = others) -> Interval:
            said = fit_power_law([n[j] for j in others], [y[j] for j in others]).at(n[i], new=True)
            return said.times(1 / y[i])

        left_out.append(LeftOut(n[i], ratio(batches), ratio(rates)))
    return Trend(architecture, fit_power_law(n, batches), fit_power_law(n, rates), tuple(n), tuple(left_out))
