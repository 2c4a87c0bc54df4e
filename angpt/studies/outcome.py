"""What came out of a study: a row for each architecture, size and budget, at its best batch size and learning rate,
with the change from the baseline. As data (result.json), in markdown (result.md) and in the terminal."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from angpt.errors import UserError
from angpt.present.words import interval, label, overhead, plural
from angpt.stats import Deviation, Interval, deviations, geometric_mean, relative_change
from angpt.studies.config import StudyConfig
from angpt.studies.grid import Group, Point, baseline, budget_name, budget_tokens, sized
from angpt.studies.jobs import State, ended, state_of
from angpt.studies.search import Optimum, optimum
from angpt.studies.study import Study
from angpt.studies.summarise import summarise
from angpt.system import write_atomically
from angpt.training.plan import count

EDGE = {-1: " ↓", 0: "", 1: " ↑"}
"""Beside a value that is the lowest or highest of those tried."""


@dataclass(frozen=True)
class RunOutcome:
    """One run of the study."""

    name: str
    """Of its folder, below `runs/`."""
    architecture: str
    size: str
    parameters: int
    tokens: int
    """Budget of the whole run."""
    batch: int
    lr: float
    seed: int
    status: State
    val_loss: float | None
    flops: float
    """Of the whole run."""
    seconds: float | None


@dataclass(frozen=True)
class Row:
    """An architecture of a size at a budget, at the best of the points that were tried."""

    architecture: str
    size: str
    budget: str
    parameters: int
    tokens: int
    batch: int
    lr: float
    batch_side: int
    """-1 or 1 where the batch is the smallest or largest of several, and so not known to be the best; else 0."""
    lr_side: int
    """The same for the learning rate."""
    points: int
    """Batch sizes × learning rates that were tried."""
    seeds: int
    diverged: int
    """Of the seeds."""
    val_loss: Interval | None
    """Over the seeds that finished."""
    change: Interval | None
    """Of the loss, relative to the baseline: 0.01 is 1 % above it."""


@dataclass(frozen=True)
class Outcome:
    baseline: str
    complete: bool
    """Whether every run has ended."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    runs: tuple[RunOutcome, ...]

    def write(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)
        write_atomically(folder / "result.json", text + "\n")
        write_atomically(folder / "result.md", markdown(self))


@dataclass(frozen=True)
class Chosen:
    """The runs of a group at its best point."""

    group: Group
    best: Optimum
    points: int
    runs: tuple[Point, ...]
    losses: tuple[float, ...]
    diverged: int


def outcome(study: Study) -> Outcome:
    """What the runs say so far."""
    config = study.config
    chosen = choose(study)
    spread = dict(zip((c.group for c in chosen), deviations([c.losses for c in chosen]), strict=True))
    rows = tuple(_row(config, c, _base(config, c, chosen), spread) for c in chosen)
    runs = tuple(_run(study, point) for point in dict.fromkeys(p for s in study.searches() for p in s.points()))
    complete = all(run.status in ("finished", "diverged") for run in runs)
    return Outcome(baseline(config), complete, rows, tuple(_notes(rows)), runs)


def choose(study: Study) -> list[Chosen]:
    """The best point of each group of which a run has ended."""
    seeds: dict[Group, dict[tuple[int, float], list[int]]] = {}
    for search in study.searches():
        for point in search.points():
            of_point = seeds.setdefault(search.group, {}).setdefault((point.batch, point.lr), [])
            if point.seed not in of_point:
                of_point.append(point.seed)
    found = [_choose(study, group, points) for group, points in seeds.items()]
    return [c for c in found if c is not None]


def _choose(study: Study, group: Group, points: dict[tuple[int, float], list[int]]) -> Chosen | None:
    lines: dict[int, list[float]] = {}
    for batch, lr in points:
        lines.setdefault(batch, []).append(lr)

    def at(best: Optimum) -> Chosen:
        runs = tuple(Point(group, best.batch, best.lr, seed) for seed in points[best.batch, best.lr])
        summaries = [s for run in runs if (s := ended(study.job(run).folder)) is not None]
        losses = tuple(s.val_loss for s in summaries if s.status == "finished" and s.val_loss is not None)
        return Chosen(group, best, len(points), runs, losses, len(summaries) - len(losses))

    if best := optimum(lines, lambda batch, lr: study.loss(group, points[batch, lr])(batch, lr)):
        return at(best)
    # No point whose seeds have all finished: the one of which most have.
    begun = [c for batch, lr in points if (c := at(Optimum(batch, lr, math.inf, 0, 0))).losses or c.diverged]
    return max(begun, key=lambda c: (len(c.losses), -sum(c.losses)), default=None)


