"""The commands `angpt compare` and `angpt report`: call the library and print."""

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from angpt.config import ModelConfig, TrainConfig
from angpt.errors import UserError
from angpt.studies.config import CompareConfig
from angpt.system import available_cores
from angpt.training.commands import EXIT_INTERRUPTED, starting_point, without_rates


def compare_command(args: Sequence[str]) -> Callable[..., None]:
    """The sub-command, whose defaults depend on the arguments that it will be called with."""
    start = starting_point(args, resumable=False)
    start = dataclasses.replace(without_rates(start, start), seed=TrainConfig.seed)
    plain = dataclasses.replace(start.model, architecture=ModelConfig.architecture)
    base = CompareConfig(train=dataclasses.replace(start, model=plain))

    def compare(
        settings: Annotated[CompareConfig, tyro.conf.arg(name="")] = base,
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
        from rich.console import Console

        from angpt.studies.compare import Study
        from angpt.studies.executor import Interrupted
        from angpt.studies.overview import Overview

        console = Console()
        folder = out or Path("studies") / (preset or (config.stem if config else "laptop"))
        command = shlex.join(["angpt", *args])
        study = Study.create(folder, settings, command)
        try:
            with Overview(console) as overview:
                result = study.execute(default_workers() if workers is None else workers, overview.tick)
        except Interrupted:
            console.print(f"{folder}: stopped; the same command goes on: {command}", highlight=False, soft_wrap=True)
            sys.exit(EXIT_INTERRUPTED)
        for note in study.tuning_notes():
            console.print(f"note: {note}", highlight=False, soft_wrap=True)
        page = study.report()
        console.print(f"\n{result.verdict}\n\nreport: {page}", highlight=False, soft_wrap=True)

    return compare


def default_workers() -> int:
    """One per GPU; on the CPU two, since the threads of one process do not fill the cores with small matrices."""
    import torch

    return torch.cuda.device_count() or min(2, available_cores())


def report(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path | None = None,
    baseline: str | None = None,
) -> None:
    """Write the page of a comparison, or of any runs, from their folders alone; they may be under way.

    Args:
        folders: The folder of a comparison, or run folders.
        out: Folder for report.html and figures/; the comparison's own, or report, unless given.
        baseline: What speed-ups refer to, for run folders; gpt+ where there is one, else the first.
    """
    from rich.console import Console

    from angpt.report import write_report
    from angpt.studies.compare import Study
    from angpt.studies.summarise import summarise
    from angpt.training.run import Run

    if not folders:
        raise UserError("name the folder of a comparison, or run folders")
    if len(folders) == 1 and (folders[0] / "study.toml").exists():
        page = Study.open(folders[0]).report(out)
    else:
        runs = [(folder, Run.open(folder).config()) for folder in folders]
        names = [config.model.architecture for _, config in runs]
        chosen = baseline or ("gpt+" if "gpt+" in names else names[0])
        if chosen not in names:
            raise UserError(f"--baseline {chosen}: none of the runs is of this architecture")
        command = f"angpt report {shlex.join(map(str, folders))}"
        target = out or Path("report")
        page = write_report(target, list(folders), summarise(runs, chosen), target, [command])
    Console().print(f"report: {page}", highlight=False, soft_wrap=True)
