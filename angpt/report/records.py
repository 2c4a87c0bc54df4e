"""What the report reads of the run folders: evaluations, layers, configuration, how each run ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angpt.config import TrainConfig
from angpt.errors import UserError
from angpt.studies.results import Result, RunResult
from angpt.training.run import Run, Summary


@dataclass(frozen=True)
class Evaluation:
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class RunRecords:
    """One run folder, and what the result says of it."""

    path: Path
    result: RunResult
    config: TrainConfig
    summary: Summary | None
    evaluations: tuple[Evaluation, ...]
    layers: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Study:
    """Everything that the page shows."""

    result: Result
    runs: tuple[RunRecords, ...]
    """In the order of the result; runs that have not started are left out."""

    def of(self, architecture: str) -> list[RunRecords]:
        return [run for run in self.runs if run.result.architecture == architecture]

    def representative(self, architecture: str) -> RunRecords | None:
        """The run that stands for an architecture where one is shown: its largest budget, of these the first seed."""
        return min(self.of(architecture), key=lambda run: (-run.result.budget, run.result.seed), default=None)


def read_study(folders: Sequence[Path], result: Result) -> Study:
    """Match run folders with the runs of the result, by name."""
    found: dict[str, RunRecords] = {}
    for path in folders:
        run = next((run for run in result.runs if _ends_with(path, run.name)), None)
        if run is None:
            raise UserError(f"{path}: not among the runs of the result; work out the result of the comparison again")
        if run.status != "waiting" or (path / "config.toml").exists():
            found[run.name] = _read(path, run)
    return Study(result, tuple(found[run.name] for run in result.runs if run.name in found))


def _ends_with(path: Path, name: str) -> bool:
    parts = Path(name).parts
    return path.absolute().parts[-len(parts) :] == parts


def _read(path: Path, result: RunResult) -> RunRecords:
    run = Run.open(path)
    evaluations, layers = [], []
    try:
        for record in run.records():
            # A value that was not finite is written as null.
            if record["kind"] == "val" and record["val_loss"] is not None:
                evaluations.append(Evaluation(record["tokens"], record["seconds"], record["val_loss"]))
            elif record["kind"] == "layers":
                layers.append(record)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run.metrics}: cannot be read ({error!r}); repeat the run") from error
    return RunRecords(path, result, run.config(), run.summary(), tuple(evaluations), tuple(layers))
