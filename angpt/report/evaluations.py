"""What `angpt eval` has found of the runs: a row for each task, a column for each run."""

from dataclasses import dataclass

from angpt.evaluation.results import Line, lines, read_results, with_error
from angpt.present import words as text
from angpt.report.records import Study


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


def read_evaluations(study: Study) -> Evaluations:
    """Of the runs that have been evaluated."""
    found = [(run.result, results) for run in study.runs if (results := read_results(run.path)) is not None]
    runs = (EvaluatedRun(r.architecture, text.quantity(r.budget), r.seed, e.model.weights[:8]) for r, e in found)
    return Evaluations(tuple(runs), tuple(lines([results for _, results in found])))


def cell(line: Line, column: int) -> str:
    return with_error(line.values[column])
