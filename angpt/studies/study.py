"""A study is a file: grids of runs. Its folder holds a copy of the file, the runs, and what came out.

study.toml    the file, with the command that began it
runs/         a run folder for each point of the grids, under a name that says which
failed/       why a run failed, as text; it is left alone until it is to be tried again
slurm/        jobs.json and the output of jobs, on a cluster
result.json   what came out; result.md: the same as a table
"""

import dataclasses
import fcntl
import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from angpt.config import read_toml
from angpt.errors import UserError
from angpt.studies.config import Grid, StudyConfig
from angpt.studies.executor import Pool, execute
from angpt.studies.grid import Group, Point, groups, largest_lines, run_config, start_lines
from angpt.studies.jobs import MADE_BY, Job, check_new, ended, note_failure, repeated_by
from angpt.studies.search import Loss, grow
from angpt.system import write_atomically
from angpt.training.launch import check
from angpt.training.plan import make_plan

FILE = "study.toml"


@dataclass(frozen=True)
class Search:
    """A group of runs as far as its grid has grown."""

    group: Group
    grid: Grid
    lines: dict[int, list[float]]

    def points(self) -> Iterator[Point]:
        for batch, rates in self.lines.items():
            for lr in rates:
                for seed in self.grid.seeds:
                    yield Point(self.group, batch, lr, seed)


class Study:
    """A study and its folder, which need not be there yet."""

    def __init__(self, folder: Path, config: StudyConfig) -> None:
        self.folder, self.config = folder, config

    @classmethod
    def read(cls, file: Path, folder: Path) -> "Study":
        return cls(folder, read_toml(StudyConfig, file))

    @classmethod
    def open(cls, folder: Path) -> "Study":
        """The study of a folder."""
        if not holds_study(folder):
            raise UserError(f"{folder}: holds no study; begin one with `angpt study run FILE.toml`")
        return cls.read(folder / FILE, folder)

    def begin(self, file: Path, command: str, on_this_machine: bool) -> None:
        """Make the folder, or take over the one that an earlier call made: a study may grow with its file."""
        path = self.folder / FILE
        if path.exists() and not holds_study(self.folder):
            raise UserError(f"{self.folder}: holds a comparison; choose another --out")
        if not path.exists():
            check_new(self.folder)
        self.check(on_this_machine)
        text = file.read_text(encoding="utf-8")
        if file.resolve() == path.resolve():
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{MADE_BY}{command}\n{text}")
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written to ({error}); choose another --out") from error

    def check(self, on_this_machine: bool) -> None:
        """Find what would stop the runs before anything is written; on a cluster, devices are not asked for here."""
        for job in [*self.jobs(), *self.growth()]:
            job.plan  # noqa: B018
        for search in self.searches():  # the data and the device are the same for all runs of a group
            config = self.job(next(search.points())).config
            check(make_plan(config if on_this_machine else dataclasses.replace(config, device="cpu")))

    def job(self, point: Point) -> Job:
        return Job(run_config(self.config, point), self.folder / "runs" / point.name)

    def loss(self, group: Group, seeds: Sequence[int]) -> Loss:
        """Of a point, the geometric mean over seeds; infinite if one diverged, None while one has not ended."""

        def loss(batch: int, lr: float) -> float | None:
            logs = []
            for seed in seeds:
                summary = ended(self.folder / "runs" / Point(group, batch, lr, seed).name)
                if summary is None:
                    return None
                diverged = summary.status == "diverged" or summary.val_loss is None
                logs.append(math.inf if diverged else math.log(summary.val_loss or math.nan))
            return math.exp(sum(logs) / len(logs))

        return loss

    def searches(self) -> list[Search]:
        """Every group of every grid, with the points that the results so far call for."""
        found = []
        for grid in self.config.grid:
            for group in groups(grid, self.config.train):
                start, loss = start_lines(grid, group, self.config), self.loss(group, grid.seeds)
                context = self.config.train.model.context
                found.append(Search(group, grid, grow(start, loss, grid.lr_limits, grid.batch_limits, context)))
        return found

    def jobs(self) -> list[Job]:
        """Every run that is called for, each once."""
        return [self.job(point) for point in dict.fromkeys(p for s in self.searches() for p in s.points())]

    def growth(self) -> list[Job]:
        """The further runs that there would be if every grid grew to its limits."""
        known = {job.folder for job in self.jobs()}
        lattice = [
            Search(s.group, s.grid, largest_lines(start_lines(s.grid, s.group, self.config), s.grid))
            for s in self.searches()
            if s.grid.lr_limits or s.grid.batch_limits
        ]
        points = dict.fromkeys(p for s in lattice for p in s.points())
        return [job for job in map(self.job, points) if job.folder not in known]

    def execute(self, pool: Pool, tick: Callable[[Sequence[Job], set[Path]], None]) -> None:
        """All runs to their end. Those that fail are noted, and do not keep the others from going on."""
        with self.lock():
            execute(self.jobs, pool, tick, note_failure)

    def commands(self) -> list[str]:
        """What makes this study again."""
        return repeated_by(self.folder, self.config.train.data.path)

    def failed(self) -> list[Job]:
        return [job for job in self.jobs() if ended(job.folder) is None and job.failure.exists()]

    def retry(self) -> None:
        """Let the failed runs be tried again."""
        for job in self.failed():
            job.failure.unlink()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time executes a study."""
        with (self.folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(f"{self.folder}: another process executes this study") from error
            yield


def holds_study(folder: Path) -> bool:
    """Whether the folder holds a study rather than a comparison."""
    try:
        return "grid" in tomllib.loads((folder / FILE).read_text(encoding="utf-8"))
    except OSError:
        return False
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{folder / FILE}: cannot be read as TOML ({error})") from error
