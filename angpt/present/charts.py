"""A figure with what belongs to it (caption, description, numbers), and its way into files and into the page."""

import base64
import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from angpt.present.style import INK, styled

Row = tuple[str | float | int | None, ...]


@dataclass(frozen=True)
class Chart:
    """A figure that can be drawn wide, for a desk, or narrow, for a phone."""

    name: str
    """Name of its files, without a suffix."""
    title: str
    caption: str
    alt: str
    """Text for readers who cannot see the figure."""
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    draw: Callable[[bool], Figure]
    """The figure; narrow if true."""


@dataclass(frozen=True)
class Absent:
    """A figure for which there are no data yet."""

    title: str
    reason: str


@dataclass(frozen=True)
class Drawn:
    """A chart as the page needs it: SVG for both widths, and the numbers as a link that holds them."""

    chart: Chart
    wide: str
    narrow: str
    data_uri: str


def write_chart(chart: Chart, folder: Path) -> Drawn:
    """Write NAME.png, NAME.svg and NAME.csv."""
    with styled():
        wide = chart.draw(False)
        wide.savefig(folder / f"{chart.name}.png", metadata={"Software": None})
        wide.set_layout_engine("none")  # it is laid out
        svg, narrow = _svg(wide), _svg(chart.draw(True))
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    standalone = re.sub(r"(<svg [^>]*>)", rf"\1\n {background}", svg, count=1)
    (folder / f"{chart.name}.svg").write_text(standalone, encoding="utf-8")
    table = _csv(chart)
    (folder / f"{chart.name}.csv").write_text(table, encoding="utf-8")
    return Drawn(
        chart,
        inline(svg, f"{chart.name}-wide", chart.alt),
        inline(narrow, f"{chart.name}-narrow", chart.alt),
        "data:text/csv;base64," + base64.b64encode(table.encode()).decode(),
    )


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def inline(svg: str, prefix: str, alt: str) -> str:
    """An SVG of matplotlib as an element of a page: it takes the page's font and text colour and the room it is given,
    and shares no id with other figures."""
    body = svg[svg.index("<svg ") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # In a page, the rule for all elements would hold outside the figure as well; the page's style has it instead.
    body = re.sub(r"<style [^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\n?", "", body, flags=re.DOTALL)
    body = re.sub(r'(?<= )id="', f'id="{prefix}-', body)
    body = body.replace("url(#", f"url(#{prefix}-").replace('xlink:href="#', f'href="#{prefix}-')
    body = body.replace(INK, "currentColor")
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
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
