"""The style of all figures: a colour and a marker per architecture, and the layout of panels."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from angpt.present.words import quantity

DASHED: Any = (0, (4, 3))
INK = "#16181d"
"""Colour of text and axes; in the page it is replaced by the page's text colour."""

# All of these have a contrast of at least 3 on white and on the page's dark background.
KNOWN = {"gpt+": "#a838e0", "ngpt": "#b58a16", "angpt": "#159a40"}
FURTHER = ("#2176c7", "#d55e00", "#d4508a", "#009090", "#8c6d5a", "#6b7fd7", "#c0392b", "#7a8a00")
MARKERS = "os^DvPX<>*"
GROUPS = {
    "W_e": "#2176c7", "W_qkv": "#d55e00", "W_p": "#009090", "W_uz": "#d4508a", "W_d": "#7a8a00", "W_h": "#8c6d5a"
}  # fmt: skip
DEPTH = LinearSegmentedColormap.from_list("depth", ["#3b6fd4", "#9b5fc0", "#d0588c", "#d9741f"])
"""Colours from the first layer to the last, with similar contrast on light and dark backgrounds."""

RC: dict[str, Any] = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.alpha": 0.14,
    "grid.color": INK,
    "grid.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "angpt",
    "text.color": INK,
    "text.parse_math": False,  # names may contain $
    "xtick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.color": INK,
    "ytick.labelsize": 8.5,
    "axes.titley": 1.0,  # as matplotlib would place it, which takes a tenth of the time of a page to find out
}

EACH_RUN = "each run"
"""Note of thin lines that show runs whose mean is a line, too."""
SINGLE_RUN = "single run"
"""Note of thin lines that show runs of a budget without a mean, so that the page tells their values."""

WIDE, NARROW = 9.6, 3.75
"""Widths in inches: the column of the page on a desktop, and a phone."""


@dataclass(frozen=True)
class Look:
    color: Any
    marker: str


def looks(architectures: Iterable[str]) -> dict[str, Look]:
    """Colour and marker of each architecture. Those of Table 1 are the same in every study."""
    names = list(dict.fromkeys(architectures))
    found = {name: Look(color, marker) for (name, color), marker in zip(KNOWN.items(), MARKERS, strict=False)}
    for i, name in enumerate(name for name in names if name not in KNOWN):
        found[name] = Look(FURTHER[i % len(FURTHER)], MARKERS[(len(KNOWN) + i) % len(MARKERS)])
    return {name: found[name] for name in names}


def unlisted(name: str, note: str) -> str:
    """Label of a line that has no entry of its own in legends, with what tells it from the line of this name."""
    return f"_{name}\t{note}"


def styled() -> Any:
    """Context for drawing and writing figures, independent of the user's own matplotlib settings."""
    return matplotlib.style.context(RC, after_reset=True)


def panels(
    count: int, narrow: bool, columns: int = 3, height: float = 2.9, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels in rows of at most `columns`, or in one column if narrow."""
    columns = 1 if narrow else min(columns, count)
    rows = -(-count // columns)
    width = NARROW if narrow else WIDE
    figure = Figure(figsize=(width, rows * min(height, 0.75 * width)), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def token_axis(axes: Axes) -> None:
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value)))
    axes.locator_params(axis="x", nbins=5)


def plain_log_axis(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """A logarithmic axis labelled with plain numbers."""
    axes.set(**{f"{which}scale": "log"})
    axis, (low, high) = (axes.yaxis, axes.get_ylim()) if which == "y" else (axes.xaxis, axes.get_xlim())
    label_axis(axis, "{:g}".format, log_ticks(low, high, (1, 2, 5)))


def log_ticks(low: float, high: float, digits: Sequence[float] = (1, 3), short: float = 300.0) -> Locator:
    """Ticks at powers of ten, and at multiples by `digits` on an axis that spans less than a factor of `short`; at
    most five at round numbers on one that spans less than a factor of 2.2."""
    if high / low < 2.2:
        return MaxNLocator(4, steps=(1, 2, 5, 10))
    return LogLocator(subs=digits if high / low < short else (1,))


def label_axis(axis: Axis, text: Callable[[float], str], ticks: Locator | Sequence[float] | None = None) -> None:
    """Label an axis with `text` of each value, at the given ticks if any, without minor ticks."""
    if ticks is not None:
        axis.set_major_locator(ticks if isinstance(ticks, Locator) else FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def reference(ax: Axes, vertical: bool = False) -> None:
    """Draw a dashed line at 1."""
    (ax.axvline if vertical else ax.axhline)(1, color=INK, lw=0.8, ls=DASHED)


def band(ax: Axes, x: Any, low: Any, high: Any, color: Any) -> None:
    """Draw a pale area between two lines."""
    ax.fill_between(x, low, high, color=color, alpha=0.15, lw=0, zorder=1)


def blend(color: str, part: float) -> tuple[float, float, float]:
    """The colour mixed with this part of white."""
    red, green, blue = (part + (1 - part) * value for value in to_rgb(color))
    return red, green, blue


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the indices below `count`, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int)).tolist()


def outer_labels(axes: list[Axes], narrow: bool) -> None:
    """Label only the axes at the left and at the bottom of a grid of panels that share them."""
    spots = [ax.get_subplotspec() for ax in axes]
    places = {(s.rowspan.start, s.colspan.start) for s in spots if s is not None}
    for ax, spot in zip(axes, spots, strict=True):
        if narrow or spot is None:
            continue
        if spot.colspan.start > 0:
            ax.tick_params(labelleft=False)
            ax.yaxis.label.set_visible(False)  # not removed: a page shows the panel by itself, with its label
        if (spot.rowspan.start + 1, spot.colspan.start) in places:
            ax.tick_params(labelbottom=False)
            ax.xaxis.label.set_visible(False)


def fold_legend(figure: Figure, axes: Axes, narrow: bool) -> None:
    """One legend above all panels, in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        room = int((NARROW if narrow else WIDE) / (0.6 + 0.085 * max(map(len, names))))
        rows = -(-len(names) // max(1, room))
        figure.legend(handles, names, loc="outside upper left", ncols=-(-len(names) // rows), handlelength=2.2)
