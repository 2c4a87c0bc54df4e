"""A study is a file: grids of runs. Its folder holds a copy of the file, the runs, and what came out.

study.toml    the file, with the command that began it
runs/         a run folder for each point of the grids, under a name that says which
tuning/       a run folder for each trial of grids that are tuned
failed/       why a run failed, as text; it is left alone until it is to be tried again
slurm/        jobs.json and the output of jobs, on a cluster
result.json   what came out, brought up to date whenever a run ends; result.md: the same as a table
"""

import dataclasses
import fcntl
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from angpt.config import to_toml
from angpt.errors import UserError
from angpt.results import Result, RunResult
from angpt.studies.compare import read_config
from angpt.studies.config import Grid, StudyConfig
from angpt.studies.executor import Pool, execute
from angpt.studies.grid import (
    Group,
    Point,
    baseline,
    budget_name,
    groups,
    largest_lines,
    lr_limits,
    run_config,
    start_lines,
    tuning_group,
)
from angpt.studies.jobs import MADE_BY, Job, check_new, ended, failure_of, note_failure, repeated_by
from angpt.studies.outcome import write_result
from angpt.studies.search import Loss, Optimum, grow, optimum
from angpt.studies.summarise import Chosen, choose, run_result, summarise
from angpt.system import write_atomically
from angpt.training.launch import check
from angpt.training.plan import make_plan

FILE = "study.toml"


@dataclass(frozen=True)
class Tuning:
    """The trials that choose the learning rate of an architecture and size, as far as they have grown."""

    group: Group
    grid: Grid
    batch: int
    rates: list[float]
    ended: bool
    best: Optimum | None
    """None where no trial has finished."""

    @property
    def rate(self) -> float | None:
        """The rate that was chosen; None while trials are left to do, or where all diverged."""
        return self.best.lr if self.best is not None and self.ended else None


