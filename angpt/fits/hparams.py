"""The best learning rate as a function of model size, tokens and batch size, and the best batch size of the first two.

For each model size N, budget D and batch size B, log loss over log learning rate is interpolated and minimised; the
minima give the law lr*(N, D, B). Where a size and budget has at least three, they are interpolated and minimised over
log batch size in the same way, the paper's second stage; these optima give the law B*(N, D), and the rate at the best
batch size follows. A minimum at the edge of its grid does not count: it is flagged and left out of the laws.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from angpt.errors import UserError
from angpt.fits.interpolate import Curve
from angpt.fits.plane import PlaneLaw, fit_plane
from angpt.fits.records import Cell, RunTable
from angpt.present.words import label, quantity
from angpt.stats import Interval, edge

T = TypeVar("T")
SAME_BUDGET = 0.05
"""Relative difference in tokens per parameter up to which budgets are the same."""
SETTINGS = {"parameters": "N", "tokens": "D", "batch_tokens": "B"}
"""What the laws depend on, and its symbols."""
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
    """The sweeps and the optimum of one model size and budget of one architecture."""

    architecture: str
    parameters: float
    tokens: float
    sweeps: tuple[Sweep, ...]
    optimum: Optimum | None
    problem: str | None
    """Why there is no optimum."""
    flags: tuple[str, ...]
    """Notes on the sweeps and on the optimum."""
    budgets: int = 1
    """Number of budgets of this size."""

    @property
    def name(self) -> str:
        tokens = f", {quantity(self.tokens)} tokens" if self.budgets > 1 else ""
        return f"{label(self.architecture)} {quantity(self.parameters)}{tokens}"


@dataclass(frozen=True)
class Best:
    """A best value, and the settings that it belongs to: SETTINGS for a learning rate, without the last for a batch."""

    settings: dict[str, float]
    value: float


@dataclass(frozen=True)
class FittedLaw:
    """A law, the best values that it is fitted to, and how well each is predicted by the others."""

    law: PlaneLaw
    points: tuple[Best, ...]
    left_out: tuple[Interval | None, ...]
    """For each point, the prediction from the others divided by the value; None if the others have no such law."""

    def check(self, settings: dict[str, float]) -> Interval | None:
        """The element of `left_out` for these settings."""
        return next((left for p, left in zip(self.points, self.left_out, strict=True) if p.settings == settings), None)

    @property
    def sizes(self) -> list[float]:
        return sorted({point.settings["parameters"] for point in self.points})


@dataclass(frozen=True)
class Trend:
    """The laws of one architecture."""

    architecture: str
    lr: FittedLaw
    """lr*(N, D, B), with terms for what varies."""
    batch_tokens: FittedLaw | None
    """B*(N, D); None without optima over batch sizes."""

    @property
    def with_tokens(self) -> bool:
        """True if the law of the learning rate has a term for tokens."""
        return "tokens" in self.lr.law.center

    def at_best_batch(self, parameters: float, tokens: float) -> dict[str, Interval]:
        """`batch_tokens`, B*(N, D), and `lr`, the learning rate at that batch size (its interval is for this batch)."""
        assert self.batch_tokens is not None
        settings = {"parameters": parameters, "tokens": tokens}
        batch = self.batch_tokens.law.at(settings)
        return {"batch_tokens": batch, "lr": self.lr.law.at({**settings, "batch_tokens": batch.mean})}


@dataclass(frozen=True)
class HparamFit:
    notes: tuple[str, ...]
    trends: tuple[Trend, ...]
    sizes: tuple[SizeFit, ...]

    def of(self, architecture: str) -> list[SizeFit]:
        return [size for size in self.sizes if size.architecture == architecture]


def fit_hparams(table: RunTable, multiple: float | None = None) -> HparamFit:
    """The optimum of every size and budget, and the laws through them; `multiple` selects tokens per parameter."""
    cells = _chosen_budget(table, multiple)
    notes = list(table.notes)
    sizes: list[SizeFit] = []
    trends: list[Trend] = []
    several = 0
    for architecture in dict.fromkeys(cell.record.architecture for cell in cells):
        mine = [c for c in cells if c.record.architecture == architecture]
        found: list[SizeFit] = []
        for n in sorted({c.record.parameters for c in mine}):
            budgets = by_budget([c for c in mine if c.record.parameters == n])
            for group in budgets:
                best, chosen = _best_settings(group)
                found.append(replace(fit_size(best), budgets=len(budgets)))
                several += chosen
        sizes += found
        trend = fit_trend(architecture, found)
        if isinstance(trend, str):
            notes.append(f"{label(architecture)}: {trend}")
        else:
            trends.append(trend)
            for what, fitted in (("learning rate", trend.lr), ("batch size", trend.batch_tokens)):
                if fitted is not None and fitted.law.freedom < 1:
                    count = len(fitted.points)
                    notes.append(f"{label(architecture)}: {count} values: the law of the {what} has no interval")
    if several:
        notes.append(f"{several:,} points were run with several other settings (such as β₂); the best of each is taken")
    for size in sizes:
        notes += [f"{size.name}: {text}" for text in (size.problem, *size.flags) if text]
    return HparamFit(tuple(notes), tuple(trends), tuple(sizes))


def _chosen_budget(table: RunTable, multiple: float | None) -> list[Cell]:
    """The cells with `multiple` tokens per parameter, or all, and a cell with an infinite loss per diverged run."""
    cells = [*table.cells, *(Cell(r, math.inf, 0, 1) for r in table.diverged if r.batch_tokens and r.lr)]
    if multiple is None:
        return cells
    ratios = [c.record.tokens / c.record.parameters for c in cells]
    chosen = [c for c, r in zip(cells, ratios, strict=True) if abs(math.log(r / multiple)) <= SAME_BUDGET]
    if not chosen:
        tried = sorted({float(f"{r:.3g}") for r in ratios})
        raise UserError(f"--multiple {multiple:g}: no run has this many tokens per parameter; there are {tried}")
    return chosen


def by_budget(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of one model size in groups of equal tokens, within what rounding to whole steps changes."""
    groups: list[list[Cell]] = []
    for cell in sorted(cells, key=lambda c: c.record.tokens):
        if groups and math.log(cell.record.tokens / groups[-1][0].record.tokens) <= 2 * SAME_BUDGET:
            groups[-1].append(cell)
        else:
            groups.append([cell])
    return groups


