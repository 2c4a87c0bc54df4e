"""The configuration of a study: its file, key by key."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, Literal

from angpt.config import SIZES, Recipe, TrainConfig, parse_budget
from angpt.errors import UserError, nearest
from angpt.serialization import check_types, from_dict
from angpt.slurm import SlurmConfig

MOST_TRIALS = 64
"""Learning rates, a factor of two apart, beyond which the smallest or the largest are not numbers that train."""
MOST_THREADS = 1024
"""CPU threads of a run beyond which PyTorch may fail to start them."""
OF_A_GRID = {
    "optimizer.lr": "lrs",
    "optimizer.name": "architectures such as angpt:muon",
    "model.architecture": "architectures",
    "batch_tokens": "batches",
    "seed": "seeds",
}
"""Settings that differ between runs of a study, and the key of a grid that sets them."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model."""

    d_model: int
    n_layers: int
    n_heads: int


@dataclass(frozen=True)
class Grid:
    """A run for every combination of what it lists. A multiple such as "2x" is of the rule for the architecture and
    size (docs/hyperparameters.md), that of a budget of the baseline's parameters."""

    architectures: tuple[str, ...] = ("gpt+", "ngpt", "angpt")
    """Architectures and variants; with `:muon`, such as angpt:muon, trained by Muon, else by Adam."""
    sizes: tuple[str, ...] = ()
    """Sizes of the paper, 32M to 1B, or names of [shapes]; the dimensions of [train.model] unless given."""
    budgets: tuple[str, ...] = ()
    """Token budgets, each a complete training: 10B, 20x; that of [train] unless given."""
    batches: tuple[int | str, ...] = ("1x",)
    """Tokens per step."""
    lrs: tuple[float | str, ...] = ("1x",)
    """Peak learning rates, with `:muon` those of Muon; multiples are of those of [lrs] where it names the architecture.
    Adam's rate beside Muon is by the rule for the budget, unless `optimizer.adam_lr` is given in [train]."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the initial weights and of the order of the data."""
    lr_limits: tuple[float, ...] = ()
    """Lowest and highest rate to go to, by the ratio of the grid, until the best rate has a worse one on either side;
    the grid stays as it is unless given."""
    batch_limits: tuple[int, ...] = ()
    """Smallest and largest number of tokens per step to go to, in the same way."""
    tune: int = 0
    """Try this many learning rates for each architecture and size first, a factor of two apart around the one of
    `lrs`, with the smallest budget and the first seed, and train all runs with the best. The trials go on beyond their
    edge as with lr_limits, which are 16 times beyond the lowest and highest rate unless given."""

    def __post_init__(self) -> None:
        check_types(self, "grid.")
        object.__setattr__(self, "architectures", tuple(name.lower() for name in self.architectures))
        for name in ("architectures", "sizes", "budgets", "batches", "lrs", "seeds"):
            axis: Sequence[Any] = getattr(self, name)
            if len(set(axis)) != len(axis):
                raise UserError(f"grid.{name} = {', '.join(map(str, axis))} names one twice")
            if not axis and name not in ("sizes", "budgets"):
                raise UserError(f"grid.{name}: name at least one")
        for name in ("batches", "lrs"):
            for value in getattr(self, name):
                if not 0 < (multiple(value, f"grid.{name}") if isinstance(value, str) else value) < float("inf"):
                    raise UserError(f"grid.{name}: {value} must be positive and finite")
        for text in self.budgets:
            parse_budget(text, parameters=10**9)
        if not 0 <= self.tune <= MOST_TRIALS:
            raise UserError(f"grid.tune = {self.tune} must be from 0 to {MOST_TRIALS}")
        if self.tune and (len(self.lrs) > 1 or len(self.batches) > 1 or self.batch_limits):
            raise UserError("grid.tune: chooses the learning rate, so lrs and batches must have one value each")
        for name, values in (("lr_limits", self.tune or len(self.lrs)), ("batch_limits", len(self.batches))):
            limits: tuple[float, ...] = getattr(self, name)
            if limits and not (len(limits) == 2 and 0 < limits[0] < limits[1] < float("inf")):
                raise UserError(f"grid.{name} = {list(limits)}: give the lowest and the highest value")
            if limits and values < 2:
                raise UserError(f"grid.{name}: a grid goes on by its own ratio, so it must have two values at least")


