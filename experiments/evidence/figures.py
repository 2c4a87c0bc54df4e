"""Figures of docs/evidence, drawn from its run folders."""

import math
from collections.abc import Iterator

from matplotlib.figure import Figure

from angpt.config import parse_budget
from angpt.present.style import DASHED, label_axis, log_ticks, looks, panels, plain_log_axis
from angpt.present.words import label, quantity
from angpt.stats import mean_interval
from experiments.evidence.protocol import BUDGETS, LARGEST, MULTIPLIED, SENSITIVITY, Protocol
from experiments.evidence.results import Results, curve
from experiments.evidence.trials import ARMS, arm_name


def titles(results: Results) -> dict[str, str]:
    """What the figures show for which there are runs, by name."""
    found = {"tuning": "Tuning losses of all trials over their learning rate"}
    if any(loss is not None for arm in ARMS for budget in BUDGETS for loss in results.losses(arm, budget).values()):
        found["losses"] = (
            "Final losses of every seed over tokens, and lines through the means of complete sets of seeds"
        )
    if any(results.protocol.loss("sensitivity", f"{arm_name(arm)}-chosen") is not None for arm in ARMS):
        found["sensitivity"] = "Tuning loss above that of the chosen settings, as one setting changes"
    return found


def figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """The figures for which there are runs."""
    drawn = {
        "tuning": lambda: tuning_figure(results.protocol),
        "losses": lambda: losses_figure(results),
        "sensitivity": lambda: sensitivity_figure(results.protocol),
    }
    for name in titles(results):
        yield name, drawn[name]()


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
    """Final losses over tokens, every seed; seeds that diverged are crosses at the upper edge."""
    figure, axes = panels(2, narrow=False, columns=2, height=3.2, sharey=True)
    for ax, suffix in zip(axes, ("", ":muon"), strict=True):
        for arm in (name for name in ARMS if (":" in name) == bool(suffix)):
            look, means = looks([arm.partition(":")[0]])[arm.partition(":")[0]], []
            ax.plot([], [], look.marker, ls="-", color=look.color, ms=3, label=label(arm))
            for budget in (b for b, arms in {**BUDGETS, **LARGEST}.items() if arm in arms):
                tokens, found = parse_budget(budget, 1), results.losses(arm, budget).values()
                known = [x for x in found if x is not None and x < math.inf]
                ax.plot([tokens] * len(known), known, look.marker, color=look.color, ms=3)
                if results.diverged(arm, budget):
                    ax.plot(tokens, 0.97, "x", color=look.color, transform=ax.get_xaxis_transform())
                # A line only joins neighbouring budgets whose seeds have all finished.
                complete = results.complete(arm, budget)
                means.append((tokens, mean_interval(complete).mean if complete else math.nan))
            ax.plot(*zip(*means, strict=True), color=look.color)
        ax.set(xscale="log", xlabel="tokens", ylabel="validation loss")
        label_axis(ax.xaxis, quantity, [8e7, 1.6e8, 3.2e8, 6.4e8])
        ax.legend()
    return figure


def sensitivity_figure(protocol: Protocol) -> Figure:
    """Tuning loss above that of the chosen settings, as one setting changes; settings that diverged are crosses at the
    upper edge."""
    figure, axes = panels(2 * len(SENSITIVITY), narrow=False, columns=len(SENSITIVITY), height=2.8)
    places = [(key, suffix) for suffix in ("", ":muon") for key in SENSITIVITY]
    for ax, (key, suffix) in zip(axes, places, strict=True):
        for arm in (name for name in ARMS if (":" in name) == bool(suffix)):
            look = looks([arm.partition(":")[0]])[arm.partition(":")[0]]
            chosen = protocol.loss("sensitivity", f"{arm_name(arm)}-chosen")
            found = {float(v.lstrip("x")): loss for v, loss in curve(protocol, arm, key).items() if loss is not None}
            if not found or chosen is None or chosen == math.inf:
                continue
            points = [(value, loss - chosen) for value, loss in found.items() if loss < math.inf]
            ax.plot(*zip(*points, strict=True), look.marker, ls=DASHED, color=look.color, label=label(arm))
            gone = [value for value, loss in found.items() if loss == math.inf]
            ax.plot(gone, [0.97] * len(gone), "x", color=look.color, transform=ax.get_xaxis_transform())
        name = key.rpartition(".")[2]
        ax.set(xlabel=f"{name} ÷ chosen" if key in MULTIPLIED else name, ylabel="loss − chosen")
        if key in MULTIPLIED:
            plain_log_axis(ax, "x")
            label_axis(ax.xaxis, "{:g}".format, [float(v.lstrip("x")) for v in (*SENSITIVITY[key], "x1")])
        if key == next(iter(SENSITIVITY)) and ax.get_legend_handles_labels()[0]:
            ax.legend()  # all architectures have this setting
    return figure
