"""The input of every fit: records of runs, averaged over seeds.

Notes say which runs were left out or merged; every output repeats them.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from angpt.errors import UserError
from angpt.present.words import LABELS
from angpt.stats import mean_log

COLUMNS = {
    "architecture": "name of the architecture; `model` if the column is missing",
    "parameters": "all parameters, including embedding and head",
    "tokens": "tokens trained on",
    "loss": "validation loss; empty, nan or inf: diverged",
    "batch_tokens": "tokens per step",
    "lr": "peak learning rate",
    "seed": "runs that differ only in it are averaged",
    "settings": "other settings, as text; of runs that differ only in it, the best is taken",
    "embedding_parameters": "parameters of the embedding, for --count head or none",
    "head_parameters": "parameters of the head, for --count none",
    "attention_flops": "FLOPs of attention per token, for --attention",
    "flops": "training FLOPs of the run, for --count given",
    "run": "name of the run; its rows are the points of its curve, the one with the most tokens is the end",
}
"""Columns of a CSV file, with their meaning."""
Status = Literal["finished", "diverged", "unfinished"]
Count = Literal["all", "head", "none", "given"]
"""Choices of --count; see compute.py."""


@dataclass(frozen=True)
class Record:
    """One run."""

    source: str
    """Its folder, or file and line, for messages."""
    architecture: str
    parameters: float
    tokens: float
    loss: float
    """Final loss; NaN if the run diverged."""
    status: Status = "finished"
    batch_tokens: float | None = None
    lr: float | None = None
    seed: str = "0"
    settings: str = ""
    embedding_parameters: float | None = None
    head_parameters: float | None = None
    attention_flops: float | None = None
    flops: float | None = None
    curve: tuple[tuple[float, float], ...] = ()
    """(tokens, loss) of every evaluation, the last included; empty if unknown or not read."""
    loss_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that define the loss, such as the data; empty if unknown."""

    @property
    def point(self) -> tuple[object, ...]:
        """The settings that are equal in runs which differ only in the seed."""
        return self.architecture, self.parameters, self.tokens, self.batch_tokens, self.lr, self.settings


@dataclass(frozen=True)
class Cell:
    """The runs with equal settings, averaged over seeds."""

    record: Record
    """One of the runs; everything but its loss and seed holds for all."""
    log_loss: float
    """Mean of the log losses."""
    seeds: int
    diverged: int
    """Number of further runs with these settings, which diverged."""


@dataclass(frozen=True)
class RunTable:
    """The runs that a fit reads, averaged over seeds."""

    cells: tuple[Cell, ...]
    diverged: tuple[Record, ...]
    notes: tuple[str, ...]

    def architectures(self) -> list[str]:
        return list(dict.fromkeys(cell.record.architecture for cell in self.cells))


def average(records: Sequence[Record], notes: Sequence[str] = ()) -> RunTable:
    """Average the finished runs over seeds, without those that diverged or did not finish."""
    total = len(records)
    diverged = tuple(r for r in records if r.status == "diverged")
    unfinished = sum(r.status == "unfinished" for r in records)
    groups: dict[tuple[object, ...], list[Record]] = {}
    copies = 0
    for record in (r for r in records if r.status == "finished"):
        group = groups.setdefault(record.point, [])
        if any((r.seed, r.loss) == (record.seed, record.loss) for r in group):
            copies += 1
        else:
            group.append(record)
    if not groups:
        raise UserError(f"none of the {total:,} runs has finished with a finite loss; there is nothing to fit")
    repeated = [group for group in groups.values() if len(group) > 1]
    runs, again = sum(map(len, repeated)), sum(len(group) > len({r.seed for r in group}) for group in repeated)
    lost = Counter(r.point for r in diverged)
    partly = sum(point in lost for point in groups)
    first = diverged[0].source if diverged else ""
    counted = (
        (len(diverged), f"{len(diverged):,} of {total:,} runs diverged and are left out (first: {first})"),
        (unfinished, f"{unfinished:,} of {total:,} runs have not finished and are left out"),
        (copies, f"{copies:,} runs are copies of another (same settings, seed and loss) and are left out"),
        (runs, f"{runs:,} runs differ only in the seed and are averaged (mean log loss) to {len(repeated):,} points"),
        (again, f"{again:,} points have several losses for one seed; they count as further seeds"),
        (partly, f"{partly:,} points are averages over some of their seeds; the others diverged"),
    )
    cells = [
        Cell(replace(group[0], curve=_mean_curve(group)), mean_log([r.loss for r in group]), len(group), lost[point])
        for point, group in groups.items()
    ]
    known = list(LABELS)  # the columns of Table 1 come first, in its order

    def order(cell: Cell) -> tuple[int, str, float, float]:
        r = cell.record
        rank = known.index(r.architecture) if r.architecture in known else len(known)
        return rank, r.architecture, r.parameters, r.tokens

    notes = (*notes, *(note for count, note in counted if count))
    return RunTable(tuple(sorted(cells, key=order)), diverged, notes)


def _mean_curve(group: Sequence[Record]) -> tuple[tuple[float, float], ...]:
    """The geometric mean of the curves at the tokens where all were evaluated."""
    if len(group) == 1:
        return group[0].curve
    curves = [dict(r.curve) for r in group]
    common = sorted(set.intersection(*map(set, curves)))
    return tuple((t, math.exp(mean_log([c[t] for c in curves]))) for t in common)
