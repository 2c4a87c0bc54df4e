"""The figures of a hyper-parameter fit: the sweeps with their minima, the laws, and the trends over size and tokens."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.typing import ColorType

from angpt.fits.hparams import SETTINGS, HparamFit, SizeFit, Sweep, Trend
from angpt.fits.plane import PlaneLaw
from angpt.fits.powerlaw import Floats
from angpt.present.charts import Absent, Chart
from angpt.present.style import DEPTH, INK, MARKERS, band, evenly, label_axis, log_ticks, looks, panels
from angpt.present.words import bracketed, label, quantity, scientific
from angpt.stats import Interval

EXCESS = 3.0
"""Per cent above the best loss at which the colour scale ends."""
PANELS = 12
"""Most models that the figure of sweeps shows."""
PALE = "#e4e6ea"
WORDS = {"batch_tokens": ("batch size", "tokens per step"), "lr": ("learning rate", "peak learning rate")}
"""Name and axis label of each quantity."""


def sweeps(fit: HparamFit) -> Chart:
    """Loss over learning rate, a panel for each model, a line for each batch size."""
    shown = [fit.sizes[i] for i in evenly(len(fit.sizes), PANELS)]
    batches = sorted({s.batch_tokens for size in shown for s in size.sweeps})
    places = np.linspace(0, 1, max(2, len(batches)))
    looks_of = {b: (DEPTH(x), MARKERS[i % 7]) for i, (b, x) in enumerate(zip(batches, places, strict=False))}

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(len(shown), narrow, columns=3, height=2.7)
        for ax, size in zip(axes, shown, strict=True):
            for sweep in size.sweeps:
                _draw_sweep(ax, sweep, *looks_of[sweep.batch_tokens])
            ax.set_xscale("log")
            label_axis(ax.xaxis, "{:g}".format, log_ticks(*ax.get_xlim(), short=100))
            ax.set_ylim(*_loss_range(size))
            ax.set(title=size.name, xlabel="learning rate", ylabel="validation loss")
        star = Line2D([], [], color="none", marker="*", ms=10, mfc="white", mec=INK, label="interpolated minimum")
        lines = (
            Line2D([], [], color=color, marker=marker, ms=4, lw=1.4, label=f"{quantity(b)} tokens")
            for b, (color, marker) in looks_of.items()
        )
        handles = [*lines, star]
        figure.legend(handles=handles, loc="outside upper left", ncols=2 if narrow else min(6, len(handles)))
        return figure

    found = [s.minimum is not None for size in fit.sizes for s in size.sweeps]
    return Chart(
        name="sweeps",
        title="Hyper-parameter sweeps",
        caption="Validation loss over the learning rate, a line for each batch size (tokens per step). Points are "
        "runs, averaged over seeds. Lines are the interpolation in logarithms; they are dotted where the best rate is "
        "at the edge of its grid or the next one diverged (× at the top). Stars: the minima."
        + ("" if len(shown) == len(fit.sizes) else f" Shown are {len(shown)} of {len(fit.sizes)} models."),
        alt=f"Loss against learning rate in {len(shown)} panels, one per model. {sum(found)} of {len(found)} sweeps "
        "have a minimum inside their grid.",
        columns=("architecture", "parameters", "batch_tokens", "lr", "loss", "best_lr", "best_loss", "problem"),
        rows=tuple(
            (size.architecture, size.parameters, s.batch_tokens, lr, loss, *best, s.problem)
            for size in fit.sizes
            for s in size.sweeps
            for best in [(s.minimum.lr, s.minimum.loss) if s.minimum else (None, None)]
            for lr, loss in zip(s.lrs, s.losses, strict=True)
        ),
        draw=draw,
    )


def _draw_sweep(ax: Axes, sweep: Sweep, color: tuple[float, ...], marker: str) -> None:
    ax.plot(sweep.lrs, sweep.losses, marker, color=color, ms=4)
    curve = sweep.curve()
    if curve is None:
        ax.plot(sweep.lrs, sweep.losses, ":", color=color, lw=1.2)
    else:
        x = np.linspace(curve.x[0], curve.x[-1], 200)
        ax.plot(np.exp(x), np.exp(curve(x)), color=color, lw=1.4)
    for lr in sweep.diverged:
        ax.plot(lr, 0.97, "x", color=color, ms=5, mew=1.4, transform=ax.get_xaxis_transform())
    if sweep.minimum is not None:
        ax.plot(sweep.minimum.lr, sweep.minimum.loss, "*", color=color, ms=11, mec=INK, mew=0.8, zorder=5)


def _loss_range(size: SizeFit) -> tuple[float, float]:
    """The range of the loss axis, without losses far above the minima."""
    losses = [x for s in size.sweeps for x in s.losses]
    if not losses:
        return 0.0, 1.0
    low = min(losses)
    high = min(max(losses), low + 4 * float(np.median(np.array(losses) - low)) + 1e-3 * low)
    room = (high - low) or 0.1 * high
    return low - 0.08 * room, high + 0.1 * room


def rates(fit: HparamFit) -> Chart | Absent:
    """The best learning rates against those of their law."""
    title = "Laws of the learning rate"
    if not fit.trends:
        return Absent(title, "No architecture has two sweeps with a best rate inside their grids.")

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(len(fit.trends), narrow, columns=2, height=3.3)
        for ax, trend in zip(axes, fit.trends, strict=True):
            _draw_rates(ax, trend)
            ax.set(title=label(trend.architecture), xlabel="learning rate by the law", ylabel="best learning rate")
        return figure

    laws = [f"{label(t.architecture)}: lr* = {law_text(t.lr.law)}" for t in fit.trends]
    return Chart(
        name="rates",
        title=title,
        caption="Best learning rates, one for each model size, budget and batch size, against the power law of "
        "parameters N, tokens D and tokens per step B through them. Line: equal; band: a factor of 1.4. "
        f"{'. '.join(laws)}.",
        alt=f"Best learning rates against those of their law. {'; '.join(laws)}.",
        columns=("architecture", "parameters", "tokens", "batch_tokens", "best_lr", "fitted_lr"),
        rows=tuple(
            (t.architecture, *p.settings.values(), p.value, t.lr.law.at(p.settings).mean)
            for t in fit.trends
            for p in t.lr.points
        ),
        draw=draw,
    )


def _draw_rates(ax: Axes, trend: Trend) -> None:
    sizes, fitted = trend.lr.sizes, [trend.lr.law.at(p.settings).mean for p in trend.lr.points]
    found = [p.value for p in trend.lr.points]
    x = np.array([min(*fitted, *found) / 1.3, max(*fitted, *found) * 1.3])
    ax.plot(x, x, color=INK, lw=0.8)
    band(ax, x, x / 1.4, x * 1.4, INK)
    for i, size in enumerate(sizes):
        mine = [p.settings["parameters"] == size for p in trend.lr.points]
        at = [[v for v, own in zip(values, mine, strict=True) if own] for values in (fitted, found)]
        ax.plot(*at, MARKERS[i % 7], color=DEPTH(i / max(1, len(sizes) - 1)), mec=INK, mew=0.6, label=quantity(size))
    ax.set(xscale="log", yscale="log", xlim=x, ylim=x)
    digits = (1, 2, 3, 5, 7) if x[1] < 8 * x[0] else (1, 2, 5)
    for axis in (ax.xaxis, ax.yaxis):
        label_axis(axis, "{:.2g}".format, log_ticks(x[0], x[1], digits))
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="parameters", fontsize=8, title_fontsize=8)


def law_text(law: PlaneLaw) -> str:
    """A power law as text: prefactor, variables, and exponents with their intervals."""
    letters = [(SETTINGS[name], *pair) for name, pair in zip(law.exponents, ("aᵃ", "bᵇ", "cᶜ"), strict=False)]
    product = "".join(f"·{symbol}{raised}" for symbol, _, raised in letters)
    values = (f"{a} = {bracketed(e, '.3f')}" for (_, a, _), e in zip(letters, law.exponents.values(), strict=True))
    return f"{factor_text(law.prefactor.mean)}{product}, {', '.join(values)}"


def factor_text(factor: float) -> str:
    return f"{factor:.3g}" if 1e-3 <= factor < 1e4 else scientific(factor, 3)


def trends(fit: HparamFit) -> Chart | Absent:
    """Best batch size, and learning rate at it, over model size."""
    title = "Trends of batch size and learning rate"
    having = [t for t in fit.trends if t.batch_tokens is not None and not t.with_tokens]
    if not having:
        return Absent(title, "No architecture has best batch sizes of two sizes with one budget each.")

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(2 * len(having), narrow, columns=2, height=3.1)
        style = looks([t.architecture for t in having])
        for i, trend in enumerate(having):
            name = trend.architecture
            pair = axes[2 * i : 2 * i + 2]
            for ax, what in zip(pair, WORDS, strict=True):
                drawn = _draw_trend(ax, fit.of(name), trend, what, style[name].color)
                words, unit = WORDS[what]
                ax.set(title=f"{label(name)}: {words}", xlabel="parameters N", ylabel=unit)
            bar = figure.colorbar(drawn, ax=pair, shrink=0.8, aspect=22, pad=0.02, extend="max")
            bar.set_label("loss above the best (%)")
            bar.outline.set_visible(False)
        return figure

    laws = _batch_laws(having)
    return Chart(
        name="trends",
        title=title,
        caption="Optimal batch size, and the learning rate at it, over the number of parameters. Dots: every value of "
        "the grid, darker if its best run is closer to the best of that model. Diamonds: the two-stage estimates; "
        f"dashed: the laws, with their 95 % bands (of the rate: at the dashed batch size). {'. '.join(laws)}.",
        alt=f"Batch size and learning rate against model size. {'; '.join(laws)}.",
        columns=("architecture", "parameters", "tokens", "best_batch_tokens", "best_lr", "loss", "problem"),
        rows=tuple(
            (s.architecture, s.parameters, s.tokens, *best, s.problem)
            for s in fit.sizes
            for o in [s.optimum]
            for best in [(o.batch_tokens, o.lr, o.loss) if o else (None, None, None)]
        ),
        draw=draw,
    )


def _batch_laws(trends: Sequence[Trend]) -> list[str]:
    return [f"{label(t.architecture)}: B* = {law_text(t.batch_tokens.law)}" for t in trends if t.batch_tokens]


def token_trends(fit: HparamFit) -> Chart | Absent:
    """Best batch size, and learning rate at it, over tokens, a line for each model size."""
    title = "Trends over training tokens"
    having = [t for t in fit.trends if t.batch_tokens is not None and t.with_tokens]
    if not having:
        return Absent(title, "No architecture has best batch sizes of sizes with several budgets.")

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(2 * len(having), narrow, columns=2, height=3.3)
        for i, trend in enumerate(having):
            for ax, what in zip(axes[2 * i : 2 * i + 2], WORDS, strict=True):
                _draw_token_trend(ax, fit.of(trend.architecture), trend, what)
                words, unit = WORDS[what]
                ax.set(title=f"{label(trend.architecture)}: {words}", xlabel="training tokens D", ylabel=unit)
        return figure

    laws = _batch_laws(having)
    return Chart(
        name="tokens",
        title=title,
        caption="Optimal batch size, and the learning rate at it, over the number of training tokens. Points: the "
        "two-stage estimates of each model size and budget; lines: the laws, with their 95 % bands (of the rate: at "
        f"the batch size of the line). {'. '.join(laws)}.",
        alt=f"Batch size and learning rate against tokens, a line for each model size. {'; '.join(laws)}.",
        columns=(
            "architecture",
            "parameters",
            "tokens",
            "best_batch_tokens",
            "best_lr",
            "fitted_batch_tokens",
            "fitted_lr",
        ),
        rows=tuple(
            (t.architecture, s.parameters, s.tokens, o.batch_tokens, o.lr, *(fitted[what].mean for what in WORDS))
            for t in having
            for s in fit.of(t.architecture)
            if (o := s.optimum) is not None
            for fitted in [t.at_best_batch(s.parameters, s.tokens)]
        ),
        draw=draw,
    )


def _draw_token_trend(ax: Axes, sizes: Sequence[SizeFit], trend: Trend, what: str) -> None:
    having = [s for s in sizes if s.optimum is not None]
    counts = sorted({s.parameters for s in having})
    for i, size in enumerate(counts):
        color = DEPTH(i / max(1, len(counts) - 1))
        found = [(s.tokens, getattr(s.optimum, what)) for s in having if s.parameters == size]
        x = np.geomspace(min(d for d, _ in found) / 1.3, max(d for d, _ in found) * 1.3, 40)
        _draw_law(ax, x, [trend.at_best_batch(size, d)[what] for d in x], color)
        ax.plot(*zip(*found, strict=True), MARKERS[i % 7], color=color, mec=INK, mew=0.6, ms=6, label=quantity(size))
    ax.set(xscale="log", yscale="log")
    label_axis(ax.xaxis, quantity, log_ticks(*ax.get_xlim()))
    text = quantity if what == "batch_tokens" else "{:.2g}".format
    label_axis(ax.yaxis, text, log_ticks(*ax.get_ylim(), digits=(1, 2, 3, 5, 7)))
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="parameters", fontsize=8, title_fontsize=8)


def _draw_law(ax: Axes, x: Floats, values: Sequence[Interval], color: ColorType) -> None:
    """Draw the values of a law as a dashed line, with a band if they have intervals."""
    mean, low, high = np.array([(v.mean, v.low, v.high) for v in values], float).T
    ax.plot(x, mean, "--", color=color, lw=1.4, zorder=4)
    if values[0].low is not None:
        band(ax, x, low, high, color)


def _draw_trend(ax: Axes, sizes: Sequence[SizeFit], trend: Trend, what: str, color: str) -> PathCollection:
    shades = LinearSegmentedColormap.from_list("excess", [color, PALE])
    points = [point for size in sizes for point in _grid_points(size, what)]
    order = sorted(points, key=lambda p: -p[2])  # the best on top
    n, y, excess = (np.array([p[i] for p in order]) for i in range(3))
    drawn = ax.scatter(n, y, c=excess, cmap=shades, norm=Normalize(0, EXCESS), s=30, edgecolors=INK, linewidths=0.3)
    optima = [(s.parameters, getattr(s.optimum, what)) for s in sizes if s.optimum is not None]
    x, tokens = np.geomspace(min(n) / 1.3, max(n) * 1.3, 60), sizes[0].tokens  # the laws have no term for tokens
    _draw_law(ax, x, [trend.at_best_batch(size, tokens)[what] for size in x], color)
    at = [p[0] for p in optima], [p[1] for p in optima]
    ax.plot(*at, "D", color="white", mec=INK, mew=1.3, ms=8, zorder=6)
    ax.plot(*at, "D", color=color, ms=4.5, zorder=7)
    ax.set_xscale("log")
    ax.set_yscale("log", base=2)
    ax.set_ylim(min(y) / 1.6, max(y) * 1.6)
    label_axis(ax.xaxis, quantity, _apart(sorted({s.parameters for s in sizes})))
    label_axis(ax.yaxis, quantity if what == "batch_tokens" else "{:.2g}".format, _apart(sorted(set(y.tolist()))))
    return drawn


def _apart(values: Sequence[float]) -> list[float]:
    """At most eight of the values, evenly spaced."""
    return list(values[:: math.ceil(len(values) / 8)])


def _grid_points(size: SizeFit, what: str) -> list[tuple[float, float, float]]:
    """(N, value, per cent by which the best loss at this value exceeds the best of all)."""
    best: dict[float, float] = {}
    for sweep in size.sweeps:
        for lr, loss in zip(sweep.lrs, sweep.losses, strict=True):
            value = sweep.batch_tokens if what == "batch_tokens" else lr
            best[value] = min(loss, best.get(value, math.inf))
    lowest = min(best.values(), default=1.0)
    return [(size.parameters, value, 100 * (loss / lowest - 1)) for value, loss in best.items()]
