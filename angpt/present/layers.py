"""Charts of the values of each layer that runs record during training: input norms, α and row norms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from angpt.present.charts import Absent, Chart, Row
from angpt.present.style import DEPTH, GROUPS, band, fold_legend, outer_labels, panels, plain_log_axis, token_axis
from angpt.present.words import quantity

Values = NDArray[np.float64]

ALPHAS = {"alpha_a": "α of attention", "alpha_m": "α of MLP"}
LEGEND_LAYERS = 8
"""Largest number of layers in a legend; more are shown by a colour bar."""
NOTHING = "No run has recorded its layers (layers_every = 0, or no step done yet)."


@dataclass(frozen=True)
class LayerHistory:
    """Values of each layer that a run recorded, and the name of the run in figures."""

    label: str
    architecture: str
    run: str
    budget: int
    seed: int
    records: tuple[dict[str, Any], ...]


def input_norms(found: Sequence[LayerHistory]) -> Chart | Absent:
    """Length of the residual stream before each layer, during training."""
    title = "Input norm of each layer"
    runs = with_values(found, ["input_norm"])
    if not runs:
        return Absent(title, NOTHING)
    series = [(run.label, *values_of(run, "input_norm")) for run in runs]
    options: dict[str, Any] = {"ylabel": "mean length of h", "logarithmic": True, "last": "out"}
    ends = [
        f"{name}: from {values[-1, 0]:.3g} into the first layer to {values[-1, -1]:.3g} after the last"
        for name, _, values in series
    ]
    return Chart(
        name="input-norms",
        title=title,
        caption="Mean length of the residual stream h as it enters each layer, and after the last (“out”), on a "
        f"logarithmic axis that the panels share. {_which_runs(runs)}",
        alt=f"Line charts, one per architecture, at the end of training: {'; '.join(ends)}.",
        **_numbers(runs, ["input_norm"]),
        draw=lambda narrow: layer_panels(series, narrow, in_a_row(len(series)), **options),
    )


def alphas(found: Sequence[LayerHistory]) -> Chart | Absent:
    """Interpolation weights α of each layer, during training."""
    heading = "Interpolation weight α of each layer"
    runs = with_values(found, list(ALPHAS))
    if not runs:
        recorded = any(run.records for run in found)
        return Absent(heading, "No architecture here has an α." if recorded else NOTHING)
    series = [
        (f"{run.label}, {title}", *values_of(run, name))
        for run in runs
        for name, title in ALPHAS.items()
        if name in run.records[-1]
    ]
    columns = 4 if max(len(title) for title, _, _ in series) <= 24 else 2  # titles must not overlap
    ends = [f"{title}: {values[-1].min():.3g} to {values[-1].max():.3g}" for title, _, values in series]
    return Chart(
        name="alphas",
        title=heading,
        caption="How far each residual update moves from the stream h towards the output of attention or MLP: "
        f"the mean over dimensions of the learned α. {_which_runs(runs)}",
        alt=f"Line charts. Range over layers at the end of training: {'; '.join(ends)}.",
        **_numbers(runs, list(ALPHAS)),
        draw=lambda narrow: layer_panels(series, narrow, columns, ylabel="mean of α", height=2.6),
    )


def row_norms(found: Sequence[LayerHistory]) -> Chart | Absent:
    """Row norms of each group of matrices, during training."""
    title = "Row norms of the parameter groups"
    runs = with_values(found, list(GROUPS))
    if not runs:
        return Absent(title, NOTHING)
    series = {run.label: {name: values_of(run, name) for name in GROUPS if name in run.records[-1]} for run in runs}
    extremes = [v for groups in series.values() for _, values in groups.values() for v in (values.min(), values.max())]
    logarithmic = min(extremes) > 0 and max(extremes) / min(extremes) > 8

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(len(series), narrow, columns=in_a_row(len(series)), sharey=True)
        for ax, (title, groups) in zip(axes, series.items(), strict=True):
            for name, (tokens, values) in groups.items():
                ax.plot(tokens, values.mean(axis=1), color=GROUPS[name], lw=1.6, label=name)
                if values.shape[1] > 1:
                    band(ax, tokens, values.min(axis=1), values.max(axis=1), GROUPS[name])
            ax.set(title=title, ylabel="mean length of the rows")
        if logarithmic:
            plain_log_axis(axes[0])
        _token_axes(axes, narrow)
        fold_legend(figure, axes[0], narrow)
        return figure

    ends = [
        f"{title}: " + ", ".join(f"{name} {values[-1].mean():.3g}" for name, (_, values) in groups.items())
        for title, groups in series.items()
    ]
    return Chart(
        name="row-norms",
        title=title,
        caption="Mean length of the rows of the weight matrices: embedding W_e, attention W_qkv and W_p, MLP W_uz and "
        f"W_d, head W_h. Lines: mean over layers; bands: from the lowest layer to the highest. {_which_runs(runs)} "
        "nGPT keeps the columns of W_p and W_d at length 1 instead of their rows, so that rows of W_d have a length of "
        "about √(d_ff / d_m), which is 2 unless d_ff is given.",
        alt=f"Line charts, one per architecture. Means over layers at the end of training: {'; '.join(ends)}.",
        **_numbers(runs, list(GROUPS)),
        draw=draw,
    )


def with_values(found: Sequence[LayerHistory], names: Sequence[str]) -> list[LayerHistory]:
    """The runs that recorded at least one of these values."""
    return [run for run in found if run.records and any(name in run.records[-1] for name in names)]


def in_a_row(panels: int) -> int:
    """Number of panels per row: four panels fit in one row, other numbers are in rows of three."""
    return 4 if panels == 4 else 3


def _which_runs(runs: Sequence[LayerHistory]) -> str:
    budgets, seeds = sorted({run.budget for run in runs}), sorted({run.seed for run in runs})
    return f"One run each: {' and '.join(map(quantity, budgets))} tokens, seed {' and '.join(map(str, seeds))}."


def values_of(run: LayerHistory, name: str) -> tuple[Values, Values]:
    """Tokens (T,) and values (T, layers) that a run recorded under a name."""
    records = [record for record in run.records if name in record]
    tokens = np.array([record["tokens"] for record in records], dtype=np.float64)
    return tokens, np.array([np.atleast_1d(record[name]) for record in records], dtype=np.float64)


def _numbers(runs: Sequence[LayerHistory], names: Sequence[str]) -> dict[str, Any]:
    """Columns and rows of a chart: a row per record and layer, and one for the values outside the layers."""
    rows: list[Row] = []
    for run in runs:
        for record in run.records:
            lists = [record[name] for name in names if isinstance(record.get(name), list)]
            head = (run.architecture, run.run, record["tokens"])
            for layer in range(max(map(len, lists), default=0)):
                values = (record[n][layer] if isinstance(record.get(n), list) else None for n in names)
                rows.append((*head, layer + 1, *values))
            once = [None if isinstance(record.get(n), list) else record.get(n) for n in names]
            if any(value is not None for value in once):
                rows.append((*head, None, *once))
    return {"columns": ("architecture", "run", "tokens", "layer", *names), "rows": tuple(rows)}


def layer_lines(ax: Axes, tokens: Values, values: Values, depth: int, last: str | None = None) -> None:
    """Draw a line per layer, coloured by depth; `last` is the name of the deepest if it is no layer."""
    for layer in range(values.shape[1]):
        name = last if last and layer == depth - 1 else f"layer {layer + 1}"
        ax.plot(tokens, values[:, layer], color=DEPTH(layer / max(1, depth - 1)), lw=1.4, label=name)


def layer_panels(
    series: Sequence[tuple[str, Values, Values]],
    narrow: bool,
    columns: int,
    *,
    ylabel: str = "",
    height: float = 2.9,
    shared: bool = True,
    logarithmic: bool = False,
    last: str | None = None,
) -> Figure:
    """A panel for each (title, tokens, values), with a line per layer and a legend or colour bar of the layers."""
    depth = max(values.shape[1] for _, _, values in series)
    figure, axes = panels(len(series), narrow, columns=columns, height=height, sharey=shared)
    for ax, (title, tokens, values) in zip(axes, series, strict=True):
        layer_lines(ax, tokens, values, depth, last)
        ax.set(title=title, ylabel=ylabel)
    if logarithmic:
        plain_log_axis(axes[0])
    _token_axes(axes, narrow or not shared)
    depth_key(figure, axes, depth, narrow, last)
    return figure


def layer_ticks(depth: int) -> list[int]:
    """Layers to label on an axis: the first, the last, and up to eight between that are not too close to the last."""
    ticks = sorted({1, depth, *range(1, depth + 1, -(-depth // 8))})
    return [tick for tick in ticks if tick in (1, depth) or depth - tick >= depth / 10]


def layer_axis(ax: Axes, layers: int, out: bool = False) -> None:
    """Label the x axis with the layers, from 1; `out` adds a place after the last."""
    ticks = layer_ticks(layers + out)
    ax.set_xticks(ticks, ["out" if out and tick == layers + 1 else str(tick) for tick in ticks])
    ax.set_xlabel("layer")


def _token_axes(axes: list[Axes], narrow: bool) -> None:
    for ax in axes:
        token_axis(ax)
        ax.set_xlim(left=0)
    outer_labels(axes, narrow)


def depth_key(figure: Figure, axes: list[Axes], depth: int, narrow: bool, last: str | None = None) -> None:
    """Add what maps colours to layers: a legend of a few, a colour bar of many."""
    if depth <= LEGEND_LAYERS:
        fold_legend(figure, max(axes, key=lambda ax: len(ax.get_legend_handles_labels()[1])), narrow)
        return
    colors = ListedColormap([DEPTH(i / max(1, depth - 1)) for i in range(depth)])
    mappable = ScalarMappable(BoundaryNorm(np.arange(depth + 1) + 0.5, depth), colors)
    ticks = layer_ticks(depth)
    inch = 1 / figure.get_figheight()
    below: dict[str, Any] = {"location": "bottom", "fraction": 0.15 * inch, "pad": 0.05 * inch}
    beside: dict[str, Any] = {"pad": 0.01, "fraction": 0.03, "aspect": max(20.0, 6.5 * figure.get_figheight())}
    options = below if narrow else beside
    bar = figure.colorbar(mappable, ax=axes, ticks=ticks, label="layer", **options)
    bar.set_ticklabels([last if last and tick == depth else str(tick) for tick in ticks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)
    bar.solids.set_edgecolor("face")  # type: ignore[union-attr]
