"""How the runs were trained: the loss and the gradient norm of their steps, and the settings of each architecture."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from angpt.present.charts import Absent, Chart
from angpt.present.style import fold_legend, looks, panels, plain_log_axis, token_axis
from angpt.present.words import label, listed, number, percent
from angpt.reports.records import Material, ReportedRun
from angpt.training.record import TrainStep

BINS = 150
"""Points of a curve; more steps are drawn in groups of equal size."""


def training_curves(study: Material) -> Chart | Absent:
    """Training loss and gradient norm of the run that stands for each architecture."""
    title = "Training loss and gradient norm"
    runs = [run for run in study.representatives() if run.record.steps]
    if not runs:
        return Absent(title, "No run has made a step yet.")
    style = looks(study.result.architectures)
    curves = {run.result.architecture: grouped(run.record.steps) for run in runs}
    positive = all(step.grad_norm > 0 for curve in curves.values() for step in curve)

    def draw(narrow: bool) -> Figure:
        figure, axes = panels(2, narrow, columns=2, height=3.2)
        for architecture, curve in curves.items():
            tokens = [step.tokens for step in curve]
            for ax, values in zip(axes, ([s.loss for s in curve], [s.grad_norm for s in curve]), strict=True):
                ax.plot(tokens, values, color=style[architecture].color, lw=1.3, label=label(architecture))
        axes[0].set(title="Training loss", ylabel="loss of the batch")
        axes[1].set(title="Gradient norm", ylabel="norm before clipping")
        if positive:
            plain_log_axis(axes[1])
        for ax in axes:
            token_axis(ax)
            ax.set_xlim(left=0)
        fold_legend(figure, axes[0], narrow)
        return figure

    ends = [f"{label(a)} loss {c[-1].loss:.3f}, gradient norm {number(c[-1].grad_norm)}" for a, c in curves.items()]
    return Chart(
        name="training",
        title=title,
        caption="One run for each architecture, at the largest budget. Of many steps, groups are drawn: the mean loss "
        "and the largest gradient norm of each.",
        alt=f"Two line charts. At the end of training: {listed(ends)}.",
        columns=("run", "architecture", "tokens", "loss", "grad_norm"),
        rows=tuple(
            (r.result.name, r.result.architecture, s.tokens, s.loss, s.grad_norm) for r in runs for s in r.record.steps
        ),
        draw=draw,
    )


def grouped(steps: Sequence[TrainStep]) -> list[TrainStep]:
    """At most BINS groups of consecutive steps, with their last tokens, mean loss and largest gradient norm."""
    size = -(-len(steps) // BINS)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [
        replace(group[-1], loss=sum(s.loss for s in group) / len(group), grad_norm=max(s.grad_norm for s in group))
        for group in groups
    ]


def recipes(study: Material) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Headings, and for each architecture the settings of its optimizer; several values where runs differ."""
    columns = ("Optimizer", "Peak learning rate", "Warm-up", "Decay of the rate", "Weight decay", "Gradient clipping")
    rows = []
    for architecture in study.result.architectures:
        cells = [_recipe(run) for run in study.of(architecture)]
        if cells:
            rows.append((architecture, [", ".join(dict.fromkeys(values)) for values in zip(*cells, strict=True)]))
    return list(columns), rows


def _recipe(run: ReportedRun) -> tuple[str, ...]:
    optimizer = run.record.config.optimizer
    return (
        optimizer.name.capitalize(),
        f"{run.result.lr:g}" + (f" (Adam {optimizer.adam_lr:g})" if optimizer.adam_lr else ""),
        f"{percent(optimizer.warmup, 0)} of steps" if optimizer.warmup else "none",
        f"cosine to {percent(optimizer.final_lr, 0)}",
        f"{optimizer.weight_decay:g}" if optimizer.weight_decay else "none",
        f"at norm {optimizer.clip:g}",
    )
