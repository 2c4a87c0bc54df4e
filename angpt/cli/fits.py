"""The commands `angpt fit hparams` and `angpt fit scaling`: read runs, call the library, print and write."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from angpt.errors import UserError
from angpt.fits.records import Count, RunTable, read_table
from angpt.present.tables import show

if TYPE_CHECKING:
    from rich.console import Console

Sources = Annotated[tuple[Path, ...], tyro.conf.Positional]


def hparams(
    sources: Sources,
    out: Path = Path("fits/hparams"),
    architectures: tuple[str, ...] = (),
    multiple: float | None = None,
    write_rules: Path | None = None,
) -> None:
    """How the best batch size and learning rate move with model size: two-stage interpolation, power laws, intervals.

    Args:
        sources: Study folders, run folders, or CSV files (docs/fits.md lists their columns).
        out: Folder for hparams.json and the figures.
        architectures: Fit these only; all unless given.
        multiple: Take the runs with this many tokens per parameter, where there are several budgets.
        write_rules: Write the laws as rules of `angpt train` to this file; it follows angpt/training/rules.toml.
    """
    from rich.console import Console

    from angpt.fits.hparam_figures import sweeps, trends
    from angpt.fits.hparams import fit_hparams
    from angpt.fits.output import hparam_tables, hparam_values, write_fit

    console = Console()
    if multiple is not None and not 0 < multiple < float("inf"):
        raise UserError(f"--multiple {multiple}: must be positive and finite")
    table = _read(console, sources, ("batch_tokens", "lr"), architectures)
    fit = fit_hparams(table, multiple)
    source = _command("hparams", sources)
    written = write_fit(out, "hparams", hparam_values(fit, source), [sweeps(fit), trends(fit)])
    show(console, *hparam_tables(fit))
    _say(console, fit.notes, written)
    if write_rules is not None:
        from angpt.fits.rules import write_rules as write

        if not fit.trends:
            raise UserError("--write-rules: there is no law to write; the notes above say why")
        for line in write(write_rules, fit.trends, source):
            console.print(f"rule: {write_rules}: {line}", highlight=False, soft_wrap=True)


def scaling(
    sources: Sources,
    out: Path = Path("fits/scaling"),
    architectures: tuple[str, ...] = (),
    baseline: str | None = None,
    count: Count = "all",
    attention: bool = False,
    curves: bool = False,
    bins: int = 1500,
    bootstrap: int = 1000,
    huber: float | None = None,
    seed: int = 0,
) -> None:
    """How the loss falls with compute, and how to spend it: three approaches, intervals, architectures side by side.

    Args:
        sources: Study folders, run folders, or CSV files (docs/fits.md lists their columns).
        out: Folder for scaling.json and the figures.
        architectures: Fit these only; all unless given.
        baseline: What the others are compared with; gpt+ where there is one, else the first.
        count: What counts as N, with C = 6·N·D: all parameters; those without the embedding, which is a look-up (head);
            without embedding and head (none); or all, with the compute that the records state (given).
        attention: Count the FLOPs of attention, too.
        curves: Take the minima over all evaluations within runs, as Chinchilla does, not over complete runs.
        bins: Parts of equal logarithmic width that the range of compute is cut into, each with its lowest loss.
        bootstrap: Samples for the intervals of the parametric fit.
        huber: Where the loss of the parametric fit turns from squares to absolute values; 0.001 or 1.345 standard
            deviations of the noise, whichever is more, unless given.
        seed: Of the bootstrap.
    """
    from rich.console import Console

    from angpt.fits.compute import Counting
    from angpt.fits.output import scaling_tables, scaling_values, write_fit
    from angpt.fits.scaling import Options, fit_scaling
    from angpt.fits.scaling_figures import isoflop_curves, loss_over_compute, optimal_sizes, parametric_law, savings

    console = Console()
    options = Options(Counting(count, attention), curves, bins, bootstrap, seed, huber)
    table = _read(console, sources, (), architectures, curves)
    with console.status("fitting"):
        fit = fit_scaling(table, options, baseline)
    charts = [make(fit) for make in (loss_over_compute, optimal_sizes, isoflop_curves, parametric_law, savings)]
    with console.status("drawing"):
        written = write_fit(out, "scaling", scaling_values(fit, _command("scaling", sources)), charts)
    console.print(fit.counting, highlight=False, soft_wrap=True)
    show(console, *scaling_tables(fit))
    _say(console, fit.notes, written)


def _read(
    console: "Console",
    sources: Sequence[Path],
    needed: Sequence[str],
    architectures: Sequence[str],
    curves: bool = False,
) -> RunTable:
    from dataclasses import replace

    from angpt.errors import nearest

    with console.status("reading runs"):
        table = read_table(sources, needed, curves)
    known = table.architectures()
    for name in architectures:
        if name not in known:
            raise UserError(f"--architectures {name}: none of the runs is of this architecture: {nearest(name, known)}")
    if not architectures:
        return table
    cells = tuple(c for c in table.cells if c.record.architecture in architectures)
    diverged = tuple(r for r in table.diverged if r.architecture in architectures)
    return replace(table, cells=cells, diverged=diverged)


def _command(verb: str, sources: Sequence[Path]) -> str:
    return f"angpt fit {verb} {shlex.join(map(str, sources))}"


def _say(console: "Console", notes: Sequence[str], written: Sequence[str]) -> None:
    for line in [*(f"note: {note}" for note in notes), *written]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
