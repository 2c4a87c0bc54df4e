"""The figures of a scaling fit that show curves of single sizes or levels: IsoFLOP valleys and the parametric law."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from angpt.fits.isoflop import IsoFlop, Level
from angpt.fits.parametric import Parametric
from angpt.fits.scaling import ArchitectureFit, ScalingFit
from angpt.fits.scaling_figures import loss_axis
from angpt.present import style
from angpt.present.charts import Absent, Chart
from angpt.present.words import bracketed, label, quantity, scientific

T = TypeVar("T")
LEVELS, SIZES = 14, 8
"""Most levels and sizes that a panel shows."""
NEAR = 0.05
"""Relative difference up to which runs of another size are drawn with a size."""


def isoflop_curves(fit: ScalingFit) -> Chart | Absent:
    """Loss over size at each level of compute."""
    title = "IsoFLOP curves"
    having = [(f, f.isoflop) for f in fit.architectures if isinstance(f.isoflop, IsoFlop)]
    if not having:
        return Absent(title, f"{fit.architectures[0].isoflop}.")
    most = max(len(iso.levels) for _, iso in having)
    triangles = "; triangles are the minima of Akima's interpolant, which is not drawn"

    def levels(ax: Axes, f: ArchitectureFit, iso: IsoFlop) -> None:
        akima = {lev.compute: lev for lev in f.akima.levels} if isinstance(f.akima, IsoFlop) else {}
        shown = [iso.levels[i] for i in style.evenly(len(iso.levels), LEVELS)]
        for level, look in zip(shown, ranked(len(shown)), strict=True):
            _draw_level(ax, level, akima.get(level.compute), look)

    return Chart(
        name="isoflop",
        title=title,
        caption="Loss over model size at equal compute. Points are runs; lines are the parabolas in logarithms, drawn "
        "over the sizes that they were fitted to, and diamonds their vertices"
        + (triangles if any(isinstance(f.akima, IsoFlop) for f, _ in having) else "")
        + ". Pale levels have their best run at the smallest or largest size, and no "
        + ("optimum. " if most <= LEVELS else f"optimum. Shown are {LEVELS} of up to {most} levels, evenly spaced. ")
        + f"{fit.counting}.",
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
        draw=_panels(having, levels, "parameters N", "FLOPs"),
    )


def _draw_level(ax: Axes, level: Level, akima: Level | None, look: style.Look) -> None:
    pale = 0.35 if level.problem else 1.0
    ax.plot(
        level.parameters,
        level.losses,
        look.marker,
        color=look.color,
        ms=3.5,
        alpha=pale,
        label=scientific(level.compute),
    )
    if level.vertex is None:
        return
    x = np.geomspace(*level.vertex.support, 80)
    ax.plot(x, level.curve(x), color=look.color, lw=1.3)
    if akima is not None and akima.vertex is not None:
        ax.plot(akima.vertex.parameters, akima.vertex.loss, "^", color="white", mec=style.INK, mew=0.8, ms=5, zorder=5)
    ax.plot(level.vertex.parameters, level.vertex.loss, "D", color=look.color, mec=style.INK, mew=0.8, ms=5.5, zorder=6)


def parametric_law(fit: ScalingFit) -> Chart | Absent:
    """Loss over tokens for each size, and the parametric law through them."""
    title = "The parametric law"
    having = [(f, f.parametric) for f in fit.architectures if isinstance(f.parametric, Parametric)]
    if not having:
        return Absent(title, f"{fit.architectures[0].parametric}.")

    def sizes(ax: Axes, f: ArchitectureFit, law: Parametric) -> None:
        s, shown = f.sample, _spread_sizes(f)
        for size, look in zip(shown, ranked(len(shown)), strict=True):
            mine = np.abs(np.log(s.parameters / size)) <= NEAR
            d = np.geomspace(s.tokens[mine].min() / 1.2, s.tokens[mine].max() * 1.2, 60)
            values = [law.estimate(law.log_loss(math.log(size), math.log(x))) for x in d]
            mean, low, high = np.exp(np.array([(v.mean, v.low, v.high) for v in values], float)).T
            ax.plot(s.tokens[mine], np.exp(s.log_loss[mine]), look.marker, color=look.color, ms=4, label=quantity(size))
            ax.plot(d, mean, color=look.color, lw=1.3)
            if law.freedom > 0 and len(law.theta) > 1:
                style.band(ax, d, low, high, look.color)

    words = []
    for f, law in having:
        e, a_, b_, a, b = law.parameters().values()
        terms = f"A = {a_.mean:.4g}, B = {b_.mean:.4g}, a = {bracketed(a, '.3f')}, b = {bracketed(b, '.3f')}"
        words.append(f"{label(f.architecture)}: E = {bracketed(e, '.3f')}, {terms}")
    most = max(len(np.unique(f.sample.parameters)) for f, _ in having)
    return Chart(
        name="parametric",
        title=title,
        caption="Points are runs of these sizes (within 5 %), lines the law L = E + A/Nᵃ + B/Dᵇ fitted to all sizes at "
        "once, with its 95 % band. "
        + ("" if most <= SIZES else f"Shown are {SIZES} of up to {most} sizes. ")
        + f"{'. '.join(words)}.",
        alt=f"Loss against tokens with a line for each model size. {'; '.join(words)}.",
        columns=("architecture", "parameter", "value", "low", "high"),
        rows=tuple(
            (f.architecture, name, e.mean, e.low, e.high) for f, law in having for name, e in law.parameters().items()
        ),
        draw=_panels(having, sizes, "tokens D", "parameters"),
    )


def _spread_sizes(f: ArchitectureFit) -> list[float]:
    """All sizes, or of many those with the most runs in equal parts of the range of sizes."""
    tried, runs = np.unique(f.sample.parameters, return_counts=True)
    if len(tried) <= SIZES:
        return tried.tolist()
    near = np.array([np.sum(runs[np.abs(np.log(tried / size)) <= NEAR]) for size in tried])
    part = np.minimum((np.log(tried / tried[0]) / math.log(tried[-1] / tried[0]) * SIZES).astype(int), SIZES - 1)
    return [float(tried[part == i][np.argmax(near[part == i])]) for i in range(SIZES) if np.any(part == i)]


def ranked(count: int) -> list[style.Look]:
    """Colours and markers for curves in the order of a quantity, neighbours as different as possible."""
    return [style.Look(style.DEPTH(i / max(1, count - 1)), style.MARKERS[i % 7]) for i in range(count)]


def _panels(
    having: Sequence[tuple[ArchitectureFit, T]], curves: Callable[[Axes, ArchitectureFit, T], None], x: str, lines: str
) -> Callable[[bool], Figure]:
    """Panels of loss over `x`, one per architecture, whose legend lists the `lines`."""

    def draw(narrow: bool) -> Figure:
        figure, axes = style.panels(len(having), narrow, columns=2, height=3.8)
        for ax, (f, found) in zip(axes, having, strict=True):
            curves(ax, f, found)
            ax.set_xscale("log")
            style.label_axis(ax.xaxis, quantity, style.log_ticks(*ax.get_xlim()))
            loss_axis(ax)
            ax.set(title=label(f.architecture), xlabel=x)
            handles = [h for h in ax.get_legend_handles_labels()[0] if isinstance(h, Line2D)]
            ax.legend(
                handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), title=lines, fontsize=8, title_fontsize=8
            )
        return figure

    return draw
