"""A study is a file: grids of runs. Its folder holds a copy of the file, the runs, and what came out.

study.toml    the file, with the command that began it
runs/         a run folder for each point of the grids, under a name that says which
tuning/       a run folder for each trial of grids that are tuned
failed/       why a run failed, as text; it is left alone until it is to be tried again
slurm/        jobs.json and the output of jobs, on a cluster
result.json   what came out, brought up to date when a run ends or it is read; result.md: the same as a table
"""

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from angpt.errors import UserError
from angpt.present.terminal import terminal
from angpt.present.words import plural
from angpt.results import RESULT, Result, RunResult
from angpt.serialization import read_toml, to_toml
from angpt.studies.config import Grid, StudyConfig
from angpt.studies.executor import Pool, execute
from angpt.studies.grid import (
    Group,
    Point,
    baseline,
    baseline_parameters,
    budget_name,
    groups,
    largest_lines,
    lr_limits,
    run_config,
    start_lines,
    tuning_group,
)
from angpt.studies.jobs import MADE_BY, Job, changed_settings, check_new, ended, failure_of, note_failure, repeated_by
from angpt.studies.outcome import markdown
from angpt.studies.search import Loss, Optimum, grow, optimum
from angpt.studies.summarise import Chosen, choose, run_result, summarise
from angpt.system import LOCK, locked, write_atomically
from angpt.training.launch import check
from angpt.training.plan import make_plan
from angpt.version import __version__

FILE = "study.toml"
STUDIES = Path("studies")


def file_of(study: Path) -> Path:
    """The file of a study that is given by its file or by its folder."""
    return study / FILE if study.is_dir() else study


def folder_of(study: Path) -> Path:
    """The folder of a study that is given by its file or by its folder."""
    return STUDIES / study.stem if study.suffix == ".toml" and not study.is_dir() else study


@dataclass(frozen=True)
class Search:
    """A group of runs, or of the trials that choose their learning rate, as far as its grid has grown."""

    group: Group
    grid: Grid
    lines: dict[int, list[float]]
    trials: bool = False
    ready: bool = True
    """False while trials have not chosen the learning rate; `lines` has the one that they vary."""

    def points(self) -> Iterator[Point]:
        for batch, rates in self.lines.items():
            for lr in rates:
                for seed in self.grid.seeds[: 1 if self.trials else None]:
                    yield Point(self.group, batch, lr, seed, self.trials)


