"""What `angpt eval` has found of the runs: a row for each task, a column for each run."""

from dataclasses import dataclass

from angpt.evaluation.results import Line, lines, read_results, with_error
from angpt.present import words as text
from angpt.reports.records import Material


@dataclass(frozen=True)
class EvaluatedRun:
    architecture: str
    budget: str
    seed: int
    weights: str
    """The beginning of their hash."""


@dataclass(frozen=True)
class Evaluations:
    runs: tuple[EvaluatedRun, ...]
    lines: tuple[Line, ...]


def read_evaluations(study: Material) -> Evaluations:
    """The evaluations of the runs that have some."""
    found = [(run.result, results) for run in study.runs if (results := read_results(run.record.path)) is not None]
    runs = (EvaluatedRun(r.architecture, text.quantity(r.tokens), r.seed, e.model.weights[:8]) for r, e in found)
    return Evaluations(tuple(runs), tuple(lines([results for _, results in found])))


def cell(line: Line, column: int) -> str:
    return with_error(line.values[column])
