"""The command `angpt train`: choose the configuration, call the library and print."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from angpt.config import TrainConfig, preset
from angpt.errors import UserError
from angpt.present.terminal import terminal
from angpt.serialization import read_toml
from angpt.slurm import SlurmConfig

EXIT_INTERRUPTED, EXIT_DIVERGED = 3, 4
DEFAULT_PRESET = "laptop"
Preset = Annotated[str | None, tyro.conf.arg(aliases=["--size"])]


def starting_point(args: Sequence[str], resumable: bool = True) -> TrainConfig:
    """The configuration that other options override: that of a run, a file or a preset."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.set_defaults(resume=None)
    parser.add_argument("--preset", "--size")
    for name in ("--config", *(("--resume",) if resumable else ())):
        parser.add_argument(name)
    try:
        chosen, _ = parser.parse_known_args(args)
    except argparse.ArgumentError:  # a missing value, which the main parser reports
        return preset(DEFAULT_PRESET)
    given = [name for name, value in vars(chosen).items() if value is not None]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} both choose a configuration; give one of them")
    if chosen.resume is not None:
        from angpt.training.run import Run

        return Run.open(Path(chosen.resume)).config()
    if chosen.config is not None:
        return read_toml(TrainConfig, Path(chosen.config))
    return preset(chosen.preset or DEFAULT_PRESET)


def given_settings(args: Sequence[str]) -> set[str]:
    """The dotted names of the settings that options give."""
    names = {word.partition("=")[0][2:].replace("-", "_") for word in args if word.startswith("--")}
    return names | ({"optimizer.lr"} if "lr" in names else set())


def train_command(args: Sequence[str]) -> Callable[..., None]:
    """The sub-command, whose defaults depend on its arguments."""
    base = starting_point(args)

    def train(
        settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = base,
        preset: Preset = None,
        config: Path | None = None,
        resume: Path | None = None,
        out: Path | None = None,
        slurm: bool = False,
        cluster: Annotated[SlurmConfig, tyro.conf.arg(name="slurm")] = SlurmConfig(),  # noqa: B008
    ) -> None:
        """Train one model into a run folder. Ctrl-C finishes the step, saves, and exits with 3; --resume continues.

        On several GPUs or machines: `torchrun … -m angpt train …` or --slurm; see docs/scaling.md.

        Args:
            settings: Every setting can be given here, in a --config file, or by a --preset, in this order.
            preset: Start from laptop (the default; minutes on two CPU cores) or a size of the paper, 32M to 1B.
            config: Start from a TOML file, such as the config.toml of another run, which repeats it. What it leaves out
                is that of a 32M model. With another --arch or --optimizer, its learning rates, warm-up and decay are
                chosen anew unless they are given as options.
            resume: Continue the run in this folder, exactly as if it had never stopped.
            out: The new run folder; unless given, a name under runs/ made of architecture, size and seed.
            slurm: Queue it as a job of a SLURM cluster, on --slurm.nodes machines with --slurm.gpus GPUs each. It
                continues by itself after its time limit and after a requeue.
            cluster: Resources of the SLURM job.
        """
        if cluster != SlurmConfig() and not slurm:
            raise UserError("options --slurm.… need --slurm; give that as well")
        if resume is not None and out is not None:
            raise UserError("--resume continues in its own folder; leave out --out")
        if resume is None:
            settings = settings.without_choices_of(base, given_settings(args))
        folder = resume or out or Path("runs") / settings.default_name
        if not slurm:
            run_here(settings, folder, resume is not None)
        elif resume is None and folder.exists():
            raise UserError(f"{folder}: exists; continue with `--resume {folder}` or choose another --out")
        else:
            queue(settings, folder, cluster)

    return train


def queue(config: TrainConfig, folder: Path, cluster: SlurmConfig) -> None:
    """Submit a run, new or to be resumed, as one job. Its output goes to slurm/NAME next to the run folder."""
    from angpt.slurm import submit
    from angpt.training.plan import make_plan

    make_plan(config, cluster.ranks)  # finds mistakes before there is a GPU
    logs = folder.parent / "slurm" / folder.name
    number = submit(partial(train_in_job, config, folder.resolve(), cluster.threads), logs, folder.name, cluster)
    print(f"{folder}: queued as job {number}, of {cluster.ranks} processes; it reports to {logs}/{number}_0_log.out")


def train_in_job(config: TrainConfig, folder: Path, threads: int) -> bool:
    """Train in each process of a job; return True if the run has ended."""
    import torch

    from angpt import api

    torch.set_num_threads(threads)
    return api.train(config, folder, resume=True, progress=True, signals=True).status != "interrupted"


def run_here(config: TrainConfig, folder: Path, resumed: bool) -> None:
    """Train in this process and print how the run ended, which also decides the exit code."""
    from angpt import api
    from angpt.training.ranks import launched_rank

    s = api.train(config, folder, resume=resumed, progress=True, signals=True).summary
    assert s is not None
    console = terminal(quiet=launched_rank() > 0)  # rank 0 prints it
    loss = "none" if s.val_loss is None else f"{s.val_loss:.4f}"
    speed = "" if not s.tokens_per_s else f" at {s.tokens_per_s:,.0f} tokens/s"
    where = f"step {s.step:,} of {s.steps:,}"
    line = {
        "finished": f"finished: validation loss {loss} after {s.tokens:,} tokens{speed}",
        "interrupted": f"interrupted after {where}; continue with: angpt train --resume {folder}",
        "diverged": f"diverged at {where}: the loss or the gradient is not finite; "
        f"last good checkpoint: {s.checkpoint or 'none'}",
    }[s.status]
    console.print(f"{folder}: {line}")
    if s.status != "finished":
        sys.exit(EXIT_INTERRUPTED if s.status == "interrupted" else EXIT_DIVERGED)
