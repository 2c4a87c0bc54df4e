"""The result of any run folders: runs that differ in the seed alone share a row, all others have rows of their own."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from angpt.config import DIMENSIONS, MACHINE_SETTINGS, RECORDS, SIZES, TrainConfig, settings_of
from angpt.errors import UserError
from angpt.results import Result, RunResult
from angpt.studies.grid import Group, short
from angpt.studies.jobs import Job
from angpt.studies.search import Optimum
from angpt.studies.summarise import Chosen, run_result, summarise
from angpt.training.record import LOSS_SETTINGS
from angpt.training.run import Run

SIZE = "size"
SHARED = (SIZE, "model.d_ff", *LOSS_SETTINGS, "device")
"""Settings that runs must share to be compared; where they differ, each value has its own table and verdict."""
IGNORED = (*MACHINE_SETTINGS, *RECORDS, "record_moments", "model.architecture", "tokens", "seed")
"""Settings that do not change the loss, and those that rows have anyway."""


def summarise_runs(folders: Sequence[Path], baseline: str) -> Result:
    """The result of run folders."""
    configs = [Run.open(folder).config() for folder in folders]
    settings = [_settings(config) for config in configs]
    shared = [{name: own[name] for name in SHARED} for own in settings]
    runs = [
        run_result(Job(config, folder), _slug(_words(own, shared)))
        for config, folder, own in zip(configs, folders, shared, strict=True)
    ]
    cells: dict[tuple[str, str, int], list[tuple[RunResult, dict[str, Any]]]] = {}
    for run, own in zip(runs, settings, strict=True):
        cells.setdefault((run.architecture, run.size, run.tokens), []).append((run, own))
    groups: dict[Group, list[RunResult]] = {}
    for (architecture, size, tokens), members in cells.items():
        for run, own in members:
            group = Group(architecture, size, short(tokens), _words(own, [other for _, other in members]))
            if twin := next((other for other in groups.get(group, ()) if other.seed == run.seed), None):
                raise UserError(f"{twin.name} and {run.name} have the same settings and the same seed; leave one out")
            groups.setdefault(group, []).append(run)
    chosen = [
        Chosen(group, Optimum(found[0].batch, found[0].lr, math.inf, 0, 0), 1, tuple(found))
        for group, found in groups.items()
    ]
    return summarise(chosen, runs, baseline)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """The settings by their dotted names, with the dimensions of the model as one, and without what they imply."""
    config = dataclasses.replace(config, model=config.model.without_derived_of(config.model))
    found = {name: value for name, value in settings_of(config).items() if name not in IGNORED}
    dimensions = tuple(found.pop(f"model.{name}") for name in DIMENSIONS)
    named = (name for name, known in SIZES.items() if known == dimensions)
    size = next(named, "x".join(map(str, dimensions)))
    return {SIZE: size, **found, "data.path": str(Path(config.data.path))}


def _words(own: Mapping[str, Any], all_settings: Sequence[Mapping[str, Any]]) -> str:
    """What is not the same in all of several settings, as they stand in one of them: lr 0.004, warmup 0."""
    varied = [name for name in own if any(other[name] != own[name] for other in all_settings)]
    words = {name: f"{own[name]:g}" if isinstance(own[name], float) else str(own[name]) for name in varied}
    return ", ".join(word if name == SIZE else f"{name.rpartition('.')[2]} {word}" for name, word in words.items())


def _slug(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"[^\w.+]+", "-", text).strip("-")
