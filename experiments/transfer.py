"""Does a learning rate that was tuned on small models hold for larger ones and more tokens?

    python experiments/transfer.py docs/evidence/transfer docs/evidence/rates --table PAGE.md --figure FILE.png

Laws of the best rate are fitted to sweeps of small models: lr*(N, D, B) to 7M and 14M of the first folder, as planned;
lr*(D, B) to 7M alone, which was added when the first had failed with Muon; and lr*(N, D, B) to 7M and 14M of both
folders. The second folder has sweeps that ran after the first two laws. For each sweep that a law has not seen, the
table has the rate that it predicts, divided by the best one, and the loss that this costs, both read off the
interpolated sweep. Other
predictions: the best rate of the smallest model and budget at the same batch size, as it is and times tokens^(−1/3), a
published law (another, −0.32, differs by 2 % here); and the defaults, which were chosen with the runs of the first
folder in sight."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from angpt.fits.hparams import SETTINGS, HparamFit, SizeFit, Sweep, fit_hparams, fit_law
from angpt.fits.interpolate import Curve
from angpt.fits.reading import read_table
from angpt.present.style import INK, label_axis, log_ticks, looks, panels, styled
from angpt.present.words import label, quantity
from angpt.training.plan import rule_for

LAWS = {"law of 7M": (10e6, False), "law of 7M and 14M": (20e6, False), "… with a second sweep of 14M": (20e6, True)}
"""Laws by what they are fitted to: models of fewer parameters than this, of the first folder or of both."""
SMALL = max(limit for limit, _ in LAWS.values())
HEADER = "| model | best rate found | prediction | rate | ÷ best | loss above the best |"


@dataclass(frozen=True)
class Prediction:
    """A learning rate that was predicted for a sweep, and what the sweep says of it."""

    target: SizeFit
    sweep: Sweep
    method: str
    lr: float

    @property
    def best(self) -> float:
        """The best rate; of a sweep without a minimum inside, the best one tried."""
        sweep = self.sweep
        return sweep.minimum.lr if sweep.minimum else sweep.lrs[int(np.argmin(sweep.losses))]

    @property
    def cost(self) -> float | None:
        """Loss above that of the best rate; None outside the rates tried."""
        if not self.sweep.lrs[0] <= self.lr <= self.sweep.lrs[-1]:
            return None
        curve = Curve.through(np.log(self.sweep.lrs), np.log(self.sweep.losses))
        return math.exp(float(curve(math.log(self.lr)))) - math.exp(float(curve(math.log(self.best))))

    def row(self) -> tuple[str, ...]:
        model = f"{label(self.target.architecture)}, {quantity(self.target.parameters)}, {quantity(self.target.tokens)}"
        inside = self.sweep.minimum is not None
        cost = "outside the rates tried" if self.cost is None else f"{self.cost:+.3f}".replace("-", "−")
        found = f"{self.best:.3g}" if inside else f"≤ {self.best:.3g}"
        return model, found, self.method, f"{self.lr:.3g}", f"{'' if inside else '≥ '}{self.lr / self.best:.2f}", cost


def predictions(fit: HparamFit, every: HparamFit) -> Iterator[Prediction]:
    """Every prediction for every sweep that is not one of the small models in `fit`."""
    seen = {identity(size) for size in fit.sizes if size.parameters < SMALL}
    for target in (size for size in every.sizes if identity(size) not in seen):
        rule, smallest = rule_for(target.architecture), fit.of(target.architecture)[0]
        for sweep in (s for s in target.sweeps if s.losses):
            values = target.parameters, target.tokens, sweep.batch_tokens
            for method, (limit, later) in LAWS.items():
                if later and target.parameters < limit:
                    continue  # the law has seen it
                trends = (every if later else fit).trends
                points = next(t.lr.points for t in trends if t.architecture == target.architecture)
                fitted = fit_law([p for p in points if p.settings["parameters"] < limit])
                assert fitted is not None
                yield Prediction(target, sweep, method, fitted.law.at(dict(zip(SETTINGS, values, strict=True))).mean)
            start = next(s.minimum for s in smallest.sweeps if s.batch_tokens == sweep.batch_tokens)
            assert start is not None
            longer = target.tokens / smallest.tokens
            for method, lr in (
                (f"best of {quantity(smallest.parameters)}, {quantity(smallest.tokens)}", start.lr),
                ("… × tokens^(−1/3)", start.lr * longer ** (-1 / 3)),
                ("default", rule.lr_at(*map(round, values))),
            ):
                yield Prediction(target, sweep, method, lr)


def identity(size: SizeFit) -> tuple[str, float, float]:
    return size.architecture, size.parameters, size.tokens


def table(fit: HparamFit, every: HparamFit) -> str:
    """All predictions as Markdown; the name and best rate of a model stand in its first row."""
    lines, before = [HEADER, "|---|---|---|---|---|---|"], ""
    for model, found, *rest in (p.row() for p in predictions(fit, every)):
        lines.append("| " + " | ".join((*((model, found) if model != before else ("", "")), *rest)) + " |")
        before = model
    return "\n".join(lines) + "\n"


def figure(fit: HparamFit, every: HparamFit) -> Figure:
    """The sweeps of the larger models, with the rates that the laws of the small ones predict."""
    chosen = [p for p in predictions(fit, every) if p.method in LAWS and p.target.parameters > SMALL]
    sweeps = [chosen[i : i + len(LAWS)] for i in range(0, len(chosen), len(LAWS))]
    drawn, axes = panels(len(sweeps), narrow=False, columns=2, height=2.6)
    colors = looks(p.target.architecture for p in chosen)
    for ax, laws in zip(axes, sweeps, strict=True):
        p = laws[0]
        color, x = colors[p.target.architecture].color, np.log(p.sweep.lrs)
        fine = np.linspace(x[0], x[-1], 100)
        ax.plot(np.exp(fine), np.exp(Curve.through(x, np.log(p.sweep.losses))(fine)), color=color)
        ax.plot(p.sweep.lrs, p.sweep.losses, "o", color=color)
        for law, dashes in zip(laws, (":", "--", "-."), strict=True):
            ax.axvline(law.lr, color=INK, ls=dashes, lw=1.3, label=law.method)
        if p.sweep.minimum:
            ax.plot(p.best, p.sweep.minimum.loss, "*", color="white", mec=INK, ms=12)
        ax.set(xscale="log", xlabel="learning rate", ylabel="tuning loss", title=p.row()[0])
        label_axis(ax.xaxis, "{:g}".format, log_ticks(*ax.get_xlim(), short=100))
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return drawn


def replaced(page: str, new: str) -> str:
    """The page with a new table in the place of the one with the same header."""
    before, _, after = page.partition(HEADER)
    return before + new.rstrip("\n") + "\n\n" + after.partition("\n\n")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of run folders, to whose small models laws are fitted")
    parser.add_argument("tests", type=Path, help="folder of further runs")
    parser.add_argument("--table", type=Path, help="replace the table of this page")
    parser.add_argument("--figure", type=Path, help="write the figure to this file")
    args = parser.parse_args()
    fit, every = (
        fit_hparams(read_table(folders, ("batch_tokens", "lr"))) for folders in ([args.runs], [args.runs, args.tests])
    )
    print(text := table(fit, every))
    if args.table:
        args.table.write_text(replaced(args.table.read_text(), text))
    if args.figure:
        with styled():
            figure(fit, every).savefig(args.figure, metadata={"Software": None})


if __name__ == "__main__":
    main()
