"""From the runs at the best points of a study to its Result: means over seeds, speed-ups, costs, and the verdict."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from angpt.present.words import label, number, overhead, quantity, speedup
from angpt.results import Cost, Result, Row, RunResult, SpeedUp
from angpt.stats import (
    Deviation,
    Interval,
    deviations,
    geometric_mean,
    mean_interval,
    mean_log,
    relative_change,
)
from angpt.studies.grid import Group
from angpt.studies.jobs import Job, state_of
from angpt.studies.search import Loss, Optimum, optimum
from angpt.studies.speedup import CurvePoint, speed_up
from angpt.training.record import newest_values
from angpt.training.run import Run

WIDE = 2.0
"""Ratio of the ends of a speed-up's interval above which the verdict gives no value."""
BOUNDS = {"=": "", ">": "more than ", "<": "less than "}
"""Relations of a speed-up in the words of the verdict."""


@dataclass(frozen=True)
class Chosen:
    """The runs of a group at its best point."""

    group: Group
    best: Optimum
    points: int
    """Points that were tried."""
    runs: tuple[RunResult, ...]

    @property
    def tokens(self) -> int:
        return self.runs[0].tokens

    @property
    def finished(self) -> list[RunResult]:
        return [run for run in self.runs if run.val_loss is not None]

    @property
    def losses(self) -> list[float]:
        return [run.val_loss for run in self.runs if run.val_loss is not None]

    @property
    def diverged(self) -> int:
        return sum(run.ended for run in self.runs) - len(self.losses)


def run_result(job: Job, size: str = "") -> RunResult:
    """The result of a run, whose folder need not exist yet."""
    plan, status = job.plan, state_of(job, running=False)
    summary = Run(job.folder).summary() if job.folder.exists() else None
    step = 0 if status == "waiting" else newest_values(job.folder).get("step", 0) if summary is None else summary.step
    return RunResult(
        name=job.folder.resolve().name,
        architecture=job.config.recipe,
        size=size,
        parameters=plan.parameters,
        tokens=int(plan.config.tokens),
        batch=plan.batch_tokens,
        lr=plan.peak_lr,
        seed=job.config.seed,
        status=status,
        progress=step / plan.steps,
        val_loss=summary.val_loss if summary is not None and status == "finished" else None,
        steps=plan.steps,
        flops=job.flops,
        seconds=summary.seconds if summary is not None else None,
        memory_gib=summary.peak_memory_gib if summary is not None else None,
    )


def choose(group: Group, points: Mapping[tuple[int, float], Sequence[RunResult]], loss: Loss) -> Chosen:
    """The best point of a group. Where no point has finished with all its seeds, the one of which most have."""
    lines: dict[int, list[float]] = {}
    for batch, lr in points:
        lines.setdefault(batch, []).append(lr)
    if best := optimum(lines, loss):
        return Chosen(group, best, len(points), tuple(points[best.batch, best.lr]))
    found = [
        Chosen(group, Optimum(batch, lr, math.inf, 0, 0), len(points), tuple(runs))
        for (batch, lr), runs in points.items()
    ]
    return max(found, key=lambda c: (len(c.losses), -sum(c.losses), c.diverged > 0))


