"""The section of the page that looks inside the models: what `angpt analyze` measures, of one run per architecture."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from angpt.analysis.analyse import Analysis, analyse, state_of
from angpt.analysis.charts import LAYER_CHARTS
from angpt.analysis.claims import Claim, claims
from angpt.analysis.shift_charts import SHIFT_CHARTS
from angpt.analysis.tables import tables
from angpt.errors import UserError
from angpt.inference.source import Source
from angpt.present.charts import Absent, Chart, Drawn, write_chart
from angpt.present.tables import Table
from angpt.present.words import quantity
from angpt.reports.records import Material, ReportedRun
from angpt.training.checkpoint import State
from angpt.training.hardware import choose_device

FILE = "analysis.json"
LARGEST = 10_000_000
"""Parameters of models that are measured on the CPU while the page is written; larger ones take a GPU, or
`angpt analyze` before it."""


@dataclass(frozen=True)
class Inside:
    claims: list[Claim]
    tables: list[Table]
    figures: list[Drawn | Absent]
    note: str
    """Why there is nothing, or not of every model; else on how much text was measured."""


def look_inside(study: Material, sources: Mapping[str, Source], folder: Path, out: Path) -> Inside:
    """The analysis of the run that stands for each architecture: as it lies in the folder, if it is of these
    checkpoints, or made now. Its figures are written to `out`."""
    runs = study.representatives()
    ready = [run for run in runs if run.result.name in sources]
    notes = [f"{run.result.name} has no good checkpoint yet." for run in runs if run not in ready]
    if not ready:
        return Inside([], [], [], " ".join(notes) or "No run has started yet.")
    states = {run.result.name: state_of(sources[run.result.name]) for run in ready}
    analysis = _stored([base / place for base in (out, folder) for place in (f"analysis/{FILE}", FILE)], states)
    if analysis is None:
        try:
            analysis = _measured(ready, sources, out)
        except UserError as error:
            return Inside([], [], [], " ".join([*notes, f"{error}."]))
    charts = [make(analysis) for make in (*LAYER_CHARTS, *SHIFT_CHARTS)]
    drawn: list[Drawn | Absent] = [write_chart(c, out / "figures") if isinstance(c, Chart) else c for c in charts]
    text = quantity(max(run.measured_tokens for run in analysis.runs))
    notes.append(f"Measured on {text} tokens of validation text, at the last checkpoint of one run per architecture.")
    return Inside(claims(analysis), tables(analysis), drawn, " ".join(notes))


def _stored(paths: list[Path], states: Mapping[str, State]) -> Analysis | None:
    """An analysis of exactly these checkpoints, by the names of their runs, where there is one."""
    for path in dict.fromkeys(paths):
        try:
            found = {run.run: run for run in Analysis.read(path).runs} if path.exists() else {}
        except UserError:  # of another version: it is made again
            continue
        chosen = [found[name] for name in states if name in found]
        known = [
            run for run in chosen if (run.step, run.fingerprint) == (states[run.run].step, states[run.run].fingerprint)
        ]
        if len(known) == len(states):
            return Analysis(tuple(known))
    return None


def _measured(runs: list[ReportedRun], sources: Mapping[str, Source], out: Path) -> Analysis:
    large = max(run.result.parameters for run in runs) > LARGEST
    folders = [run.record.path for run in runs]
    if large and choose_device("auto").type == "cpu":
        command = shlex.join(["angpt", "analyze", *map(str, folders), "--out", str(out / "analysis")])
        raise UserError(f"The models are too large to be measured in passing: {command} does it for the next page")
    opened = {run.record.path: sources[run.result.name] for run in runs}
    analysis = analyse(folders, device="auto" if large else "cpu", sources=opened)
    analysis.write(out / FILE)
    return analysis
