"""Does a learning rate that was tuned on small models hold for larger ones and more tokens?

    python experiments/transfer.py docs/evidence/transfer --table PAGE.md --figure FILE.png
    python experiments/transfer.py docs/evidence/transfer --tests docs/evidence/rates     # sweeps that no law has seen

Laws of the best rate are fitted to the sweeps of small models: lr*(N, D, B) to 7M and 14M, as planned, and lr*(D, B) to
7M alone, which was added when the first had failed with Muon. For each sweep of a larger model, the table has the rates
that they predict, divided by the best one, and the loss that they cost, both read off the interpolated sweep. Other
predictions: the best rate of the smallest model and budget at the same batch size, as it is and times tokens^(−1/3), a
published law (another, −0.32, differs by 2 % here); and the defaults, which were chosen with all runs in sight."""

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

SMALL = {"law of 7M": 10e6, "law of 7M and 14M": 20e6}
"""Laws by the number of parameters that the models they are fitted to stay below."""
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


def predictions(fit: HparamFit, tests: HparamFit | None = None) -> Iterator[Prediction]:
    """Every prediction for every sweep of a larger model, or for the sweeps of `tests`, which no law is fitted to."""
    for target in tests.sizes if tests else fit.sizes:
        if tests is None and target.parameters < max(SMALL.values()):
            continue
        rule, smallest = rule_for(target.architecture), fit.of(target.architecture)[0]
        points = next(t.lr.points for t in fit.trends if t.architecture == target.architecture)
        for sweep in target.sweeps:
            values = target.parameters, target.tokens, sweep.batch_tokens
            for method, limit in SMALL.items():
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


def table(fit: HparamFit, tests: HparamFit | None = None) -> str:
    """All predictions as Markdown; the name and best rate of a model stand in its first row."""
    lines, before = [HEADER, "|---|---|---|---|---|---|"], ""
    for model, found, *rest in (p.row() for p in predictions(fit, tests)):
        lines.append("| " + " | ".join((*((model, found) if model != before else ("", "")), *rest)) + " |")
        before = model
    return "\n".join(lines) + "\n"


def figure(fit: HparamFit) -> Figure:
    """The sweeps of the larger models, with the rates that the laws of the small ones predict."""
    chosen = [p for p in predictions(fit) if p.method in SMALL]
    sweeps = [chosen[i : i + len(SMALL)] for i in range(0, len(chosen), len(SMALL))]
    drawn, axes = panels(len(sweeps), narrow=False, columns=2, height=2.6)
    colors = looks(p.target.architecture for p in chosen)
    for ax, laws in zip(axes, sweeps, strict=True):
        p = laws[0]
        color, x = colors[p.target.architecture].color, np.log(p.sweep.lrs)
        fine = np.linspace(x[0], x[-1], 100)
        ax.plot(np.exp(fine), np.exp(Curve.through(x, np.log(p.sweep.losses))(fine)), color=color)
        ax.plot(p.sweep.lrs, p.sweep.losses, "o", color=color)
        for law, dashes in zip(laws, (":", "--"), strict=True):
            ax.axvline(law.lr, color=INK, ls=dashes, lw=1.3, label=law.method)
        if p.sweep.minimum:
            ax.plot(p.best, p.sweep.minimum.loss, "*", color="white", mec=INK, ms=12)
        ax.set(xscale="log", xlabel="learning rate", ylabel="tuning loss", title=p.row()[0])
        label_axis(ax.xaxis, "{:g}".format, log_ticks(*ax.get_xlim(), short=100))
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return drawn


def replaced(page: str, new: str) -> str:
    """The page with a new table in the place of the one with the same header."""
    before, _, after = page.partition(HEADER)
    return before + new.rstrip("\n") + "\n\n" + after.partition("\n\n")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of run folders")
    parser.add_argument("--table", type=Path, help="replace the table of this page")
    parser.add_argument("--figure", type=Path, help="write the figure to this file")
    parser.add_argument("--tests", type=Path, help="print the table for the sweeps of this folder instead")
    args = parser.parse_args()
    fit, tests = (
        fit_hparams(read_table([folder], ("batch_tokens", "lr"))) if folder else None
        for folder in (args.runs, args.tests)
    )
    assert fit is not None
    print(text := table(fit, tests))
    if args.table:
        args.table.write_text(replaced(args.table.read_text(), text))
    if args.figure:
        with styled():
            figure(fit).savefig(args.figure, metadata={"Software": None})


if __name__ == "__main__":
    main()
