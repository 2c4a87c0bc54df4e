"""The figures of losses and costs: each a function of the study."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from angpt.present.charts import Absent, Chart, Row
from angpt.present.style import (
    EACH_RUN,
    INK,
    NARROW,
    SINGLE_RUN,
    WIDE,
    Look,
    fold_legend,
    label_axis,
    looks,
    outer_labels,
    panels,
    reference,
    token_axis,
    unlisted,
)
from angpt.present.words import interval, label, listed, overhead, quantity, speedup
from angpt.reports.records import Material, ReportedRun
from angpt.results import Cost, SpeedUp
from angpt.results import Row as ResultRow
from angpt.stats import Interval
from angpt.training.record import Evaluation

T = TypeVar("T")
SPEEDUPS: dict[str, Callable[[ResultRow], SpeedUp | None]] = {
    "tokens": lambda row: row.speedup_tokens,
    "time": lambda row: row.speedup_seconds,
}
POINTS = 10_000
"""Points of all thin lines of a figure; above this, each is drawn with fewer."""
EARLY = 0.15
"""Part of the largest budget whose losses may lie above the axis."""


def loss_curves(study: Material) -> Chart | Absent:
    """Validation loss against tokens and against time."""
    title = "Validation loss through training"
    runs = [run for run in study.runs if run.record.evaluations]
    if not runs:
        return Absent(title, "No run has been evaluated yet.")
    style = looks(study.result.architectures)
    largest = study.result.largest_budget(runs[0].result.size)
    named = {row.architecture: row.runs for row in study.result.leaders if row.tokens == largest}
    means = {a: _mean_curve([run for run in study.of(a) if run.result.name in named.get(a, ())]) for a in style}
    seconds, unit = _time_unit(max(run.record.evaluations[-1].seconds for run in runs))
    low, high = _loss_range(runs, largest)
    most = max(2, POINTS // len(runs))
    abscissas: tuple[Callable[[Evaluation], float], ...] = (lambda e: e.tokens, lambda e: e.seconds / seconds)

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(2, narrow, columns=2, height=3.5, sharey=not narrow)
        for ax, x in zip(axes, abscissas, strict=True):
            for architecture, note in product(style, (EACH_RUN, SINGLE_RUN)):
                look, longer = style[architecture], note == SINGLE_RUN  # longer than any run of the mean
                mine = [run for run in study.of(architecture) if (run.result.tokens > largest) == longer]
                own = [thinned(run.record.evaluations, most) for run in mine]
                points = [point for run in own for point in (*((x(e), e.loss) for e in run), (math.nan, math.nan))]
                if points:  # one line, with gaps between runs: they may be thousands
                    name = unlisted(label(architecture), note)
                    ax.plot(*zip(*points, strict=True), color=look.color, lw=0.8, alpha=0.45, label=name)
            for architecture, curve in means.items():
                look = style[architecture]
                xs, ys = [x(e) for e in curve], [e.loss for e in curve]
                every = max(1, len(curve) // 10)
                ax.plot(xs, ys, look.marker + "-", color=look.color, lw=2.2, ms=5, markevery=every,
                        label=label(architecture))  # fmt: skip
            ax.set_ylim(low, high)
            ax.set_xlim(left=0)
            ax.set_ylabel("validation loss")
        token_axis(axes[0])
        axes[0].set_title("Against tokens")
        axes[1].set(xlabel=f"training time ({unit})", title="Against time")
        axes[1].locator_params(axis="x", nbins=5)
        outer_labels(axes, narrow)
        fold_legend(figure, axes[0], narrow)
        return figure

    ends = [f"{label(a)} {c[-1].loss:.4f} after {quantity(c[-1].tokens)} tokens" for a, c in means.items() if c]
    return Chart(
        name="loss",
        title=title,
        caption="Loss on the validation split against the tokens seen and against the time spent in training steps. "
        f"Thin lines: each run, of every budget and seed. Bold lines: the mean over seeds at {quantity(largest)} "
        f"tokens. Losses above {high:.2f}, early in training, are cut off.",
        alt=f"Two line charts of the validation loss. Mean at the last evaluation: {listed(ends) or 'none yet'}.",
        columns=("run", "architecture", "seed", "budget", "tokens", "seconds", "val_loss"),
        rows=tuple(
            (r.result.name, r.result.architecture, r.result.seed, r.result.tokens, e.tokens, e.seconds, e.loss)
            for r in runs
            for e in r.record.evaluations
        ),
        draw=draw,
    )


def thinned(values: Sequence[T], most: int) -> Sequence[T]:
    """At most this many of the values, evenly spread, with the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _mean_curve(runs: list[ReportedRun]) -> list[Evaluation]:
    """The mean over runs, wherever all that have not diverged were evaluated."""
    curves = [
        {e.tokens: e for e in run.record.evaluations}
        for run in runs
        if run.record.evaluations and run.result.status != "diverged"
    ]
    if not curves:
        return []
    mean = []
    for tokens in sorted(set.intersection(*(set(curve) for curve in curves))):
        points = [curve[tokens] for curve in curves]
        seconds, loss = sum(p.seconds for p in points) / len(points), sum(p.loss for p in points) / len(points)
        mean.append(Evaluation(tokens, seconds, loss))
    return mean