def summarise(
    chosen: Sequence[Chosen],
    runs: Sequence[RunResult],
    baseline: str,
    baseline_budget: str | None = None,
    notes: Sequence[str] = (),
) -> Result:
    """The result of a study whose groups have these best points."""
    complete = all(run.ended for run in runs)
    rows: dict[Group, Row] = {}
    costs: list[Cost] = []
    verdicts: dict[str, str] = {}
    for size in dict.fromkeys(c.group.size for c in chosen):
        members = [c for c in chosen if c.group.size == size]
        leaders = leading(members)
        # Runs that differ in the seed vary by the same factor at every architecture and budget of a size.
        spread = dict(zip((c.group for c in members), deviations([c.losses for c in members]), strict=True))
        in_tokens = _speed_ups(members, baseline, spread, lambda run: float(run.tokens))
        in_seconds = _speed_ups(members, baseline, spread, lambda run: run.seconds or 0.0)
        for c in members:
            base, own = leaders.get((baseline, baseline_budget or c.group.budget)), spread[c.group]
            relative = None
            if base is not None and base is not c and base.losses and c.losses:
                relative = relative_change(c.losses, base.losses, own, spread[base.group])
            rows[c.group] = Row(
                architecture=c.group.architecture,
                size=size,
                budget=c.group.budget,
                parameters=c.runs[0].parameters,
                tokens=c.tokens,
                batch=c.best.batch,
                lr=c.best.lr,
                batch_side=c.best.batch_side,
                lr_side=c.best.lr_side,
                points=c.points,
                seeds=len(c.runs),
                diverged=c.diverged,
                val_loss=geometric_mean(c.losses, own) if c.losses else None,
                change=relative,
                speedup_tokens=in_tokens.get(c.group),
                speedup_seconds=in_seconds.get(c.group),
                runs=tuple(run.name for run in c.runs),
                settings=c.group.settings,
            )
        own_costs = _costs(list(leaders.values()), baseline)
        costs += own_costs
        if found := contest(list(leaders.values()), baseline):
            winner, opponent, tests = found
            samples = winner.losses, opponent.losses, spread[winner.group], spread[opponent.group]
            change, noisy = relative_change(*samples), relative_change(*samples, tests).covers(0.0)
            best, reference = rows[winner.group], rows[opponent.group]
            compared = [rows[c.group] for c in leaders.values()]
            sentence = verdict(best, reference, change, noisy, compared, own_costs)
            sentence += other_optimizers(best, reference, compared)
            verdicts[size] = sentence if complete else f"So far: {sentence}"
        else:
            verdicts[size] = no_verdict(list(leaders.values()), baseline)
    ordered = [rows[c.group] for c in chosen]
    return Result(
        baseline, complete, verdicts, tuple(ordered), tuple(costs), (*notes, *_edge_notes(ordered)), tuple(runs)
    )


def leading(members: Sequence[Chosen]) -> dict[tuple[str, str], Chosen]:
    """For each architecture and budget the group to compare: of several settings, the one with the lowest loss."""
    found: dict[tuple[str, str], list[Chosen]] = {}
    for c in members:
        found.setdefault((c.group.architecture, c.group.budget), []).append(c)
    return {key: min(group, key=lambda c: mean_log(c.losses) if c.losses else math.inf) for key, group in found.items()}


def _speed_ups(
    members: Sequence[Chosen],
    baseline: str,
    losses: Mapping[Group, Deviation],
    used: Callable[[RunResult], float],
) -> dict[Group, SpeedUp]:
    """The speed-up of each group over the baseline's runs of all budgets, in tokens or in seconds."""
    done = [c for c in members if c.losses]
    uses = [tuple(map(used, c.finished)) for c in done]
    points = {
        c.group: CurvePoint(own, tuple(c.losses), losses[c.group], deviation)
        for c, own, deviation in zip(done, uses, deviations(uses), strict=True)
    }
    base = [points[c.group] for c in leading(done).values() if c.group.architecture == baseline]
    found = {group: speed_up(base, point) for group, point in points.items() if group.architecture != baseline}
    return {group: value for group, value in found.items() if value is not None}


def _costs(members: Sequence[Chosen], baseline: str) -> list[Cost]:
    """Time per step of each architecture; the overhead from pairs of runs with the same budget, batch and seed."""
    milliseconds: dict[str, dict[tuple[int, int, int], float]] = {}
    finished = [run for c in members for run in c.finished]
    for run in finished:
        milliseconds.setdefault(run.architecture, {})[run.tokens, run.batch, run.seed] = (
            1000 * (run.seconds or 0.0) / run.steps
        )
    base = milliseconds.get(baseline, {})
    costs = []
    for name, own in milliseconds.items():
        mine = [run for run in finished if run.architecture == name]
        ratios = [own[key] / base[key] - 1 for key in own if key in base]
        overhead = mean_interval(ratios) if ratios and name != baseline else None
        memory = max((run.memory_gib for run in mine if run.memory_gib is not None), default=None)
        step_ms = mean_interval(list(own.values()))
        costs.append(Cost(name, mine[0].size, mine[0].parameters, step_ms, overhead, memory))
    return costs


