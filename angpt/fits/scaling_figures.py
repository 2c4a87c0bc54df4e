"""The figures of a scaling fit: loss over compute, optimal sizes and tokens, and the compute that is saved."""

import math
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from angpt.fits.frontier import Frontier
from angpt.fits.hparam_figures import PALE, factor_text
from angpt.fits.isoflop import IsoFlop
from angpt.fits.powerlaw import Floats, PowerLaw
from angpt.fits.saturating import Saturating
from angpt.fits.scaling import APPROACHES, Approach, ArchitectureFit, Comparison, LawEstimate, ScalingFit, saving
from angpt.present import style
from angpt.present.charts import Absent, Chart, Row
from angpt.present.words import bracketed, label, listed, quantity, scientific

MANY = 1500
"""Clouds of more points than this are drawn as pixels in SVG files too."""
TOGETHER, JOINED = 8, 15
"""With up to this many sizes, architectures share a panel; with up to this many, the sizes have lines and names."""
EXCESS = 1.5
"""Per cent above the lowest loss at which the colour scale ends."""


def loss_over_compute(fit: ScalingFit) -> Chart:
    """Every run, joined by size, and the law of the frontier."""
    colors = style.looks(f.architecture for f in fit.architectures)
    laws = {f.architecture: law for f in fit.architectures if (law := f.loss_law("frontier")) is not None}
    sizes = max(len(np.unique(f.sample.parameters)) for f in fit.architectures)

    def draw(narrow: bool) -> Figure:
        alone = len(fit.architectures) == 1
        apart = not alone and TOGETHER < sizes <= JOINED
        count = len(fit.architectures) if apart else 1
        figure, axes = style.panels(count, narrow, columns=2, height=4.6 if count == 1 else 4.0)
        handles = []
        for i, f in enumerate(fit.architectures):
            ax, look, law = axes[i % count], colors[f.architecture], laws.get(f.architecture)
            color = look.color
            if sizes <= JOINED:
                _draw_runs(ax, f, look, lines=sizes > TOGETHER, named=apart or i == 0)
            else:
                cloud = _draw_cloud(ax, f, look, alone)
                if alone:
                    color = style.INK
                    bar = figure.colorbar(cloud, ax=axes, shrink=0.8, aspect=25, pad=0.02, label="parameters")
                    style.label_axis(bar.ax.yaxis, quantity, style.log_ticks(*bar.ax.get_ylim()))
                    bar.outline.set_visible(False)
            text = label(f.architecture)
            if law is not None:
                _draw_law(ax, law, f.sample.compute, color)
                text += f": {loss_text(law)}"
            handles.append(
                Line2D([], [], ls="--" if law else "none", lw=1.5, color=color, marker=look.marker, label=text)
            )
        limits = [ax.get_ylim() for ax in axes]
        for ax in axes:
            ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
            compute_axis(ax)
            loss_axis(ax)
        figure.legend(handles=handles, loc="outside upper left", ncols=1, handlelength=3)
        return figure

    words = [f"{label(name)}: {loss_text(law)}" for name, law in laws.items()]
    bounds = [label(f.architecture) for f in fit.architectures if not getattr(f.frontier, "optimal", True)]
    extra = f" For {listed(bounds)} it is that of the best runs, not of optima." if bounds else ""
    return Chart(
        name="loss",
        title="Loss over compute",
        caption="Each point is a complete run"
        + (", larger and darker for larger models" if sizes <= TOGETHER else ", coloured by the size of its model")
        + ("; thin lines join the runs of a size" if TOGETHER < sizes <= JOINED else "")
        + ". Dashed: the loss of the best size at each compute by the frontier regression, with its 95 % band: a power "
        "law, or a law with an irreducible loss E where that is needed. Runs of other sizes lie above it."
        f"{extra} {'. '.join(words)}. {fit.counting}.",
        alt=f"Validation loss against training compute on logarithmic axes. {'; '.join(words) or 'No law'}.",
        columns=("architecture", "parameters", "tokens", "compute", "loss"),
        rows=tuple(
            (f.architecture, float(n), float(d), float(c), math.exp(y))
            for f in fit.architectures
            for s in [f.sample]
            for n, d, c, y in zip(s.parameters, s.tokens, s.compute, s.log_loss, strict=True)
        ),
        draw=draw,
    )


