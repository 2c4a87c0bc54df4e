"""Line charts as plain data, which the script of a page draws again so that they answer to the pointer and to keys."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from angpt.present.style import EACH_RUN, INK, SINGLE_RUN, evenly

MOST_LINES = 60
"""Lines of a panel above which those of single runs are left out."""
MOST_POINTS = 150
"""Points of a line above which it is drawn with fewer."""
DIGITS = 5
"""Significant digits of each number."""


def panels_of(figure: Figure) -> list[dict[str, Any]]:
    """The panels of a figure with their named lines; a panel without one, such as a bar chart, is left out."""
    found = []
    for ax in figure.axes:
        series = [] if _has_names(ax.yaxis) else [part for line in ax.get_lines() for part in _series(ax, line)]
        if len(series) > MOST_LINES:
            series = [part for part in series if part["note"] not in (EACH_RUN, SINGLE_RUN)]
        if series:
            found.append(
                {
                    "title": ax.get_title("left"),
                    "labels": [ax.get_xlabel(), ax.get_ylabel()],
                    "limits": [_rounded(ax.get_xlim()), _rounded(ax.get_ylim())],
                    "log": [ax.get_xscale() == "log", ax.get_yscale() == "log"],
                    "ticks": _names(ax) if _has_names(ax.xaxis) else None,
                    "series": series,
                    "bars": list(_bars(ax)),
                    "areas": list(_areas(ax)),
                    "rules": list(_rules(ax)),
                }
            )
    return found


def _series(ax: Axes, line: Line2D) -> Iterator[dict[str, Any]]:
    """The parts of a named line between gaps of x, each in the order of x."""
    text = str(line.get_label())
    name, _, note = text.removeprefix("_").partition("\t")
    if (text.startswith("_") and not note) or line.get_transform() != ax.transData:
        return  # unnamed, the end of an error bar, or a line across the panel
    x, y = (np.asarray(values, dtype=np.float64) for values in line.get_data())
    known = np.flatnonzero(np.isfinite(x))
    for part in np.split(known, np.flatnonzero(np.diff(known) > 1) + 1):
        order = part[np.argsort(x[part], kind="stable")][evenly(len(part), MOST_POINTS)]
        if not len(order):
            continue
        yield {
            "name": name,
            "note": note,
            "color": _color(line.get_color()),
            "dash": line.is_dashed(),
            "dots": line.get_linestyle() == "None",
            "x": _rounded(x[order]),
            "y": _rounded(y[order]),
        }


def _bars(ax: Axes) -> Iterator[dict[str, Any]]:
    """Vertical error bars."""
    for container in ax.containers:
        bars: Any = container.lines[2] if isinstance(container, ErrorbarContainer) else ()
        for drawn in bars:
            for (x, low), (_, high) in drawn.get_segments():
                yield {"color": _color(drawn.get_color()[0]), "x": _rounded([x])[0], "y": _rounded([low, high])}


def _areas(ax: Axes) -> Iterator[dict[str, Any]]:
    """Filled areas between two lines."""
    for collection in ax.collections:
        for path in collection.get_paths() if isinstance(collection, PolyCollection) else ():
            corners = np.asarray(path.vertices)
            corners = corners[evenly(len(corners), 2 * MOST_POINTS)]
            color = np.asarray(collection.get_facecolor())[0, :3]
            yield {"color": _color(color), "x": _rounded(corners[:, 0]), "y": _rounded(corners[:, 1])}


def _rules(ax: Axes) -> Iterator[tuple[str, float]]:
    """Lines across the whole panel: the axis, x or y, and the place on it."""
    for line in ax.get_lines():
        if line.get_transform() == ax.get_yaxis_transform(which="grid"):
            yield "y", float(np.asarray(line.get_ydata())[0])
        elif line.get_transform() == ax.get_xaxis_transform(which="grid"):
            yield "x", float(np.asarray(line.get_xdata())[0])


def _color(color: Any) -> str | None:
    """A colour as #rrggbb; None for that of text, which the page chooses."""
    return None if (found := to_hex(color)) == INK else found


def _rounded(values: Any) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values]


def _has_names(axis: Any) -> bool:
    """Whether the places of ticks were chosen one by one, with a name each."""
    return isinstance(axis.get_major_locator(), FixedLocator)


def _names(ax: Axes) -> list[tuple[float, str]]:
    """Places and names of the ticks of an x axis."""
    return [(float(at), tick.get_text()) for at, tick in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)]
