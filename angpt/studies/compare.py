"""Architectures side by side: the same tokens in the same order, several seeds and budgets, one page at the end.

A comparison is a folder: study.toml says what it is, runs/ and tuning/ hold run folders, result.json what came out. It
can be killed at any moment and called again.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from angpt.config import TrainConfig, parse_budget, read_toml, to_toml
from angpt.data.shards import INDEX, Index
from angpt.errors import UserError
from angpt.studies.config import CompareConfig
from angpt.studies.executor import Job, execute
from angpt.studies.results import Result
from angpt.studies.summarise import summarise
from angpt.system import write_atomically
from angpt.training.plan import make_plan
from angpt.training.run import Run
from angpt.training.trainer import check

TUNING_SPLIT = 0.05
MADE_BY = "# made by: "


class Study:
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
    def create(cls, folder: Path, config: CompareConfig, command: str) -> "Study":
        """A new folder, or the one that a call with the same configuration began. `command` is noted in it."""
        path = folder / "study.toml"
        study = cls(folder, config)
        if path.exists():
            if read_toml(CompareConfig, path) != config:
                raise UserError(f"{folder}: holds another comparison (see its study.toml); choose another --out")
            return study
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder}: is not empty and holds no comparison; choose another --out")
        for job in study.jobs(study.default_rates()):
            check(make_plan(job.config))  # finds what is wrong before anything is written
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{MADE_BY}{command}\n{to_toml(config)}")
        return study

    @classmethod
    def open(cls, folder: Path) -> "Study":
        return cls(folder, read_toml(CompareConfig, folder / "study.toml"))

    def run_config(self, architecture: str, budget: int, seed: int, lr: float) -> TrainConfig:
        train = self.config.train
        return dataclasses.replace(
            train,
            model=dataclasses.replace(train.model, architecture=architecture),
            optimizer=dataclasses.replace(train.optimizer, lr=lr),
            tokens=str(budget),
            batch_tokens=self.batch_tokens,
            seed=seed,
        )

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

    def tuning_jobs(self) -> list[Job]:
        """The trials of the learning-rate search: as many for each architecture, at the smallest budget."""
        jobs = []
        for architecture, centre in self.default_rates().items():
            for i in range(self.config.tune):
                lr = float(f"{centre * 2.0 ** (i - (self.config.tune - 1) / 2):.3g}")
                config = self.run_config(architecture, self.budgets[0], self.config.seeds[0], lr)
                data = dataclasses.replace(config.data, tuning_split=TUNING_SPLIT)
                name = f"{architecture.replace('/', '-')}-lr{lr:g}"
                jobs.append(Job(dataclasses.replace(config, data=data), self.folder / "tuning" / name))
        return jobs

    def tuned_rates(self) -> dict[str, float]:
        """The best trial of each architecture; the rates as they are where nothing was tuned."""
        if not self.config.tune:
            return self.default_rates()
        best: dict[str, tuple[float, float]] = {}
        for job in self.tuning_jobs():
            summary = Run.open(job.folder).summary()
            if summary is None or summary.val_loss is None or summary.status != "finished":
                continue
            lr = job.config.optimizer.lr
            assert lr is not None
            trial = summary.val_loss, lr
            name = job.config.model.architecture
            best[name] = min(best.get(name, trial), trial)
        for name in self.config.architectures:
            if name not in best:
                raise UserError(f"{self.folder / 'tuning'}: no trial of {name} finished; give --lrs {name} LR by hand")
        return {name: lr for name, (_, lr) in best.items()}

    def tuning_notes(self) -> list[str]:
        """Where the search ended at the edge of its grid, and so may have missed the best rate."""
        notes = []
        for name, lr in self.tuned_rates().items() if self.config.tune > 1 else ():
            tried = [j.config.optimizer.lr for j in self.tuning_jobs() if j.config.model.architecture == name]
            if lr in (tried[0], tried[-1]):
                notes.append(
                    f"{name}: the best rate, {lr:g}, is at the edge of those tried; set --lrs to search around it"
                )
        return notes

    def execute(self, workers: int, tick: Callable[[Sequence[Job], set[Path]], None]) -> Result:
        """All runs to their end."""
        trials = self.tuning_jobs()
        execute(trials, workers, lambda running: tick(trials, running))
        rates = self.tuned_rates()
        if self.config.tune:
            write_atomically(self.folder / "tuning.json", json.dumps(rates, indent=1) + "\n")
        jobs = self.jobs(rates)
        execute(jobs, workers, lambda running: tick(jobs, running))
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
        """What makes this comparison again: the preparation of its data, where that is known, and the call."""
        found = []
        index = Path(self.config.train.data.path) / INDEX
        if index.exists():
            recipe = Index.read(index.parent).recipe
            arguments = [*recipe.sources, "--out", str(index.parent), "--tokenizer", recipe.tokenizer]
            arguments += ["--val-fraction", str(recipe.val_fraction), "--seed", str(recipe.seed)]
            options = {"--column": recipe.column, "--subset": recipe.subset, "--hub-split": recipe.hub_split}
            for option, value in options.items():
                arguments += [option, value] if value else []
            found.append(f"angpt data prepare {shlex.join(arguments)}")
        first, _, _ = (self.folder / "study.toml").read_text(encoding="utf-8").partition("\n")
        return [*found, first.removeprefix(MADE_BY)]

    def result(self) -> Result:
        """What the runs say so far."""
        rates = self.default_rates()
        if (path := self.folder / "tuning.json").exists():
            rates |= json.loads(path.read_text(encoding="utf-8"))
        return summarise([(job.folder, job.config) for job in self.jobs(rates)], self.config.architectures[0])


def run_name(architecture: str, budget: int, seed: int) -> str:
    return f"{architecture.replace('/', '-')}-{short(budget)}-s{seed}"


def short(tokens: int) -> str:
    """1500000 as 1.5M, with every digit, for it makes names of folders."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if tokens >= size:
            return f"{tokens / size:.12g}{unit}"
    return str(tokens)