def _draw_runs(ax: Axes, f: ArchitectureFit, look: style.Look, lines: bool, named: bool) -> None:
    """The runs of a few sizes, larger and darker for larger models; of more sizes, joined by lines."""
    s, sizes = f.sample, np.unique(f.sample.parameters)
    labels: list[tuple[float, float]] = []
    span = np.ptp(np.log(s.compute)) or 1.0, np.ptp(s.log_loss) or 1.0
    for rank, size in enumerate(sizes):
        part = rank / max(1, len(sizes) - 1)
        mine = np.flatnonzero(s.parameters == size)
        mine = mine[np.argsort(s.compute[mine])]
        area = 22 if lines else 12 + 40 * part
        ax.scatter(s.compute[mine], np.exp(s.log_loss[mine]), color=style.blend(look.color, 0.5 - 0.5 * part), s=area,
                   marker=look.marker, linewidths=0.4, edgecolors="white", zorder=4)  # fmt: skip
        if lines:
            ax.plot(s.compute[mine], np.exp(s.log_loss[mine]), "-", color=look.color, lw=0.8, alpha=0.4, zorder=2)
        for end, side in ((mine[0], 1), (mine[-1], -1)) if named else ():
            at = float(np.log(s.compute[end])) / span[0], float(s.log_loss[end]) / span[1]
            if all(abs(at[0] - x) > 0.1 or abs(at[1] - y) > 0.05 for x, y in labels):
                labels.append(at)
                ax.annotate(quantity(float(size)), (s.compute[end], math.exp(s.log_loss[end])), (3 * side, 5),
                            textcoords="offset points", ha="left" if side > 0 else "right", fontsize=7.5)  # fmt: skip
                break


def _draw_cloud(ax: Axes, f: ArchitectureFit, look: style.Look, alone: bool) -> PathCollection:
    """The runs of many sizes, coloured by size."""
    s = f.sample
    shades = LinearSegmentedColormap.from_list("size", [style.blend(look.color, 0.6), look.color])
    norm = LogNorm(s.parameters.min() / 1.01, s.parameters.max() * 1.01)
    alpha = max(0.3, min(1.0, 13 / math.sqrt(len(s))))
    return ax.scatter(s.compute, np.exp(s.log_loss), c=s.parameters, cmap=style.DEPTH if alone else shades, norm=norm,
                      marker=look.marker, s=20, alpha=alpha, linewidths=0, rasterized=len(s) > MANY)  # fmt: skip


def _draw_law(ax: Axes, law: PowerLaw | Saturating, compute: Floats, color: str) -> None:
    x = np.geomspace(compute.min(), compute.max(), 80)
    mean, low, high = np.array([(v.mean, v.low, v.high) for v in map(law.log_at, x)], float).T
    ax.plot(x, np.exp(mean), "--", color=color, lw=1.5, zorder=3)
    if law.freedom > 0:
        style.band(ax, x, np.exp(low), np.exp(high), color)


def loss_text(law: PowerLaw | Saturating) -> str:
    """The law of the loss in words."""
    if isinstance(law, PowerLaw):
        return f"L = {factor_text(law.prefactor.mean)}·Cᵅ, α = {bracketed(law.slope, '.3f')}"
    e, scale, alpha = law.estimates().values()
    return f"L = E + (C₀/C)ᵅ, E = {bracketed(e, '.2f')}, C₀ = {scientific(scale.mean)}, α = {bracketed(alpha, '.3f')}"


