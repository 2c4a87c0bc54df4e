"""Figures of an analysis: first moment of the gradient, unusual inputs, attention matrices."""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from angpt.analysis.analyse import Analysis
from angpt.analysis.charts import looks_of, numbers
from angpt.analysis.claims import BLOCK_MATRICES
from angpt.analysis.probe import ratio
from angpt.present.charts import Absent, Chart
from angpt.present.layers import depth_key, layer_lines
from angpt.present.style import DASHED, INK, fold_legend, outer_labels, panels, plain_log_axis, reference
from angpt.present.words import number, percent, span


def moments(analysis: Analysis) -> Chart | Absent:
    """Relative variance of the first moment during training, as the paper plots it."""
    title = "Variance of the first moment"
    runs = [(run, run.moments) for run in analysis.runs if run.moments]
    if not runs:
        return Absent(title, "No run has recorded it; train with --record-moments.")
    cells = [(run, m, g) for run, m in runs for name in BLOCK_MATRICES for g in m.groups if g.group == name]
    depth = max(len(g.relative[0]) for _, _, g in cells)

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(len(cells), narrow, len(BLOCK_MATRICES), 2.3, sharey=True, sharex=not narrow)
        for ax, (run, m, g) in zip(axes, cells, strict=True):
            layer_lines(ax, np.array(m.steps) / m.total_steps, m.total_steps * np.array(g.relative), depth)
            if m.warmup > 0:
                ax.axvline(m.warmup, color=INK, lw=0.8, ls=(0, (1, 1.5)))
            reference(ax)
            ax.set(xlabel="part of training", ylabel="relative variance", xlim=(0, 1))
            ax.set_title(f"{run.label}, {g.group}", fontsize=8)
        outer_labels(axes, narrow)
        depth_key(figure, axes, depth, narrow)
        return figure

    ends = [f"{run.label} {g.group} {number(g.peak)} at {percent(g.peak_at, 0)}" for run, _, g in cells]
    return Chart(
        name="moments",
        title=title,
        caption="Variance over the entries of the first moment m_t of Adam or Muon, divided by its mean over training; "
        "one line per layer. Dashed: the mean. Dotted: the end of warm-up.",
        alt=f"Line charts by matrix and run. Peak and when it is reached: {'; '.join(ends)}.",
        columns=("run", "group", "step", "layer", "relative_variance"),
        rows=tuple(
            (run.label, g.group, step, i + 1, value)
            for run, m in runs
            for g in m.groups
            for step, row in zip(m.steps, g.relative, strict=True)
            for i, value in enumerate(row)
        ),
        draw=draw,
    )


def robustness(analysis: Analysis) -> Chart | Absent:
    """Residual norm and loss on unusual inputs."""
    title = "Inputs unlike the training text"
    runs = [(run, run.robustness) for run in analysis.runs if run.robustness]
    if not runs:
        return Absent(title, "Robustness was not measured.")
    style = looks_of([run for run, _ in runs])
    names = list(dict.fromkeys(s.name for _, found in runs for s in found.shifts))

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(3, narrow, height=3.6, sharey=not narrow)
        for place, (run, found) in enumerate(runs):
            look, text = style[run.label], found.shifts[0]
            y = [names.index(s.name) + 0.13 * (place - (len(runs) - 1) / 2) for s in found.shifts]
            relative = [ratio(s.mean, text.mean) for s in found.shifts]
            worst = [
                ratio(s.stream[s.worst_layer - 1].mean, text.stream[s.worst_layer - 1].mean) if s.worst_layer else None
                for s in found.shifts
            ]
            for ax, values in zip(axes, (relative, worst, [s.loss for s in found.shifts]), strict=True):
                ax.plot(np.array(values, float), y, look.marker, color=look.color, ms=6, label=run.label)
        for ax in axes[:2]:
            reference(ax, vertical=True)
            ax.set_xlim(left=0)
        axes[0].set(title="Residual norm", xlabel="mean over that on text")
        axes[1].set(title="Where it changes most", xlabel="layer's mean over that on text")
        axes[2].set(title="Loss", xlabel="loss")
        for ax in axes:
            ax.set_yticks(range(len(names)), names)
            ax.set_ylim(len(names) - 0.5, -0.5)
        fold_legend(figure, axes[0], narrow)
        return figure

    changes = [(run.label, [f"{s.name} {number(s.change)}" for s in found.shifts[1:]]) for run, found in runs]
    parts = [f"{name}: {', '.join(texts)}" for name, texts in changes]
    return Chart(
        name="robustness",
        title=title,
        caption="Mean length of the residual stream over that on validation text: over all layers, and in the layer "
        "where it changes most; and the loss. Dashed: no change. In longer contexts only the positions beyond the "
        "trained context count.",
        alt=f"Dot charts. Factor by which the residual norm changes: {'; '.join(parts)}.",
        columns=("run", "input", "sequences", "length", "place", "mean", "std", "loss"),
        rows=tuple(
            (run.label, s.name, s.sequences, s.length, i + 1, stats.mean, stats.std, s.loss)
            for run, found in runs
            for s in found.shifts
            for i, stats in enumerate(s.stream)
        ),
        draw=draw,
    )


def attention(analysis: Analysis) -> Chart | Absent:
    """Row norms of the attention matrices, beside those of dense attention."""
    title = "Row norms of the attention matrices"
    runs = [(run, run.attention) for run in analysis.runs if run.attention]
    if not runs:
        return Absent(title, "Attention was not measured.")
    depth = max(run.layers for run, _ in runs)

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(len(runs), narrow, columns=min(4, len(runs)), height=3.0, sharey=True)
        for ax, (run, found) in zip(axes, runs, strict=True):
            r = np.array([(b.first * b.last) ** 0.5 for b in found[0].bins])
            layer_lines(ax, r, np.array([[b.norm for b in layer.bins] for layer in found], float).T, depth)
            ax.plot(r, r**-0.5, color=INK, lw=1, ls=DASHED, label="dense")
            ax.set(title=run.label, xlabel="row r", ylabel="‖a_r‖")
            plain_log_axis(ax, "x")
        plain_log_axis(axes[0])
        outer_labels(axes, narrow)
        depth_key(figure, axes, depth, narrow)
        return figure

    parts = [f"{run.label} {span([layer.total.scaled for layer in found])}" for run, found in runs]
    items = [(run.label, layer.layer, b) for run, found in runs for layer in found for b in layer.bins]
    return Chart(
        name="attention",
        title=title,
        caption="Mean length of row r of the attention matrices, over heads and text, one line per layer. Dashed: "
        "1/√r, the length for dense attention. A row of length 1 attends to a single token.",
        alt=f"Line charts on logarithmic axes. Mean of √r·‖a_r‖ by layer, 1 if dense: {'; '.join(parts)}.",
        **numbers(items, "run", "layer", "first", "last", "norm", "dense", "scaled", "effective"),
        draw=draw,
    )


SHIFT_CHARTS: tuple[Callable[[Analysis], Chart | Absent], ...] = (moments, robustness, attention)
