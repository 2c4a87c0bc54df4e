"""Figures of an analysis: norms, factors and learned parameters by layer."""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from angpt.analysis.analyse import Analysis, RunAnalysis
from angpt.analysis.factors import ACTIVATIONS, SYMBOLS
from angpt.analysis.norms import Norms
from angpt.present.charts import Absent, Chart
from angpt.present.layers import LayerHistory, layer_axis, layer_panels, values_of
from angpt.present.style import (
    FURTHER,
    GROUPS,
    Look,
    band,
    fold_legend,
    looks,
    panels,
    plain_log_axis,
    reference,
    unlisted,
)
from angpt.present.words import number, quantity, span

SHORT_DASHES: Any = (0, (3, 2))
BLOCK_FIELDS = ("maps", "relative_update")


def numbers(items: Iterable[tuple[Any, ...]], *columns: str) -> dict[str, Any]:
    """Columns and rows of a chart; each item is the first values of a row and an object with the others."""
    rows = ((*first, *(getattr(found, name) for name in columns[len(first) :])) for *first, found in items)
    return {"columns": columns, "rows": tuple(rows)}


def looks_of(runs: Sequence[RunAnalysis]) -> dict[str, Look]:
    """A look for each run, by its label: that of its architecture, or a new one for a second run of the same."""
    names: dict[str, str] = {}
    for run in runs:
        names[run.label] = run.label if run.architecture in names.values() else run.architecture
    found = looks(names.values())
    return {label: found[name] for label, name in names.items()}


def layer_histories(analysis: Analysis, part: str) -> list[LayerHistory]:
    """The values of each layer that the runs recorded during training."""
    measured = [(run, getattr(run, part)) for run in analysis.runs]
    return [
        LayerHistory(r.label, r.architecture, r.run, r.tokens, r.seed, found.history.records() if found else ())
        for r, found in measured
    ]


def norms(analysis: Analysis) -> Chart | Absent:
    """Length of the residual stream and ratios of the blocks by layer."""
    title = "Norms by depth"
    runs = [(run, run.norms) for run in analysis.runs if run.norms]
    if not runs:
        return Absent(title, "Norms were not measured.")
    style = looks_of([run for run, _ in runs])
    depth = max(run.layers for run, _ in runs)

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(3, narrow, height=3.2)
        for run, found in runs:
            look, places = style[run.label], range(1, run.layers + 2)
            means, stds = np.array([(s.mean or 0.0, s.std or 0.0) for s in found.stream]).T
            band(axes[0], places, np.maximum(means - stds, means / 10), means + stds, look.color)
            axes[0].plot(places, means, look.marker + "-", color=look.color, lw=1.6, ms=5, label=run.label)
            for ax, name in zip(axes[1:], BLOCK_FIELDS, strict=True):
                block_lines(ax, run.label, found, name, look, ms=4, lw=1.4)
        axes[0].set(title="Residual stream", ylabel="length of h")
        axes[1].set(title="Last map over first map", ylabel="output over input")
        axes[2].set(title="Update over stream", ylabel="update over stream")
        for ax in axes:
            plain_log_axis(ax)
            layer_axis(ax, depth, out=ax is axes[0])
        for ax in axes[1:]:
            reference(ax)
        fold_legend(figure, axes[0], narrow)
        return figure

    ends = [f"{run.label} {number(f.stream[0].mean)} to {number(f.stream[-1].mean)}" for run, f in runs]
    return Chart(
        name="norms",
        title=title,
        caption="At the last checkpoint, on validation text. Residual stream: mean length before each layer and after "
        "the last (“out”), with its standard deviation over tokens. Last map over first map: mean length after the "
        "last linear map of a block over that before its first. Update over stream: what the residual update adds "
        "to the stream (after minus before) over the stream. Solid: attention, dashed: MLP.",
        alt=f"Line charts by layer. Length of the stream into the first layer and after the last: {'; '.join(ends)}.",
        columns=("run", "layer", "stream", "std", "attention_maps", "attention_update", "mlp_maps", "mlp_update"),
        rows=tuple(
            (run.label, i, stats.mean, stats.std, *(getattr(b, name, None) for b in blocks for name in BLOCK_FIELDS))
            for run, f in runs
            for i, (stats, *blocks) in enumerate(zip_longest(f.stream, f.attention, f.mlp), 1)
        ),
        draw=draw,
    )


def block_lines(ax: Axes, run: str, found: Norms, name: str, look: Look, listed: bool = False, **style: Any) -> None:
    """A value of each layer's attention as a solid line, and of its MLP as a dashed one, by names of their own if
    `listed`."""
    for blocks, dash, what in ((found.attention, "-", "attention"), (found.mlp, SHORT_DASHES, "MLP")):
        values = [getattr(b, name) or float("nan") for b in blocks]
        ax.plot(range(1, len(blocks) + 1), values, look.marker, ls=dash, color=look.color,
                label=f"{run}, {what}" if listed else unlisted(run, what), **style)  # fmt: skip


