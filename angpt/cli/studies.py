"""The commands `angpt compare`, `angpt study …` and `angpt report`: call the library and print."""

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from angpt.cli.train import EXIT_INTERRUPTED, starting_point, without_rates
from angpt.config import ModelConfig, TrainConfig
from angpt.errors import UserError
from angpt.present.terminal import terminal
from angpt.studies.compare import Comparison
from angpt.system import available_cores

if TYPE_CHECKING:
    from rich.console import Console

    from angpt.results import Result
    from angpt.studies.executor import Pool
    from angpt.studies.study import Study

STUDIES = Path("studies")


def compare_command(args: Sequence[str]) -> Callable[..., None]:
    """The sub-command, whose defaults depend on the arguments that it will be called with."""
    start = starting_point(args, resumable=False)
    start = dataclasses.replace(without_rates(start, start), seed=TrainConfig.seed)
    base = Comparison(train=start.with_recipe(ModelConfig.architecture))

    def compare(
        settings: Annotated[Comparison, tyro.conf.arg(name="")] = base,
        preset: str | None = None,
        config: Path | None = None,
        out: Path | None = None,
        workers: int | None = None,
    ) -> None:
        """Train architectures side by side on the same tokens, and write a page that shows what came out.

        Called again, it goes on where it was stopped; runs that have finished are not repeated.

        Args:
            settings: What to compare, and every setting of the runs.
            preset: Settings of the runs: laptop (the default) or a size of the paper, 32M to 1B.
            config: Settings of the runs from a TOML file.
            out: Folder of the comparison; studies/ and the name of the preset unless given.
            workers: Runs at a time; one per GPU, or two on the CPU, unless given.
        """

        from angpt.reports import write_pages
        from angpt.studies.executor import Processes
        from angpt.studies.study import FILE, Study

        folder = out or STUDIES / (preset or (config.stem if config else "laptop"))
        command = shlex.join(["angpt", *args])
        study = Study(folder, settings.study())
        pool = Processes(default_workers() if workers is None else workers)
        if not (folder / FILE).exists():
            study.begin(None, command, on_this_machine=True)
        elif Study.open(folder).config != study.config:
            raise UserError(f"{folder}: holds another study (see its {FILE}); choose another --out")
        study.retry()
        console = terminal()
        result = _execute(study, pool, console, f"stopped; the same command goes on: {command}")
        _notes(console, result.notes)
        _check_failures(study, result)
        pages = write_pages(folder, result, folder, study.commands())
        shown = "".join(f"\nreport: {page}" for page in pages)
        console.print(f"\n{result.verdict}\n{shown}")

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

    from angpt.present.tables import show
    from angpt.studies.executor import InProcess, Pool, Processes
    from angpt.studies.outcome import result_table
    from angpt.studies.study import Study

    options: dict[str, Any] = {"partition": partition, "hours": hours, "gpus": gpus}
    asked = {name: value for name, value in options.items() if value is not None}
    if asked and not slurm:
        raise UserError(f"--{next(iter(asked))} is for --slurm")
    if slurm and workers is not None:
        raise UserError("--workers is for runs on this machine; with --slurm, at_most of [slurm] limits the jobs")
    console = terminal()
    study = Study.read(_file(file), out or _folder(file))
    threads = study.config.threads
    if slurm:
        from angpt.studies.cluster import Cluster

        pool: Pool = Cluster(study.folder, dataclasses.replace(study.config.slurm, **asked), threads)
    elif workers == 0:
        pool = InProcess(console, threads)
    else:
        pool = Processes(default_workers() if workers is None else workers, threads)
    command = shlex.join(["angpt", "study", "run", str(file), *(["--out", str(out)] if out else [])])
    study.begin(_file(file), command, on_this_machine=not slurm)
    if retry:
        study.retry()
    stays = " watching; the jobs stay in the queue" if slurm else ""
    result = _execute(study, pool, console, f"stopped{stays}; the same command goes on", live=workers != 0)
    if any(run.ended for run in result.runs):
        show(console, result_table(result))
    _notes(console, result.notes)
    _check_failures(study, result, "(--retry tries again)")
    console.print(f"result: {study.folder / 'result.md'}")