def _loss_range(runs: list[ReportedRun], largest: int) -> tuple[float, float]:
    """Losses worth seeing: where every run ends, and what the longest do after their steep start."""
    steady = [run for run in runs if run.result.status != "diverged"] or runs
    late = [e.loss for run in steady for e in run.record.evaluations if e.tokens >= EARLY * largest]
    high = max(late + [run.record.evaluations[-1].loss for run in steady])
    low = min(e.loss for run in steady for e in run.record.evaluations)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


def _time_unit(longest: float) -> tuple[float, str]:
    for seconds, unit in ((3600.0, "hours"), (60.0, "minutes")):
        if longest >= 2 * seconds:
            return seconds, unit
    return 1.0, "seconds"


def budgets(study: Material) -> Chart | Absent:
    """Final loss and speed-up against the budget; by architecture, where there is one budget."""
    title = "Final loss and speed-up"
    finished = (row for row in study.result.leaders if row.val_loss is not None)
    rows = sorted(finished, key=lambda row: row.tokens)
    if not rows:
        return Absent(title, "No run has finished yet.")
    baseline = label(study.result.baseline)
    style = looks(study.result.architectures)
    place = _Places(tuple(sorted({row.tokens for row in rows})), tuple(style))
    title += " by token budget" if len(place.budgets) > 1 else f" at {quantity(place.budgets[0])} tokens"
    kinds = {name: of for name, of in SPEEDUPS.items() if any(map(of, rows))}

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(1 + len(kinds), narrow, height=3.2)
        for architecture, look in style.items():
            mine = [row for row in rows if row.architecture == architecture]
            _draw_losses(axes[0], mine, place, look)
            for ax, of in zip(axes[1:], kinds.values(), strict=True):
                _draw_speedups(ax, label(architecture), [(place.x(row), s) for row in mine if (s := of(row))], look)
        axes[0].set(ylabel="validation loss", title="Final loss")
        for ax, kind in zip(axes[1:], kinds, strict=True):
            reference(ax)
            ax.set(ylabel=f"speed-up over {baseline}", title=f"Speed-up in {kind}")
            ax.margins(y=0.25)  # room for the arrows
        for ax in axes:
            place.dress(ax)
        fold_legend(figure, axes[0], narrow)
        return figure

    intervals = any(row.val_loss is not None and row.val_loss.low is not None for row in rows)
    caption = "Validation loss at the end of training"
    caption += ", mean over seeds. " if len(study.result.seeds) > 1 else ". "
    if kinds:
        caption += f"The speed-up is what {baseline} needs for the same loss, divided by what was used; 1, the dashed "
        caption += (
            "line, is as fast. An open marker with an arrow is a bound: the true value lies in its direction, with "
        )
        caption += "a confidence of 97.5 % if there are several seeds. "
    else:
        caption += "No speed-up is known yet. "
    spread = "Bars: 95 % confidence intervals, from the spread between seeds pooled over architectures and budgets."
    caption += spread if intervals else "No intervals: there is one seed."
    return Chart(
        name="budgets",
        title=title,
        caption=caption,
        alt="Final loss and speed-up. " + "; ".join(_describe(row) for row in rows) + ".",
        columns=("architecture", "budget", "seeds", "val_loss", "low", "high", "diverged",
                 "speedup_tokens", "relation", "low", "high", "speedup_seconds", "relation", "low", "high"),
        rows=tuple(_budget_row(row) for row in rows),
        draw=draw,
    )  # fmt: skip


