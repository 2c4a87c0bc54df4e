"""What a comparison found, as plain data: `result.json` is this, and the report shows nothing that is not in it."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from angpt.config import from_dict
from angpt.errors import UserError
from angpt.stats import Interval
from angpt.system import write_atomically

RunStatus = Literal["finished", "diverged", "interrupted", "waiting"]


@dataclass(frozen=True)
class SpeedUp:
    """Tokens (or seconds) that the baseline needs for the same loss, over those used.

    Where the loss lies outside the range that the baseline's complete runs span, only a bound is known: `more than`
    the value, or `less than` it.
    """

    value: float
    low: float | None
    high: float | None
    relation: Literal["=", ">", "<"]


@dataclass(frozen=True)
class RunResult:
    """One run of the comparison, complete or not."""

    name: str
    """Of its folder, below `runs/`."""
    architecture: str
    seed: int
    budget: int
    """Tokens of the whole run."""
    status: RunStatus
    progress: float
    """Part of its steps that is done."""
    lr: float
    val_loss: float | None
    seconds: float | None


@dataclass(frozen=True)
class Cell:
    """An architecture at a budget: the runs over all seeds."""

    architecture: str
    budget: int
    val_loss: Interval | None
    """None while no run has finished."""
    diverged: int
    speedup_tokens: SpeedUp | None
    """None for the baseline itself, and while there is nothing to compare with."""
    speedup_seconds: SpeedUp | None


@dataclass(frozen=True)
class Cost:
    """What an architecture costs per step, over all its runs."""

    architecture: str
    parameters: int
    step_ms: Interval
    overhead: Interval | None
    """Relative to the baseline's step time: 0.03 is 3 % more. None for the baseline."""
    memory_gib: float | None


@dataclass(frozen=True)
class Result:
    """A comparison."""

    baseline: str
    architectures: tuple[str, ...]
    budgets: tuple[int, ...]
    seeds: tuple[int, ...]
    complete: bool
    """Whether every run has ended."""
    verdict: str
    """One sentence."""
    cells: tuple[Cell, ...]
    costs: tuple[Cost, ...]
    runs: tuple[RunResult, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return from_dict(cls, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, UserError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from error

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n")
