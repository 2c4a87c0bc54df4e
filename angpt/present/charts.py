"""Charts: a figure with its caption, description and numbers, written to files and to the page."""

import base64
import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from angpt.present.interactive import panels_of
from angpt.present.style import INK, styled

EMBEDDED_BYTES = 250_000
"""Largest table of numbers inside a page, which otherwise links to the file."""

Row = tuple[str | float | int | None, ...]


@dataclass(frozen=True)
class Chart:
    """A figure that can be drawn wide for a desktop or narrow for a phone, with its texts and numbers."""

    name: str
    """Name of the files, without suffix."""
    title: str
    caption: str
    alt: str
    """Text for readers who cannot see the figure."""
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    draw: Callable[[bool], Figure]
    """Draws the figure; the argument is True for the narrow form."""


@dataclass(frozen=True)
class Absent:
    """A figure without data, and the reason."""

    title: str
    reason: str


@dataclass(frozen=True)
class Drawn:
    """A chart for the page: SVG, the address of the numbers (a data URI unless they are many), and its line charts as
    data, which the script of the page draws instead."""

    chart: Chart
    wide: str
    narrow: str | None
    """The form for a phone; None for line charts, which the script draws at any width. Without scripts, a phone
    scrolls the wide form."""
    data_uri: str
    panels: list[dict[str, Any]]


def write_chart(chart: Chart, folder: Path) -> Drawn:
    """Write NAME.png, NAME.svg and NAME.csv, and return the chart for the page."""
    for kind in ("png", "svg", "csv"):
        (folder / f"{chart.name}.{kind}").unlink(missing_ok=True)  # a link stays behind with what it points to
    with styled():
        wide = _laid_out(chart.draw(False))
        wide.savefig(folder / f"{chart.name}.png", metadata={"Software": None})
        svg, panels = _svg(wide), panels_of(wide)
        narrow = None if panels else _svg(_laid_out(chart.draw(True)))
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    standalone = re.sub(r"(<svg [^>]*>)", rf"\1\n {background}", svg, count=1)
    (folder / f"{chart.name}.svg").write_text(standalone, encoding="utf-8")
    table = _csv(chart)
    (folder / f"{chart.name}.csv").write_text(table, encoding="utf-8")
    return Drawn(
        chart,
        inline(svg, f"{chart.name}-wide", chart.alt),
        None if narrow is None else inline(narrow, f"{chart.name}-narrow", chart.alt),
        address(table, "text/csv", f"{folder.name}/{chart.name}.csv"),
        panels,
    )


def address(text: str, kind: str, file: str) -> str:
    """Where a page finds a text: in a data URI, or in the file if it is large."""
    if len(text) > EMBEDDED_BYTES:
        return file
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _laid_out(figure: Figure) -> Figure:
    """Arrange a figure for good. Otherwise each file is drawn twice, the first time only to arrange it."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine(None)
    return figure


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def inline(svg: str, prefix: str, alt: str) -> str:
    """An SVG of matplotlib as an element of a page: with the page's font, text colour and width, and unique ids."""
    body = svg[svg.index("<svg ") :]
    # A style rule inside the SVG would apply to the whole page; the page's own style sheet contains it.
    for unwanted in (r"<metadata>.*?</metadata>", r"<style [^>]*>.*?</style>", r"<!--.*?-->\n?"):
        body = re.sub(unwanted, "", body, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|xlink:href=")#([^)"]*)', body))
    body = re.sub(r' id="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", body)
    body = body.replace("url(#", f"url(#{prefix}-").replace('xlink:href="#', f'href="#{prefix}-')
    body = body.replace(INK, "currentColor")
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    # Most of the file are coordinates, of which a hundredth of a point is enough, indentation, and rotations by 0.
    body = re.sub(r"<(?:path|use|text|rect)\b[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", re.sub(r"\n +", "\n", body))
    view = re.search(r'viewBox="[^"]*"', body)
    assert view is not None
    opening = f'<svg {view[0]} role="img" aria-label="{escape(alt)}">'
    return re.sub(r"<svg [^>]*>", lambda _: opening, body, count=1).rstrip()


def _csv(chart: Chart) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(chart.columns)
    writer.writerows(chart.rows)
    return buffer.getvalue()
