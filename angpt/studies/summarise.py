"""From run folders to a Result: means over seeds, speed-ups, costs, and the verdict in one sentence."""

from collections.abc import Callable, Sequence
from pathlib import Path

from angpt.config import TrainConfig, parse_budget
from angpt.present.words import label, quantity
from angpt.stats import Interval, differ, geometric_mean, mean_interval, pooled_deviation
from angpt.studies.results import Cell, Cost, Result, RunResult, RunStatus, SpeedUp
from angpt.studies.speedup import Point, speed_up
from angpt.training.plan import make_plan
from angpt.training.run import Run, Summary


def summarise(runs: Sequence[tuple[Path, TrainConfig]], baseline: str) -> Result:
    """The result of runs that are given by their folder, which need not exist yet, and their configuration."""
    found = [_run_result(folder, config) for folder, config in runs]
    summaries = {folder.resolve().name: _summary(folder) for folder, _ in runs}
    architectures = tuple(dict.fromkeys(r.architecture for r in found))
    budgets = tuple(sorted({r.budget for r in found}))
    finished = [r for r in found if r.status == "finished" and r.val_loss is not None]

    def points(used: Callable[[RunResult], float]) -> dict[tuple[str, int], Point]:
        cells: dict[tuple[str, int], list[RunResult]] = {}
        for r in finished:
            cells.setdefault((r.architecture, r.budget), []).append(r)
        return {
            key: Point(tuple(used(r) for r in runs), tuple(r.val_loss or 0.0 for r in runs))
            for key, runs in cells.items()
        }

    by_tokens, by_seconds = points(lambda r: r.budget), points(lambda r: r.seconds or 0.0)
    deviation = pooled_deviation([p.losses for p in by_tokens.values()])

    def compared(cells: dict[tuple[str, int], Point], key: tuple[str, int]) -> SpeedUp | None:
        base = [p for (name, _), p in cells.items() if name == baseline]
        uses = pooled_deviation([p.uses for p in cells.values()])
        return None if key[0] == baseline or key not in cells else speed_up(base, cells[key], deviation, uses)

    def apart(one: Cell, two: Cell) -> bool | None:
        mine, theirs = (by_tokens[c.architecture, c.budget].losses for c in (one, two))
        return differ(mine, theirs, deviation)

    cells = tuple(
        Cell(
            architecture=architecture,
            budget=budget,
            val_loss=geometric_mean(by_tokens[key].losses, deviation) if key in by_tokens else None,
            diverged=sum(r.status == "diverged" for r in found if (r.architecture, r.budget) == (architecture, budget)),
            speedup_tokens=compared(by_tokens, key),
            speedup_seconds=compared(by_seconds, key),
        )
        for architecture in architectures
        for budget in budgets
        for key in [(architecture, budget)]
    )
    costs = _costs(finished, summaries, architectures, baseline)
    complete = all(r.status in ("finished", "diverged") for r in found)
    return Result(
        baseline=baseline,
        architectures=architectures,
        budgets=budgets,
        seeds=tuple(sorted({r.seed for r in found})),
        complete=complete,
        verdict=verdict(cells, costs, baseline, apart, complete),
        cells=cells,
        costs=costs,
        runs=tuple(found),
    )


def _summary(folder: Path) -> Summary | None:
    return Run(folder).summary() if folder.exists() else None


def _run_result(folder: Path, config: TrainConfig) -> RunResult:
    plan = make_plan(Run(folder).config() if folder.exists() else config)
    summary = _summary(folder)
    status: RunStatus = "waiting"
    step = 0
    if summary is not None:
        status, step = summary.status, summary.step
    elif folder.exists():
        status, step = "interrupted", max((r["step"] for r in Run(folder).records()), default=0)
    return RunResult(
        name=folder.resolve().name,
        architecture=config.model.architecture,
        seed=config.seed,
        budget=parse_budget(plan.config.tokens, plan.parameters),
        status=status,
        progress=step / plan.steps,
        lr=plan.peak_lr,
        val_loss=summary.val_loss if summary else None,
        seconds=summary.seconds if summary else None,
    )


