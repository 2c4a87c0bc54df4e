"""What a study found, as plain data: `result.json`, which report, fits and analysis read.

`Study.result` reads the file, and computes and writes it again if it is missing or stale.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from angpt.serialization import read_json, sealed_json
from angpt.stats import Interval
from angpt.system import write_atomically

RESULT = "result.json"

State = Literal["waiting", "queued", "running", "stopped", "finished", "diverged", "failed"]
"""How far a run is. finished and diverged runs have ended; a failed one could not be trained."""


@dataclass(frozen=True)
class SpeedUp:
    """Tokens (or seconds) that the baseline needs for the same loss, divided by those used.

    Where the loss lies outside the range that the baseline's complete runs span, only a bound is known, with a
    confidence of 97.5 % where there are several seeds: more than the value (">"), or less ("<").
    """

    value: float
    low: float | None
    high: float | None
    relation: Literal["=", ">", "<"]


@dataclass(frozen=True)
class RunResult:
    """One run, complete or not."""

    name: str
    """Name of its folder, below `runs/` of the study."""
    architecture: str
    size: str
    """Name of its size; empty where the study has none."""
    parameters: int
    tokens: int
    """Budget of the whole run."""
    batch: int
    """Tokens per step."""
    lr: float
    """Peak learning rate."""
    seed: int
    status: State
    progress: float
    """Fraction of its steps that is done."""
    val_loss: float | None
    """At the end; None for a run that has not finished."""
    steps: int
    """Steps of the whole run."""
    flops: float
    """FLOPs of the whole run."""
    seconds: float | None
    """Time spent in training steps."""
    memory_gib: float | None
    """Peak memory."""

    @property
    def ended(self) -> bool:
        return self.status in ("finished", "diverged")


@dataclass(frozen=True)
class Row:
    """An architecture of a size at a budget, at the best of the points that were tried."""

    architecture: str
    size: str
    budget: str
    """The budget as it stands in names: 20x, 1.5B."""
    parameters: int
    tokens: int
    batch: int
    lr: float
    batch_side: int
    """-1 or 1 where the batch is the smallest or largest of several, and so not known to be the best; else 0."""
    lr_side: int
    """-1 or 1 where the learning rate is the lowest or highest of several; else 0."""
    points: int
    """Batch sizes × learning rates that were tried."""
    seeds: int
    diverged: int
    """Number of seeds that diverged."""
    val_loss: Interval | None
    """Geometric mean over the seeds that finished; None while none has."""
    change: Interval | None
    """Change of the loss relative to the baseline: 0.01 is 1 % above it."""
    speedup_tokens: SpeedUp | None
    """None for the baseline itself, and while there is nothing to compare with."""
    speedup_seconds: SpeedUp | None
    runs: tuple[str, ...]
    """Names of the runs at this point, one per seed."""
    settings: str = ""
    """What else tells it from rows of the same architecture, size and budget; empty in a study, which has one."""


@dataclass(frozen=True)
class Cost:
    """The cost of a training step of an architecture and size, over the runs of its rows."""

    architecture: str
    size: str
    parameters: int
    step_ms: Interval
    overhead: Interval | None
    """Relative to the baseline's step time: 0.03 is 3 % more. None for the baseline, and without runs of both with the
    same budget, batch and seed."""
    memory_gib: float | None


@dataclass(frozen=True)
class Result:
    """The result of a study."""

    baseline: str
    complete: bool
    """True if every run has ended."""
    verdicts: dict[str, str]
    """For each size a sentence on the best architecture at the largest budget."""
    rows: tuple[Row, ...]
    costs: tuple[Cost, ...]
    notes: tuple[str, ...]
    runs: tuple[RunResult, ...]
    sources: str = ""
    """Checksum of the settings and files that the result was computed from; another one means that it is stale."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.architecture for row in self.rows))

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.size for row in self.rows))

    @property
    def budgets(self) -> tuple[int, ...]:
        """In tokens, the smallest first."""
        return tuple(sorted({row.tokens for row in self.rows}))

    def largest_budget(self, size: str) -> int:
        """The largest budget, in tokens, of a row of this size that is not of the baseline; of any row, where there is
        no other. Longer runs of the baseline alone only serve the speed-ups of others."""
        rows = [row for row in self.rows if row.size == size]
        return max(row.tokens for row in [row for row in rows if row.architecture != self.baseline] or rows)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({run.seed for run in self.runs}))

    @property
    def verdict(self) -> str:
        """The sentences of all sizes."""
        several = len(self.verdicts) > 1
        return "\n".join(f"{size}: {text}" if several else text for size, text in self.verdicts.items())

    @property
    def leaders(self) -> tuple[Row, ...]:
        """Of rows with the same architecture, size and budget, the one with the lowest loss."""
        found: dict[tuple[str, str, int], Row] = {}
        for row in sorted(self.rows, key=lambda row: row.val_loss.mean if row.val_loss else math.inf):
            found.setdefault((row.architecture, row.size, row.tokens), row)
        return tuple(row for row in self.rows if row in found.values())

    def of_size(self, size: str) -> "Result":
        """The rows, costs and verdict of one size, with the runs of these rows alone."""
        rows = tuple(row for row in self.rows if row.size == size)
        names = {name for row in rows for name in row.runs}
        runs = tuple(run for run in self.runs if run.name in names)
        return dataclasses.replace(
            self,
            complete=all(run.ended for run in runs),
            verdicts={size: self.verdicts[size]},
            rows=rows,
            costs=tuple(cost for cost in self.costs if cost.size == size),
            runs=runs,
        )

    def representatives(self) -> list[RunResult]:
        """One run for each architecture and size, where a single one is shown: the first seed that has not diverged at
        the largest budget, see `largest_budget`. Runs that have not started are left out."""
        runs = {run.name: run for run in self.runs if run.status not in ("waiting", "queued")}
        best: dict[tuple[str, str], RunResult] = {}
        largest = {size: self.largest_budget(size) for size in self.sizes}
        for row in (row for row in self.leaders if row.tokens <= largest[row.size]):
            for run in (runs[name] for name in row.runs if name in runs):
                key = row.architecture, row.size
                if key not in best or _order(run) < _order(best[key]):
                    best[key] = run
        return list(best.values())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The result.json of a study, stale or not."""
        return read_json(cls, folder / RESULT, f"`angpt report {folder}` writes it again")

    def write(self, folder: Path) -> None:
        write_atomically(folder / RESULT, sealed_json(self))


def _order(run: RunResult) -> tuple[int, bool, int]:
    return -run.tokens, run.status == "diverged", run.seed
