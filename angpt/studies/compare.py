"""Architectures side by side: the same tokens in the same order, several seeds and budgets, one page at the end.

A comparison is a folder: study.toml says what it is, runs/ and tuning/ hold run folders, result.json what came out. It
can be killed at any moment and called again.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from angpt.config import TrainConfig, parse_budget, read_toml, to_toml
from angpt.errors import UserError
from angpt.studies.config import CompareConfig
from angpt.studies.executor import Pool, execute
from angpt.studies.grid import folder_name, settled, short
from angpt.studies.jobs import MADE_BY, Job, check_new, ended, repeated_by
from angpt.studies.results import Result
from angpt.studies.search import Optimum, grow, optimum, rounded
from angpt.studies.study import holds_study
from angpt.studies.summarise import summarise
from angpt.system import write_atomically
from angpt.training.launch import check
from angpt.training.plan import make_plan

TUNING_SPLIT = 0.05
TUNING_RATIO = 2.0
TUNING_REACH = 16.0
"""How far beyond its first and last rate the search may go."""


class Comparison:
    """A comparison in its folder."""

    def __init__(self, folder: Path, config: CompareConfig) -> None:
        self.folder, self.config = folder, config
        baseline = dataclasses.replace(config.train.model, architecture=config.architectures[0])
        plan = make_plan(dataclasses.replace(config.train, model=baseline))
        budgets = config.budgets or tuple(str(round(float(plan.config.tokens) * part)) for part in (0.5, 1, 2))
        # One batch size and the same budgets for all, those of the baseline: the tokens must be the same.
        self.batch_tokens = plan.batch_tokens
        self.budgets = sorted({parse_budget(text, plan.parameters) for text in budgets})

    @classmethod
    def create(cls, folder: Path, config: CompareConfig, command: str) -> "Comparison":
        """A new folder, or the one that a call with the same configuration began. `command` is noted in it."""
        path = folder / "study.toml"
        study = cls(folder, config)
        if holds_study(folder):
            raise UserError(f"{folder}: holds a study (angpt study); choose another --out")
        if path.exists():
            if read_toml(CompareConfig, path) != config:
                raise UserError(f"{folder}: holds another comparison (see its study.toml); choose another --out")
            return study
        check_new(folder)
        for job in study.jobs(study.default_rates()):
            check(make_plan(job.config))  # finds what is wrong before anything is written
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{MADE_BY}{command}\n{to_toml(config)}")
        return study

    @classmethod
    def open(cls, folder: Path) -> "Comparison":
        return cls(folder, read_toml(CompareConfig, folder / "study.toml"))

    def run_config(self, architecture: str, budget: int, seed: int, lr: float) -> TrainConfig:
        train = self.config.train
        model = dataclasses.replace(train.model, architecture=architecture)
        return settled(dataclasses.replace(train, model=model), budget, self.batch_tokens, lr, seed)

    def jobs(self, rates: dict[str, float]) -> list[Job]:
        """Every run, the small budgets first, the architectures in turn."""
        return [
            Job(
                self.run_config(architecture, budget, seed, rates[architecture]),
                self.folder / "runs" / run_name(architecture, budget, seed),
            )
            for budget in self.budgets
            for seed in self.config.seeds
            for architecture in self.config.architectures
        ]

    def default_rates(self) -> dict[str, float]:
        """The learning rate of each architecture: as given, or by its rule."""
        train = self.config.train
        return {
            name: self.config.lrs.get(name)
            or make_plan(dataclasses.replace(train, model=dataclasses.replace(train.model, architecture=name))).peak_lr
            for name in self.config.architectures
        }

    def tuning_job(self, architecture: str, lr: float) -> Job:
        """A trial of the learning-rate search, at the smallest budget."""
        config = self.run_config(architecture, self.budgets[0], self.config.seeds[0], lr)
        data = dataclasses.replace(config.data, tuning_split=TUNING_SPLIT)
        return Job(
            dataclasses.replace(config, data=data), self.folder / "tuning" / f"{folder_name(architecture)}-lr{lr:g}"
        )

    def tuning(self) -> dict[str, tuple[list[float], Optimum | None]]:
        """The rates of the search and the best so far: as many to begin with for each architecture, and further ones
        where the best has none on one side of it."""
        found = {}
        for name, centre in self.default_rates().items() if self.config.tune else ():
            start = [
                rounded(centre * TUNING_RATIO ** (i - (self.config.tune - 1) / 2)) for i in range(self.config.tune)
            ]

            def loss(_: int, lr: float, name: str = name) -> float | None:
                summary = ended(self.tuning_job(name, lr).folder)
                if summary is None:
                    return None
                return float("inf") if summary.status == "diverged" else summary.val_loss

            lines = grow({0: start}, loss, (start[0] / TUNING_REACH, start[-1] * TUNING_REACH))
            found[name] = lines[0], optimum(lines, loss)
        return found

    def tuning_jobs(self) -> list[Job]:
        return [self.tuning_job(name, lr) for name, (rates, _) in self.tuning().items() for lr in rates]

    def tuned_rates(self) -> dict[str, float]:
        """The best trial of each architecture; the rates as they are where nothing was tuned."""
        rates = self.default_rates()
        for name, (_, best) in self.tuning().items():
            if best is None:
                raise UserError(f"{self.folder / 'tuning'}: no trial of {name} finished; give --lrs {name} LR by hand")
            rates[name] = best.lr
        return rates

    def tuning_notes(self) -> list[str]:
        """Where the search ended at the edge of its grid, and so may have missed the best rate."""
        return [
            f"{name}: the best rate, {best.lr:g}, is at the edge of those tried; set --lrs to search around it"
            for name, (_, best) in self.tuning().items()
            if best is not None and best.lr_side
        ]

    def execute(self, pool: Pool, tick: Callable[[Sequence[Job], set[Path]], None]) -> Result:
        """All runs to their end."""
        execute(self.tuning_jobs, pool, tick)
        rates = self.tuned_rates()
        if self.config.tune:
            write_atomically(self.folder / "tuning.json", json.dumps(rates, indent=1) + "\n")
        jobs = self.jobs(rates)
        execute(lambda: jobs, pool, tick)
        return self.result()

    def report(self, out: Path | None = None) -> Path:
        """Write result.json and the page, of the runs as they are now."""
        from angpt.report import write_report

        result = self.result()
        target = out or self.folder
        target.mkdir(parents=True, exist_ok=True)
        result.write(target / "result.json")
        runs = [path for r in result.runs if (path := self.folder / "runs" / r.name).exists()]
        return write_report(self.folder, runs, result, target, self.commands())

    def commands(self) -> list[str]:
        """What makes this comparison again."""
        return repeated_by(self.folder, self.config.train.data.path)

    def result(self) -> Result:
        """What the runs say so far."""
        rates = self.default_rates()
        if (path := self.folder / "tuning.json").exists():
            rates |= json.loads(path.read_text(encoding="utf-8"))
        return summarise([(job.folder, job.config) for job in self.jobs(rates)], self.config.architectures[0])


def run_name(architecture: str, budget: int, seed: int) -> str:
    return f"{folder_name(architecture)}-{short(budget)}-s{seed}"
