"""The commands `angpt fit hparams` and `angpt fit scaling`."""

import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from angpt.fits.records import Count
from angpt.present.tables import show
from angpt.present.terminal import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from angpt.fits.hparams import HparamFit
    from angpt.fits.scaling import ScalingFit

Sources = Annotated[
    tuple[Path, ...],
    tyro.conf.Positional,
    tyro.conf.arg(help="Study folders, run folders, or CSV files (docs/fits.md lists their columns)."),
]
Architectures = Annotated[tuple[str, ...], tyro.conf.arg(help="Fit only these; all unless given.")]


def hparams(
    sources: Sources,
    out: Path = Path("fits/hparams"),
    architectures: Architectures = (),
    multiple: float | None = None,
    write_rules: Path | None = None,
) -> None:
    """Best learning rate as a function of model size, tokens and batch size, and best batch size of the first two.

    Args:
        out: Folder for hparams.json and the figures.
        multiple: Use only the runs with this many tokens per parameter: laws over the model size alone.
        write_rules: Write the laws as rules of `angpt train` to this file, in the format of angpt/training/rules.toml.
    """
    from angpt import api

    console = terminal()
    with console.status("reading runs"):
        fit = api.fit_hparams(sources, architectures=architectures, multiple=multiple)
    source = f"angpt fit hparams {shlex.join(map(str, sources))}"
    _print(console, fit)
    rules: list[str] = []
    with ExitStack() as last:
        if write_rules is not None:
            from angpt.fits.rules import new_rules, written_last

            text, lines = new_rules(write_rules, fit.trends, source)
            rules = [f"rule: {write_rules}: {line}" for line in lines]
            last.enter_context(written_last(write_rules, text, out))
        written = _write(console, fit, out, source)
    _print_lines(console, [*written, *rules])


def scaling(
    sources: Sources,
    out: Path = Path("fits/scaling"),
    architectures: Architectures = (),
    baseline: str | None = None,
    count: Count = "all",
    attention: bool = False,
    curves: bool = False,
    bootstrap: int = 1000,
    huber: float = 0.001,
    seed: int = 0,
    paper: bool = False,
    bins: int = 1500,
) -> None:
    """Loss as a function of compute, and the best size and tokens for it: three approaches, architectures compared.

    Args:
        out: Folder for scaling.json and the figures.
        baseline: Architecture that the others are compared with; gpt+ if present, otherwise the first.
        count: What counts as N in C = 6·N·D: all parameters; without the embedding, which is a look-up (head); without
            embedding and head (none); or all, with the compute that the records state (given).
        attention: Also count the FLOPs of attention.
        curves: Use all evaluations during runs for the frontier, instead of complete runs.
        bootstrap: Bootstrap samples for the intervals of the parametric fit.
        huber: δ of the Huber loss of the parametric fit.
        seed: Seed of the bootstrap.
        paper: Also follow the paper's procedure to the letter: the best run of each compute bin, and power laws through
            them. Without several sizes in each bin its laws are those of the design (docs/table-j1.md).
        bins: Bins of equal logarithmic width for --paper.
    """
    from angpt import api

    console = terminal()
    options: dict[str, Any] = {"count": count, "attention": attention, "curves": curves, "bootstrap": bootstrap}
    options |= {"huber": huber, "seed": seed, "paper": paper, "bins": bins}
    with console.status("fitting"):
        fit = api.fit_scaling(sources, architectures=architectures, baseline=baseline, **options)
    _print(console, fit)
    _print_lines(console, _write(console, fit, out, f"angpt fit scaling {shlex.join(map(str, sources))}"))


def _write(console: "Console", fit: "HparamFit | ScalingFit", out: Path, source: str) -> list[str]:
    """Write the results to the folder `out`; return a line for each file."""
    from angpt.fits.output import write_fit

    with console.status("drawing"):
        return write_fit(fit, out, source)


def _print(console: "Console", fit: "HparamFit | ScalingFit") -> None:
    """Print tables and notes."""
    from angpt.fits.output import fit_tables

    if counting := getattr(fit, "counting", None):
        console.print(counting)
    show(console, *fit_tables(fit))
    _print_lines(console, [f"note: {note}" for note in fit.notes])


def _print_lines(console: "Console", lines: list[str]) -> None:
    for line in lines:
        console.print(line)