@dataclass(frozen=True)
class Search:
    """A group of runs as far as its grid has grown."""

    group: Group
    grid: Grid
    lines: dict[int, list[float]]
    tuning: Tuning | None = None

    @property
    def ready(self) -> bool:
        """Whether the learning rates are known; until the trials have ended, `lines` has the rate that they vary."""
        return self.tuning is None or self.tuning.rate is not None

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
        return cls(folder, read_config(file))

    @classmethod
    def open(cls, folder: Path) -> "Study":
        """The study of a folder."""
        if not (folder / FILE).exists():
            raise UserError(f"{folder}: holds no study; begin one with `angpt study run FILE.toml`")
        return cls.read(folder / FILE, folder)

    def begin(self, file: Path | None, command: str, on_this_machine: bool) -> None:
        """Make the folder, or take over the one that an earlier call made: a study may grow with its file. Without a
        file, the configuration is written as one."""
        path = self.folder / FILE
        if not path.exists():
            check_new(self.folder)
        self.check(on_this_machine)
        if file is not None and file.resolve() == path.resolve():
            return
        text = to_toml(self.config) if file is None else file.read_text(encoding="utf-8")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{MADE_BY}{command}\n{text}")
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written to ({error}); choose another --out") from error

    def check(self, on_this_machine: bool) -> None:
        """Find what would stop the runs before anything is written; on a cluster, devices are not asked for here."""
        for job in [*self.planned(), *self.growth()]:
            job.plan  # noqa: B018
        searches = self.searches()
        first = [self.job(next(s.points())) for s in searches]  # data and device are the same for all runs of a group
        trials = [self.trial(s.tuning, s.tuning.rates[0]) for s in searches if s.tuning is not None]
        for job in [*first, *trials]:
            config = job.config
            check(make_plan(config if on_this_machine else dataclasses.replace(config, device="cpu")))

    def run_folder(self, point: Point) -> Path:
        return self.folder / "runs" / (point.name if self.config.names == "full" else point.short_name)

    def job(self, point: Point) -> Job:
        return Job(run_config(self.config, point), self.run_folder(point))

    def trial(self, tuning: Tuning, lr: float) -> Job:
        """A trial of the learning rate, evaluated on the part of the training data that is held out for it."""
        point = Point(tuning.group, tuning.batch, lr, tuning.grid.seeds[0])
        config = run_config(self.config, point)
        data = dataclasses.replace(config.data, tuning_split=tuning.grid.tuning_split)
        return Job(dataclasses.replace(config, data=data), self._trial_folder(point))

    def _trial_folder(self, point: Point) -> Path:
        if self.config.names == "full":
            name = f"{point.name}-trial"
        else:
            name = f"{dataclasses.replace(point.group, budget='').name}-lr{point.lr:g}"
        return self.folder / "tuning" / name

    def loss(self, group: Group, seeds: Sequence[int], folder: Callable[[Point], Path] | None = None) -> Loss:
        """The loss of a point, a geometric mean over seeds; infinite if one diverged, None while one has not ended."""
        where = folder or self.run_folder

        def loss(batch: int, lr: float) -> float | None:
            logs = []
            for seed in seeds:
                summary = ended(where(Point(group, batch, lr, seed)))
                if summary is None:
                    return None
                diverged = summary.status == "diverged" or summary.val_loss is None
                logs.append(math.inf if diverged else math.log(summary.val_loss or math.nan))
            return math.exp(sum(logs) / len(logs))

        return loss

    def searches(self) -> list[Search]:
        """Every group of every grid, with the points that the results so far call for."""
        found = []
        context = self.config.train.model.context
        for grid in self.config.grid:
            tunings: dict[Group, Tuning] = {}
            for group in groups(grid, self.config.train):
                if grid.tune:
                    ((batch, (centre,)),) = start_lines(_untuned(grid), group, self.config).items()
                    trials = tuning_group(self.config, grid, group)
                    if trials not in tunings:
                        tunings[trials] = self._tuning(grid, trials, batch)
                    tuning = tunings[trials]
                    found.append(Search(group, grid, {batch: [tuning.rate or centre]}, tuning))
                    continue
                start, loss = start_lines(grid, group, self.config), self.loss(group, grid.seeds)
                found.append(Search(group, grid, grow(start, loss, grid.lr_limits, grid.batch_limits, context)))
        return found

    def _tuning(self, grid: Grid, group: Group, batch: int) -> Tuning:
        loss = self.loss(group, grid.seeds[:1], self._trial_folder)
        start = start_lines(grid, group, self.config)
        lines = grow(start, loss, lr_limits(grid, start))
        over = all(loss(batch, lr) is not None for lr in lines[batch])
        return Tuning(group, grid, batch, lines[batch], over, optimum(lines, loss))

    def tunings(self, searches: Iterable[Search] | None = None) -> list[Tuning]:
        """The trials of every architecture and size that is tuned."""
        found = {(s.tuning.group, s.grid): s.tuning for s in searches or self.searches() if s.tuning is not None}
        return list(found.values())

    def jobs(self) -> list[Job]:
        """Every run that is called for, each once: the trials first, then runs whose learning rate is known."""
        return self._jobs(lambda search: search.ready)

    def planned(self) -> list[Job]:
        """Every run, those included whose learning rate the trials have not chosen yet."""
        return self._jobs(lambda search: True)

    def _jobs(self, called_for: Callable[[Search], bool]) -> list[Job]:
        searches = self.searches()
        trials = [self.trial(tuning, lr) for tuning in self.tunings(searches) for lr in tuning.rates]
        points = dict.fromkeys(p for s in searches if called_for(s) for p in s.points())
        found = trials + [self.job(point) for point in _in_turn(points)]
        configs = {job.folder: job.config for job in found}
        if wrong := next((job for job in found if configs[job.folder] != job.config), None):
            raise UserError(
                f"{wrong.folder}: two runs have this name; use full names, and rates with six digits at most"
            )
        return [Job(config, folder) for folder, config in configs.items()]

    def growth(self) -> list[Job]:
        """The further runs that there would be if every grid grew to its limits."""
        searches = self.searches()
        known = {job.folder for job in self.planned()}
        found: dict[Path, Job] = {}
        for search in searches:
            if search.tuning is None and (search.grid.lr_limits or search.grid.batch_limits):
                start = start_lines(search.grid, search.group, self.config)
                points = dataclasses.replace(search, lines=largest_lines(start, search.grid)).points()
                found |= {job.folder: job for job in map(self.job, points)}
        for tuning in (t for t in self.tunings(searches) if not t.ended):
            start = start_lines(tuning.grid, tuning.group, self.config)
            rates = largest_lines(start, tuning.grid)[tuning.batch]
            found |= {job.folder: job for job in (self.trial(tuning, lr) for lr in rates)}
        return [job for folder, job in found.items() if folder not in known]

    def execute(self, pool: Pool, tick: Callable[[Sequence[Job], set[Path]], None]) -> Result:
        """All runs to their end, and what came out. Runs that fail are noted, and do not keep the others from going
        on."""

        def jobs() -> list[Job]:
            self.write_result()
            return self.jobs()

        with self.lock():
            execute(jobs, pool, tick, note_failure)
            return self.write_result()

    def result(self) -> Result:
        """What the runs say so far."""
        searches = self.searches()
        runs = {point: run_result(self.job(point), point.group.size) for s in searches for point in s.points()}
        points: dict[Group, dict[tuple[int, float], list[RunResult]]] = {}
        for point, run in runs.items():
            points.setdefault(point.group, {}).setdefault((point.batch, point.lr), []).append(run)
        chosen = [self._choose(group, of_group) for group, of_group in points.items()]
        base_budget = None if self.config.baseline_budget is None else budget_name(self.config.baseline_budget)
        notes = [
            f"{t.group.architecture}: the best rate, {t.best.lr:g}, is at the edge of those tried; "
            "set lrs to search around it"
            for t in self.tunings(searches)
            if t.ended and t.best is not None and t.best.lr_side
        ]
        return summarise(chosen, list(runs.values()), baseline(self.config), base_budget, notes)

    def _choose(self, group: Group, points: dict[tuple[int, float], list[RunResult]]) -> Chosen:
        seeds = {at: [run.seed for run in runs] for at, runs in points.items()}
        return choose(group, points, lambda batch, lr: self.loss(group, seeds[batch, lr])(batch, lr))

    def write_result(self) -> Result:
        """Write result.json and result.md, of the runs as they are now."""
        result = self.result()
        write_result(result, self.folder)
        return result

    def commands(self) -> list[str]:
        """What makes this study again."""
        return repeated_by(self.folder, self.config.train.data.path)

    def failed(self) -> list[Job]:
        return [job for job in self.jobs() if ended(job.folder) is None and job.failure.exists()]

    def failures(self) -> dict[str, str]:
        """Why runs failed, by their names, and why others cannot begin."""
        found = {job.folder.name: failure_of(job) or "" for job in self.failed()}
        for tuning in self.tunings():
            if tuning.ended and tuning.best is None:
                name = tuning.group.architecture
                found[name] = f"no trial of its learning rate finished; give {name} a rate with lrs"
        return found

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


def _untuned(grid: Grid) -> Grid:
    return dataclasses.replace(grid, tune=0, lr_limits=())


def _in_turn(points: Iterable[Point]) -> list[Point]:
    """The architectures of a size and budget in turn, seed by seed, so that a study under way can be compared."""
    listed = list(points)
    order = {place: i for i, place in enumerate(dict.fromkeys((p.group.size, p.group.budget) for p in listed))}
    seeds = list(dict.fromkeys(p.seed for p in listed))
    return sorted(listed, key=lambda p: (order[p.group.size, p.group.budget], seeds.index(p.seed)))
