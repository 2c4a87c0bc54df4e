"""The commands `angpt compare`, `angpt study …` and `angpt report`: call the library and print."""

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from angpt.cli.data import prepare
from angpt.cli.train import EXIT_INTERRUPTED, Preset, starting_point
from angpt.config import DataConfig, ModelConfig, TrainConfig, size_name
from angpt.errors import UserError
from angpt.present.terminal import terminal
from angpt.studies.compare import Comparison

if TYPE_CHECKING:
    from angpt.api import StudyOutcome
    from angpt.results import Result

SET_BY_COMPARISON = ("ModelConfig.architecture", "OptimizerConfig.lr", "OptimizerConfig.name", "TrainConfig.seed")
"""Settings of a run that `angpt compare` does not take: it has --architectures, --lrs and --seeds."""


def compare_command(args: Sequence[str]) -> Callable[..., None]:
    """The sub-command, whose defaults depend on the arguments that it will be called with."""
    start = starting_point(args, resumable=False)
    start = dataclasses.replace(start.without_choices_of(start).without_rates_of(start), seed=TrainConfig.seed)
    base = Comparison(train=start.with_recipe(ModelConfig.architecture))

    def compare(
        settings: Annotated[Comparison, tyro.conf.arg(name="")] = base,
        preset: Preset = None,
        config: Path | None = None,
        out: Path | None = None,
        workers: int | None = None,
    ) -> None:
        """Train architectures side by side on the same tokens, and write a page that shows what came out.

        Called again, it goes on where it was stopped; runs that have finished are not repeated, and further
        architectures, budgets or seeds add their runs. Without --data it trains on the text of Python's standard
        library, which it prepares if data/stdlib does not exist.

        Args:
            settings: What to compare, and every setting of the runs.
            preset: Settings of the runs: laptop (the default) or a size of the paper, 32M to 1B.
            config: Settings of the runs from a TOML file.
            out: Folder of the comparison; studies/ and the name of the preset unless given.
            workers: Runs at a time, each in its own process; 0: in this process. One per GPU, or two on the CPU, unless
                given.
        """
        import jinja2  # noqa: F401  # here, so that a missing package is told before the training
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401

        from angpt import api
        from angpt.data.shards import INDEX
        from angpt.studies.study import FILE, STUDIES

        if settings.budgets and any(word.partition("=")[0] == "--tokens" for word in args):
            raise UserError("--tokens and --budgets both set the budgets; give one of them")
        folder = out or STUDIES / (size_name(preset) if preset else config.stem if config else "laptop")
        if not (folder / FILE).exists() and settings.train.data.path == DataConfig.path:
            settings.study()  # finds mistakes first
            if not (Path(DataConfig.path) / INDEX).exists():
                prepare(("stdlib",), Path(DataConfig.path))
        command = shlex.join(["angpt", *args])
        stopped = f"{folder}: stopped; the same command goes on: {command}"
        try:
            outcome = _executed(api.compare, stopped, settings, folder, workers=workers, command=command)
        except api.RunsFailed as error:
            _notes(error.outcome.result.notes)
            raise
        _notes(outcome.result.notes)
        shown = "".join(f"\nreport: {page}" for page in api.report(folder, progress=_tell_stage))
        terminal().print(f"\n{outcome.result.verdict}\n{shown}")

    return compare


def study_run(
    file: Annotated[Path, tyro.conf.Positional],
    out: Path | None = None,
    workers: int | None = None,
    retry: bool = False,
    slurm: bool = False,
    partition: str | None = None,
    hours: float | None = None,
    gpus: int | None = None,
) -> None:
    """Train every run of a study file (docs/studies.md), and write what came out to result.json and result.md.

    Called again, it goes on where it was stopped; runs that have ended are not repeated, and a file that has grown
    adds its new runs. Here, on several processes or through SLURM, the results are the same.

    Args:
        file: The study, such as experiments/ablation-small.toml, or the folder of one.
        out: Its folder; studies/ and the name of the file unless given.
        workers: Runs at a time, each in its own process; 0: in this process. One per GPU, or two on the CPU, unless
            given.
        retry: Try the runs again that failed before.
        slurm: Queue each run as a job of a SLURM cluster, as [slurm] of the file says. Ctrl-C leaves them in the queue.
        partition: Of SLURM, instead of that of the file.
        hours: Time limit of a job, instead of that of the file.
        gpus: GPUs of a job, instead of those of the file.
    """

    import scipy  # noqa: F401  # here, so that a missing package is told before the training

    from angpt import api
    from angpt.studies.study import Study, file_of, folder_of

    options: dict[str, Any] = {"partition": partition, "hours": hours, "gpus": gpus}
    asked = {name: value for name, value in options.items() if value is not None}
    if asked and not slurm:
        raise UserError(f"--{next(iter(asked))} is for --slurm")
    if slurm and workers is not None:
        raise UserError("--workers is for runs on this machine; with --slurm, at_most of [slurm] limits the jobs")
    folder = out or folder_of(file)
    cluster = dataclasses.replace(Study.read(file_of(file), folder).config.slurm, **asked) if slurm else None
    stopped = f"{folder}: stopped{' watching; the jobs stay in the queue' if slurm else ''}; the same command goes on"
    try:
        outcome = _executed(api.study, stopped, file, out, workers=workers, retry=retry, slurm=cluster)
    except api.RunsFailed as error:
        _show(error.outcome.result)
        raise
    _show(outcome.result)
    terminal().print(f"result: {folder / 'result.md'}")


