"""A run that the protocol calls for, its configuration from tables, and what is stored of it in docs/evidence."""

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from angpt.config import TrainConfig
from angpt.serialization import from_dict

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
KEPT_EVERY, STORED = 10, "metrics.jsonl.gz"
"""Of the records of training steps, every tenth is stored, in a file of this name."""
LossOf = Callable[[str, str], float | None]
"""The loss of a run by the names of its stage and its folder; infinite if it diverged, None if it has not ended."""


@dataclass(frozen=True)
class Item:
    """A run that the protocol calls for."""

    stage: str
    name: str
    build: Callable[[], TrainConfig]
    """Makes the configuration, which takes longer than to find that the run has ended."""
    change: str = ""
    """Name of a change of Muon (relatives.py)."""
    provisional: bool = False
    """True while the runs that decide its settings have not ended: it cannot start."""
    analysed: bool = False
    """True if the model is analysed after its training, as long as its weights exist."""
    evaluated: bool = False
    """True if it is also evaluated on tasks."""
    quantized: bool = False
    """True if its 8-bit forms are evaluated, too."""

    @property
    def folder(self) -> Path:
        return Path(self.stage) / self.name

    @cached_property
    def config(self) -> TrainConfig:
        return self.build()


def configured(*layers: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a run from tables and dotted names, of which later ones win."""
    values: dict[str, Any] = {"model": {}, "data": {}, "optimizer": {}}
    for layer in layers:
        for key, value in layer.items():
            group, _, last = key.rpartition(".")
            if isinstance(value, Mapping):
                values[key] = values[key] | dict(value)
            else:
                (values[group] if group else values)[last] = value
    return from_dict(TrainConfig, values)


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run as they are stored, or extracted; empty if there are none."""
    path = folder / STORED
    if path.exists():
        text = gzip.decompress(path.read_bytes()).decode()
    else:
        path = path.with_suffix("")
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]
