"""The protocol of docs/evidence.md as code: which runs it calls for, in their order, and the choice of settings.

Everything here is a function of the run folders: the trials that have ended decide the edge rule and the choice, the
choice decides the settings of the final runs, ablations and sensitivity runs. Nothing is typed in."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

from angpt.config import Recipe, TrainConfig, parse_budget
from angpt.studies.grid import folder_name
from angpt.studies.jobs import ended
from angpt.training.plan import make_plan
from experiments.evidence import eight_bits, relatives
from experiments.evidence.items import EVIDENCE, Item, configured
from experiments.evidence.stored import StoredStudy, study_config
from experiments.evidence.trials import (
    ADDED,
    ARMS,
    OCTAVES,
    RATES,
    TRIED,
    Settings,
    Trial,
    arm_name,
    best_trial,
    edges_of,
    space_of,
)

TRIALS = EVIDENCE / "trials.json"

SEEDS = (1, 2, 3)
BUDGETS = {"80M": ARMS, "160M": ARMS, "320M": ARMS}
LARGEST = {"640M": ("gpt+", "angpt", "gpt+:muon", "angpt:muon")}
INSIDE = ("320M", "640M")
"""Budgets at which the models of the first seed are analysed and, of the arms with the largest budget, evaluated on
tasks, as long as their weights exist."""
QUANTIZED: tuple[Recipe, ...] = ("gpt+", "angpt")
"""Arms of which the 8-bit forms are evaluated, too, at the first of these budgets (docs/inference.md)."""
DATA = {"data/one": 1, "data/tuning": 2, "data/all": 4}
"""Folders of tokens, and how many parts of the text each has."""

SHARED: dict[str, Any] = {
    "batch_tokens": 65536,
    "micro_batch": 32,
    "eval_tokens": 1_000_000_000,  # the whole split
    "layers_every": 0,
    "model": {"d_model": 256, "n_layers": 6, "n_heads": 4},
}
TRIAL = {
    "tokens": "80M",
    "eval_every": 245,
    "checkpoint_every": 1221,
    "data": {"path": "data/tuning", "tuning_split": 0.01},
}

ABLATIONS = {
    "angpt": (
        "angpt/const-x0.5", "angpt/const-x2", "angpt/all-x0.5", "angpt/all-x2", "angpt/no-const",
        "angpt/no-residual-factor", "angpt/no-factors", "angpt/no-lerp",
    ),
    "ngpt": ("ngpt/lerp-factor", "ngpt/bounded"),
    "gpt+": ("gpt+/no-qk-norm",),
}  # fmt: skip
"""Rows of the paper's tables of ablations, which have the settings of their architecture."""
RELATED = ("gpt+/ln-scaling", "gpt+/dyt")
"""Related work, whose learning rate is searched as in the paper, the other settings being those of GPT+."""
RELATED_RATES = (0.5, 1.0, 2.0)
ABLATION_SEEDS = (1, 2)


