"""The command `angpt analyze`: call the library and print."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from angpt.config import Device
from angpt.errors import UserError, nearest

if TYPE_CHECKING:
    import rich.console

    from angpt.analysis.analyse import Analysis

ALL = ("norms", "factors", "learned", "moments", "robustness", "attention")
TOY = "toy"


def analyze(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    parts: tuple[str, ...] = ALL,
    data: str | None = None,
    out: Path | None = None,
    tokens: int = 16_384,
    device: Device = "auto",
) -> None:
    """Measure inside trained models what the paper measures: tables here, JSON, Markdown and figures in a folder.

    Args:
        runs: Run folders, or the folder of a study, of which one run per architecture and size is taken.
        parts: norms, factors, learned, moments (needs a run with --record-moments), robustness, attention; and toy, the
            examples of the paper's section 3, which needs no run.
        data: Text to measure on, prepared with the runs' tokenizer; what they were trained on unless given.
        out: Folder for analysis.json, analysis.md and figures/; analysis in the folder of the study, or here, unless
            given.
        tokens: Validation tokens to measure on.
        device: cpu, cuda, or auto: cuda where there is one.
    """
    from rich.console import Console

    console = Console()
    for part in parts:
        if part not in (*ALL, TOY):
            raise UserError(f"unknown part {part!r}: {nearest(part, (*ALL, TOY))}")
    if not parts:
        raise UserError(f"--parts needs at least one of {', '.join((*ALL, TOY))}")
    measured = [part for part in parts if part != TOY]
    folders = expand(runs)
    if measured and not folders:
        raise UserError("name run folders, or the folder of a study (only --parts toy needs none)")
    study = len(runs) == 1 and folders != list(runs)
    target = out or (runs[0] / "analysis" if study else Path("analysis"))
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; choose another --out")
    arguments = ["angpt", "analyze", *map(str, runs), "--out", str(target), "--tokens", str(tokens)]
    arguments += ["--parts", *parts] if parts != ALL else []
    arguments += ["--data", data] if data else []
    if measured:
        measure(console, folders, measured, data, target, tokens, device, shlex.join(arguments))
    if TOY in parts:
        from angpt.analysis.toy import preconditioning_chart, residual_chart
        from angpt.analysis.write import write_charts

        write_charts([preconditioning_chart(), residual_chart()], target)
        console.print(f"toy examples: {target / 'figures'}", highlight=False, soft_wrap=True)


def expand(folders: Sequence[Path]) -> list[Path]:
    """Run folders as they are; of a study, the run that stands for each architecture and size."""
    found: list[Path] = []
    for folder in folders:
        if not (folder / "study.toml").exists():
            found.append(folder)
            continue
        from angpt.studies.study import Study

        runs = [folder / "runs" / run.name for run in Study.open(folder).result().representatives()]
        found += [path for path in runs if path.exists()]
        if not any(path.exists() for path in runs):
            raise UserError(f"{folder}: no run has started yet; `angpt study run {folder}` begins them")
    return found


def measure(
    console: "rich.console.Console",
    folders: Sequence[Path],
    parts: Sequence[str],
    data: str | None,
    target: Path,
    tokens: int,
    device: Device,
    command: str,
) -> None:
    from angpt.analysis.analyse import analyse
    from angpt.analysis.progress import progress
    from angpt.analysis.write import write_analysis  # before anything is measured: it may lack a package

    with progress(console) as tick:
        analysis = analyse(folders, parts, data=data, tokens=tokens, device=device, tick=tick)
    try:
        target.mkdir(parents=True, exist_ok=True)
        page = write_analysis(analysis, target, command)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error}); choose another --out") from error
    print_tables(console, analysis)
    console.print(f"analysis: {page}", highlight=False, soft_wrap=True)


def print_tables(console: "rich.console.Console", analysis: "Analysis") -> None:
    from angpt.analysis.claims import claims, claims_table
    from angpt.analysis.tables import tables
    from angpt.present.tables import show

    for table in tables(analysis):
        show(console, table)
    if found := claims(analysis):
        show(console, claims_table(found, "The paper's picture"))
