"""What the run folders of docs/evidence say: losses by arm, budget and seed, tests, speed-ups, ablations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, variance

from angpt.analysis.analyse import Analysis
from angpt.analysis.claims import claims
from angpt.config import Recipe
from angpt.evaluation.results import Results as Evaluation
from angpt.evaluation.results import read_results
from angpt.present.words import quantity
from angpt.results import Result, Row
from angpt.stats import Deviation, Difference, Interval, deviations, holm, relative_change, seed_difference
from angpt.studies.folders import summarise_runs
from angpt.studies.grid import folder_name
from experiments.evidence import paper
from experiments.evidence.items import EVIDENCE
from experiments.evidence.protocol import (
    ABLATION_SEEDS,
    BUDGETS,
    INSIDE,
    LARGEST,
    MULTIPLIED,
    SEEDS,
    SENSITIVITY,
    Protocol,
    varies,
)
from experiments.evidence.trials import ARCHITECTURES, ARMS, TIE, arm_name

SIGNIFICANT = 0.01
WARM_UP = ("gpt+-adam-chosen", "gpt+-adam-warmup-0")
"""Sensitivity runs whose first moments are compared."""
EARLIER = EVIDENCE.parent / "analysis-32M" / "analysis.md"
"""Claims of the paper judged by earlier models, until those of the final runs are analysed."""


@dataclass(frozen=True)
class Comparison:
    """Two arms at a budget."""

    one: Recipe
    two: Recipe
    budget: str
    difference: Difference | None
    """Mean loss of `two` minus that of `one`; None until both have all their seeds."""
    adjusted: float | None = None
    """P-value after Holm's correction over the primary comparisons."""


@dataclass(frozen=True)
class Claimed:
    """A claim of the paper about the inside of its models, and what was found."""

    paper: str
    here: str
    holds: bool
    source: str
    """The models that were analysed; empty for earlier ones than the final runs."""


