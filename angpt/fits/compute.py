"""Arrays for the fits: parameters and compute, counted with or without embedding, head and attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from angpt.errors import UserError
from angpt.fits.powerlaw import Floats
from angpt.fits.records import COLUMNS, Cell, Count
from angpt.serialization import check_settings

MERGE = 0.02
"""Budgets of one model size that differ by at most this fraction are equal when choices are compared: runs with
different batch sizes rarely end at the same number of tokens."""
COUNTED: dict[Count, tuple[str, tuple[str, ...]]] = {
    "all": ("all parameters, embedding and head included", ()),
    "head": ("parameters without the embedding, head included", ("embedding_parameters",)),
    "none": ("parameters without embedding and head", ("embedding_parameters", "head_parameters")),
}
"""What N is for each choice of --count, and the columns that are subtracted from all parameters."""


@dataclass(frozen=True)
class Counting:
    """How parameters and compute are counted."""

    count: Count = "all"
    attention: bool = False

    def __post_init__(self) -> None:
        known = ("given", *COUNTED)
        check_settings(self, f"one of {', '.join(known)}", lambda count: count in known, "count")
        if self.count == "given" and self.attention:
            raise UserError("--count given takes the FLOPs of the records; leave out --attention")

    def describe(self) -> str:
        if self.count == "given":
            return "N: all parameters; C: the FLOPs that the records state"
        return f"N: {COUNTED[self.count][0]}; C = {'(6·N + attention)' if self.attention else '6·N'}·D"

    def of(self, cells: Sequence[Cell]) -> tuple[Floats, Floats]:
        """N and the compute per token of each cell."""
        n = _column(cells, "parameters")
        if self.count == "given":
            return n, _column(cells, "flops") / _column(cells, "tokens")
        for name in COUNTED[self.count][1]:
            n = n - _column(cells, name)
        if n.min() <= 0:
            source = cells[int(n.argmin())].record.source
            raise UserError(f"{source}: no parameters are left without embedding and head; choose another --count")
        return n, 6 * n + (_column(cells, "attention_flops") if self.attention else 0.0)


def _column(cells: Sequence[Cell], name: str) -> Floats:
    values = [getattr(cell.record, name) for cell in cells]
    if None in values:
        source = cells[values.index(None)].record.source
        raise UserError(f"{source}: has no {name} ({COLUMNS[name]}); choose another --count or leave out --attention")
    return np.array(values, float)


@dataclass(frozen=True)
class Sample:
    """The points that a fit uses for one architecture, as arrays."""

    parameters: Floats
    tokens: Floats
    compute: Floats
    log_loss: Floats
    """Mean over the seeds."""
    seeds: Floats

    def __len__(self) -> int:
        return len(self.parameters)

    def take(self, index: Sequence[int] | NDArray[np.intp]) -> "Sample":
        return Sample(*(values[index] for values in vars(self).values()))


def make_sample(cells: Sequence[Cell], counting: Counting) -> tuple[Sample, list[str]]:
    """Every complete run of one architecture; of runs that differ in a choice (batch size, rate, settings), the best.

    Runs of equal choices, or without any in their records, are all kept, also if their budgets are nearly equal.
    """
    n, per_token = counting.of(cells)
    tokens = _column(cells, "tokens")
    loss = np.array([cell.log_loss for cell in cells])
    groups: list[list[int]] = []
    for i in np.lexsort((tokens, n)):
        same = groups and n[i] == n[groups[-1][0]] and tokens[i] <= tokens[groups[-1][0]] * (1 + MERGE)
        groups[-1].append(int(i)) if same else groups.append([int(i)])
    kept = [i for group in groups for i in _best_choice(cells, group)]
    notes = []
    if len(kept) < len(cells):
        pairs = f"{len(cells):,} points, {len(groups):,} pairs of size and budget (within {MERGE:.0%})"
        notes.append(f"{pairs}: of those that differ in batch size, rate or settings the best is taken")
    seeds = np.array([float(cell.seeds) for cell in cells])
    return Sample(n, tokens, per_token * tokens, loss, seeds).take(kept), notes


def _best_choice(cells: Sequence[Cell], group: list[int]) -> list[int]:
    """Those of the group with the batch size, rate and settings of its lowest loss."""

    def choice(i: int) -> tuple[object, ...]:
        record = cells[i].record
        return record.batch_tokens, record.lr, record.settings

    best = choice(min(group, key=lambda i: cells[i].log_loss))
    return [i for i in group if choice(i) == best]


def make_curves(cells: Sequence[Cell], counting: Counting) -> tuple[Sample, NDArray[np.intp]]:
    """Every evaluation during the runs of one architecture, and the number of the run that each belongs to."""
    n, per_token = counting.of(cells)
    points = [(i, tokens, loss, cell.seeds) for i, cell in enumerate(cells) for tokens, loss in cell.record.curve]
    if not points:
        raise UserError("the runs have no curves; leave out --curves, or give a CSV file with a column `run`")
    tokens, loss, seeds = np.array([p[1:] for p in points], float).T
    run = np.array([p[0] for p in points])
    curve = np.unique(run, return_inverse=True)[1]
    return Sample(n[run], tokens, per_token[run] * tokens, np.log(loss), seeds), curve