def _edge_notes(rows: Sequence[Row]) -> list[str]:
    """A note for each search that ended at an edge, and so may have missed the best."""
    words = {-1: "lowest", 1: "highest"}
    notes = []
    for row in rows:
        name = " ".join(part for part in (label(row.architecture), row.size, row.budget) if part)
        for what, value, edge, limits in (
            ("learning rate", f"{row.lr:g}", row.lr_side, "lr_limits"),
            ("batch", f"{row.batch:,} tokens", row.batch_side, "batch_limits"),
        ):
            if edge and row.val_loss is not None:
                notes.append(f"{name}: the best {what}, {value}, is the {words[edge]} of those tried: see {limits}")
    return notes


def candidates(members: Sequence[Chosen], baseline: str) -> list[Chosen]:
    """What is compared with the baseline: what its optimizer trained, if there is such, or optimizers would be
    compared."""
    others = [c for c in members if c.group.architecture != baseline]
    return [c for c in others if _optimizer(c.group.architecture) == _optimizer(baseline)] or others


def contest(members: Sequence[Chosen], baseline: str) -> tuple[Chosen, Chosen, int] | None:
    """The best candidate at their largest budget, the baseline there, and the number of candidates; None while one of
    the two has no loss."""
    done = [c for c in members if c.losses]
    others = [c for c in candidates(members, baseline) if c.losses]
    largest = [c for c in others if c.tokens == max(c.tokens for c in others)]
    reference = next(
        (c for c in done if c.group.architecture == baseline and largest and c.tokens == largest[0].tokens), None
    )
    if reference is None:
        return None
    return min(largest, key=lambda c: mean_log(c.losses)), reference, len(largest)


def no_verdict(members: Sequence[Chosen], baseline: str) -> str:
    """Why the best architecture cannot be compared with the baseline."""
    if not all(run.ended for c in members for run in c.runs):
        return "Too few runs have finished for a verdict."
    others = candidates(members, baseline)
    if not others:
        return f"No verdict: {label(baseline)} was trained alone."
    largest = max((c.tokens for c in others if c.losses), default=0)
    if not largest:
        return f"No verdict: all runs that {label(baseline)} is compared with diverged."
    if any(c.group.architecture == baseline and c.tokens == largest for c in members):
        return f"No verdict: all runs of {label(baseline)} at {quantity(largest)} tokens diverged."
    budget = f"{quantity(largest)} tokens, the largest budget of the others"
    return f"No verdict: {label(baseline)} was not trained with {budget}."


def verdict(
    best: Row, reference: Row, change: Interval, noisy: bool, rows: Sequence[Row], costs: Sequence[Cost]
) -> str:
    """A few sentences that compare the best architecture with the baseline.

    Args:
        best: One architecture at the largest budget, the best of those that are compared with the baseline.
        reference: The baseline there.
        change: Of the loss, with its own 95 % interval.
        noisy: True if the best of so many candidates may differ from the baseline as much by chance.
        rows: All that are compared, for the speed-ups.
        costs: Of all of them.
    """
    assert best.val_loss is not None
    assert reference.val_loss is not None
    ours, theirs = best.val_loss.mean, reference.val_loss.mean
    name, base = label(best.architecture), label(reference.architecture)
    sentences = [
        f"{name} reaches {ours:.3f}{_lost(best)}, {base} {theirs:.3f}{_lost(reference)} "
        f"({overhead(change if noisy else Interval(change.mean))})"
    ]
    if noisy:
        selected = "" if change.covers(0.0) else ", since it is the best of several"
        sentences.append(f"Too noisy to tell which is better{selected}")
    elif change.low is None:
        sentences.append("One seed: no intervals")
    if not noisy:
        gains = _gain(rows, name, best.architecture, base), _average(rows, best.architecture)
        sentences += [gain for gain in gains if gain]
    cost = next((c for c in costs if c.architecture == best.architecture), None)
    if cost and cost.overhead:
        sentences.append(_time(cost.overhead))
    return ". ".join(sentences) + "."