def _executed(call: Callable[..., "StudyOutcome"], stopped: str, *args: Any, **options: Any) -> "StudyOutcome":
    """What an API call returns that executes a study; a signal prints `stopped` and exits."""
    from angpt.studies.executor import Interrupted

    try:
        return call(*args, progress=True, signals=True, **options)
    except Interrupted:
        terminal().print(stopped)
        sys.exit(EXIT_INTERRUPTED)


def _show(result: "Result") -> None:
    """Print the table of a result, if a run has ended, and its notes."""
    from angpt.present.tables import show
    from angpt.studies.outcome import result_table

    if any(run.ended for run in result.runs):
        show(terminal(), result_table(result))
    _notes(result.notes)


def _tell_stage(stage: str) -> None:
    terminal().print(f"report: {stage} …")


def _notes(notes: Sequence[str]) -> None:
    for note in notes:
        terminal().print(f"note: {note}")


def study_status(study: Annotated[Path, tyro.conf.Positional]) -> None:
    """How far a study is: the state of its runs, what is left, what failed and why, and the results so far.

    Args:
        study: The folder of a study, or its file.
    """

    from angpt.present.tables import show
    from angpt.studies.progress import progress, status_lines, status_table
    from angpt.studies.study import Study, folder_of

    console = terminal()
    opened = Study.open(folder_of(study))
    if study.is_file() and Study.read(study, opened.folder).config != opened.config:
        _notes([f"{study}: was edited since {opened.folder} began; `angpt study run {study}` takes it over"])
    runs = progress(opened)
    show(console, status_table(runs))
    for line in status_lines(opened, runs):
        console.print(line)
    _show(opened.result())


def study_plan(
    file: Annotated[Path, tyro.conf.Positional], out: Path | None = None, tflops: float | None = None
) -> None:
    """What a study would run, and what that costs, before anything starts.

    Args:
        file: The study, or the folder of one.
        out: Its folder, if it has been begun elsewhere than in studies/; runs that have ended cost nothing.
        tflops: What a GPU does in training, in TFLOP/s; 125, an A100 at 40 % of its peak, unless given. GPU hours are
            left out if it is not given and the study is small enough for this machine without a GPU.
    """

    from angpt.present.tables import show
    from angpt.studies.progress import gpu_rate, plan_lines, plan_table, progress
    from angpt.studies.study import Study, file_of, folder_of

    if tflops is not None and not 0 < tflops < float("inf"):
        raise UserError(f"--tflops {tflops}: must be positive and finite")
    study = Study.read(file_of(file), out or folder_of(file))
    runs, console = progress(study), terminal()
    rate = tflops or gpu_rate(study, runs)
    show(console, plan_table(runs, rate))
    for line in plan_lines(study, runs, rate):
        console.print(line)


def report(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path | None = None,
    baseline: str | None = None,
) -> None:
    """Write the page of a study, such as a comparison, or of any runs, from their folders alone; they may be under way.

    Args:
        folders: The folder of a study, or run folders.
        out: Folder for report.html and figures/; that of the study, or report, unless given. Runs that cannot be
            compared, for example of different sizes, have a page each, in folders below it.
        baseline: What speed-ups refer to, for run folders; gpt+ where there is one, else the first.
    """

    from angpt import api
    from angpt.studies.study import FILE, Study

    if len(folders) == 1 and (folders[0] / FILE).exists():
        _notes(Study.open(folders[0]).result().notes)
    for page in api.report(folders, out, baseline, progress=_tell_stage):
        terminal().print(f"report: {page}")
