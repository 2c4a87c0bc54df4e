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
"""Per cent above the best loss from which grid points are drawn alike."""
PANELS = 12
"""Models drawn of many."""
PALE = "#e4e6ea"


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
            ax.set(title=f"{label(size.architecture)} {quantity(size.parameters)}", ylabel="validation loss")
            ax.set_xlabel("learning rate")
        handles = [
            Line2D([], [], color=color, marker=marker, ms=4, lw=1.4, label=f"{quantity(b)} tokens")
            for b, (color, marker) in looks_of.items()
        ]
        handles.append(
            Line2D([], [], color="none", marker="*", ms=10, mfc="white", mec=INK, label="interpolated minimum")
        )
        figure.legend(handles=handles, loc="outside upper left", ncols=2 if narrow else min(6, len(handles)))
        return figure

    found = sum(s.minimum is not None for size in fit.sizes for s in size.sweeps)
    total = sum(len(size.sweeps) for size in fit.sizes)
    return Chart(
        name="sweeps",
        title="Hyper-parameter sweeps",
        caption="Validation loss over the learning rate, a line for each batch size (tokens per step). Points are "
        "runs, averaged over seeds; lines are the interpolation in logarithms; it is missing (dots alone) where the "
        "best rate is on the edge of its grid or the next one diverged (× at the top). Stars: the minima."
        + ("" if len(shown) == len(fit.sizes) else f" Shown are {len(shown)} of {len(fit.sizes)} models."),
        alt=f"Loss against learning rate in {len(shown)} panels, one per model. {found} of {total} sweeps have a "
        "minimum inside their grid.",
        columns=("architecture", "parameters", "batch_tokens", "lr", "loss", "best_lr", "best_loss", "problem"),
        rows=tuple(
            (
                size.architecture,
                size.parameters,
                s.batch_tokens,
                lr,
                loss,
                getattr(m, "lr", None),
                getattr(m, "loss", None),
                s.problem,
            )
            for size in fit.sizes
            for s in size.sweeps
            for m in [s.minimum]
            for lr, loss in zip(s.lrs, s.losses, strict=True)
        ),
        draw=draw,
    )


def _draw_sweep(ax: Axes, sweep: Sweep, color: tuple[float, ...], marker: str) -> None:
    ax.plot(sweep.lrs, sweep.losses, marker, color=color, ms=4)
    curve = sweep.curve()
    if curve is None or curve.method == "parabola":  # which joins three of the points only
        ax.plot(sweep.lrs, sweep.losses, ":", color=color, lw=1.2, alpha=0.5 if curve else 1.0)
    if curve is not None:
        x = np.linspace(*curve.support, 200)
        ax.plot(np.exp(x), np.exp(curve(x)), color=color, lw=1.4)
    for lr in sweep.diverged:
        ax.plot(lr, 0.97, "x", color=color, ms=5, mew=1.4, transform=ax.get_xaxis_transform())
    if sweep.minimum is not None:
        ax.plot(sweep.minimum.lr, sweep.minimum.loss, "*", color=color, ms=11, mec=INK, mew=0.8, zorder=5)


def _loss_range(size: SizeFit) -> tuple[float, float]:
    """The range of the loss axis: all minima and what is near them; losses far above would flatten them."""
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
            for ax, what in zip(pair, ("batch_tokens", "lr"), strict=True):
                drawn = _draw_trend(ax, fit.of(name), trend, what, style[name].color)
                words = "batch size" if what == "batch_tokens" else "learning rate"
                ax.set(title=f"{label(name)}: {words}", xlabel="parameters N")
                ax.set_ylabel("tokens per step" if what == "batch_tokens" else "peak learning rate")
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
        "the darker the closer its best run comes to the best of that model. Diamonds: the two-stage estimates; "
        f"dashed: the power laws through them, with their 95 % bands. {'. '.join(laws)}.",
        alt=f"Batch size and learning rate against model size: {listed([label(n) for n in names])}. {'; '.join(laws)}.",
        columns=("architecture", "parameters", "tokens", "best_batch_tokens", "best_lr", "loss", "problem"),
        rows=tuple(
            (
                s.architecture,
                s.parameters,
                s.tokens,
                *(getattr(o, k, None) for k in ("batch_tokens", "lr", "loss")),
                s.problem,
            )
            for s in fit.sizes
            for o in [s.optimum]
        ),
        draw=draw,
    )


def law_text(law: PowerLaw, variable: str) -> str:
    """Prefactor and exponent with its interval."""
    return f"{law.prefactor.mean:.4g}·{variable}^{bracketed(law.slope, '.3f')}".replace("-", "−")


def _draw_trend(ax: Axes, sizes: Sequence[SizeFit], trend: Trend | None, what: str, color: str) -> PathCollection:
    shades = LinearSegmentedColormap.from_list("excess", [color, PALE])
    points = [point for size in sizes for point in _grid_points(size, what)]
    order = sorted(points, key=lambda p: -p[2])  # the best on top
    n, y, excess = (np.array([p[i] for p in order]) for i in range(3))
    drawn = ax.scatter(n, y, c=excess, cmap=shades, norm=Normalize(0, EXCESS), s=30, edgecolors=INK, linewidths=0.3)
    optima = [(s.parameters, getattr(s.optimum, what)) for s in sizes if s.optimum is not None]
    if trend is not None:
        law: PowerLaw = getattr(trend, what)
        x = np.geomspace(min(n) / 1.3, max(n) * 1.3, 60)
        draw_law(ax, law, x, color)
    ax.plot([p[0] for p in optima], [p[1] for p in optima], "D", color="white", mec=INK, mew=1.3, ms=8, zorder=6)
    ax.plot([p[0] for p in optima], [p[1] for p in optima], "D", color=color, ms=4.5, zorder=7)
    ax.set_xscale("log")
    ax.set_yscale("log", base=2)
    ax.set_ylim(min(y) / 1.6, max(y) * 1.6)
    every = sorted({s.parameters for s in sizes})
    label_axis(ax.xaxis, quantity, _apart(every))
    label_axis(ax.yaxis, quantity if what == "batch_tokens" else "{:.2g}".format, _apart(sorted(set(y.tolist()))))
    return drawn


def _apart(values: Sequence[float]) -> list[float]:
    """At most eight of the values, evenly spaced."""
    step = math.ceil(len(values) / 8)
    return list(values[::step])


def _grid_points(size: SizeFit, what: str) -> list[tuple[float, float, float]]:
    """(N, value, per cent that the best loss at this value is above the best of all)."""
    best: dict[float, float] = {}
    for sweep in size.sweeps:
        for lr, loss in zip(sweep.lrs, sweep.losses, strict=True):
            value = sweep.batch_tokens if what == "batch_tokens" else lr
            best[value] = min(loss, best.get(value, math.inf))
    lowest = min(best.values(), default=1.0)
    return [(size.parameters, value, 100 * (loss / lowest - 1)) for value, loss in best.items()]


def draw_law(ax: Axes, law: PowerLaw, x: Floats, color: str, name: str | None = None) -> None:
    """A dashed line and its band."""
    values = [law.at(v) for v in x]
    ax.plot(x, [v.mean for v in values], "--", color=color, lw=1.5, label=name, zorder=4)
    if law.freedom > 0:
        low, high = [v.low or v.mean for v in values], [v.high or v.mean for v in values]
        band(ax, x, low, high, color)
