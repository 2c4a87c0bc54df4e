"""A typed reader of a run folder, also while the run is running."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from angpt.config import TrainConfig
from angpt.errors import UserError
from angpt.training.run import Run, Summary

TAIL_BYTES = 65_536
"""How much of the end of metrics.jsonl `newest_values` reads."""


@dataclass(frozen=True)
class Evaluation:
    """The loss on the validation split after a number of tokens."""

    tokens: int
    seconds: float
    """Time spent in training steps so far."""
    loss: float


@dataclass(frozen=True)
class RunRecord:
    """A run: configuration, summary and the records of metrics.jsonl, which is read on first use.

    Records with a value that is not finite (null in the file) are left out.
    """

    path: Path
    config: TrainConfig
    summary: Summary | None
    """None while the run is running, or if it was killed."""

    @classmethod
    def open(cls, path: Path) -> Self:
        run = Run.open(path)
        return cls(path, run.config(), run.summary())

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.path.resolve().name

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """All evaluations, in order."""
        return self._metrics[0]

    @property
    def layers(self) -> tuple[dict[str, Any], ...]:
        """Records of each layer: input norm, α, row norms."""
        return self._metrics[1]

    @property
    def moments(self) -> tuple[dict[str, Any], ...]:
        """Variances of Adam's first moment, of a run with `record_moments`."""
        return self._metrics[2]

    @cached_property
    def _metrics(self) -> tuple[tuple[Evaluation, ...], tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
        run = Run(self.path)
        try:
            records = [record for record in run.records() if not _has_null(record)]
            val, layers, moments = (tuple(r for r in records if r["kind"] == k) for k in ("val", "layers", "moments"))
            if not all({"step", "tokens"} <= record.keys() for record in (*layers, *moments)):
                raise KeyError("step or tokens")
            return tuple(Evaluation(r["tokens"], r["seconds"], r["val_loss"]) for r in val), layers, moments
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{run.metrics}: cannot be read ({error!r}); repeat the run") from error


def newest_values(folder: Path) -> dict[str, Any]:
    """The newest value of each quantity in metrics.jsonl, from the end of the file; empty for a run without one."""
    merged: dict[str, Any] = {}
    with suppress(FileNotFoundError), Run(folder).metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in file.read().split(b"\n")[:-1]:
            with suppress(ValueError):  # the first may begin in the middle
                merged |= json.loads(line)
    return merged


def _has_null(record: dict[str, Any]) -> bool:
    return any(value is None or (isinstance(value, list) and None in value) for value in record.values())
