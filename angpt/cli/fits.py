"""The commands `angpt fit hparams` and `angpt fit scaling`."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from angpt.cli.analysis import expand
from angpt.errors import UserError, nearest
from angpt.fits.records import Count, RunTable
from angpt.present.tables import Table, show
from angpt.present.terminal import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from angpt.present.charts import Absent, Chart
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

    from angpt.fits.hparam_figures import rates, sweeps, token_trends, trends
    from angpt.fits.hparams import fit_hparams
    from angpt.fits.output import hparam_tables

    console = terminal()
    if multiple is not None and not 0 < multiple < float("inf"):
        raise UserError(f"--multiple {multiple}: must be positive and finite")
    table = _read(console, sources, ("batch_tokens", "lr"), architectures)
    fit = fit_hparams(table, multiple)
    source = f"angpt fit hparams {shlex.join(map(str, sources))}"
    charts = [make(fit) for make in (sweeps, rates, trends, token_trends)]
    _write(console, out, "hparams", {"made_by": source, **vars(fit)}, charts, hparam_tables(fit))
    if write_rules is not None:
        from angpt.fits.rules import write_rules as write

        if not fit.trends:
            raise UserError("--write-rules: there is no law to write; the notes above say why")
        for line in write(write_rules, fit.trends, source):
            console.print(f"rule: {write_rules}: {line}")


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

    from angpt.fits.compute import Counting
    from angpt.fits.curve_figures import isoflop_curves, parametric_law
    from angpt.fits.output import scaling_tables, scaling_values
    from angpt.fits.scaling import Options, fit_scaling
    from angpt.fits.scaling_figures import loss_over_compute, optimal_sizes, savings

    console = terminal()
    options = Options(Counting(count, attention), curves, bootstrap, seed, huber, paper, bins)
    table = _read(console, sources, (), architectures, curves)
    with console.status("fitting"):
        fit = fit_scaling(table, options, baseline)
    charts = [make(fit) for make in (loss_over_compute, optimal_sizes, isoflop_curves, parametric_law, savings)]
    source = f"angpt fit scaling {shlex.join(map(str, sources))}"
    _write(console, out, "scaling", {"made_by": source, **scaling_values(fit)}, charts, scaling_tables(fit))


def _read(
    console: "Console", sources: Sequence[Path], needed: Sequence[str], chosen: Sequence[str], curves: bool = False
) -> RunTable:
    """The runs of the chosen architectures, or of all."""
    from angpt.fits.reading import read_table

    with console.status("reading runs"):
        table = read_table(expand(sources, lambda result: result.runs), needed, curves)
    known = table.architectures()
    for name in chosen:
        if name not in known:
            raise UserError(f"--architectures {name}: no run has this architecture: {nearest(name, known)}")
    if not chosen:
        return table
    cells = tuple(c for c in table.cells if c.record.architecture in chosen)
    diverged = tuple(r for r in table.diverged if r.architecture in chosen)
    return dataclasses.replace(table, cells=cells, diverged=diverged)


def _write(
    console: "Console",
    out: Path,
    name: str,
    values: dict[str, Any],
    charts: "list[Chart | Absent]",
    tables: list[Table],
) -> None:
    """Write the results to the folder `out`, and print tables, notes and what was written."""
    from angpt.fits.output import write_fit

    with console.status("drawing"):
        written = write_fit(out, name, values, charts)
    if "counting" in values:
        console.print(values["counting"])
    show(console, *tables)
    for line in [*(f"note: {note}" for note in values["notes"]), *written]:
        console.print(line)
