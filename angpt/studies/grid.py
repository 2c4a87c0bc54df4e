"""From the grids of a study to its runs: what they are called, and what their settings are."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from angpt.config import SIZES, Recipe, TrainConfig, parse_budget
from angpt.errors import UserError
from angpt.studies.config import Grid, Shape, StudyConfig, multiple
from angpt.studies.search import SLACK, rounded
from angpt.training.plan import count, rule_for

SMALL = 100_000_000
"""Parameters below which `beta2_below_100M` holds."""
MOST_VALUES = 1000
"""Values to which a grid may grow along an axis."""
TUNING_RATIO = 2.0
TUNING_REACH = 16.0
"""Factor by which trials may go beyond their first and last rate unless lr_limits are given."""


@dataclass(frozen=True)
class Group:
    """The runs among which a batch size and a learning rate are chosen; they differ in these and in the seed alone."""

    architecture: Recipe
    size: str
    """Empty where the study has no sizes."""
    budget: str
    """The budget as it stands in names: 20x, 1.5B."""
    settings: str = ""
    """What else tells it from groups of the same architecture, size and budget; empty in a study."""

    @property
    def name(self) -> str:
        return "-".join(part for part in (folder_name(self.architecture), self.size, self.budget) if part)


@dataclass(frozen=True)
class Point:
    """One run."""

    group: Group
    batch: int
    lr: float
    seed: int
    trial: bool = False
    """True for one of the runs that choose the learning rate of others."""

    @property
    def full_name(self) -> str:
        """A name that is the same for the same settings, whatever else the study holds."""
        return f"{self.group.name}-b{self.batch}-lr{rate_name(self.lr)}-{'trial' if self.trial else f's{self.seed}'}"

    @property
    def short_name(self) -> str:
        """A name for studies with one batch size and one learning rate for each group."""
        if self.trial:
            return f"{dataclasses.replace(self.group, budget='').name}-lr{rate_name(self.lr)}"
        return f"{self.group.name}-s{self.seed}"


def groups(grid: Grid, train: TrainConfig) -> Iterator[Group]:
    """The groups of a grid, the architectures in turn."""
    sizes, budgets = grid.sizes or ("",), grid.budgets or (train.tokens,)
    for size, budget, architecture in product(sizes, budgets, grid.architectures):
        yield Group(architecture, size, budget_name(budget))


def start_lines(grid: Grid, group: Group, config: StudyConfig, trials: bool = False) -> dict[int, list[float]]:
    """The learning rates at each batch size that the grid names, or those of the first trials around them."""
    model = sized(config, group).model
    (parameters, _), budget = count(model), budget_tokens(config, group)
    rule = rule_for(group.architecture)
    batch = rule.batch_at(parameters, budget, model.context)
    batches = [
        _sequences(multiple(v, "batches") * batch, model.context) if isinstance(v, str) else v for v in grid.batches
    ]
    lines = {}
    for tokens in sorted(set(batches)):
        lr = config.lrs.get(group.architecture) or rule.lr_at(parameters, budget, tokens)
        rates = [_times(multiple(v, "lrs"), lr) if isinstance(v, str) else v for v in grid.lrs]
        if trials:
            rates = [rounded(rates[0] * TUNING_RATIO ** (i - (grid.tune - 1) / 2)) for i in range(grid.tune)]
        lines[tokens] = sorted(set(rates))
    rates = [rate for line in lines.values() for rate in line]
    for name, values, limits in (("lr", rates, grid.lr_limits), ("batch", batches, grid.batch_limits)):
        for value in values if trials or not grid.tune else ():
            if limits and not limits[0] <= value <= limits[1]:
                raise UserError(f"grid.{name}_limits: {value:g}, where {group.name} begins, lies outside them")
    return lines


def lr_limits(grid: Grid, start: Mapping[int, list[float]]) -> tuple[float, ...]:
    """How far the learning rates may go beyond those that the grid begins with; empty where they stay as they are."""
    if not grid.tune or grid.lr_limits:
        return grid.lr_limits
    rates = [rate for line in start.values() for rate in line]
    return min(rates) / TUNING_REACH, max(rates) * TUNING_REACH


def tuning_group(config: StudyConfig, grid: Grid, group: Group) -> Group:
    """The group of the trials that choose the learning rate of a group: that of the smallest budget."""
    budgets = [dataclasses.replace(group, budget=budget_name(text)) for text in grid.budgets or (config.train.tokens,)]
    return min(budgets, key=lambda other: budget_tokens(config, other))


def sized(config: StudyConfig, group: Group) -> TrainConfig:
    """The settings of the runs with the recipe and the size of a group."""
    shape = dataclasses.asdict(config.shapes[group.size]) if group.size in config.shapes else {}
    if group.size in SIZES:
        shape = dict(zip((f.name for f in dataclasses.fields(Shape)), SIZES[group.size], strict=True))
    train = config.train_of(group.architecture)
    return dataclasses.replace(train, model=dataclasses.replace(train.model, **shape))


def run_config(config: StudyConfig, point: Point) -> TrainConfig:
    """The settings of a run."""
    train = sized(config, point.group)
    parameters, _ = count(train.model)
    if config.beta2_below_100M is not None and parameters < SMALL:
        optimizer = dataclasses.replace(train.optimizer, beta2=config.beta2_below_100M)
        train = dataclasses.replace(train, optimizer=optimizer)
    if point.trial:
        train = dataclasses.replace(train, data=dataclasses.replace(train.data, tuning_split=config.tuning_split))
    optimizer = dataclasses.replace(train.optimizer, lr=point.lr)
    tokens = str(budget_tokens(config, point.group))
    return dataclasses.replace(train, optimizer=optimizer, tokens=tokens, batch_tokens=point.batch, seed=point.seed)


def budget_tokens(config: StudyConfig, group: Group) -> int:
    """The budget of a group in tokens. Multiples are of the baseline's parameters, so that it is the same for every
    architecture of a size."""
    return parse_budget(group.budget, baseline_parameters(config, group))


def baseline_parameters(config: StudyConfig, group: Group) -> int:
    """Number of parameters of the baseline in the size of a group."""
    return count(sized(config, dataclasses.replace(group, architecture=baseline(config))).model)[0]


def baseline(config: StudyConfig) -> str:
    return config.baseline or config.grid[0].architectures[0]


def folder_name(recipe: Recipe) -> str:
    return recipe.replace("/", "-").replace(":", "-")


def budget_name(text: str) -> str:
    """One name for each budget: 1e9 and 1000M are 1B."""
    if text.strip()[-1] in "xX":
        return f"{multiple(text, 'budgets'):.12g}x"
    return short(parse_budget(text, parameters=1))


def rate_name(lr: float) -> str:
    """One name for each learning rate: six digits, or all of them where six are not enough."""
    return f"{lr:g}" if float(f"{lr:g}") == lr else repr(float(lr))


def short(tokens: int) -> str:
    """A number of tokens in short, 1500000 as 1.5M, with every digit: it stands in names of folders."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if tokens >= size:
            return f"{tokens / size:.12g}{unit}"
    return str(tokens)


