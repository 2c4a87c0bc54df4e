"""The configuration of a comparison, and that of a study."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from angpt.config import SIZES, ModelConfig, TrainConfig, parse_budget
from angpt.errors import UserError, nearest
from angpt.slurm import SlurmConfig


@dataclass(frozen=True)
class CompareConfig:
    """What is compared, on what."""

    architectures: tuple[str, ...] = ("gpt+", "ngpt", "angpt")
    """Architectures and variants; the first is the baseline."""
    seeds: tuple[int, ...] = (0, 1)
    """Each seed starts the model and orders the data in its own way, the same for every architecture."""
    budgets: tuple[str, ...] = ()
    """Token budgets, each a complete training; a half, once and twice the budget of the run settings unless given."""
    lrs: dict[str, float] = field(default_factory=dict)
    """Learning rates of architectures, such as angpt 0.01; by the rule for the size unless given."""
    tune: int = 0
    """Try this many learning rates for each architecture first, a factor of two apart, on a part of the training data
    that is held out for it, and take the best. Where the best is the lowest or highest of them, go on beyond it."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """Everything else about the runs."""

    def __post_init__(self) -> None:
        _distinct(self, "architectures", "seeds", "budgets")
        _some(self, "architectures", "seeds")
        if unknown := set(self.lrs) - set(self.architectures):
            raise UserError(f"lrs: {', '.join(sorted(unknown))} is not among the architectures that are compared")
        if wrong := [name for name, lr in self.lrs.items() if not 0 < lr < float("inf")]:
            raise UserError(f"lrs: the rate of {wrong[0]} must be positive and finite")
        if self.train.optimizer.lr is not None:
            raise UserError("a comparison has a rate for each architecture: give --lrs rather than --optimizer.lr")
        if self.train.seed != TrainConfig.seed:
            raise UserError("a comparison has several seeds: give --seeds rather than --seed")
        if self.train.model.architecture != ModelConfig.architecture:
            raise UserError("a comparison has several architectures: give --architectures rather than --arch")
        if self.tune < 0:
            raise UserError(f"tune = {self.tune} must not be negative")


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
    """Architectures and variants."""
    sizes: tuple[str, ...] = ()
    """Sizes of the paper, 32M to 1B, or names of [shapes]; the dimensions of [train.model] unless given."""
    budgets: tuple[str, ...] = ()
    """Token budgets, each a complete training: 10B, 20x; that of [train] unless given."""
    batches: tuple[int | str, ...] = ("1x",)
    """Tokens per step."""
    lrs: tuple[float | str, ...] = ("1x",)
    """Peak learning rates."""
    seeds: tuple[int, ...] = (0,)
    """Of the start of the model and the order of the data."""
    lr_limits: tuple[float, ...] = ()
    """Lowest and highest rate to go to, by the ratio of the grid, until the best rate has a worse one on either side;
    the grid stays as it is unless given."""
    batch_limits: tuple[int, ...] = ()
    """The same for the tokens per step."""

    def __post_init__(self) -> None:
        axes = ("architectures", "sizes", "budgets", "batches", "lrs", "seeds")
        _distinct(self, *axes, prefix="grid.")
        _some(self, "architectures", "batches", "lrs", "seeds", prefix="grid.")
        for name in ("batches", "lrs"):
            for value in getattr(self, name):
                if not 0 < (multiple(value, f"grid.{name}") if isinstance(value, str) else value) < float("inf"):
                    raise UserError(f"grid.{name}: {value} must be positive and finite")
        for text in self.budgets:
            parse_budget(text, parameters=10**9)
        for name, axis in (("lr_limits", self.lrs), ("batch_limits", self.batches)):
            limits: tuple[float, ...] = getattr(self, name)
            if limits and not (len(limits) == 2 and 0 < limits[0] < limits[1] < float("inf")):
                raise UserError(f"grid.{name} = {list(limits)}: give the lowest and the highest value")
            if limits and len(axis) < 2:
                raise UserError(f"grid.{name}: a grid goes on by its own ratio, so it must have two values at least")


@dataclass(frozen=True)
class StudyConfig:
    """A study: its runs, and what they have in common."""

    grid: tuple[Grid, ...] = ()
    """Every [[grid]] is a set of runs; one that stands in two of them is done once."""
    baseline: str = ""
    """Architecture that losses are compared with, size by size; the first of the first grid unless given."""
    baseline_budget: str | None = None
    """Its budget; that of each row unless given."""
    beta2_below_100M: float | None = None
    """Adam's β₂ of models below 100 million parameters (the paper's hyper-parameter study takes 0.99)."""
    threads: int | None = None
    """CPU threads of a run. The same number gives the same bits however the study is executed; unless given, the cores
    are shared among the runs under way."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Sizes of the study's own: [shapes.tiny] with d_model, n_layers and n_heads."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """What is asked of SLURM for each run, with --slurm."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Everything else about the runs."""

    def __post_init__(self) -> None:
        if not self.grid:
            raise UserError("a study has one [[grid]] at least")
        for given, key, instead in (
            (self.train.optimizer.lr is not None, "optimizer.lr", "lrs"),
            (self.train.batch_tokens is not None, "batch_tokens", "batches"),
            (self.train.seed != TrainConfig.seed, "seed", "seeds"),
            (self.train.model.architecture != ModelConfig.architecture, "model.architecture", "architectures"),
        ):
            if given:
                raise UserError(f"train.{key}: runs of a study differ in it; say {instead} in [[grid]]")
        for name in self.shapes:
            if name in SIZES or not re.fullmatch(r"[A-Za-z0-9.]+", name):
                raise UserError(f"shapes.{name}: a name of letters, digits and dots that is no size of the paper")
        known = {*SIZES, *self.shapes}
        for size in {size for grid in self.grid for size in grid.sizes} - known:
            raise UserError(f"grid.sizes: unknown size {size!r}: {nearest(size, known)}")
        architectures = list(dict.fromkeys(name for grid in self.grid for name in grid.architectures))
        if self.baseline and self.baseline not in architectures:
            raise UserError(f"baseline = {self.baseline!r} is not in a grid: {nearest(self.baseline, architectures)}")
        if self.baseline_budget is not None:
            parse_budget(self.baseline_budget, parameters=10**9)
        if self.beta2_below_100M is not None and not 0 <= self.beta2_below_100M < 1:
            raise UserError(f"beta2_below_100M must be in [0, 1), not {self.beta2_below_100M}")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"threads must be positive, not {self.threads}")


def multiple(text: str, where: str) -> float:
    """The number in a text such as 2x or 0.5x."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,2})?)\s*[xX]", text.strip())
    if match is None:
        raise UserError(f"{where}: {text!r} is neither a number nor a multiple such as 2x")
    return float(match[1])


def _distinct(config: Any, *names: str, prefix: str = "") -> None:
    for name in names:
        values: Sequence[Any] = getattr(config, name)
        if len(set(values)) != len(values):
            raise UserError(f"{prefix}{name} = {', '.join(map(str, values))} names one twice")


def _some(config: Any, *names: str, prefix: str = "") -> None:
    for name in names:
        if not getattr(config, name):
            raise UserError(f"{prefix}{name}: name at least one")