class _Places:
    """Where a row stands on the x axis: at its budget, or at its architecture if there is one budget only."""

    def __init__(self, budgets: tuple[int, ...], architectures: tuple[str, ...]) -> None:
        self.budgets, self.architectures = budgets, architectures

    def x(self, row: ResultRow) -> float:
        number = self.architectures.index(row.architecture)
        if len(self.budgets) == 1:
            return number
        aside = number - (len(self.architectures) - 1) / 2  # so that intervals do not lie on each other
        return row.tokens * 2 ** (0.06 * aside)

    def dress(self, ax: Axes) -> None:
        if len(self.budgets) == 1:
            names = [label(a) for a in self.architectures]
            short = sum(map(len, names)) <= 24  # else they would run into each other, and the legend has them, too
            ax.set_xticks(range(len(names)) if short else [], names if short else [])
            ax.set_xlim(-0.6, len(names) - 0.4)
            ax.grid(visible=False, axis="x")
            return
        ax.set_xscale("log", base=2)
        label_axis(ax.xaxis, quantity, self.budgets)
        ax.set_xlim(self.budgets[0] / 1.3, self.budgets[-1] * 1.3)
        ax.set_xlabel("token budget")


def _draw_losses(ax: Axes, rows: list[ResultRow], place: _Places, look: Look) -> None:
    points = [(place.x(row), row.val_loss) for row in rows if row.val_loss is not None]
    for x, loss in points:
        _bar(ax, x, loss.low, loss.high, look)
    if points:
        means = [loss.mean for _, loss in points]
        ax.plot([x for x, _ in points], means, look.marker + "-", color=look.color, lw=1.6, ms=6,
                label=label(rows[0].architecture))  # fmt: skip


def _draw_speedups(ax: Axes, name: str, found: list[tuple[float, SpeedUp]], look: Look) -> None:
    """The values joined by lines, and the bounds by themselves: a line to a bound would look like a trend."""
    known = [(x, s.value) for x, s in found if s.relation == "="]
    if known:
        ax.plot(*zip(*known, strict=True), look.marker + "-", color=look.color, lw=1.6, ms=6, label=name)
    for x, s in found:
        _bar(ax, x, s.low, s.high, look)
        if s.relation != "=":
            note = unlisted(name, "more than" if s.relation == ">" else "less than")
            ax.plot(x, s.value, look.marker, color=look.color, ms=6, mew=1.5, mfc="none", label=note)
            arrow = {"arrowstyle": "<|-", "color": look.color, "lw": 1.4, "shrinkA": 0, "shrinkB": 4}
            end = (0, 22 if s.relation == ">" else -22)
            ax.annotate("", (x, s.value), end, textcoords="offset points", arrowprops=arrow)


def _bar(ax: Axes, x: float, low: float | None, high: float | None, look: Look) -> None:
    if low is not None and high is not None:
        ax.errorbar([x], [(low + high) / 2], yerr=(high - low) / 2, color=look.color, lw=1.4, capsize=3.5, fmt="none")


def _describe(row: ResultRow) -> str:
    assert row.val_loss is not None
    text = f"{label(row.architecture)} at {quantity(row.tokens)} tokens: loss {interval(row.val_loss, 4)}"
    if row.speedup_tokens is not None:
        text += f", {speedup(**vars(row.speedup_tokens))} in tokens"
    return text


def _budget_row(row: ResultRow) -> Row:
    loss = row.val_loss
    assert loss is not None
    first: Row = (row.architecture, row.tokens, loss.n, loss.mean, loss.low, loss.high, row.diverged)
    return first + _speedup_row(row.speedup_tokens) + _speedup_row(row.speedup_seconds)


def _speedup_row(s: SpeedUp | None) -> Row:
    return (None,) * 4 if s is None else (s.value, s.relation, s.low, s.high)