@dataclass(frozen=True)
class StudyConfig:
    """A study: its runs, and what they have in common."""

    grid: tuple[Grid, ...] = ()
    """Every [[grid]] is a set of runs; one that stands in two of them is done once."""
    baseline: str = ""
    """Architecture that losses are compared with, size by size; the first of the first grid unless given."""
    baseline_budget: str | None = None
    """Budget of the baseline that losses are compared with; that of each row unless given."""
    names: Literal["full", "short"] = "full"
    """Names of run folders. full: angpt-32M-20x-b65536-lr0.016-s0; the file can grow by further batch sizes and rates.
    short: angpt-600k-s0, for a study with one batch size and one rate for each architecture, size and budget."""
    beta2_below_100M: float | None = None
    """Adam's β₂ of models below 100 million parameters (the paper's hyper-parameter study takes 0.99)."""
    threads: int | None = None
    """CPU threads of a run. The same number gives the same bits however the study is executed; unless given, the cores
    are shared among the runs under way."""
    lrs: dict[str, float] = field(default_factory=dict)
    """Learning rates of architectures that multiples refer to, under [lrs]; by the rule for the size unless given."""
    tuning_split: float = 0.05
    """The part of the training data that is held out for the trials of `tune`, which are evaluated on it."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Sizes of the study's own: [shapes.tiny] with d_model, n_layers and n_heads."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """Resources that are asked of SLURM for each run, with --slurm."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Everything else about the runs."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of [train] that one architecture has for itself: [settings."gpt+:muon".optimizer] with weight_decay."""

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "baseline", self.baseline.lower())
        for name in ("lrs", "settings"):
            object.__setattr__(self, name, {key.lower(): value for key, value in getattr(self, name).items()})
        if not self.grid:
            raise UserError("a study has one [[grid]] at least")
        for key in OF_A_GRID:
            given, default = (attrgetter(key)(config) for config in (self.train, TrainConfig()))
            if given != default:
                raise _differs(f"train.{key}", OF_A_GRID[key])
        for name in self.shapes:
            if name in SIZES or not re.fullmatch(r"[A-Za-z0-9.]+", name):
                raise UserError(f"shapes.{name}: a name of letters, digits and dots that is no size of the paper")
        known = {*SIZES, *self.shapes}
        for size in {size for grid in self.grid for size in grid.sizes} - known:
            raise UserError(f"grid.sizes: unknown size {size!r}: {nearest(size, known)}")
        architectures = list(dict.fromkeys(name for grid in self.grid for name in grid.architectures))
        for name in self.train.optimizer.given_for_muon if not any(":muon" in a for a in architectures) else ():
            raise UserError(f"train.optimizer.{name}: no run is trained by Muon; say architectures such as angpt:muon")
        if self.baseline and self.baseline not in architectures:
            raise UserError(f"baseline = {self.baseline!r} is not in a grid: {nearest(self.baseline, architectures)}")
        if unknown := set(self.lrs) - set(architectures):
            raise UserError(f"lrs: {', '.join(sorted(unknown))} is not among the architectures that are compared")
        if wrong := [name for name, lr in self.lrs.items() if not 0 < lr < float("inf")]:
            raise UserError(f"lrs: the rate of {wrong[0]} must be positive and finite")
        if unknown := set(self.settings) - set(architectures):
            raise UserError(f"settings: {', '.join(sorted(unknown))} is not among the architectures of a grid")
        for name in self.settings:
            self.train_of(name)
        if not 0 < self.tuning_split < 1:
            raise UserError(f"tuning_split must be in (0, 1), not {self.tuning_split}")
        if self.baseline_budget is not None:
            parse_budget(self.baseline_budget, parameters=10**9)
        if self.beta2_below_100M is not None and not 0 <= self.beta2_below_100M < 1:
            raise UserError(f"beta2_below_100M must be in [0, 1), not {self.beta2_below_100M}")
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise UserError(f"threads must be from 1 to {MOST_THREADS:,}, not {self.threads}")

    def train_of(self, recipe: Recipe) -> TrainConfig:
        """What the runs of an architecture have in common."""
        train, own = self.train.with_recipe(recipe), self.settings.get(recipe, {})
        if not own:
            return train
        values, where = asdict(train), f"settings.{recipe}"
        for key, value in own.items():
            table = isinstance(value, dict) and isinstance(values.get(key), dict)
            for name in (f"{key}.{inner}" for inner in value) if table else (key,):
                if instead := {**OF_A_GRID, "tokens": "budgets"}.get(name):
                    raise _differs(f"{where}.{name}", instead)
            values[key] = values[key] | value if table else value
        return from_dict(TrainConfig, values, where)


def _differs(key: str, instead: str) -> UserError:
    return UserError(f"{key}: runs of a study differ in it; say {instead} in [[grid]]")


def multiple(text: str, where: str) -> float:
    """The number in a text such as 2x or 0.5x."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,2})?)\s*[xX]", text.strip())
    if match is None:
        raise UserError(f"{where}: {text!r} is neither a number nor a multiple such as 2x")
    return float(match[1])