def _times(factor: float, lr: float) -> float:
    return lr if factor == 1 else rounded(factor * lr)


def _sequences(tokens: float, context: int) -> int:
    return context * max(1, round(tokens / context))


def largest_lines(start: Mapping[int, list[float]], grid: Grid) -> dict[int, list[float]]:
    """The largest extent of the lines within their limits, for an upper bound of the cost."""
    limits, grown = lr_limits(grid, start), {}
    for batch in _lattice([float(batch) for batch in sorted(start)], grid.batch_limits, "batch_limits"):
        rates = start[min(start, key=lambda other: abs(math.log(other / batch)))]
        grown[round(batch)] = [r if r in rates else rounded(r) for r in _lattice(rates, limits, "lr_limits")]
    return grown


def _lattice(values: list[float], limits: tuple[float, ...], name: str) -> list[float]:
    if not limits or len(values) < 2:
        return values
    (low, high), below, above = limits, values[0] / values[1], values[-1] / values[-2]
    steps = math.log(low / values[0]) / math.log(below) + math.log(high / values[-1]) / math.log(above)
    if len(values) + steps > MOST_VALUES:
        raise UserError(
            f"grid.{name}: with the ratio of the grid there are more than {MOST_VALUES:,} values between them; "
            "name values that are further apart, or narrower limits"
        )
    found = list(values)
    while (value := found[0] * found[0] / found[1]) >= low * (1 - SLACK):
        found.insert(0, value)
    while (value := found[-1] * found[-1] / found[-2]) <= high * (1 + SLACK):
        found.append(value)
    return found