class Protocol:
    """The protocol at the state of some run folders; of folders with the same run the first counts.

    An object is a snapshot: it does not see runs that end after it has asked for them."""

    def __init__(
        self, roots: tuple[Path, ...] = (EVIDENCE,), adapt: Callable[[TrainConfig], TrainConfig] | None = None
    ) -> None:
        self.roots, self.adapt = roots, adapt or (lambda config: config)
        self.loss, self.trials, self.edges = cache(self._loss), cache(self._trials), cache(self._edges)

    def _loss(self, stage: str, name: str) -> float | None:
        """The loss of a run at its end; infinite if it diverged, None if it has not ended."""
        for root in self.roots:
            if (summary := ended(root / stage / name)) is not None:
                finished = summary.status == "finished" and summary.val_loss is not None
                return summary.val_loss if finished else math.inf
        return None

    @cached_property
    def points(self) -> dict[str, Settings]:
        found: dict[str, Settings] = json.loads(TRIALS.read_text(encoding="utf-8"))
        return found

    def _trials(self, recipe: Recipe, extended: bool) -> list[Trial]:
        """The trials of an arm; `extended` by those of the edge rule."""
        names = [name for name in self.points if name.startswith(f"{arm_name(recipe)}-")]
        found = []
        for name in names[: TRIED + ADDED if extended else TRIED]:
            settings = self.points[name]
            if int(name[-2:]) >= TRIED:
                settings = settings | {key: self._moved(recipe, key, settings[key]) for key in self.edges(recipe)}
            found.append(Trial(name, settings, self.loss("tuning", name)))
        return found

    def _edges(self, recipe: Recipe) -> dict[str, int]:
        """The settings of the best of the first trials of an arm that are at the edge."""
        return edges_of(self.trials(recipe, extended=False))

    def _moved(self, recipe: Recipe, key: str, value: float) -> float:
        """A value at the same place in a range around that of the best of the first trials; at most 1, like decay."""
        low, high = space_of(recipe)[key]
        place = math.log(value / low) / math.log(high / low)
        best = best_trial(self.trials(recipe, extended=False))
        assert best is not None
        return min(1.0, float(f"{best.settings[key] * 2 ** (OCTAVES * (place - 0.5)):.3g}"))

    @cached_property
    def first_done(self) -> bool:
        return all(trial.loss is not None for arm in ARMS for trial in self.trials(arm, extended=False))

    @cached_property
    def extended(self) -> bool:
        """True if the edge rule adds trials, by what is known so far."""
        return any(self.edges(arm) for arm in ARMS)

    @cached_property
    def tuned(self) -> bool:
        """True if every trial that the protocol calls for has ended: settings are chosen."""
        return all(trial.loss is not None for arm in ARMS for trial in self.trials(arm, self.extended))

    def chosen(self, recipe: Recipe) -> Trial:
        """The best trial of an arm; before one has ended, the first."""
        trials = self.trials(recipe, self.extended)
        return best_trial(trials) or trials[0]

    def items(self) -> Iterator[Item]:
        """Every run that the protocol calls for, in its order."""
        for items in (self.tuning, self.final, self.ablation, self.sensitivity, self.files):
            for item in items():
                yield dataclasses.replace(item, build=partial(self._adapted, item))

    def _adapted(self, item: Item) -> TrainConfig:
        return self.adapt(item.config)

    def tuning(self) -> Iterator[Item]:
        """Trial n of every arm before trial n + 1 of any."""
        trials = [trial for arm in ARMS for trial in self.trials(arm, self.extended)]
        for trial in sorted(trials, key=lambda trial: trial.number):
            open_rule = trial.number >= TRIED and not self.first_done
            build = partial(configured, SHARED, TRIAL, trial.settings)
            yield Item("tuning", trial.name, build, provisional=open_rule)

    def final(self) -> Iterator[Item]:
        """The chosen settings with fresh seeds on all of the text, small budgets first, seed by seed."""
        for budget, arms in {**BUDGETS, **LARGEST}.items():
            for seed in SEEDS if budget in BUDGETS else SEEDS[:1]:
                for arm in arms:
                    inside = budget in INSIDE and seed == SEEDS[0]
                    item = self.reported("final", arm, budget, seed, self.chosen(arm).settings, inside)
                    evaluated = inside and any(arm in arms for arms in LARGEST.values())
                    quantized = inside and budget == INSIDE[0] and arm in QUANTIZED
                    yield dataclasses.replace(item, analysed=inside, evaluated=evaluated, quantized=quantized)

    def reported(
        self, stage: str, recipe: Recipe, budget: str, seed: int, settings: Settings, recorded: bool = False
    ) -> Item:
        """A run on all four parts that is evaluated on the validation file; `recorded`: with records of each layer."""
        steps = round(parse_budget(budget, 1) / SHARED["batch_tokens"])
        own = {"tokens": budget, "seed": seed, "checkpoint_every": steps, "data.path": "data/all"}
        own |= {"layers_every": None, "record_moments": True} if recorded else {}
        name = f"{folder_name(recipe)}-{budget}-s{seed}"
        build = partial(configured, SHARED, settings, own, {"model.architecture": recipe.partition(":")[0]})
        return Item(stage, name, build, provisional=not self.tuned)

    def ablation(self) -> Iterator[Item]:
        """Variants at 80M tokens; anGPT, GPT+ and nGPT themselves, and double the budget, are final runs."""
        base = self.chosen("gpt+").settings
        for recipe in RELATED:
            for factor in RELATED_RATES:
                yield self.rate_trial(recipe, base, factor)
        for seed in ABLATION_SEEDS:
            yield self.reported("ablation", "angpt", "40M", seed, self.chosen("angpt").settings)
            for architecture, variants in ABLATIONS.items():
                for variant in variants:
                    yield self.reported("ablation", variant, "80M", seed, self.chosen(architecture).settings)
            for recipe in RELATED:
                factor, known = self.related_rate(recipe)
                item = self.reported("ablation", recipe, "80M", seed, _times(base, "optimizer.lr", factor))
                yield dataclasses.replace(item, provisional=item.provisional or not known)

    def rate_trial(self, recipe: Recipe, base: Settings, factor: float) -> Item:
        settings = _times(base, "optimizer.lr", factor) | {"model.architecture": recipe}
        name = f"{folder_name(recipe)}-rate-x{factor:g}"
        return Item("ablation", name, partial(configured, SHARED, TRIAL, settings), provisional=not self.tuned)

    def related_rate(self, recipe: Recipe) -> tuple[float, bool]:
        """The factor of the learning rate with the lowest tuning loss, and whether all of them are known."""
        losses = {f: self.loss("ablation", f"{folder_name(recipe)}-rate-x{f:g}") for f in RELATED_RATES}
        known = {factor: loss for factor, loss in losses.items() if loss is not None}
        return min(known, key=lambda f: known[f], default=1.0), len(known) == len(losses)

    def sensitivity(self) -> Iterator[Item]:
        """The chosen settings once more, and with one of them changed, on the tuning split with a fresh seed."""
        for arm in ARMS:  # a figure of the paper is the first moment of GPT+ with and without warm-up
            moments = arm == "gpt+"
            item = self.again(arm, "chosen", {"record_moments": moments})
            yield dataclasses.replace(item, analysed=moments)
        for key, values in SENSITIVITY.items():
            for value, arm in product(values, ARMS):
                if varies(arm, key, value):
                    moments = (arm, key, value) == ("gpt+", "optimizer.warmup", "0")
                    changes = varied(key, value, self.chosen(arm).settings) | {"record_moments": moments}
                    item = self.again(arm, f"{key.rpartition('.')[2]}-{value}", changes)
                    yield dataclasses.replace(item, analysed=moments)

    def again(self, arm: Recipe, name: str, changes: Settings) -> Item:
        """A run with the chosen settings of an arm, except some."""
        settings = self.chosen(arm).settings | changes | {"seed": SEEDS[0]}
        build = partial(configured, SHARED, TRIAL, settings)
        return Item("sensitivity", f"{arm_name(arm)}-{name}", build, provisional=not self.tuned)

    def files(self) -> Iterator[Item]:
        """Relatives of Muon, the runs of study files beside this module, and losses in 8 bits."""
        yield from relatives.items(self.loss)
        for stage, file in FILES:
            earlier = SWEEPS[:-1] if stage == SWEEPS[-1] else ()
            waits = stage in ("defaults", "scaling") and not self.tuned
            for job in StoredStudy(study_config(file), self.sweep_loss).jobs():
                known = any(self.loss(other, job.folder.name) is not None for other in earlier)
                if not known and (stage != "defaults" or _identity(job.config) not in self.identities):
                    yield Item(stage, job.folder.name, partial(getattr, job, "config"), provisional=waits)
        yield from eight_bits.items()

    def sweep_loss(self, name: str) -> float | None:
        """The loss of a run of any sweep of learning rates."""
        losses = (self.loss(stage, name) for stage in SWEEPS)
        return next((loss for loss in losses if loss is not None), None)

    @cached_property
    def identities(self) -> set[tuple[Any, ...]]:
        return {_identity(item.config) for item in self.final()}


