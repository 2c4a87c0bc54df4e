"""What the report reads of the run folders: evaluations, layers, configuration, how each run ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angpt.config import TrainConfig
from angpt.errors import UserError
from angpt.present.layers import LayerHistory
from angpt.present.words import label
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
        """The run that stands for an architecture where one is shown: of its largest budget the first seed, or the
        first that has not diverged."""

        def order(run: RunRecords) -> tuple[int, bool, int]:
            return -run.result.budget, run.result.status == "diverged", run.result.seed

        return min(self.of(architecture), key=order, default=None)


def layer_histories(study: Study) -> list[LayerHistory]:
    """What the run that stands for each architecture recorded of its layers."""
    runs = [run for a in study.result.architectures if (run := study.representative(a)) is not None]
    return [
        LayerHistory(label(r.architecture), r.architecture, r.name, r.budget, r.seed, run.layers)
        for run in runs
        for r in [run.result]
    ]


def read_study(folders: Sequence[Path], result: Result) -> Study:
    """Match run folders with the runs of the result, by name."""
    found: dict[str, RunRecords] = {}
    for path in folders:
        run = next((run for run in result.runs if _ends_with(path, run.name)), None)
        if run is None:
            raise UserError(f"{path}: not among the runs of the result; work out the result of the comparison again")
        if run.name in found:
            raise UserError(f"{path}: there are two runs of the name {run.name}; rename the folder of one")
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
            if _has_null(record):  # which stands for a value that was not finite: there is nothing to draw
                continue
            if record["kind"] == "val":
                evaluations.append(Evaluation(record["tokens"], record["seconds"], record["val_loss"]))
            elif record["kind"] == "layers":
                layers.append(record)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run.metrics}: cannot be read ({error!r}); repeat the run") from error
    return RunRecords(path, result, run.config(), run.summary(), tuple(evaluations), tuple(layers))


def _has_null(record: dict[str, Any]) -> bool:
    return any(value is None or (isinstance(value, list) and None in value) for value in record.values())
