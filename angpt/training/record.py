"""What a run has recorded: a typed reader of a run folder, complete or under way."""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from angpt.config import TrainConfig
from angpt.errors import UserError
from angpt.training.run import Run, Summary

TAIL_BYTES = 65_536


@dataclass(frozen=True)
class Evaluation:
    """The loss on the validation split at one time."""

    tokens: int
    seconds: float
    """Time spent in training steps so far."""
    loss: float


@dataclass(frozen=True)
class RunRecord:
    """A run folder: configuration, how it ended, and what metrics.jsonl holds, which is read on first use.

    Records with a value that was not finite, which is null in the file, are left out.
    """

    path: Path
    config: TrainConfig
    summary: Summary | None
    """None while the run is under way, or if it was killed."""

    @classmethod
    def open(cls, path: Path) -> Self:
        run = Run.open(path)
        return cls(path, run.config(), run.summary())

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.resolve().name

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return self._metrics[0]

    @property
    def layers(self) -> tuple[dict[str, Any], ...]:
        """Values of each layer (input norm, α, row norms) at several times."""
        return self._metrics[1]

    @property
    def moments(self) -> tuple[dict[str, Any], ...]:
        """Variances of Adam's first moment at several times, of a run with `record_moments`."""
        return self._metrics[2]

    @cached_property
    def _metrics(self) -> tuple[tuple[Evaluation, ...], tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
        run = Run(self.path)
        evaluations, of_kind = [], dict[str, list[dict[str, Any]]](layers=[], moments=[])
        try:
            for record in run.records():
                if _has_null(record):
                    continue
                if record["kind"] == "val":
                    evaluations.append(Evaluation(record["tokens"], record["seconds"], record["val_loss"]))
                elif record["kind"] in of_kind:
                    if not {"step", "tokens"} <= record.keys():
                        raise KeyError("step or tokens")
                    of_kind[record["kind"]].append(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{run.metrics}: cannot be read ({error!r}); repeat the run") from error
        return tuple(evaluations), tuple(of_kind["layers"]), tuple(of_kind["moments"])


def newest_values(folder: Path) -> dict[str, Any]:
    """The newest value of each quantity in metrics.jsonl, from the end of the file; empty for a run without one."""
    path = Run(folder).metrics
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().split(b"\n")
    merged: dict[str, Any] = {}
    for line in lines[:-1]:
        try:
            merged |= json.loads(line)
        except ValueError:  # the first may begin in the middle
            continue
    return merged


def _has_null(record: dict[str, Any]) -> bool:
    return any(value is None or (isinstance(value, list) and None in value) for value in record.values())