class Study:
    """A study and its folder, which need not be there yet."""

    def __init__(self, folder: Path, config: StudyConfig) -> None:
        self.folder, self.config = folder, config
        self._known: dict[Point, Job] = {}

    @classmethod
    def read(cls, file: Path, folder: Path) -> "Study":
        return cls(folder, read_toml(StudyConfig, file))

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
        text = to_toml(self.config) if file is None else os.fsdecode(file.read_bytes())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{MADE_BY}{command}\n{text}")
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written to ({error}); choose another --out") from error

    def extends(self, other: "Study") -> bool:
        """True if every run of another study is one of this, with the same settings."""
        runs = {job.folder: job.config for job in self.planned()}
        return all(runs.get(job.folder) == job.config for job in other.planned())

    def check(self, on_this_machine: bool) -> None:
        """Find what would stop the runs before anything is written; on a cluster, devices are not asked for here."""
        for job in [*self.planned(), *self.growth()]:
            job.plan  # noqa: B018
        for search in self.searches():  # the data and the device are the same for all runs of a group
            config = self.job(next(search.points())).config
            check(make_plan(config if on_this_machine else dataclasses.replace(config, device="cpu")))

    def job(self, point: Point) -> Job:
        if point not in self._known:
            self._known[point] = Job(run_config(self.config, point), self.run_folder(point))
        return self._known[point]

    def run_folder(self, point: Point) -> Path:
        name = point.full_name if self.config.names == "full" else point.short_name
        return self.folder / ("tuning" if point.trial else "runs") / name

    def loss(self, group: Group, seeds: Sequence[int], trials: bool = False) -> Loss:
        """The loss of a point, a geometric mean over seeds; infinite if one diverged, None while one has not ended."""

        def loss(batch: int, lr: float) -> float | None:
            logs = []
            for seed in seeds:
                summary = ended(self.run_folder(Point(group, batch, lr, seed, trials)))
                if summary is None:
                    return None
                diverged = summary.status == "diverged" or summary.val_loss is None
                logs.append(math.inf if diverged else math.log(summary.val_loss or math.nan))
            return math.exp(sum(logs) / len(logs))

        return loss

    def searches(self) -> list[Search]:
        """Every group of every grid, small models first, with the points that the results so far call for."""
        found: list[Search] = []
        for grid in self.config.grid:
            for group in groups(grid, self.config.train):
                if not grid.tune:
                    found.append(self._grown(grid, group))
                    continue
                trials = self._grown(grid, tuning_group(self.config, grid, group), trials=True)
                if trials not in found:
                    found.append(trials)
                best, over = self.tuned(trials)
                lines = start_lines(grid, group, self.config)
                if best is not None and over:
                    lines = {batch: [best.lr] for batch in lines}
                found.append(Search(group, grid, lines, ready=best is not None and over))
        return sorted(found, key=lambda search: baseline_parameters(self.config, search.group))

    def _grown(self, grid: Grid, group: Group, trials: bool = False) -> Search:
        start = start_lines(grid, group, self.config, trials)
        loss = self.loss(group, grid.seeds[:1] if trials else grid.seeds, trials)
        lines = grow(start, loss, lr_limits(grid, start), grid.batch_limits, self.config.train.model.context)
        return Search(group, grid, lines, trials)

    def tuned(self, trials: Search) -> tuple[Optimum | None, bool]:
        """The best of the trials so far, and whether all have ended."""
        loss = self.loss(trials.group, trials.grid.seeds[:1], trials=True)
        over = all(loss(batch, lr) is not None for batch, rates in trials.lines.items() for lr in rates)
        return optimum(trials.lines, loss), over

    def jobs(self) -> list[Job]:
        """Every run that is called for, each once: the trials first, then the runs whose learning rate is known."""
        return self._jobs([search for search in self.searches() if search.ready])

    def planned(self) -> list[Job]:
        """Every run, those included whose learning rate the trials have not chosen yet."""
        return self._jobs(self.searches())

    def _jobs(self, searches: Sequence[Search]) -> list[Job]:
        points = list(dict.fromkeys(point for search in searches for point in search.points()))
        places = list(dict.fromkeys((not p.trial, p.group.size, p.group.budget) for p in points))
        # The architectures of a size and budget in turn, seed by seed, so that a study under way can be compared.
        points.sort(key=lambda p: (not p.trial, places.index((not p.trial, p.group.size, p.group.budget)), p.seed))
        found: dict[Path, Job] = {}
        for job in map(self.job, points):
            if found.setdefault(job.folder, job).config != job.config:
                raise UserError(f"{job.folder}: two runs have this name; use names = 'full'")
        return list(found.values())

    def growth(self) -> list[Job]:
        """The further runs that there would be if every grid grew to its limits."""
        known = {job.folder for job in self.planned()}
        largest = [
            dataclasses.replace(s, lines=largest_lines(start_lines(s.grid, s.group, self.config, s.trials), s.grid))
            for s in self.searches()
            if (not self.tuned(s)[1] if s.trials else not s.grid.tune and (s.grid.lr_limits or s.grid.batch_limits))
        ]
        return [job for job in self._jobs(largest) if job.folder not in known]

    def execute(self, pool: Pool, tick: Callable[[Sequence[Job], set[Path]], None], signals: bool = True) -> Result:
        """Bring all runs to their end. A run that fails is noted, and the others go on."""

        def jobs() -> list[Job]:
            self.result()
            return self.jobs()

        with self.lock():
            execute(jobs, pool, tick, note_failure, signals)
            return self.result()

    def result(self) -> Result:
        """The result of the runs as they are now: result.json, computed and written again if it is missing or stale."""
        sources = self._sources()
        with suppress(UserError):
            if (stored := Result.read(self.folder)).sources == sources:
                return stored
        result = dataclasses.replace(self._compute(), sources=sources)
        try:
            write_atomically(self.folder / "result.md", markdown(result))
            result.write(self.folder)
        except OSError as error:
            note = f"note: {self.folder}: {RESULT} cannot be written ({error.strerror})"
            terminal(stderr=True).print(note)
        return result

    def _sources(self) -> str:
        """Checksum of all that the result is computed from: this version, the settings, and files of the runs, of which
        metrics.jsonl counts by its length, since it is only appended to."""
        digest = hashlib.sha256(os.fsencode(f"{__version__}\n{to_toml(self.config)}"))
        names = ("config.toml", "summary.json", "metrics.jsonl")
        patterns = ["failed/*.txt", *(f"{kind}/*/{name}" for kind in ("runs", "tuning") for name in names)]
        for path in sorted(path for pattern in patterns for path in self.folder.glob(pattern)):
            with suppress(FileNotFoundError):  # the summary of a run that goes on is removed
                content = str(path.stat().st_size).encode() if path.suffix == ".jsonl" else path.read_bytes()
                digest.update(os.fsencode(f"\n{path.relative_to(self.folder)} {len(content)}\n") + content)
        return digest.hexdigest()

    def _compute(self) -> Result:
        searches = self.searches()
        called_for = dict.fromkeys(point for search in searches if not search.trials for point in search.points())
        runs = {point: run_result(self.job(point), point.group.size) for point in called_for}
        points: dict[Group, dict[tuple[int, float], list[RunResult]]] = {}
        for point, run in runs.items():
            points.setdefault(point.group, {}).setdefault((point.batch, point.lr), []).append(run)
        chosen = [self._choose(group, of_group) for group, of_group in points.items()]
        base_budget = None if self.config.baseline_budget is None else budget_name(self.config.baseline_budget)
        tuned = [(search.group.architecture, *self.tuned(search)) for search in searches if search.trials]
        notes = [
            f"{name}: the best rate, {best.lr:g}, is at the edge of those tried; set lrs to search around it"
            for name, best, over in tuned
            if best is not None and over and best.lr_side
        ]
        notes += self._edits(self._jobs(searches))
        return summarise(chosen, list(runs.values()), baseline(self.config), base_budget, notes)

    def _edits(self, jobs: Sequence[Job]) -> list[str]:
        """Notes on runs in the folder that are not as the file, which may have been edited since, has them."""
        notes = []
        if changed := [names for job in jobs if (names := changed_settings(job))]:
            settings = ", ".join(dict.fromkeys(name for names in changed for name in names))
            notes.append(f"{FILE}: {plural(len(changed), 'run')} began with other values of {settings}")
        known = {job.folder.name for job in jobs}
        if left := sorted({path.parent.name for path in self.folder.glob("runs/[!.]*/config.toml")} - known):
            shown = f"{', '.join(left[:3])}{', …' if len(left) > 3 else ''}"
            notes.append(f"{FILE}: {plural(len(left), 'run')} not in it and left out: {shown}")
        return notes

    def _choose(self, group: Group, points: dict[tuple[int, float], list[RunResult]]) -> Chosen:
        seeds = {at: [run.seed for run in runs] for at, runs in points.items()}
        return choose(group, points, lambda batch, lr: self.loss(group, seeds[batch, lr])(batch, lr))

    def commands(self) -> list[str]:
        """The commands that make this study again."""
        return repeated_by(self.folder, self.config.train.data.path)

    def failed(self) -> list[Job]:
        return [job for job in self.jobs() if ended(job.folder) is None and job.failure.exists()]

    def failures(self) -> dict[str, str]:
        """Why runs failed, by their names, and why others cannot begin."""
        found = {job.folder.name: failure_of(job) or "" for job in self.failed()}
        for name in (s.group.architecture for s in self.searches() if s.trials and self.tuned(s) == (None, True)):
            found[name] = f"no trial of its learning rate finished; give {name} a rate with lrs"
        return found

    def retry(self) -> None:
        """Let the failed runs be tried again."""
        for job in self.failed():
            job.failure.unlink()

    def lock(self) -> AbstractContextManager[None]:
        """The lock of the folder, held in a `with` block: one process at a time executes a study."""
        return locked(self.folder / LOCK, "another process executes this study")