SENSITIVITY: dict[str, tuple[str, ...]] = {
    "optimizer.lr": ("x0.25", "x0.5", "x2", "x4"),
    "optimizer.warmup": ("0", "0.1"),
    "optimizer.weight_decay": ("0", "0.1", "1"),
    "model.stored_scale": ("x0.25", "x4"),
}
"""Settings that are varied one at a time; a value with x multiplies the chosen one."""


MULTIPLIED = {key for key, values in SENSITIVITY.items() if values[0].startswith("x")}


def varies(arm: Recipe, key: str, value: str) -> bool:
    """True if a setting of an arm is varied to a value. GPT+ has no stored scale. The others are chosen without warm-up
    and decay, and try one value of each."""
    return (key != "model.stored_scale") if arm.startswith("gpt+") else value not in ("0", "1")


FILES = (
    ("optimizers", "optimizers.toml"),
    ("transfer", "transfer-20M.toml"),
    ("transfer", "transfer-40M.toml"),
    ("transfer", "transfer-80M.toml"),
    ("rates", "rates-80M.toml"),
    ("batches", "batches-20M.toml"),
    ("batches", "batches-40M.toml"),
    ("batches", "batches-80M.toml"),
    ("defaults", "defaults.toml"),
    ("scaling", "scaling.toml"),
)
"""Study files in the order in which they run, each with the folder of its runs."""
SWEEPS = ("transfer", "rates", "batches")
"""Folders of sweeps of learning rates, with the same names for the same settings; the last does not repeat runs of
the others."""


def varied(key: str, value: str, chosen: Settings) -> Settings:
    """The settings that a sensitivity run changes. With Muon, both rates are multiplied."""
    if not value.startswith("x"):
        return {key: float(value)}
    keys = [k for k in RATES if k in chosen] if key in RATES else [key]
    return {k: float(f"{chosen[k] * float(value[1:]):.3g}") for k in keys}


def _times(settings: Settings, key: str, factor: float) -> Settings:
    return settings | {key: float(f"{settings[key] * factor:.3g}")}


def _identity(config: TrainConfig) -> tuple[Any, ...]:
    """What decides the loss of a run."""
    plan = make_plan(dataclasses.replace(config, device="cpu"))
    return plan.config.model.resolved(), plan.config.optimizer, plan.config.data, plan.steps, config.seed