def costs(study: Material) -> Chart | Absent:
    """Step time and memory."""
    title = "What a training step costs"
    found = study.result.costs
    if not found:
        return Absent(title, "No run has trained long enough to tell.")
    style = looks(study.result.architectures)
    baseline = next((cost for cost in found if cost.architecture == study.result.baseline), None)
    memory = [cost for cost in found if cost.memory_gib is not None]

    def draw(narrow: bool) -> Figure:
        count = 2 if memory else 1
        figure, axes = panels(count, narrow, columns=2, height=0.9 + 0.42 * len(found))
        _bars(axes[0], found, style, [cost.step_ms for cost in found], [_time_text(cost) for cost in found], narrow)
        axes[0].set(xlabel="milliseconds per step", title="Time")
        if memory:
            values = [Interval(cost.memory_gib or 0.0, None, None, 1) for cost in memory]
            _bars(axes[1], memory, style, values, [_memory_text(cost, baseline) for cost in memory], narrow)
            axes[1].set(xlabel="GiB", title="Memory")
        return figure

    name = label(study.result.baseline)
    return Chart(
        name="costs",
        title=title,
        caption=f"Mean time of a training step over all runs, and the overhead relative to {name}"
        + (", each with its 95 % confidence interval. " if any(c.step_ms.low is not None for c in found) else ". ")
        + ("Memory: the most that a run held on its device (on a CPU, the whole process)." if memory else ""),
        alt="Bar chart. "
        + "; ".join(f"{label(cost.architecture)}: {_time_text(cost)}, {_memory_text(cost, baseline)}" for cost in found)
        + ".",
        columns=("architecture", "parameters", "step_ms", "low", "high", "overhead", "low", "high", "memory_gib"),
        rows=tuple(_cost_row(cost) for cost in found),
        draw=draw,
    )


def _bars(
    ax: Axes, costs: Sequence[Cost], style: dict[str, Look], values: list[Interval], texts: list[str], narrow: bool
) -> None:
    names = [label(cost.architecture) for cost in costs]
    texts = [text.replace(", ", "\n") for text in texts] if narrow else texts
    longest = max(value.mean if value.high is None else value.high for value in values)
    for y, (cost, value, text) in enumerate(zip(costs, values, texts, strict=True)):
        ax.barh(y, value.mean, height=0.55, color=style[cost.architecture].color, alpha=0.85)
        end = value.mean
        if value.low is not None and value.high is not None:
            half = (value.high - value.low) / 2
            ax.errorbar([value.mean], [y], xerr=half, color=INK, lw=1.2, capsize=3, fmt="none")
            end = value.high
        ax.text(end + 0.02 * longest, y, text, va="center", fontsize=8.5)
    ax.set_yticks(range(len(costs)), names)
    ax.set_ylim(len(costs) - 0.5, -0.5)
    # Room for the texts, in inches: a letter takes about 0.08.
    width = (NARROW if narrow else WIDE / 2) - 0.4 - 0.08 * max(map(len, names))
    needed = 0.1 + 0.08 * max(len(line) for text in texts for line in text.split("\n"))
    ax.set_xlim(0, longest * width / max(width - needed, width / 4))
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.locator_params(axis="x", nbins=5)


def _time_text(cost: Cost) -> str:
    text = f"{cost.step_ms.mean:.1f} ms"
    return text if cost.overhead is None else f"{text}, {overhead(cost.overhead)}"


def _memory_text(cost: Cost, baseline: Cost | None) -> str:
    if cost.memory_gib is None:
        return "memory unknown"
    text = f"{cost.memory_gib:.2f} GiB"
    if baseline is None or not baseline.memory_gib or cost is baseline:
        return text
    more = Interval(cost.memory_gib / baseline.memory_gib - 1, None, None, 1)
    return f"{text}, {overhead(more)}"


def _cost_row(cost: Cost) -> Row:
    step, more = cost.step_ms, cost.overhead
    extra: Row = (None,) * 3 if more is None else (more.mean, more.low, more.high)
    return cost.architecture, cost.parameters, step.mean, step.low, step.high, *extra, cost.memory_gib
