"""The figures of a hyper-parameter fit: the sweeps with their minima, and the trends over model size."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from angpt.fits.hparams import HparamFit, SizeFit, Sweep, Trend
from angpt.fits.powerlaw import Floats, PowerLaw
from angpt.present.charts import Absent, Chart
from angpt.present.style import DEPTH, INK, MARKERS, band, evenly, label_axis, log_ticks, looks, panels
from angpt.present.words import bracketed, label, listed, quantity

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
            title = f"{label(size.architecture)} {quantity(size.parameters)}"
            ax.set(title=title, xlabel="learning rate", ylabel="validation loss")
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


def trends(fit: HparamFit) -> Chart | Absent:
    """Best batch size and learning rate over model size."""
    title = "Trends of batch size and learning rate"
    names = list(dict.fromkeys(size.architecture for size in fit.sizes))
    if not fit.trends:
        return Absent(title, "No architecture has two sizes with an optimum inside their grids.")

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(2 * len(names), narrow, columns=2, height=3.1)
        style = looks(names)
        for i, name in enumerate(names):
            trend = next((t for t in fit.trends if t.architecture == name), None)
            pair = axes[2 * i : 2 * i + 2]
            for ax, what in zip(pair, WORDS, strict=True):
                drawn = _draw_trend(ax, fit.of(name), trend, what, style[name].color)
                words, unit = WORDS[what]
                ax.set(title=f"{label(name)}: {words}", xlabel="parameters N", ylabel=unit)
            bar = figure.colorbar(drawn, ax=pair, shrink=0.8, aspect=22, pad=0.02, extend="max")
            bar.set_label("loss above the best (%)")
            bar.outline.set_visible(False)
        return figure

    laws = [
        f"{label(t.architecture)}: B* = {law_text(t.batch_tokens, 'N')}, lr* = {law_text(t.lr, 'N')}"
        for t in fit.trends
    ]
    return Chart(
        name="trends",
        title=title,
        caption="Optimal batch size and learning rate over the number of parameters. Dots: every value of the grid, "
        "darker if its best run is closer to the best of that model. Diamonds: the two-stage estimates; "
        f"dashed: the power laws through them, with their 95 % bands. {'. '.join(laws)}.",
        alt=f"Batch size and learning rate against model size: {listed([label(n) for n in names])}. {'; '.join(laws)}.",
        columns=("architecture", "parameters", "tokens", "best_batch_tokens", "best_lr", "loss", "problem"),
        rows=tuple(
            (s.architecture, s.parameters, s.tokens, *best, s.problem)
            for s in fit.sizes
            for o in [s.optimum]
            for best in [(o.batch_tokens, o.lr, o.loss) if o else (None, None, None)]
        ),
        draw=draw,
    )


def law_text(law: PowerLaw, variable: str) -> str:
    """A power law as text: prefactor, variable, and exponent with its interval."""
    return f"{law.prefactor.mean:.4g}·{variable}^{bracketed(law.slope, '.3f')}".replace("-", "−")


def _draw_trend(ax: Axes, sizes: Sequence[SizeFit], trend: Trend | None, what: str, color: str) -> PathCollection:
    shades = LinearSegmentedColormap.from_list("excess", [color, PALE])
    points = [point for size in sizes for point in _grid_points(size, what)]
    order = sorted(points, key=lambda p: -p[2])  # the best on top
    n, y, excess = (np.array([p[i] for p in order]) for i in range(3))
    drawn = ax.scatter(n, y, c=excess, cmap=shades, norm=Normalize(0, EXCESS), s=30, edgecolors=INK, linewidths=0.3)
    optima = [(s.parameters, getattr(s.optimum, what)) for s in sizes if s.optimum is not None]
    if trend is not None:
        draw_law(ax, getattr(trend, what), np.geomspace(min(n) / 1.3, max(n) * 1.3, 60), color)
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


def draw_law(ax: Axes, law: PowerLaw, x: Floats, color: str, name: str | None = None) -> None:
    """Draw a power law as a dashed line with its 95 % band."""
    mean, low, high = np.array([(v.mean, v.low, v.high) for v in map(law.at, x)], float).T
    ax.plot(x, mean, "--", color=color, lw=1.5, label=name, zorder=4)
    if law.freedom > 0:
        band(ax, x, low, high, color)