def _best_settings(cells: Sequence[Cell]) -> tuple[list[Cell], int]:
    """The best cell for each batch size and rate, and for how many of these several settings finished."""

    def key(cell: Cell) -> tuple[object, ...]:
        return cell.record.batch_tokens, cell.record.lr

    best: dict[tuple[object, ...], Cell] = {}
    for cell in sorted(cells, key=lambda c: c.log_loss):
        best.setdefault(key(cell), cell)
    return list(best.values()), sum(n > 1 for n in Counter(key(c) for c in cells if c.seeds).values())


def _or_problem(found: T | str) -> tuple[T | None, str | None]:
    return (None, found) if isinstance(found, str) else (found, None)


def fit_size(cells: Sequence[Cell]) -> SizeFit:
    """The optimum of one model size and budget. Settings at which any seed diverged count as diverged."""
    first = cells[0].record
    tokens = float(np.median([c.record.tokens for c in cells if c.seeds] or [c.record.tokens for c in cells]))
    sweeps = []
    for batch in sorted({c.record.batch_tokens or 0.0 for c in cells}):
        mine = [c for c in cells if c.record.batch_tokens == batch]
        lost = sorted(c.record.lr or 0.0 for c in mine if c.diverged)
        good = sorted((c.record.lr or 0.0, math.exp(c.log_loss)) for c in mine if not c.diverged)
        sweeps.append(fit_sweep(batch, good, lost))
    flags = [f"batch of {quantity(s.batch_tokens)} tokens: {s.problem}" for s in sweeps if s.problem]
    flags += [
        f"batch of {quantity(s.batch_tokens)} tokens: the next higher rate diverged, so the best one itself is taken"
        for s in sweeps
        if s.minimum is not None and s.minimum.bounded
    ]
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


def fit_trend(architecture: str, sizes: Sequence[SizeFit]) -> Trend | str:
    """The laws of the best learning rate and batch size, or why there is none."""
    rates, batches = [], []
    for size in sizes:
        of_size = size.parameters, size.tokens
        for s in size.sweeps:
            if s.minimum is not None:
                rates.append(Best(dict(zip(SETTINGS, (*of_size, s.batch_tokens), strict=True)), s.minimum.lr))
        if size.optimum is not None:
            batches.append(Best(dict(zip(SETTINGS, of_size, strict=False)), size.optimum.batch_tokens))
    lr = fit_law(rates)
    if lr is None:
        return f"{len(rates)} of {sum(len(size.sweeps) for size in sizes)} sweeps have a best rate inside: no law"
    return Trend(architecture, lr, fit_law(batches))


def fit_law(points: Sequence[Best]) -> FittedLaw | None:
    """The law of best values, with the check by leaving each out in turn; None for fewer than two.

    It has a term for a setting that varies where those before it are equal: for tokens if a size was trained on several
    budgets, for the batch size if a size and budget has several. The effects of these settings can be told apart.
    """
    if len(points) < 2:
        return None
    names, terms = list(points[0].settings), []
    for i, name in enumerate(names):
        found = defaultdict(set)
        for point in points:
            found[tuple(point.settings[other] for other in names[:i])].add(point.settings[name])
        if any(len(values) > 1 for values in found.values()):
            terms.append(name)

    def law(chosen: Sequence[Best]) -> PlaneLaw:
        return fit_plane({name: [p.settings[name] for p in chosen] for name in terms}, [p.value for p in chosen])

    def left_out(i: int) -> Interval | None:
        try:
            others = law([*points[:i], *points[i + 1 :]])
        except ValueError:
            return None
        return others.at(points[i].settings, new=True).times(1 / points[i].value)

    return FittedLaw(law(points), tuple(points), tuple(left_out(i) for i in range(len(points))))
