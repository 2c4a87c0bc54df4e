"""What a page shows: the result of a study and the records of its runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from angpt.errors import UserError
from angpt.results import Result, RunResult
from angpt.training.record import RunRecord


@dataclass(frozen=True)
class ReportedRun:
    """A run folder, and what the result says of it."""

    result: RunResult
    record: RunRecord


@dataclass(frozen=True)
class Material:
    """Everything that the page shows."""

    result: Result
    runs: tuple[ReportedRun, ...]
    """In the order of the result; runs that have not started are left out."""

    def of(self, architecture: str) -> list[ReportedRun]:
        return [run for run in self.runs if run.result.architecture == architecture]

    def representatives(self) -> list[ReportedRun]:
        """The run that stands for each architecture where a single one is shown."""
        found = {run.result.name: run for run in self.runs}
        return [found[run.name] for run in self.result.representatives() if run.name in found]


def read_material(folders: Sequence[Path], result: Result) -> Material:
    """Match run folders with the runs of the result, by name."""
    found: dict[str, ReportedRun] = {}
    known = {run.name: run for run in result.runs}
    for path in folders:
        run = known.get(path.resolve().name)
        if run is None:
            raise UserError(f"{path}: not among the runs of the result; work out the result of the study again")
        if run.name in found:
            raise UserError(f"{path}: there are two runs of the name {run.name}; rename the folder of one")
        if run.status != "waiting" or (path / "config.toml").exists():
            found[run.name] = ReportedRun(run, RunRecord.open(path))
    return Material(result, tuple(found[run.name] for run in result.runs if run.name in found))
