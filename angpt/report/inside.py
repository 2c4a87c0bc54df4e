"""The section of the page on the inside of the models: what `angpt analyze` measures, of one run per architecture."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from angpt.analysis.analyse import Analysis, RunAnalysis, analyse, newest_state
from angpt.analysis.charts import LAYER_CHARTS
from angpt.analysis.claims import Claim, claims
from angpt.analysis.shift_charts import SHIFT_CHARTS
from angpt.analysis.tables import tables
from angpt.errors import UserError
from angpt.present.charts import Absent, Chart, Drawn, write_chart
from angpt.present.tables import Table
from angpt.present.words import quantity
from angpt.report.records import RunRecords, Study
from angpt.training.run import Run

FILE = "analysis.json"
LARGEST = 10_000_000
"""Parameters of models that are measured while the page is written; larger ones take `angpt analyze` before it."""


@dataclass(frozen=True)
class Inside:
    claims: list[Claim]
    tables: list[Table]
    figures: list[Drawn | Absent]
    note: str
    """Why there is nothing, or not of every model; else on how much text was measured."""


def look_inside(study: Study, folder: Path, out: Path) -> Inside:
    """The analysis of the run that stands for each architecture: as it lies in the folder, if it is of these
    checkpoints, or made now. Its figures are written to `out`."""
    runs = [run for a in study.result.architectures if (run := study.representative(a)) is not None]
    ready, notes = [], []
    for run in runs:
        try:
            newest_state(Run(run.path))
            ready.append(run)
        except UserError:
            notes.append(f"{run.result.name} has no good checkpoint yet.")
    if not ready:
        return Inside([], [], [], " ".join(notes) or "No run has started yet.")
    analysis = _stored([out / "analysis" / FILE, folder / "analysis" / FILE, out / FILE], ready)
    if analysis is None:
        try:
            analysis = _measured(ready, out)
        except UserError as error:
            return Inside([], [], [], " ".join([*notes, f"{error}."]))
    charts = [make(analysis) for make in (*LAYER_CHARTS, *SHIFT_CHARTS)]
    drawn: list[Drawn | Absent] = [write_chart(c, out / "figures") if isinstance(c, Chart) else c for c in charts]
    text = quantity(max(run.measured_tokens for run in analysis.runs))
    notes.append(f"Measured on {text} tokens of validation text, at the last checkpoint of one run per architecture.")
    return Inside(claims(analysis), tables(analysis), drawn, " ".join(notes))


def _stored(paths: list[Path], runs: list[RunRecords]) -> Analysis | None:
    """An analysis of exactly these checkpoints, where there is one."""
    for path in dict.fromkeys(paths):
        try:
            found = {run.run: run for run in Analysis.read(path).runs} if path.exists() else {}
        except UserError:  # of another version: it is made again
            continue
        chosen = [found.get(run.path.resolve().name) for run in runs]
        known = [mine for mine, run in zip(chosen, runs, strict=True) if mine is not None and _is_of(mine, run)]
        if len(known) == len(runs):
            return Analysis(tuple(known))
    return None


def _is_of(analysis: RunAnalysis, run: RunRecords) -> bool:
    state = newest_state(Run(run.path))
    return (analysis.step, analysis.fingerprint) == (state.step, state.fingerprint)


def _measured(runs: list[RunRecords], out: Path) -> Analysis:
    sizes = [run.summary.parameters for run in runs if run.summary is not None]
    if max(sizes, default=0) > LARGEST:
        command = shlex.join(["angpt", "analyze", *(str(run.path) for run in runs), "--out", str(out / "analysis")])
        raise UserError(f"The models are too large to be measured in passing: {command} does it for the next page")
    analysis = analyse([run.path for run in runs], device="cpu")
    analysis.write(out / FILE)
    return analysis
