"""The result of a study as a table: in the terminal, and in result.md beside result.json."""

import math

from angpt.present.tables import Table
from angpt.present.words import interval, label, overhead, plural, without_html
from angpt.results import Result, Row

EDGE = {-1: " ↓", 0: "", 1: " ↑"}
"""Beside a value that is the lowest or highest of those tried."""


def result_table(result: Result) -> Table:
    """A row for each architecture, size and budget of which a run has ended; columns that say the same in every row are
    left out."""
    rows = [row for row in result.rows if row.val_loss is not None or row.diverged]
    columns: dict[str, list[str]] = {"": [label(r.architecture) for r in rows]}
    columns["size"] = [r.size for r in rows]
    columns["parameters"] = [f"{r.parameters / 1e6:,.2f}M" for r in rows]
    columns["budget"] = [r.budget for r in rows]
    columns["settings"] = [r.settings for r in rows]
    columns["batch"] = [f"{r.batch:,}{EDGE[r.batch_side]}" for r in rows]
    columns["lr"] = [f"{r.lr:g}{EDGE[r.lr_side]}" for r in rows]
    columns["validation loss"] = [_loss(r) for r in rows]
    columns["change"] = ["" if r.change is None else overhead(r.change, digits=2) for r in rows]
    columns["perplexity"] = ["" if r.val_loss is None else f"{math.exp(min(r.val_loss.mean, 700)):,.2f}" for r in rows]
    always = ("", "validation loss", "perplexity")
    kept = {name: cells for name, cells in columns.items() if len(set(cells)) > 1 or name in always}
    return Table(list(kept), list(zip(*kept.values(), strict=True)))


def _loss(row: Row) -> str:
    if row.val_loss is None:
        return f"diverged ({row.diverged} of {plural(row.seeds, 'seed')})"
    text = interval(row.val_loss, 4)
    return f"{text} ({row.diverged} of {row.seeds} diverged)" if row.diverged else text


def markdown(result: Result) -> str:
    """The text of result.md."""
    over = sum(run.ended for run in result.runs)
    state = f"{over} of {plural(len(result.runs), 'run')} ended. " if not result.complete else ""
    several = any(row.val_loss is not None and row.val_loss.low is not None for row in result.rows)
    explained = f"{state}Changes are relative to {label(result.baseline)}."
    if several:
        explained += " ± is half of the 95 % interval over seeds, whose spread is pooled over the rows of a size"
        explained += " except those that vary far more."
    lines = [result_table(result).markdown(), "", explained, *(f"- {note}" for note in result.notes)]
    return without_html("\n".join(lines) + "\n")
