"""A typed reader of a run folder, also while the run is running."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from angpt.config import TrainConfig
from angpt.errors import UserError
from angpt.serialization import parse_json, typed
from angpt.training.run import Run, Summary

BLOCK_BYTES = 65_536
"""How much of the end of metrics.jsonl `newest_values` reads."""
NEWEST = ("step", "loss", "val_loss", "tokens_per_s")
"""Quantities of `newest_values`."""
MOST_RECORDS = 1024
"""Above this number, records of a kind are thinned evenly: a figure does not show more."""
KIND = b'{"kind": "'
"""How every line begins."""
KINDS = ("train", "val", "layers", "moments", "fp8")
LOSS_SETTINGS = (
    "model.vocab_size", "model.context", "data.path", "data.mask_documents", "data.tuning_split", "eval_tokens",
    "precision",
)  # fmt: skip
"""Settings that define the validation loss: losses of runs that differ in them cannot be compared."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss on the validation split after a number of tokens."""

    tokens: int
    seconds: float
    """Time spent in training steps so far."""
    loss: float


@dataclass(frozen=True, slots=True)
class TrainStep:
    """A training step: its loss before the update, and what was measured with it."""

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    mfu: float
    """Model FLOPs utilisation: part of the device's rate of matrix products; nan where that is not known."""
    seconds: float
    """Time spent in training steps so far."""


TRAIN_STEP = tuple(field.name for field in fields(TrainStep))


@dataclass(frozen=True)
class RunRecord:
    """A run: configuration, summary and the records of metrics.jsonl, which is read on first use.

    Records with a value that is not finite (null in the file) are left out. Of more than MOST_RECORDS of a kind, every
    second, fourth, … is kept, and the last.
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

    @cached_property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """Evaluations with a finite loss, in order; at most about MOST_RECORDS."""
        return tuple(Evaluation(r["tokens"], r["seconds"], r["val_loss"]) for r in self._records("val"))

    @cached_property
    def steps(self) -> tuple[TrainStep, ...]:
        """Training steps without null values, in order; at most about MOST_RECORDS."""
        return tuple(TrainStep(**{name: r[name] for name in TRAIN_STEP}) for r in self._records("train"))

    @cached_property
    def layers(self) -> tuple[dict[str, Any], ...]:
        """Records of each layer: input norm, α, row norms."""
        return tuple(self._records("layers"))

    @cached_property
    def moments(self) -> tuple[dict[str, Any], ...]:
        """Variances of the first moment, of a run with `record_moments`."""
        return tuple(self._records("moments"))

    def _records(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind; those of each layer must have the same names and numbers of layers."""
        run, lines, found = Run(self.path), _Thinned(), list[dict[str, Any]]()
        for number, line in run.lines():
            own = line[len(KIND) : line.find(b'"', len(KIND))].decode(errors="replace")
            if own == kind:
                lines.add(number, line)
            elif own not in KINDS:
                raise UserError(f"{run.metrics}, line {number}: is no record of a run; restore it or repeat the run")
        for number, line in lines:
            try:
                record = _record(line, kind)
                if not _has_null(record):
                    found.append(record)
                    if kind != "val" and _layers(record) != _layers(found[0]):
                        raise UserError("other names or another number of layers than the first record")
            except UserError as error:
                raise UserError(
                    f"{run.metrics}, line {number}: cannot be read ({error}); restore it or repeat the run"
                ) from error
        return found


class _Thinned:
    """Numbered lines, of which every second is dropped whenever they become too many; the last one stays."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, bytes]] = []
        self.last: tuple[int, bytes] | None = None
        self.every, self.count = 1, 0

    def add(self, number: int, line: bytes) -> None:
        self.last = number, line
        if self.count % self.every == 0:
            self.kept.append(self.last)
            if len(self.kept) > MOST_RECORDS:
                del self.kept[1::2]
                self.every *= 2
        self.count += 1

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        yield from self.kept
        if self.last is not None and self.last is not self.kept[-1]:
            yield self.last


def _record(line: bytes, kind: str) -> dict[str, Any]:
    record = typed(dict[str, Any], parse_json(line), "the line")
    for name in ("step", "tokens"):
        typed(int, record.get(name), name)
    if kind == "val":
        typed(float, record.get("seconds"), "seconds", finite=True)
        typed(float | None, record.get("val_loss"), "val_loss", finite=True)
        return record
    if kind == "train":
        values = {name: typed(float | None, record.get(name), name, finite=True) for name in TRAIN_STEP}
        unknown = {name: math.nan for name in TRAIN_STEP if name not in ("loss", "grad_norm") and values[name] is None}
        return values | {"step": record["step"], "tokens": record["tokens"]} | unknown
    for name, value in record.items():
        if name not in ("kind", "step", "tokens"):
            typed(float | None | tuple[float | None, ...], value, name, finite=True)
    return record


def _layers(record: dict[str, Any]) -> dict[str, int]:
    return {name: len(value) if isinstance(value, list) else 0 for name, value in record.items()}


def newest_values(folder: Path) -> dict[str, float]:
    """The newest finite values of NEWEST in metrics.jsonl, from the end of the file; those that it has."""
    found: dict[str, float] = {}
    with suppress(FileNotFoundError), Run(folder).metrics.open("rb") as file:
        end, rest = file.seek(0, os.SEEK_END), b""
        while end and len(found) < len(NEWEST):
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            lines = (file.read(end - start) + rest).split(b"\n")
            rest = lines.pop(0) if start else b""  # the end of a line that begins in the block before
            for line in reversed(lines):
                if wanted := [name for name in NEWEST if name not in found and f'"{name}"'.encode() in line]:
                    with suppress(UserError):  # the last may be incomplete
                        record = typed(dict[str, Any], parse_json(line), "the line")
                        for name in wanted:
                            if record.get(name) is not None:
                                found[name] = typed(float, record[name], name, finite=True)
            end = start
    return found


def _has_null(record: dict[str, Any]) -> bool:
    return any(value is None or (isinstance(value, list) and None in value) for value in record.values())
