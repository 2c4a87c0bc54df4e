"""A run as something to be done: whether it has ended, what it left, and how it is brought to its end."""

import dataclasses
import os
import shlex
import time
import traceback
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from angpt.config import TrainConfig, differences
from angpt.data.shards import INDEX, Index
from angpt.errors import UserError, explain, one_line
from angpt.results import State
from angpt.system import check_new_name, write_atomically
from angpt.training.plan import Plan, make_plan
from angpt.training.run import Run, Summary

if TYPE_CHECKING:
    from angpt.training.reporter import Reporter

LOCK_SECONDS = 20.0
MADE_BY = "# made by: "
"""Begins study.toml: the command that made the folder."""


@dataclass(frozen=True)
class Job:
    """A run to begin, to go on with, or to leave as it is if it has ended."""

    config: TrainConfig
    folder: Path

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.config)

    @property
    def flops(self) -> float:
        plan = self.plan
        return float(plan.flops_per_token * plan.steps * plan.batch_tokens)

    @property
    def failure(self) -> Path:
        """The file that says why the run failed: failed/NAME.txt beside the folder runs/."""
        return self.folder.parent.parent / "failed" / f"{self.folder.name}.txt"


def ended(folder: Path) -> Summary | None:
    """The summary of a run that has finished or diverged; None while there is something left to do."""
    summary = Run(folder).summary()
    return summary if summary is not None and summary.ended else None


def state_of(job: Job, running: bool) -> State:
    if running:
        return "running"
    if (summary := ended(job.folder)) is not None:
        return "finished" if summary.status == "finished" else "diverged"
    if job.failure.exists():
        return "failed"
    return "stopped" if job.folder.exists() else "waiting"


def changed_settings(job: Job) -> list[str]:
    """The settings that the folder of a run, where there is one, has with other values. What the job leaves to the
    device is the device's, wherever the run was begun."""
    if not job.folder.exists():
        return []
    run, plan = Run.open(job.folder), job.plan
    if run.has_text_of(plan.config):  # which is read much faster than the settings
        return []
    stored = run.config()
    if job.config.device == "auto" and stored.device != plan.config.device:
        plan = make_plan(dataclasses.replace(job.config, device=stored.device))
    return list(differences(plan.config, stored))


def check_settings(job: Job) -> None:
    """Refuse a folder that holds another run."""
    if changed := changed_settings(job):
        raise UserError(
            f"{job.folder}: was begun with other settings ({', '.join(changed)}; see its config.toml); move it away"
        )


def bring_to_end(job: Job, reporter: "Reporter", signals: bool = True) -> Summary:
    """Begin a run or go on with it, here and now."""
    from angpt.training.launch import start
    from angpt.training.ranks import launched_rank

    config = job.config
    if job.folder.exists():  # perhaps rank 0 has just made it, which comes to the same
        check_settings(job)
        config = Run.open(job.folder).config()
        if launched_rank() == 0:
            _wait_for_lock(Run.open(job.folder))
    return start(config, job.folder, reporter, again=True, signals=signals)


def _wait_for_lock(run: Run) -> None:
    """Give the process of a call that was just killed the moment that it takes to end."""
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            with run.lock():
                return
        except UserError:
            time.sleep(0.2)


def reason(error: Exception) -> str:
    """The reason of a failure: one line, with a traceback for an error of the program itself."""
    line = explain(error)
    return line or f"{one_line(f'{type(error).__name__}: {error}')}\n{''.join(traceback.format_exception(error))}"


def note_failure(job: Job, text: str) -> None:
    job.failure.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(job.failure, text.rstrip() + "\n")


def failure_of(job: Job) -> str | None:
    """The first line of the note, if there is one."""
    try:
        return (job.failure.read_text(encoding="utf-8").splitlines() or ["no reason was given"])[0]
    except FileNotFoundError:
        return None


def check_new(folder: Path) -> None:
    """Refuse a folder in which no study can begin."""
    check_new_name(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there and is not an empty folder; choose another --out")


def repeated_by(folder: Path, data: str) -> list[str]:
    """The commands that make a study again: the preparation of its data, where that is known, and the call."""
    found = []
    index = Path(data) / INDEX
    if index.exists():
        recipe = Index.read(index.parent).recipe
        arguments = [*recipe.sources, "--out", str(index.parent), "--tokenizer", recipe.tokenizer]
        arguments += ["--val-fraction", str(recipe.val_fraction), "--seed", str(recipe.seed)]
        options = {"--column": recipe.column, "--subset": recipe.subset, "--hub-split": recipe.hub_split}
        for option, value in options.items():
            arguments += [option, value] if value else []
        found.append(f"angpt data prepare {shlex.join(arguments)}")
    first, _, _ = os.fsdecode((folder / "study.toml").read_bytes()).partition("\n")
    return [*found, first.removeprefix(MADE_BY)] if first.startswith(MADE_BY) else found
