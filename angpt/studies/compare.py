"""The short way to write a study that compares architectures on the same tokens: `angpt compare`."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from angpt.config import ModelConfig, OptimizerConfig, TrainConfig, parse_budget
from angpt.errors import UserError
from angpt.serialization import check_types
from angpt.studies.config import Grid, StudyConfig


@dataclass(frozen=True)
class Comparison:
    """The options of `angpt compare`: what is compared, on what."""

    architectures: tuple[str, ...] = ("gpt+", "ngpt", "angpt")
    """Architectures and variants, the first is the baseline; with `:muon`, such as angpt:muon, trained by Muon."""
    seeds: tuple[int, ...] = (0, 1)
    """Each seed starts the model and orders the data in its own way, the same for every architecture."""
    budgets: tuple[str, ...] = ()
    """Token budgets, each a complete training; a half, once and twice the budget of the run settings unless given."""
    baseline_budgets: tuple[str, ...] = ()
    """Larger token budgets at which the baseline alone is trained, with the first seed: where others at their largest
    budget are better than the baseline at its own, the speed-up becomes a number instead of a bound."""
    lrs: dict[str, float] = field(default_factory=dict)
    """Learning rates of architectures, such as angpt 0.01 angpt:muon 0.03; by the rule for the size unless given."""
    tune: int = 0
    """Try this many learning rates for each architecture first, a factor of two apart, on a part of the training data
    that is held out for it, and take the best. Where the best is the lowest or highest of them, go on beyond it."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """Everything else about the runs."""

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "architectures", tuple(name.lower() for name in self.architectures))

    def study(self) -> StudyConfig:
        """The study file: one batch size and the same budgets for all architectures, those of the baseline."""
        from angpt.studies.grid import short  # not above: it imports PyTorch, which --help does not need
        from angpt.training.plan import count, rule_for

        if not self.architectures:
            raise UserError("architectures: name at least one")
        train = self.train
        if train.optimizer.lr is not None:
            raise UserError("a comparison has a rate for each architecture: give --lrs rather than --optimizer.lr")
        if train.seed != TrainConfig.seed:
            raise UserError("a comparison has several seeds: give --seeds rather than --seed")
        if train.model.architecture != ModelConfig.architecture:
            raise UserError("a comparison has several architectures: give --architectures rather than --arch")
        if train.optimizer.name != OptimizerConfig.name:
            raise UserError("give --architectures such as angpt:muon rather than --optimizer.name")
        models = [train.with_recipe(name).model for name in self.architectures]
        model, (parameters, *_) = models[0], [count(model)[0] for model in models]
        whole = parse_budget(train.tokens, parameters)
        budgets = [parse_budget(text, parameters) for text in self.budgets]
        rule = rule_for(self.architectures[0])
        batch = train.batch_tokens or rule.batch_at(parameters, max(budgets, default=whole), model.context)
        shared = sorted(set(budgets or [round(whole * part) for part in (0.5, 1, 2)]))
        further = sorted({parse_budget(text, parameters) for text in self.baseline_budgets})
        if further and further[0] <= shared[-1]:
            raise UserError(f"baseline_budgets: must be larger than {short(shared[-1])}, the largest of the budgets")
        grid = Grid(
            architectures=self.architectures,
            budgets=tuple(map(short, shared)),
            batches=(batch,),
            seeds=self.seeds,
            tune=self.tune,
        )
        longer = dataclasses.replace(
            grid,
            architectures=self.architectures[:1],
            budgets=tuple(map(short, shared[:1] + further)),  # the smallest is that of the trials of `tune`
            seeds=self.seeds[:1],
        )
        return StudyConfig(
            grid=(longer, grid) if further else (grid,),  # the longest run first: no worker waits for it at the end
            baseline=self.architectures[0],
            names="short",
            lrs=self.lrs,
            train=dataclasses.replace(train, batch_tokens=None),
        )
