"""The figures of a scaling fit: loss over compute, optimal sizes and tokens, IsoFLOP curves, the parametric law, and
the compute that one architecture saves."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from angpt.fits.frontier import Frontier
from angpt.fits.hparam_figures import draw_law, law_text
from angpt.fits.isoflop import IsoFlop, Level
from angpt.fits.parametric import Parametric
from angpt.fits.powerlaw import Floats
from angpt.fits.scaling import APPROACHES, Approach, ArchitectureFit, Comparison, ScalingFit, saving
from angpt.present import style
from angpt.present.charts import Absent, Chart, Row
from angpt.present.words import label, listed, quantity

T = TypeVar("T")
MANY = 1500
"""Clouds of more points than this are drawn as pixels in SVG files too."""
CURVES = 8
"""Most sizes or levels that a figure shows."""
FAR = 30.0
"""Optima are drawn up to this factor beyond the sizes tried."""
NEAR = 0.05
"""Relative difference up to which runs of another size are drawn with a size."""


def loss_over_compute(fit: ScalingFit) -> Chart:
    """Every run, and the law of the frontier."""
    colors = style.looks(f.architecture for f in fit.architectures)
    laws = {f.architecture: f.frontier.loss for f in fit.architectures if isinstance(f.frontier, Frontier)}

    def draw(narrow: bool) -> Figure:
        figure, (ax,) = style.panels(1, narrow, columns=1, height=4.6)
        for f in fit.architectures:
            look, s = colors[f.architecture], f.sample
            alpha = max(0.15, min(0.75, 40 / math.sqrt(len(s)) / 3))
            ax.plot(s.compute, np.exp(s.log_loss), look.marker, color=look.color, ms=4, alpha=alpha, mec="none",
                    rasterized=len(s) > MANY, label=label(f.architecture))  # fmt: skip
        for name, law in laws.items():
            text = f"{label(name)}: {law_text(law, 'C')}"
            draw_law(ax, law, np.geomspace(*law.x, 80), colors[name].color, text)
        compute_axis(ax)
        _loss_axis(ax)
        style.fold_legend(figure, ax, narrow)
        return figure

    words = [f"{label(name)}: L(C) = {law_text(law, 'C')}" for name, law in laws.items()]
    bounds = [label(f.architecture) for f in fit.architectures if not getattr(f.frontier, "optimal", True)]
    extra = f" For {listed(bounds)} it is that of the best runs, not of optima." if bounds else ""
    return Chart(
        name="loss",
        title="Loss over compute",
        caption="Each point is a complete run, the best at its size and budget. Dashed: the power law of the lowest "
        f"loss at each compute, with its 95 % band.{extra} {fit.counting}.",
        alt=f"Validation loss against training compute on logarithmic axes. {'; '.join(words) or 'No law.'}",
        columns=("architecture", "parameters", "tokens", "compute", "loss"),
        rows=tuple(
            (f.architecture, float(n), float(d), float(c), math.exp(y))
            for f in fit.architectures
            for s in [f.sample]
            for n, d, c, y in zip(s.parameters, s.tokens, s.compute, s.log_loss, strict=True)
        ),
        draw=draw,
    )


def optimal_sizes(fit: ScalingFit) -> Chart | Absent:
    """N_opt(C) and D_opt(C) by all three approaches."""
    title = "Compute-optimal model size and tokens"
    having = [f for f in fit.architectures if _has_optimum(f)]
    if not having:
        return Absent(title, "There are no optima; the notes say why.")
    colors = style.looks(f.architecture for f in fit.architectures)

    def draw(narrow: bool) -> Figure:
        figure, axes = style.panels(2, narrow, columns=2, height=3.9)
        for ax, name, heading in zip(axes, ("parameters", "tokens"), ("N_opt(C)", "D_opt(C)"), strict=True):
            for f in having:
                _draw_optimum(ax, f, name, colors[f.architecture])
            compute_axis(ax)
            ax.set_yscale("log")
            style.label_axis(ax.yaxis, quantity, style.log_ticks(*ax.get_ylim()))
            ax.set(title=f"{name.capitalize()} {heading}", ylabel=name)
        lines: list[dict[str, Any]] = [
            {"color": colors[f.architecture].color, "lw": 2, "label": label(f.architecture)} for f in having
        ]
        if any(f.law("frontier", "parameters") is not None for f in having):
            lines.append({"marker": ".", "ls": "--", "lw": 1.4, "label": "frontier regression"})
        if any(isinstance(f.isoflop, IsoFlop) for f in having):
            lines.append({"marker": "D", "mfc": "white", "ls": "none", "ms": 5, "label": "IsoFLOP minima"})
        if any(isinstance(f.parametric, Parametric) for f in having):
            lines.append({"ls": ":", "lw": 1.4, "label": "parametric fit"})
        handles = [Line2D([], [], **({"color": style.INK} | line)) for line in lines]
        figure.legend(handles=handles, loc="outside upper left", ncols=1 if narrow else 5)
        return figure

    words = []
    rows: list[Row] = []
    for f in having:
        for approach in APPROACHES:
            for symbol, name in (("N_opt", "parameters"), ("D_opt", "tokens")):
                if (e := f.estimate(approach, name)) is not None and e.prefactor is not None:
                    exponent = (e.exponent.mean, e.exponent.low, e.exponent.high)
                    rows.append((f.architecture, approach, symbol, e.prefactor.mean, *exponent))
        n, d = f.law("frontier", "parameters"), f.law("frontier", "tokens")
        if n is not None and d is not None:
            words.append(f"{label(f.architecture)}: N_opt = {law_text(n, 'C')}, D_opt = {law_text(d, 'C')}")
    return Chart(
        name="optimal",
        title=title,
        caption="Best number of parameters and of tokens at each compute, by the approaches that find an optimum. "
        "Minima are those with a smaller and a larger model beside them; bands are the 95 % intervals of their law. "
        + "".join(f"{text}. " for text in words)
        + f"{fit.counting}.",
        alt=f"Two panels on logarithmic axes: optimal parameters and tokens against compute. {'; '.join(words)}.",
        columns=("architecture", "approach", "quantity", "prefactor", "exponent", "low", "high"),
        rows=tuple(rows),
        draw=draw,
    )


def _has_optimum(f: ArchitectureFit) -> bool:
    found = f.law("frontier", "parameters") is not None or isinstance(f.isoflop, IsoFlop)
    return found or len(_parametric_optimum(f, "parameters")[0]) > 0


def _parametric_optimum(f: ArchitectureFit, name: str) -> tuple[Floats, Floats]:
    """Compute, and the best size or tokens there, where it is within FAR of the sizes tried."""
    if isinstance(f.parametric, str):
        return np.empty(0), np.empty(0)
    x = np.geomspace(*f.parametric.compute, 40)
    n, d = np.array([[values[0] for values in f.parametric.log_optimum(math.log(c))[:2]] for c in x]).T
    tried = np.log(f.sample.parameters)
    near = (n > tried.min() - math.log(FAR)) & (n < tried.max() + math.log(FAR))
    return x[near], np.exp((n if name == "parameters" else d)[near])


def _draw_optimum(ax: Axes, f: ArchitectureFit, name: str, look: style.Look) -> None:
    law = f.law("frontier", name)
    if isinstance(f.frontier, Frontier) and law is not None:
        draw_law(ax, law, np.geomspace(law.x[0] / 1.5, law.x[1] * 1.5, 60), look.color)
    if isinstance(f.isoflop, IsoFlop):
        at = [(lev.compute, getattr(lev.vertex, name)) for lev in f.isoflop.levels if lev.vertex is not None]
        ax.plot(*zip(*at, strict=True), "D", mec=look.color, mfc="white", mew=1.4, ms=5.5, zorder=6)
    ax.plot(*_parametric_optimum(f, name), ":", color=look.color, lw=1.5)


def isoflop_curves(fit: ScalingFit) -> Chart | Absent:
    """Loss over size at each level of compute."""
    title = "IsoFLOP curves"
    having = [(f, f.isoflop) for f in fit.architectures if isinstance(f.isoflop, IsoFlop)]
    if not having:
        return Absent(title, f"{fit.architectures[0].isoflop}.")

    def levels(ax: Axes, f: ArchitectureFit, iso: IsoFlop) -> None:
        shown = [iso.levels[i] for i in style.evenly(len(iso.levels), CURVES)]
        norm = LogNorm(shown[0].compute / 1.01, shown[-1].compute * 1.01)
        for level in shown:
            _draw_level(ax, level, style.DEPTH(norm(level.compute)))

    return Chart(
        name="isoflop",
        title=title,
        caption="Loss over model size at equal compute. Points are runs; lines are the parabolas in logarithms, drawn "
        "over the sizes that they were fitted to; diamonds are their vertices. Pale levels have their best run at the "
        f"smallest or largest size, and no optimum. {fit.counting}.",
        alt="Loss against model size, a parabola for each level of compute: "
        + "; ".join(f"{label(f.architecture)} {len(iso.levels)} levels" for f, iso in having)
        + ".",
        columns=("architecture", "compute", "parameters", "loss", "optimal_parameters", "optimal_tokens", "problem"),
        rows=tuple(
            (f.architecture, lev.compute, float(n), float(y), *best, lev.problem)
            for f, iso in having
            for lev in iso.levels
            for best in [(lev.vertex.parameters, lev.vertex.tokens) if lev.vertex else (None, None)]
            for n, y in zip(lev.parameters, lev.losses, strict=True)
        ),
        draw=_loss_curves(having, levels, "parameters N", "FLOPs"),
    )


def _draw_level(ax: Axes, level: Level, color: tuple[float, ...]) -> None:
    pale = 0.35 if level.problem else 1.0
    compute = f"{level.compute:.1e}".replace("e+", "e")
    ax.plot(level.parameters, level.losses, "o", color=color, ms=3.5, alpha=pale, label=compute)
    if level.vertex is not None:
        x = np.geomspace(*level.vertex.support, 80)
        ax.plot(x, level.curve(x), color=color, lw=1.3)
        ax.plot(level.vertex.parameters, level.vertex.loss, "D", color=color, mec=style.INK, mew=0.8, ms=5.5, zorder=5)


def parametric_law(fit: ScalingFit) -> Chart | Absent:
    """Loss over tokens for each size, and the parametric law through them."""
    title = "The parametric law"
    having = [(f, f.parametric) for f in fit.architectures if isinstance(f.parametric, Parametric)]
    if not having:
        return Absent(title, f"{fit.architectures[0].parametric}.")

    def sizes(ax: Axes, f: ArchitectureFit, law: Parametric) -> None:
        s, (e, log_a, log_b, a, b) = f.sample, law.theta[0]
        tried = np.unique(s.parameters)
        shown = tried[style.evenly(len(tried), CURVES)].tolist()
        norm = LogNorm(shown[0] / 1.01, shown[-1] * 1.01)
        for size in shown:
            mine = np.abs(np.log(s.parameters / size)) <= NEAR
            color = style.DEPTH(norm(size))
            d = np.geomspace(s.tokens[mine].min() / 1.2, s.tokens[mine].max() * 1.2, 60)
            loss = math.exp(e) + math.exp(log_a) * size**-a + math.exp(log_b) * d**-b
            ax.plot(s.tokens[mine], np.exp(s.log_loss[mine]), "o", color=color, ms=3.5, label=quantity(size))
            ax.plot(d, loss, color=color, lw=1.3)

    words = []
    for f, law in having:
        e, a_, b_, a, b = (estimate.mean for estimate in law.parameters().values())
        words.append(f"{label(f.architecture)}: L = {e:.3g} + {a_:.3g}/N^{a:.3f} + {b_:.3g}/D^{b:.3f}")
    return Chart(
        name="parametric",
        title=title,
        caption="Points are runs of these sizes (within 5 %), lines the law L = E + A/Nᵃ + B/Dᵇ fitted to all sizes at "
        f"once. {'. '.join(words)}.",
        alt=f"Loss against tokens with a line for each model size. {'; '.join(words)}.",
        columns=("architecture", "parameter", "value", "low", "high"),
        rows=tuple(
            (f.architecture, name, e.mean, e.low, e.high) for f, law in having for name, e in law.parameters().items()
        ),
        draw=_loss_curves(having, sizes, "tokens D", "parameters"),
    )


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
        axes[0].set_ylabel(f"compute relative to {base}")
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


def _loss_curves(
    having: Sequence[tuple[ArchitectureFit, T]], curves: Callable[[Axes, ArchitectureFit, T], None], x: str, lines: str
) -> Callable[[bool], Figure]:
    """Panels of loss over `x`, one per architecture, whose legend lists the `lines`."""

    def draw(narrow: bool) -> Figure:
        figure, axes = style.panels(len(having), narrow, columns=2, height=3.8)
        for ax, (f, found) in zip(axes, having, strict=True):
            curves(ax, f, found)
            ax.set_xscale("log")
            style.label_axis(ax.xaxis, quantity, style.log_ticks(*ax.get_xlim()))
            _loss_axis(ax)
            ax.set(title=label(f.architecture), xlabel=x)
            ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title=lines, fontsize=8, title_fontsize=8)
        return figure

    return draw


def compute_axis(ax: Axes) -> None:
    ax.set_xscale("log")
    ax.set_xlabel("training compute C (FLOPs)")
    style.label_axis(ax.xaxis, lambda value: f"{value:.0e}".replace("e+", "e"))


def _loss_axis(ax: Axes) -> None:
    """A logarithmic loss axis; a short one has few round numbers, so it gets the ticks of a linear one."""
    style.plain_log_axis(ax)
    low, high = ax.get_ylim()
    if high / low < 8:
        ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        ax.set_yticks([t for t in ticks if low <= t <= high])
    ax.set_ylabel("validation loss")