def _lost(row: Row) -> str:
    return f", with {row.diverged} of {row.seeds} seeds diverged" if row.diverged else ""


def other_optimizers(best: Row, reference: Row, rows: Sequence[Row]) -> str:
    """A sentence on the losses at the same budget with each optimizer that is not the baseline's."""
    losses: dict[str, dict[str, float]] = {}
    for row in rows:
        name, _, optimizer = row.architecture.partition(":")
        if row.tokens == best.tokens and row.val_loss is not None:
            losses.setdefault(optimizer, {})[name] = row.val_loss.mean
    base, _, own = reference.architecture.partition(":")
    text = ""
    for optimizer, found in losses.items():
        if optimizer != own:
            listed = ", ".join(f"{label(name)} {found[name]:.3f}" for name in sorted(found, key=found.__getitem__))
            lacking = f"; {label(base)} was not trained with it, so this compares no architectures"
            text += f" With {optimizer.capitalize() or 'Adam'}: {listed}{'' if base in found else lacking}."
    return text


def _optimizer(architecture: str) -> str:
    """The optimizer in the name of a recipe; empty for Adam."""
    return architecture.partition(":")[2]


def _gain(rows: Sequence[Row], name: str, architecture: str, base: str) -> str | None:
    """The speed-up at the largest budget where it is known, and not only bounded; else the strongest bound that tells
    on which side of 1 the speed-up is."""
    own = [(row, row.speedup_tokens) for row in rows if row.architecture == architecture and row.speedup_tokens]
    sided = [(row, s) for row, s in own if s.relation == "=" or s.value == 1 or (s.value > 1) == (s.relation == ">")]
    by_relation = {r: [(row, s) for row, s in sided if s.relation == r] for r in ("=", ">", "<")}
    if by_relation["="]:
        row, s = max(by_relation["="], key=lambda pair: pair[0].tokens)
    elif by_relation[">"]:
        row, s = max(by_relation[">"], key=lambda pair: pair[1].value)
    elif by_relation["<"]:
        row, s = min(by_relation["<"], key=lambda pair: pair[1].value)
    else:
        return None
    needs = f"To match {name} at {quantity(row.tokens)} tokens, {base} needs"
    if s.low is None or s.high is None:
        return f"{needs} {BOUNDS[s.relation]}{s.value:.2f}× the tokens"
    if s.high > WIDE * s.low:
        return f"{needs} {s.low:.2f}× to {s.high:.2f}× the tokens: too noisy to tell the speed-up"
    return f"{needs} {s.value:.2f}× the tokens [{s.low:.2f}, {s.high:.2f}]"


def _average(rows: Sequence[Row], architecture: str) -> str | None:
    """The paper's measure: the mean of the speed-ups over budgets. None unless several are known, and not too noisy.

    Its interval has the means of their ends: all errors come from the baseline's curve, and may have the same sign.
    """
    own = [row.speedup_tokens for row in rows if row.architecture == architecture and row.val_loss]
    known = [s for s in own if s and s.relation == "="]
    if len(known) < 2:
        return None
    mean = sum(s.value for s in known) / len(known)
    ends = [(s.low, s.high) for s in known if s.low is not None and s.high is not None]
    low, high = (sum(end) / len(end) for end in zip(*ends, strict=True)) if len(ends) == len(known) else (None, None)
    if low is not None and high is not None and high > WIDE * low:
        return None
    of = f"{len(known)} budgets" if len(known) == len(own) else f"{len(known)} of {len(own)} budgets where it is known"
    return f"The average speed-up over the {of} is {speedup(mean, low, high)}"


def _time(overhead: Interval) -> str:
    if overhead.low is not None and overhead.high is not None and overhead.low <= 0 <= overhead.high:
        return f"No measurable difference in time per step (± {number(50 * (overhead.high - overhead.low), 2)} %)"
    return f"A step takes {abs(100 * overhead.mean):.1f} % {'more' if overhead.mean >= 0 else 'less'} time"