def _costs(
    finished: Sequence[RunResult],
    summaries: dict[str, Summary | None],
    architectures: Sequence[str],
    baseline: str,
) -> tuple[Cost, ...]:
    """Time per step of each architecture; the overhead from pairs of runs with the same budget and seed."""
    milliseconds: dict[str, dict[tuple[int, int], float]] = {}
    memory: dict[str, list[float]] = {}
    parameters: dict[str, int] = {}
    for r in finished:
        s = summaries[r.name]
        assert s is not None
        milliseconds.setdefault(r.architecture, {})[r.budget, r.seed] = 1000 * s.seconds / s.steps
        parameters[r.architecture] = s.parameters
        if s.peak_memory_gib is not None:
            memory.setdefault(r.architecture, []).append(s.peak_memory_gib)
    base = milliseconds.get(baseline, {})
    costs = []
    for name in architectures:
        if name in milliseconds:
            own = milliseconds[name]
            ratios = [own[key] / base[key] - 1 for key in own if key in base]
            overhead: Interval | None = mean_interval(ratios) if ratios and name != baseline else None
            largest = max(memory[name]) if name in memory else None
            costs.append(Cost(name, parameters[name], mean_interval(list(own.values())), overhead, largest))
    return tuple(costs)


def verdict(
    cells: Sequence[Cell],
    costs: Sequence[Cost],
    baseline: str,
    apart: Callable[[Cell, Cell], bool | None],
    complete: bool,
) -> str:
    """What a reader wants to know, in one sentence: the best architecture at the largest budget beside the baseline.

    `apart` says whether the losses of two cells differ by more than their seeds do; None where there is one seed only.
    """
    done = [(c, c.val_loss) for c in cells if c.val_loss]
    largest = [(c, loss) for c, loss in done if c.budget == max(c.budget for c, _ in done)]
    reference = next(((c, loss) for c, loss in largest if c.architecture == baseline), None)
    others = [(c, loss) for c, loss in largest if c.architecture != baseline]
    if reference is None or not others:
        return "Too few runs have finished for a verdict."
    best, ours = min(others, key=lambda pair: pair[1].mean)
    theirs = reference[1]
    name, base, distinct = label(best.architecture), label(baseline), apart(best, reference[0])
    numbers = f"({ours.mean:.3f} against {theirs.mean:.3f})"
    if distinct is False:
        sentence = f"{name} and {base} end at losses that the seeds do not tell apart {numbers}"
    else:
        change = ours.mean / theirs.mean - 1
        sentence = f"{name} ends {abs(change):.1%} {'below' if change < 0 else 'above'} {base} in loss {numbers}"
    if gain := _gain(cells, best.architecture, base):
        sentence += f"; {gain}"
    cost = next((c for c in costs if c.architecture == best.architecture), None)
    if cost and cost.overhead:
        sentence += f"; {_time(cost.overhead)}"
    if distinct is None:
        sentence += " (one seed: no error bars)"
    return f"{'' if complete else 'So far: '}{sentence}."


def _gain(cells: Sequence[Cell], architecture: str, base: str) -> str | None:
    """The speed-up at the largest budget where it is known, and not only bounded; else the strongest bound."""
    own = [(c, c.speedup_tokens) for c in cells if c.architecture == architecture and c.speedup_tokens]
    by_relation = {r: [(c, s) for c, s in own if s.relation == r] for r in ("=", ">", "<")}
    if by_relation["="]:
        cell, s = max(by_relation["="], key=lambda pair: pair[0].budget)
    elif by_relation[">"]:
        cell, s = max(by_relation[">"], key=lambda pair: pair[1].value)
    elif by_relation["<"]:
        cell, s = min(by_relation["<"], key=lambda pair: pair[1].value)
    else:
        return None
    words = {"=": "", ">": "more than ", "<": "less than "}[s.relation]
    interval = f" ({s.low:.2f} to {s.high:.2f})" if s.low is not None and s.high is not None else ""
    return (
        f"for its loss after {quantity(cell.budget)} tokens {base} needs {words}{s.value:.2f} times as many{interval}"
    )


def _time(overhead: Interval) -> str:
    if overhead.low is not None and overhead.high is not None and overhead.low <= 0 <= overhead.high:
        return f"a step takes the same time (to within {max(-overhead.low, overhead.high):.1%})"
    return f"a step takes {abs(overhead.mean):.1%} {'more' if overhead.mean >= 0 else 'less'} time"
