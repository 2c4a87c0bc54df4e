"""The search of docs/evidence.md: the arms, the range of every setting, the trials, and the edge of what was tried."""

import math
from dataclasses import dataclass
from typing import Any

from angpt.config import Recipe
from angpt.studies.grid import folder_name

ARCHITECTURES = ("gpt+", "ngpt", "angpt")
ARMS: tuple[Recipe, ...] = (*ARCHITECTURES, *(f"{name}:muon" for name in ARCHITECTURES))
ADAM = {  # log-uniform ranges; β₂ is 0.95 or 0.99
    "gpt+": {"optimizer.lr": (1e-3, 1.6e-2), "optimizer.weight_decay": (0.03, 1), "optimizer.warmup": (0.01, 0.2)},
    "ngpt": {"optimizer.lr": (4e-3, 6.4e-2), "model.stored_scale": (1 / 64, 1 / 4)},  # 1/√256 × 1/4 … 4
    "angpt": {"optimizer.lr": (3e-3, 4.8e-2), "model.stored_scale": (0.001, 0.03)},
}
MUON_LR = (7.5e-3, 0.12)
TRIED, ADDED, SOBOL_SEED = 12, 4, 20
"""Trials of every arm, those that the edge rule adds to every arm, and the seed of their sequence."""
EDGE = 2
"""The best trial is at the edge of a setting if its value is one of so many lowest or highest of its arm."""
OCTAVES = 2.0
"""Width of the range of a setting in added trials, around the value of the best trial, if that is at the edge."""
TIE = 0.01
"""Trials within so many nats of the best of their arm are named beside it."""
RATES = ("optimizer.lr", "optimizer.adam_lr")
RANGED = (*RATES, "optimizer.weight_decay", "optimizer.warmup", "model.stored_scale")
"""Settings that have a range in some arm."""

Settings = dict[str, Any]
"""Values of settings by their dotted names."""


def arm_name(recipe: Recipe) -> str:
    """The name of an arm in names of trials: gpt+-adam, angpt-muon."""
    return folder_name(recipe) if ":" in recipe else f"{recipe}-adam"


def space_of(recipe: Recipe) -> dict[str, tuple[float, float]]:
    """The range of every setting of an arm that is not one of two values."""
    architecture, _, optimizer = recipe.partition(":")
    space = dict(ADAM[architecture])
    return {"optimizer.lr": MUON_LR, "optimizer.adam_lr": space.pop("optimizer.lr"), **space} if optimizer else space


def make_trials() -> dict[str, Settings]:
    """Settings of every trial by name, a scrambled Sobol sequence for each arm, in the order in which they run."""
    from scipy.stats import qmc

    found = {}
    for recipe in ARMS:
        architecture, _, optimizer = recipe.partition(":")
        space = space_of(recipe)
        points = qmc.Sobol(len(space) + 1, rng=SOBOL_SEED).random(TRIED + ADDED).tolist()
        for i, point in enumerate(points):
            ranges = zip(point, space.items(), strict=False)
            values = {key: float(f"{low * (high / low) ** u:.3g}") for u, (key, (low, high)) in ranges}
            name = {"model.architecture": architecture} | ({"optimizer.name": optimizer} if optimizer else {})
            last = {"optimizer.beta2": 0.95 if point[-1] < 0.5 else 0.99}
            found[f"{arm_name(recipe)}-{i:02d}"] = {**name, **values, **last}
    return dict(sorted(found.items(), key=lambda item: item[0][-2:]))


@dataclass(frozen=True)
class Trial:
    """A run of the search: its settings and what came of them."""

    name: str
    settings: Settings
    loss: float | None
    """Tuning loss; infinite if the run diverged, None if it has not ended."""

    @property
    def number(self) -> int:
        return int(self.name[-2:])


def best_trial(trials: list[Trial]) -> Trial | None:
    """The trial with the lowest loss so far."""
    known = [trial for trial in trials if trial.loss is not None and trial.loss < math.inf]
    return min(known, key=lambda trial: trial.loss or 0.0, default=None)


def edges_of(trials: list[Trial]) -> dict[str, int]:
    """The settings with a range of which the best trial has one of the lowest (−1) or highest (1) values."""
    best, found = best_trial(trials), {}
    for key in RANGED if best else ():
        values = sorted(trial.settings[key] for trial in trials if key in trial.settings)
        if values and best.settings[key] in values[:EDGE]:
            found[key] = -1
        elif values and best.settings[key] in values[-EDGE:]:
            found[key] = 1
    return found