def _execute(study: "Study", pool: "Pool", console: "Console", stopped: str, live: bool = True) -> "Result":
    """Bring the runs of a study to their end, and show them meanwhile."""
    from angpt.studies.executor import Interrupted
    from angpt.studies.overview import Overview

    try:
        with Overview(console, live) as overview:
            return study.execute(pool, overview.tick)
    except Interrupted:
        console.print(f"{study.folder}: {stopped}")
        sys.exit(EXIT_INTERRUPTED)


def _check_failures(study: "Study", result: "Result", advice: str = "(the same command tries again)") -> None:
    """Raise an error that gives the first reason if runs failed."""
    if failures := study.failures():
        name, reason = next(iter(failures.items()))
        others = f"; `angpt study status {study.folder}` tells why the others did" if len(failures) > 1 else ""
        failed = f"{len(failures)} of {len(result.runs)} runs failed {advice}: {name}: {reason}{others}"
        raise UserError(f"{study.folder}: {failed}")


def _notes(console: "Console", notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"note: {note}")


def study_status(study: Annotated[Path, tyro.conf.Positional]) -> None:
    """How far a study is: the state of its runs, what is left, what failed and why, and the results so far.

    Args:
        study: The folder of a study, or its file.
    """

    from angpt.present.tables import show
    from angpt.studies.outcome import result_table
    from angpt.studies.progress import progress, status_lines, status_table
    from angpt.studies.study import Study

    console = terminal()
    opened = Study.open(_folder(study))
    if study.is_file() and Study.read(study, opened.folder).config != opened.config:
        _notes(console, [f"{study}: was edited since {opened.folder} began; `angpt study run {study}` takes it over"])
    runs = progress(opened)
    show(console, status_table(runs))
    for line in status_lines(opened, runs):
        console.print(line)
    result = opened.result()
    if any(run.ended for run in result.runs):
        show(console, result_table(result))
    _notes(console, result.notes)


def study_plan(
    file: Annotated[Path, tyro.conf.Positional], out: Path | None = None, tflops: float | None = None
) -> None:
    """What a study would run, and what that costs, before anything starts.

    Args:
        file: The study, or the folder of one.
        out: Its folder, if it has been begun elsewhere than in studies/; runs that have ended cost nothing.
        tflops: What a GPU does in training, in TFLOP/s; 125, an A100 at 40 % of its peak, unless given.
    """

    from angpt.present.tables import show
    from angpt.studies.progress import ASSUMED_TFLOPS, plan_lines, plan_table, progress
    from angpt.studies.study import Study

    if tflops is not None and not 0 < tflops < float("inf"):
        raise UserError(f"--tflops {tflops}: must be positive and finite")
    study = Study.read(_file(file), out or _folder(file))
    runs, rate, console = progress(study), tflops or ASSUMED_TFLOPS, terminal()
    show(console, plan_table(runs, rate))
    for line in plan_lines(study, runs, rate):
        console.print(line)


def _file(study: Path) -> Path:
    """The file of a study that is given by its file or by its folder."""
    return study / "study.toml" if study.is_dir() else study


def _folder(study: Path) -> Path:
    return STUDIES / study.stem if study.suffix == ".toml" and not study.is_dir() else study


def default_workers() -> int:
    """One per GPU; on the CPU two, since the threads of one process do not fill the cores with small matrices."""
    import torch

    return torch.cuda.device_count() or min(2, available_cores())


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

    from angpt.reports import write_pages
    from angpt.studies.folders import summarise_runs
    from angpt.studies.study import FILE, Study
    from angpt.training.run import Run

    if not folders:
        raise UserError("name the folder of a study, or run folders")
    if len(folders) == 1 and (folders[0] / FILE).exists():
        study = Study.open(folders[0])
        result = study.result()
        _notes(terminal(), result.notes)
        pages = write_pages(study.folder, result, out or study.folder, study.commands())
    else:
        names = [Run.open(folder).config().recipe for folder in folders]
        chosen = baseline or ("gpt+" if "gpt+" in names else names[0])
        if chosen not in names:
            raise UserError(f"--baseline {chosen}: none of the runs is of this architecture")
        command = f"angpt report {shlex.join(map(str, folders))}"
        target = out or Path("report")
        pages = write_pages(target, summarise_runs(folders, chosen), target, [command], folders)
    for page in pages:
        terminal().print(f"report: {page}")
