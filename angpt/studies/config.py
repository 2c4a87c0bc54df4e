"""The configuration of a comparison."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from angpt.config import ModelConfig, TrainConfig
from angpt.errors import UserError


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
    """Learning rate of an architecture; by the rule for its size unless given."""
    tune: int = 0
    """Try this many learning rates for each architecture first, a factor of two apart, on a part of the training data
    that is held out for it, and take the best."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """Everything else about the runs."""

    def __post_init__(self) -> None:
        for name in ("architectures", "seeds", "budgets"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise UserError(f"{name} = {', '.join(map(str, values))} names one twice")
        for name in ("architectures", "seeds"):
            if not getattr(self, name):
                raise UserError(f"{name}: name at least one")
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