def gamma(analysis: Analysis) -> Chart | Absent:
    """Length of γ, and of the stream that its norm is applied to, by layer."""
    title = "γ of the norms by depth"
    runs = [(run, run.norms) for run in analysis.runs if run.norms and "norm_a" in run.norms.gamma]
    if not runs:
        return Absent(title, "No architecture here has a γ.")
    style = looks_of([run for run, _ in runs])

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(2, narrow, columns=2, height=3.0)
        for run, found in runs:
            look, layers = style[run.label], range(1, run.layers + 1)
            for name, dash, what in (("norm_a", "-", "attention"), ("norm_m", SHORT_DASHES, "MLP")):
                axes[0].plot(layers, found.gamma[name], look.marker, ls=dash, color=look.color, ms=5,
                             label=f"{run.label}, {what}")  # fmt: skip
            block_lines(axes[1], run.label, found, "stream", look, listed=True, ms=5)
        axes[0].set(title="Length of γ", ylabel="‖γ‖")
        axes[1].set(title="Stream that the norm sees", ylabel="length of h")
        plain_log_axis(axes[1])
        for ax in axes:
            layer_axis(ax, max(run.layers for run, _ in runs))
        fold_legend(figure, axes[0], narrow)
        return figure

    ends = [f"{run.label} {span(list(f.gamma['norm_a'] + f.gamma['norm_m']))}" for run, f in runs]
    return Chart(
        name="gamma",
        title=title,
        caption="Length of the learned γ of the norm before attention (solid) and MLP (dashed), which starts at √d_m, "
        "and the mean length of the stream that the norm is applied to.",
        alt=f"Line charts by layer. Range of ‖γ‖: {'; '.join(ends)}.",
        columns=("run", "layer", "gamma_a", "gamma_m", "into_attention", "into_mlp"),
        rows=tuple(
            (run.label, i + 1, f.gamma["norm_a"][i], f.gamma["norm_m"][i], f.stream[i].mean, f.mlp[i].stream)
            for run, f in runs
            for i in range(run.layers)
        ),
        draw=draw,
    )


def bound(analysis: Analysis) -> Chart | Absent:
    """Share of rows on the bound by layer."""
    title = "Rows on the bound"
    measured = [(run, run.norms) for run in analysis.runs if run.norms]
    runs = [(run, found) for run, found in measured if any(r.constraint == "bound" for r in found.rows)]
    if not runs:
        return Absent(title, "No architecture here bounds its weights.")

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(2 * len(runs), narrow, columns=2, height=2.9)
        for (run, found), left, right in zip(runs, axes[::2], axes[1::2], strict=True):
            for group, color in GROUPS.items():
                rows = [r for r in found.rows if r.group == group]
                layers = [float(r.layer or 0) for r in rows]
                line: dict[str, Any] = {"color": color, "ms": 5, "lw": 1.4}
                left.plot(layers, [100 * (r.on_bound or 0) for r in rows], "o-", label=group, **line)
                right.plot(layers, [r.mean for r in rows], "o-", label=group, **line)
            left.set(title=f"{run.label}: rows of length 1", ylabel="% of the rows", ylim=(0, 100))
            right.set(title=f"{run.label}: mean length", ylabel="mean length of the rows")
            reference(right)
            for ax in (left, right):
                layer_axis(ax, run.layers)
                ax.set_xlim(-0.4, run.layers + 0.4)
        fold_legend(figure, axes[0], narrow)
        return figure

    parts = [f"{run.label} {span([100 * (r.on_bound or 0) for r in f.rows])} %" for run, f in runs]
    items = [(run.label, r) for run, f in runs for r in f.rows]
    return Chart(
        name="bound",
        title=title,
        caption="Share of the rows of each matrix whose length is 1 (to within 0.001), and the mean length of all its "
        "rows. W_e and W_h, which belong to no layer, are at 0.",
        alt=f"Dot charts by layer. Rows on the bound: {'; '.join(parts)}.",
        **numbers(items, "run", "group", "layer", "mean", "low", "high", "on_bound"),
        draw=draw,
    )


COLORS = dict(zip(ACTIVATIONS, (*FURTHER, "#159a40", "#a838e0"), strict=True))
LINES = {"k": SHORT_DASHES, "v": (0, (1, 1.5)), "z": SHORT_DASHES, "lerp_m": SHORT_DASHES}