def _base(config: StudyConfig, row: Chosen, chosen: Sequence[Chosen]) -> Chosen | None:
    budget = row.group.budget if config.baseline_budget is None else budget_name(config.baseline_budget)
    wanted = Group(baseline(config), row.group.size, budget)
    return next((c for c in chosen if c.group == wanted and c.losses and c is not row), None)


def _row(config: StudyConfig, c: Chosen, base: Chosen | None, spread: dict[Group, Deviation]) -> Row:
    parameters, _ = count(sized(config, c.group).model)
    return Row(
        architecture=c.group.architecture,
        size=c.group.size,
        budget=c.group.budget,
        parameters=parameters,
        tokens=budget_tokens(config, c.group),
        batch=c.best.batch,
        lr=c.best.lr,
        batch_side=c.best.batch_side,
        lr_side=c.best.lr_side,
        points=c.points,
        seeds=len(c.runs),
        diverged=c.diverged,
        val_loss=geometric_mean(c.losses, spread[c.group]) if c.losses else None,
        change=relative_change(c.losses, base.losses, spread[c.group], spread[base.group])
        if base and c.losses
        else None,
    )


def _run(study: Study, point: Point) -> RunOutcome:
    job = study.job(point)
    summary = ended(job.folder)
    return RunOutcome(
        name=point.name,
        architecture=point.group.architecture,
        size=point.group.size,
        parameters=job.plan.parameters,
        tokens=int(job.config.tokens),
        batch=point.batch,
        lr=point.lr,
        seed=point.seed,
        status=state_of(job, running=False),
        val_loss=summary.val_loss if summary is not None and summary.status == "finished" else None,
        flops=job.flops,
        seconds=summary.seconds if summary is not None else None,
    )


def _notes(rows: Sequence[Row]) -> list[str]:
    """Where a search ended at an edge, and so may have missed the best."""
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


def _cells(result: Outcome) -> tuple[list[str], list[list[str]]]:
    """Heading and rows as text; columns that say the same in every row are left out."""
    rows = result.rows
    columns: dict[str, list[str]] = {"": [label(r.architecture) for r in rows]}
    columns["size"] = [r.size for r in rows]
    columns["parameters"] = [f"{r.parameters / 1e6:,.2f}M" for r in rows]
    columns["budget"] = [r.budget for r in rows]
    columns["batch"] = [f"{r.batch:,}{EDGE[r.batch_side]}" for r in rows]
    columns["lr"] = [f"{r.lr:g}{EDGE[r.lr_side]}" for r in rows]
    columns["validation loss"] = [_loss(r) for r in rows]
    columns["change"] = ["" if r.change is None else overhead(r.change, digits=2) for r in rows]
    columns["perplexity"] = ["" if r.val_loss is None else f"{math.exp(min(r.val_loss.mean, 700)):,.2f}" for r in rows]
    kept = {
        name: cells
        for name, cells in columns.items()
        if len(set(cells)) > 1 or name in ("", "validation loss", "perplexity")
    }
    return list(kept), [list(cells) for cells in zip(*kept.values(), strict=True)]


def _loss(row: Row) -> str:
    if row.val_loss is None:
        return f"diverged ({row.diverged} of {plural(row.seeds, 'seed')})"
    text = interval(row.val_loss, 4)
    return f"{text} ({row.diverged} of {row.seeds} diverged)" if row.diverged else text


def terminal_table(result: Outcome) -> Table:
    heading, rows = _cells(result)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(heading):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(result: Outcome) -> str:
    heading, rows = _cells(result)
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    over = sum(run.status in ("finished", "diverged") for run in result.runs)
    state = f"{over} of {plural(len(result.runs), 'run')} ended. " if not result.complete else ""
    several = any(row.val_loss is not None and row.val_loss.low is not None for row in result.rows)
    lines += ["", f"{state}Changes are relative to {label(result.baseline)}." + (
        " ± is half of the 95 % interval over seeds." if several else "")]  # fmt: skip
    return "\n".join([*lines, *(f"- {note}" for note in result.notes)]) + "\n"


def write_pages(study: Study, out: Path | None = None) -> list[Path]:
    """The page of `angpt report` for each size: the runs at the best point of every architecture and budget."""
    from angpt.report import write_report

    chosen = choose(study)
    sizes = list(dict.fromkeys(c.group.size for c in chosen))
    if not sizes:
        raise UserError(f"{study.folder}: no run has ended yet")
    pages = []
    for size in sizes:
        jobs = [study.job(run) for c in chosen if c.group.size == size for run in c.runs]
        result = summarise([(job.folder, job.config) for job in jobs], baseline(study.config))
        target = (out or study.folder) / (size if len(sizes) > 1 else "")
        target.mkdir(parents=True, exist_ok=True)
        folders = [job.folder for job in jobs if job.folder.exists()]
        pages.append(write_report(study.folder, folders, result, target, study.commands()))
    return pages
