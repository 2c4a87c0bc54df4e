"""The command `angpt analyze`."""

import shlex
from pathlib import Path
from typing import Annotated

import tyro

from angpt.analysis.parts import PARTS, TOKENS, TOY
from angpt.config import Device
from angpt.errors import UserError, nearest
from angpt.present.terminal import terminal


def analyze(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    parts: tuple[str, ...] = PARTS,
    data: str | None = None,
    out: Path | None = None,
    tokens: int = TOKENS,
    device: Device = "auto",
) -> None:
    """Measure inside trained models what the paper measures: tables here, JSON, Markdown and figures in a folder.

    Args:
        runs: Run folders, or the folder of a study, of which one run per architecture and size is measured.
        parts: norms, factors, learned, moments (needs a run with --record-moments), robustness, attention; and toy, the
            examples of the paper's section 3, which needs no run.
        data: Text to measure on, prepared with the runs' tokenizer; by default the text that they were trained on.
        out: Folder for analysis.json, analysis.md and figures/; by default `analysis` in the folder of the study, or in
            the current folder.
        tokens: Validation tokens to measure on.
        device: cpu, cuda, or auto: cuda if available.
    """
    console = terminal()
    for part in parts:
        if part not in (*PARTS, TOY):
            raise UserError(f"unknown part {part!r}: {nearest(part, (*PARTS, TOY))}")
    if not parts:
        raise UserError(f"--parts needs at least one of {', '.join((*PARTS, TOY))}")
    measured = [part for part in parts if part != TOY]
    from angpt.api import run_folders

    folders = run_folders(runs, lambda result: result.representatives())
    if measured and not folders:
        raise UserError("name run folders, or the folder of a study (only --parts toy needs none)")
    study = len(runs) == 1 and folders != list(runs)
    target = out or (runs[0] / "analysis" if study else Path("analysis"))
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; choose another --out")
    if measured:
        from angpt.analysis.analyse import analyse
        from angpt.analysis.claims import claims, claims_table
        from angpt.analysis.progress import progress
        from angpt.analysis.tables import tables
        from angpt.analysis.write import write_analysis  # before anything is measured: a package may be missing
        from angpt.present.tables import show

        arguments = ["angpt", "analyze", *map(str, runs), "--out", str(target), "--tokens", str(tokens)]
        arguments += ["--parts", *parts] if parts != PARTS else []
        arguments += ["--data", data] if data else []
        with progress(console) as tick:
            analysis = analyse(folders, measured, data=data, tokens=tokens, device=device, tick=tick)
        if measured == ["moments"] and all(run.moments is None for run in analysis.runs):
            raise UserError("no run has records of moments; train with --record-moments")
        try:
            target.mkdir(parents=True, exist_ok=True)
            page = write_analysis(analysis, target, shlex.join(arguments))
        except OSError as error:
            raise UserError(f"{target}: cannot be written ({error}); choose another --out") from error
        for table in tables(analysis):
            show(console, table)
        if found := claims(analysis):
            show(console, claims_table(found, "Claims of the paper"))
        console.print(f"analysis: {page}")
    if TOY in parts:
        from angpt.analysis.toy import preconditioning_chart, residual_chart
        from angpt.analysis.write import write_charts

        write_charts([preconditioning_chart(), residual_chart()], target)
        console.print(f"toy examples: {target / 'figures'}")