def factors(analysis: Analysis) -> Chart | Absent:
    """Length of each activation after its factor, and its spread, by layer."""
    title = "Factors in trained models"
    runs = [(run, run.factors) for run in analysis.runs if run.factors and any(f.off for f in run.factors)]
    if not runs:
        return Absent(title, "No architecture here has factors ν.")

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(2 * len(runs), narrow, columns=2, height=3.4)
        if narrow:
            figure.set_figheight(figure.get_figheight() + 1.8)  # for the legend, which has a row per activation
        for (run, found), left, right in zip(runs, axes[::2], axes[1::2], strict=True):
            for name in ACTIVATIONS:
                if mine := [f for f in found if f.activation == name]:
                    layers = [f.layer for f in mine]
                    line: dict[str, Any] = {"color": COLORS[name], "ls": LINES.get(name, "-"), "ms": 4, "lw": 1.4}
                    legend = f"{SYMBOLS[name]}, {ACTIVATIONS[name]}"
                    left.plot(layers, [f.off or float("nan") for f in mine], "o", label=legend, **line)
                    right.plot(layers, [100 * (f.variation or 0) for f in mine], "o", label=legend, **line)
            reference(left)
            left.set(title=f"{run.label}: length after the factor", ylabel="ν · √E‖·‖²")
            plain_log_axis(left)
            right.set(title=f"{run.label}: spread of the length", ylabel="standard deviation / mean in %")
            right.set_ylim(bottom=0)
            for ax in (left, right):
                layer_axis(ax, run.layers)
        fold_legend(figure, axes[0], narrow)
        return figure

    parts = [
        f"{SYMBOLS[name]} of {ACTIVATIONS[name]} {span([f.off for f in found if f.activation == name])}"
        for _, found in runs[:1]
        for name in ACTIVATIONS
    ]
    return Chart(
        name="factors",
        title=title,
        caption="On validation text: the length of each activation after its factor, 1 for an exact factor (errors of "
        "earlier factors are included), and the standard deviation of the length over its mean, which no constant "
        "factor can remove.",
        alt=f"Line charts by layer. Length after the factor: {'; '.join(parts)}.",
        **numbers(
            [(run.label, SYMBOLS[f.activation], f) for run, found in runs for f in found],
            *("run", "factor", "activation", "layer", "nu", "measured", "unit", "mean_inverse", "variation", "cosine"),
        ),
        draw=draw,
    )


def learned(analysis: Analysis) -> Chart | Absent:
    """Mean |α| and g during training."""
    title = "|α| and g during training"
    names = {"alpha_a_size": "|α| of attention", "alpha_m_size": "|α| of MLP", "g": "g"}
    series = [
        (run.label, name, *values_of(run, name))
        for name in names
        for run in layer_histories(analysis, "learned")
        if run.records and name in run.records[-1]
    ]
    if not series:
        return Absent(title, "No run here recorded a learned α or g.")
    titled = [(f"{run}, {names[name]}", tokens, values) for run, name, tokens, values in series]
    columns = 3 if len(series) <= 3 else 4
    ends = [f"{title}: {span(list(values[-1]))}" for title, _, values in titled]
    return Chart(
        name="learned",
        title=title,
        caption="Mean over dimensions of |α| (anGPT does not restrict the sign of α, so the mean of α itself can be "
        "near 0), and the scale g of the attention scores; one line per layer.",
        alt=f"Line charts. At the end of training: {'; '.join(ends)}.",
        columns=("run", "value", "tokens", "layer", "mean"),
        rows=tuple(
            (run, name, float(t), i + 1, float(v))
            for run, name, tokens, values in series
            for t, row in zip(tokens, values, strict=True)
            for i, v in enumerate(row)
        ),
        draw=lambda narrow: layer_panels(titled, narrow, columns, height=2.5, shared=False),
    )


def logit_scales(analysis: Analysis) -> Chart | Absent:
    """|s_z| against token frequency."""
    title = "Logit scale by token frequency"
    runs = [(run, run.learned.s_z) for run in analysis.runs if run.learned and run.learned.s_z]
    if not runs:
        return Absent(title, "No architecture here learns a scale of the logits.")
    style = looks_of([run for run, _ in runs])

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(1, narrow, height=3.2)
        for run, s_z in runs:
            look, bins = style[run.label], [b for b in s_z.bins if b.last > 0]
            x = [(b.first * b.last) ** 0.5 for b in bins]
            band(axes[0], x, [b.low for b in bins], [b.high for b in bins], look.color)
            axes[0].plot(x, [b.mean for b in bins], look.marker + "-", color=look.color, ms=5, label=run.label)
            for b in s_z.bins:
                if b.last == 0:  # tokens that do not occur, apart at the left
                    axes[0].vlines(0.4, b.low, b.high, color=look.color, lw=1)
                    axes[0].plot(0.4, b.mean, look.marker, color=look.color, ms=5, mfc="none")
        axes[0].set(xlabel=f"occurrences in {quantity(runs[0][1].counted)} training tokens", ylabel="|s_z|")
        plain_log_axis(axes[0], "x")
        axes[0].set_ylim(bottom=0)
        fold_legend(figure, axes[0], narrow)
        return figure

    parts = [f"{run.label}: rank correlation {number(s_z.correlation, 2)}" for run, s_z in runs]
    items = [(run.label, b) for run, s_z in runs for b in s_z.bins]
    return Chart(
        name="logit-scales",
        title=title,
        caption="Mean of |s_z| over tokens that occur about equally often, and the range of the middle 80 % of them; "
        "open markers at the left: tokens that do not occur.",
        alt=f"A line chart of |s_z| against the number of occurrences. {'; '.join(parts)}.",
        **numbers(items, "run", "first", "last", "tokens", "mean", "low", "high"),
        draw=draw,
    )


LAYER_CHARTS: tuple[Callable[[Analysis], Chart | Absent], ...] = (norms, gamma, bound, factors, learned, logit_scales)