class Results:
    """The results of the run folders below a folder."""

    def __init__(self, root: Path = EVIDENCE) -> None:
        self.root, self.protocol = root, Protocol((root,))

    def losses(self, recipe: Recipe, budget: str, stage: str = "final") -> dict[int, float | None]:
        """The loss of each planned seed: infinite if it diverged, None if it has not run."""
        several = SEEDS if budget in BUDGETS else SEEDS[:1]
        seeds = ABLATION_SEEDS if stage == "ablation" else several
        return {s: self.protocol.loss(stage, f"{folder_name(recipe)}-{budget}-s{s}") for s in seeds}

    def complete(self, recipe: Recipe, budget: str) -> list[float]:
        """The losses of all seeds; empty until all have finished, and if one has diverged."""
        found = [loss for loss in self.losses(recipe, budget).values() if loss is not None and loss < math.inf]
        return found if len(found) == len(self.losses(recipe, budget)) else []

    def diverged(self, recipe: Recipe, budget: str) -> bool:
        """True if a seed has diverged: then the arm has no mean at this budget."""
        return math.inf in self.losses(recipe, budget).values()

    @cached_property
    def final(self) -> dict[tuple[Recipe, str], list[float]]:
        """The losses of arms and budgets of which several seeds have finished."""
        cells = {(arm, budget): self.complete(arm, budget) for budget, arms in BUDGETS.items() for arm in arms}
        return {cell: losses for cell, losses in cells.items() if losses}

    @cached_property
    def spread(self) -> dict[tuple[Recipe, str], Deviation]:
        """The deviation between seeds, pooled over all arms and budgets but those that vary far more."""
        return dict(zip(self.final, deviations([*self.final.values()]), strict=True))

    def compare(self, one: Recipe, two: Recipe, budget: str) -> Comparison:
        samples = self.complete(one, budget), self.complete(two, budget)
        spreads = [self.spread.get((arm, budget), Deviation(0.0, 0)) for arm in (one, two)]  # 0: of one seed
        return Comparison(one, two, budget, seed_difference(*samples, *spreads) if all(samples) else None)

    @cached_property
    def primary(self) -> list[Comparison]:
        """anGPT against GPT+ and nGPT, with each optimizer, at each budget with several seeds."""
        found = [
            self.compare(f"{other}{suffix}", f"angpt{suffix}", budget)
            for budget in BUDGETS
            for suffix in ("", ":muon")
            for other in ("gpt+", "ngpt")
        ]
        known = [c for c in found if c.difference is not None and c.difference.p_value is not None]
        p_values = [c.difference.p_value for c in known if c.difference and c.difference.p_value is not None]
        adjusted = dict(zip(map(id, known), holm(p_values, len(found)), strict=True))
        return [Comparison(c.one, c.two, c.budget, c.difference, adjusted.get(id(c))) for c in found]

    @cached_property
    def secondary(self) -> list[Comparison]:
        """nGPT against GPT+, and Muon against Adam; at budgets with one seed also anGPT against GPT+: exploratory."""
        pairs = [("gpt+", "ngpt"), ("gpt+:muon", "ngpt:muon"), *((name, f"{name}:muon") for name in ARCHITECTURES)]
        of_several = [self.compare(one, two, budget) for budget in BUDGETS for one, two in pairs]
        pairs = [(f"gpt+{suffix}", f"angpt{suffix}") for suffix in ("", ":muon")] + pairs
        of_one = [
            self.compare(one, two, budget)
            for budget, arms in LARGEST.items()
            for one, two in pairs
            if {one, two} <= {*arms}
        ]
        return of_several + of_one

    def summary(self, arms: Sequence[Recipe], baseline: Recipe) -> Result | None:
        """Means, changes, speed-ups and costs of some arms, each at the budgets at which all its seeds have finished;
        None without the baseline."""
        cells = [(arm, budget) for budget, of in {**BUDGETS, **LARGEST}.items() for arm in of if arm in arms]
        known = [(arm, budget) for arm, budget in cells if self.complete(arm, budget)]
        folders = [
            self.root / "final" / f"{folder_name(arm)}-{budget}-s{seed}"
            for arm, budget in known
            for seed in self.losses(arm, budget)
        ]
        return summarise_runs(folders, baseline) if any(arm == baseline for arm, _ in known) else None

    @cached_property
    def with_adam(self) -> Result | None:
        return self.summary(ARCHITECTURES, "gpt+")

    @cached_property
    def with_muon(self) -> Result | None:
        return self.summary([f"{name}:muon" for name in ARCHITECTURES], "gpt+:muon")

    @cached_property
    def against_adam(self) -> Result | None:
        """All arms against GPT+ with Adam."""
        return self.summary(ARMS, "gpt+")

    def row(self, recipe: Recipe, budget: str, result: Result | None) -> Row | None:
        rows = result.rows if result else ()
        return next((row for row in rows if row.architecture == recipe and row.budget == budget), None)

    def mean_speed_up(self, recipe: Recipe) -> tuple[Interval, str] | None:
        """The paper's measure: the mean over budgets of the speed-up over GPT+, and its relation: a number (=) or, if
        some of them are only bounds, a bound (> or <). None if one is missing, or if there are bounds of both kinds.

        The longest runs of GPT+ only extend its curve. The interval has the means of the ends over budgets, which share
        the errors of this curve. A bound is the mean of these ends; the end of a bound is the bound itself."""
        rows = [self.row(recipe, budget, self.with_adam) for budget in BUDGETS]
        found = [row.speedup_tokens for row in rows if row and row.speedup_tokens]
        relations = {s.relation for s in found} - {"="}
        if len(found) < len(rows) or len(relations) > 1:
            return None
        lows = [s.low if s.relation == "=" else s.value for s in found]
        highs = [s.high if s.relation == "=" else s.value for s in found]
        low, high = (None if None in ends else fmean(x for x in ends if x is not None) for ends in (lows, highs))
        if not relations:
            return Interval(fmean(s.value for s in found), low, high), "="
        relation = relations.pop()
        end = low if relation == ">" else high
        return None if end is None else (Interval(end, None, None), relation)

    @cached_property
    def tie(self) -> float:
        """Differences of single runs up to this are ties: 2√2 standard deviations over seeds, once all arms have their
        seeds at the smallest budget. Arms with a diverged run are left out."""
        budget = next(iter(BUDGETS))
        ended = all(None not in self.losses(arm, budget).values() for arm in ARMS)
        groups = [losses for arm in ARMS if (losses := self.complete(arm, budget))] if ended else []
        return 2 * math.sqrt(2 * fmean(map(variance, groups))) if groups else TIE

    def overhead(self, recipe: Recipe) -> Interval | None:
        """Time per step over that of GPT+ in the final runs, minus 1."""
        costs = self.with_adam.costs if self.with_adam else ()
        return next((cost.overhead for cost in costs if cost.architecture == recipe), None)

    def change(self, one: list[float], base: list[float]) -> Interval | None:
        """The relative change of the mean loss from `base`, with the deviation between seeds pooled over these and the
        final runs; None if one of them is missing."""
        if not one or not base:
            return None
        others = [losses for losses in self.final.values() if not {*losses} & {*one, *base}]
        own, of_base, *_ = deviations([one, base, *others])
        return relative_change(one, base, own, of_base)

    def ablation(self, recipe: Recipe, budget: str = "80M") -> dict[int, float | None]:
        """Losses of an ablation; those of the architectures themselves are final runs with the same seeds."""
        if "/" in recipe or budget == "40M":
            return self.losses(recipe, budget, "ablation")
        return {seed: loss for seed, loss in self.losses(recipe, budget).items() if seed in ABLATION_SEEDS}

    @cached_property
    def claims(self) -> list[Claimed]:
        """Claims of the paper about the inside of its models, judged by the first seed of the final runs, or by earlier
        models until these are analysed."""
        budget = next((b for b in INSIDE if all(self._inside(arm, b) for arm in ARCHITECTURES)), None)
        if budget is None:
            table = EARLIER.read_text(encoding="utf-8").partition("| the paper |")[2].partition("\n\n")[0]
            cells = [line.replace("\\|", "¦").split(" | ") for line in table.splitlines()[2:]]
            return [Claimed(c[0].removeprefix("| "), c[2].replace("¦", "|"), c[3].startswith("yes"), "") for c in cells]
        finals = self._judged(f"final/*-{budget}-s{SEEDS[0]}", f"final runs, {budget}, one seed")
        analysed = all((self.root / "sensitivity" / name / "analysis.json").exists() for name in WARM_UP)
        both = self._judged("sensitivity/gpt+-adam-*", "80M, tuning split, one seed") if analysed else []
        return [*finals, *(claim for claim in both if claim.paper.startswith("Without warm-up"))]

    def _inside(self, arm: Recipe, budget: str) -> bool:
        """True if the first seed of an arm is analysed, or has diverged so that it cannot be."""
        name = f"{folder_name(arm)}-{budget}-s{SEEDS[0]}"
        diverged = self.protocol.loss("final", name) == math.inf
        return diverged or (self.root / "final" / name / "analysis.json").exists()

    def _judged(self, folders: str, source: str) -> list[Claimed]:
        analyses = (Analysis.read(path) for path in sorted(self.root.glob(f"{folders}/analysis.json")))
        found = claims(Analysis(tuple(run for analysis in analyses for run in analysis.runs)))
        return [Claimed(claim.paper, claim.here, claim.holds, source) for claim in found]

    def with_defaults(self, recipe: Recipe, budget: str) -> tuple[bool, float | None]:
        """Whether the defaults of `angpt train` differ from the chosen settings of an arm, and the loss with them."""
        items = (item for item in self.protocol.files() if item.stage == "defaults")
        names = {(item.config.recipe, quantity(float(item.config.tokens))): item.name for item in items}
        if name := names.get((recipe, budget)):
            return True, self.protocol.loss("defaults", name)
        return False, self.losses(recipe, budget)[SEEDS[0]]

    def tasks_budget(self) -> str | None:
        """The largest budget at which both arms of the paper's table were evaluated on all tasks."""
        for budget in reversed(INSIDE):
            found = [self.evaluated(arm, budget) for arm in ("gpt+", "angpt")]
            if all(each is not None and all(map(each.task, paper.TASKS)) for each in found):
                return budget
        return None

    def evaluated(self, recipe: Recipe, budget: str, weights: str = "") -> Evaluation | None:
        """The tasks of the first seed of an arm, or of its folded form with these weights (full, fp8, int8); None
        without tasks."""
        found = read_results(self.root / "final" / f"{folder_name(recipe)}-{budget}-s{SEEDS[0]}" / weights)
        return found if found is not None and found.tasks else None


def curve(protocol: Protocol, arm: Recipe, key: str) -> dict[str, float | None]:
    """Tuning losses around the chosen settings as one of them changes; the chosen one is x1 or its own value."""
    chosen = protocol.chosen(arm)
    name = key.rpartition(".")[2]
    values = [value for value in SENSITIVITY[key] if varies(arm, key, value)]
    found = {v: protocol.loss("sensitivity", f"{arm_name(arm)}-{name}-{v}") for v in values}
    own = "x1" if key in MULTIPLIED else f"{chosen.settings.get(key, 0.0):g}"
    again = protocol.loss("sensitivity", f"{arm_name(arm)}-chosen")
    return dict(sorted((found | {own: again}).items(), key=lambda item: float(item[0].lstrip("x")))) if found else {}