def optimal_sizes(fit: ScalingFit) -> Chart | Absent:
    """N_opt(C) and D_opt(C) of each architecture, and the exponents of N_opt by all approaches."""
    title = "Compute-optimal model size and tokens"
    having = [f for f in fit.architectures if _exponents(f)]
    if not having:
        return Absent(title, "There are no optima; the notes say why.")
    colors = style.looks(f.architecture for f in fit.architectures)

    def draw(narrow: bool) -> Figure:
        figure, axes = style.panels(3 * len(having), narrow, columns=3, height=3.2)
        for i, f in enumerate(having):
            for ax, name, symbol in zip(
                axes[3 * i :], ("parameters", "tokens"), ("N_opt(C)", "D_opt(C)"), strict=False
            ):
                _draw_optimum(ax, f, name, colors[f.architecture].color)
                compute_axis(ax)
                ax.set_yscale("log")
                style.label_axis(ax.yaxis, quantity, style.log_ticks(*ax.get_ylim()))
                ax.set(title=f"{label(f.architecture)}: {symbol}", ylabel=name)
            _draw_exponents(axes[3 * i + 2], f, colors[f.architecture].color)
        lines = [
            Line2D([], [], color=style.INK, ls="--", lw=1.5, label="frontier regression, 95 % band"),
            Line2D([], [], color=style.INK, marker="o", ls="none", ms=4.5, label="runs, darker near the lowest loss"),
        ]
        if any(isinstance(f.isoflop, IsoFlop) for f in having):
            lines.append(
                Line2D([], [], color=style.INK, marker="D", mfc="white", ls="none", ms=5, label="IsoFLOP minima")
            )
        figure.legend(handles=lines, loc="outside upper left", ncols=1 if narrow else 3)
        return figure

    words, rows = [], list[Row]()
    for f in having:
        for approach, e in _exponents(f).items():
            for symbol, name in (("N_opt", "parameters"), ("D_opt", "tokens")):
                if (found := f.estimate(approach, name)) is not None and found.prefactor is not None:
                    exponent = (found.exponent.mean, found.exponent.low, found.exponent.high)
                    rows.append((f.architecture, approach, symbol, found.prefactor.mean, *exponent))
            words.append(f"{label(f.architecture)} by {APPROACHES[approach]} α = {bracketed(e.exponent, '.3f')}")
    return Chart(
        name="optimal",
        title=title,
        caption="Best number of parameters and of tokens at each compute, N_opt(C) = N₀·Cᵅ. Dots are runs, darker where"
        f" their loss is close to the lowest at their compute and pale from {EXCESS} % above it; dashed, the law of "
        "the frontier regression over the compute at which smaller and larger models were tried; diamonds, the "
        "vertices of IsoFLOP parabolas. Right: the exponent α of N_opt by each approach, with 95 % intervals. "
        f"{'. '.join(words)}. {fit.counting}.",
        alt=f"Optimal parameters and tokens against compute on logarithmic axes, and exponents. {'; '.join(words)}.",
        columns=("architecture", "approach", "quantity", "prefactor", "exponent", "low", "high"),
        rows=tuple(rows),
        draw=draw,
    )


def _exponents(f: ArchitectureFit) -> dict[Approach, LawEstimate]:
    """The laws N_opt(C) by the approaches that have one."""
    found = {a: f.estimate(a, "parameters") for a in APPROACHES if getattr(f, a) is not None}
    return {a: e for a, e in found.items() if e is not None}


def _draw_optimum(ax: Axes, f: ArchitectureFit, name: str, color: str) -> None:
    s, loss, law = f.sample, f.loss_law("frontier"), f.law("frontier", name)
    above = s.log_loss - loss.log_mean(s.compute) if loss else np.zeros(len(s))
    shades = LinearSegmentedColormap.from_list("excess", [color, PALE])
    order = np.argsort(-above)  # the best on top
    ax.scatter(s.compute[order], getattr(s, name)[order], c=100 * above[order], cmap=shades, norm=Normalize(0, EXCESS),
               s=16, edgecolors=style.INK, linewidths=0.25, rasterized=len(s) > MANY)  # fmt: skip
    if isinstance(f.frontier, Frontier) and law is not None:
        _draw_law(ax, law, np.array(law.x), color)
    if isinstance(f.isoflop, IsoFlop):
        at = [(lev.compute, getattr(lev.vertex, name)) for lev in f.isoflop.levels if lev.vertex is not None]
        ax.plot(*zip(*at, strict=True), "D", mec=style.INK, mfc="white", mew=1.2, ms=5, zorder=6)


