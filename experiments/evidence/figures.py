"""Figures of docs/evidence, drawn from its run folders."""

import math
from collections.abc import Iterator

from matplotlib.figure import Figure

from angpt.present.style import DASHED, label_axis, log_ticks, looks, panels, plain_log_axis
from angpt.present.words import label, quantity
from angpt.stats import mean_interval
from experiments.evidence.protocol import BUDGETS, LARGEST, MULTIPLIED, SENSITIVITY, Protocol
from experiments.evidence.results import Results, curve
from experiments.evidence.trials import ARMS, arm_name


def figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """The figures for which there are runs."""
    yield "tuning", tuning_figure(results.protocol)
    if any(results.losses(arm, budget)[1] is not None for arm in ARMS for budget in BUDGETS):
        yield "losses", losses_figure(results)
    if any(results.protocol.loss("sensitivity", f"{arm_name(arm)}-chosen") is not None for arm in ARMS):
        yield "sensitivity", sensitivity_figure(results.protocol)


def tuning_figure(protocol: Protocol) -> Figure:
    """Tuning losses of all trials over their learning rate."""
    figure, axes = panels(2, narrow=False, columns=2, height=3.2)
    for ax, suffix in zip(axes, ("", ":muon"), strict=True):
        for arm in (name for name in ARMS if (":" in name) == bool(suffix)):
            look = looks([arm.partition(":")[0]])[arm.partition(":")[0]]
            found = [t for t in protocol.trials(arm, protocol.extended) if t.loss is not None and t.loss < math.inf]
            points = [t.settings["optimizer.lr"] for t in found], [t.loss for t in found]
            ax.plot(*points, look.marker, color=look.color, label=label(arm))
        ax.set(xscale="log", xlabel=f"learning rate of {'Muon' if suffix else 'Adam'}", ylabel="tuning loss")
        label_axis(ax.xaxis, "{:g}".format, log_ticks(*ax.get_xlim(), short=100))
        ax.legend()
    return figure


def losses_figure(results: Results) -> Figure:
    """Final losses over tokens, every seed."""
    figure, axes = panels(2, narrow=False, columns=2, height=3.2, sharey=True)
    for ax, suffix in zip(axes, ("", ":muon"), strict=True):
        for arm in (name for name in ARMS if (":" in name) == bool(suffix)):
            look, points = looks([arm.partition(":")[0]])[arm.partition(":")[0]], []
            for budget, arms in {**BUDGETS, **LARGEST}.items():
                known = [x for x in results.losses(arm, budget).values() if x is not None and x < math.inf]
                if arm in arms and known:
                    tokens = float(budget[:-1]) * 1e6
                    if results.complete(arm, budget):
                        points.append((tokens, mean_interval(known).mean))
                    ax.plot([tokens] * len(known), known, look.marker, color=look.color, ms=3)
            ax.plot(*zip(*points, strict=True), color=look.color, label=label(arm)) if points else None
        ax.set(xscale="log", xlabel="tokens", ylabel="validation loss")
        label_axis(ax.xaxis, quantity, [8e7, 1.6e8, 3.2e8, 6.4e8])
        ax.legend()
    return figure


def sensitivity_figure(protocol: Protocol) -> Figure:
    """Tuning loss above that of the chosen settings, as one setting changes."""
    figure, axes = panels(2 * len(SENSITIVITY), narrow=False, columns=len(SENSITIVITY), height=2.8)
    places = [(key, suffix) for suffix in ("", ":muon") for key in SENSITIVITY]
    for ax, (key, suffix) in zip(axes, places, strict=True):
        for arm in (name for name in ARMS if (":" in name) == bool(suffix)):
            look = looks([arm.partition(":")[0]])[arm.partition(":")[0]]
            chosen = protocol.loss("sensitivity", f"{arm_name(arm)}-chosen") or 0.0
            found = curve(protocol, arm, key).items()
            points = [
                (float(v.lstrip("x")), loss - chosen) for v, loss in found if loss is not None and loss < math.inf
            ]
            if points:
                ax.plot(*zip(*points, strict=True), look.marker, ls=DASHED, color=look.color, label=label(arm))
        ax.set(xlabel=key.rpartition(".")[2], ylabel="loss − chosen", ylim=(-0.02, 0.5))
        if key in MULTIPLIED:
            plain_log_axis(ax, "x")
        if ax.get_legend_handles_labels()[0]:
            ax.legend()
    return figure