def _draw_exponents(ax: Axes, f: ArchitectureFit, color: str) -> None:
    """One interval per approach, one below the other."""
    found = _exponents(f)
    for row, e in enumerate(found.values()):
        value = e.exponent
        if value.low is not None and value.high is not None:
            ax.plot([value.low, value.high], [row, row], "|-", color=color, lw=1.8, ms=8, mew=1.8)
        ax.plot(value.mean, row, "o", color=color, ms=5)
        ax.annotate(
            bracketed(value, ".3f"), (value.mean, row), (0, 7), textcoords="offset points", ha="center", fontsize=7.5
        )
    ax.set_yticks(range(len(found)), [textwrap.fill(APPROACHES[a], 13) for a in found])
    ax.set_ylim(len(found) - 0.5, -0.75)
    ax.margins(x=0.15)
    ax.locator_params(axis="x", nbins=5)
    ax.set(title=f"{label(f.architecture)}: exponent of N_opt(C)", xlabel="α")


def savings(fit: ScalingFit) -> Chart | Absent:
    """Compute relative to the baseline at equal loss."""
    title = "Compute at equal loss"
    having = [c for c in fit.comparisons if c.savings]
    if not having:
        return Absent(title, "No two architectures reached a common loss.")
    base = label(having[0].baseline)
    shown: list[Approach] = [a for a in APPROACHES if any(c.approach == a for c in having)]
    colors = style.looks(f.architecture for f in fit.architectures)
    curves = [(c, _saving_curve(fit, c)) for c in having]

    def draw(narrow: bool) -> Figure:
        figure, axes = style.panels(len(shown), narrow, columns=3, height=3.3, sharey=not narrow)
        for ax, approach in zip(axes, shown, strict=True):
            for c, (x, y, low, high) in curves:
                if c.approach == approach:
                    color = colors[c.other].color
                    ax.plot(x, y, color=color, lw=1.8, label=label(c.other))
                    style.band(ax, x, low, high, color)
            style.reference(ax)
            ax.invert_xaxis()
            ax.set(title=APPROACHES[approach][0].upper() + APPROACHES[approach][1:], xlabel="validation loss")
        for ax in axes[:: 1 if narrow else 3]:
            ax.set_ylabel(f"compute relative to {base}")
        style.fold_legend(figure, axes[0], narrow)
        return figure

    words = [
        f"{label(c.other)} at loss {c.savings[1].loss:.3g} {c.savings[1].factor.mean:.2f} ({APPROACHES[c.approach]})"
        for c in having
    ]
    return Chart(
        name="savings",
        title=title,
        caption=f"Compute that an architecture needs for a loss, divided by what {base} needs, by the laws of each "
        "approach and over the losses that both reached; below 1 (dashed line) it needs less. Bands: 95 % intervals. "
        f"{fit.counting}.",
        alt=f"Ratio of compute at equal loss. {'; '.join(words)}.",
        columns=("approach", "architecture", "loss", "factor", "low", "high"),
        rows=tuple(
            (c.approach, c.other, *map(float, row)) for c, columns in curves for row in zip(*columns, strict=True)
        ),
        draw=draw,
    )


def _saving_curve(fit: ScalingFit, c: Comparison) -> tuple[Floats, ...]:
    """Losses, ratios, and the ends of their intervals."""
    one, two = fit.of(c.baseline), fit.of(c.other)
    ranges = [r for f in (one, two) if (r := f.losses(c.approach)) is not None]
    x = np.geomspace(max(r[0] for r in ranges), min(r[1] for r in ranges), 41)[1:-1]
    found = [saving(one, two, c.approach, float(loss)) for loss in x]
    return x, *np.array([(e.mean, e.low, e.high) for e in found], float).T


def compute_axis(ax: Axes) -> None:
    ax.set_xscale("log")
    ax.set_xlabel("training compute C (FLOPs)")
    style.label_axis(ax.xaxis, scientific)


def loss_axis(ax: Axes) -> None:
    """A logarithmic loss axis; a short one has few round numbers, so it gets the ticks of a linear one."""
    style.plain_log_axis(ax)
    low, high = ax.get_ylim()
    if high / low < 8:
        ticks: Sequence[float] = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        ax.set_yticks([t for t in ticks if low <= t <= high])
    ax.set_ylabel("validation loss")
