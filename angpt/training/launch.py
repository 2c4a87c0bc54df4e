"""A run from its configuration to the training loop: the processes it is on, its folder and its data, all that would
stop it found before anything is written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from angpt.config import TrainConfig, differences
from angpt.data.loader import count_windows, end_of_text
from angpt.data.shards import TokenData
from angpt.errors import UserError
from angpt.training import checkpoint
from angpt.training.hardware import present
from angpt.training.parallel import Alone, connect, launched_ranks, log_apart, restarted
from angpt.training.plan import Plan, make_plan
from angpt.training.reporter import PlainReporter, Reporter
from angpt.training.run import Run, Summary
from angpt.training.sinks import check_sinks
from angpt.training.trainer import Trainer


def start(config: TrainConfig, out: Path, reporter: Reporter, again: bool = False) -> Summary:
    """Train a new run into the folder `out`; `again`: or go on with the run that is there. A launcher that starts its
    processes again, after one was lost, means that too."""
    with launched(config) as (plan, world):
        if (again or restarted()) and world.share(out.exists):
            check_same(Run.open(out).config(), plan.config, out)
            return go_on(plan, Run.open(out), reporter, world)
        run = world.share(lambda: Run.create(out, plan.config))
        with begun(run, reporter, world) as reporter:
            return Trainer(plan, run, *open_data(plan), reporter, world).train()


def resume(out: Path, reporter: Reporter, config: TrainConfig | None = None) -> Summary:
    """Go on with a run where its last good checkpoint left it; a run that has ended is left as it is. With `config`,
    on other devices than before (see `config.DEVICES`)."""
    run = Run.open(out)
    with launched(config or run.config()) as (plan, world):
        check_same(run.config(), plan.config, out)
        return go_on(plan, run, reporter, world)


def go_on(plan: Plan, run: Run, reporter: Reporter, world: Alone) -> Summary:
    with begun(run, reporter, world) as reporter:
        summary = world.share(run.summary)
        if summary is not None and summary.status != "interrupted":
            return summary
        trainer = Trainer(plan, run, *open_data(plan), reporter, world)
        if (path := world.share(lambda: checkpoint.newest(run.checkpoints))) is not None:
            trainer.load(path)
        return trainer.train()


@contextmanager
def launched(config: TrainConfig) -> Iterator[tuple[Plan, Alone]]:
    """The plan of a run on the processes that the launcher has started, and their connection."""
    plan = make_plan(config, launched_ranks())
    check(plan)
    with connect(plan.device, config.parallel, config.shard_ranks, config.timeout) as world:
        yield plan, world


@contextmanager
def begun(run: Run, reporter: Reporter, world: Alone) -> Iterator[Reporter]:
    """Rank 0 holds the lock of the run, and talks to the user; others write to logs of their own."""
    with run.lock() if world.main else log_apart(run.logs / f"rank-{world.rank:05d}.log"):
        yield reporter if world.main else PlainReporter(Console())


def check_same(stored: TrainConfig, wanted: TrainConfig, folder: Path) -> None:
    """A run goes on only as it was begun: another budget, say, means another schedule, and so another run."""
    if not (changed := differences(stored, wanted)):
        return
    why = " (another budget has another schedule from the first step on)" if stored.tokens != wanted.tokens else ""
    raise UserError(
        f"{folder}: a run is resumed as it was begun, but {', '.join(changed)} is changed{why}; "
        f"start a new run with --config {folder / 'config.toml'} and the change"
    )


def check(plan: Plan) -> None:
    """Find what would stop the run before anything is written."""
    present(plan.device)
    train, val = open_data(plan)
    for data in (train, val):
        count_windows(data, plan.config.model.context)
    if plan.config.data.mask_documents:
        end_of_text(train)
    check_sinks(plan.config)


def open_data(plan: Plan) -> tuple[TokenData, TokenData]:
    """Training and validation tokens, checked against the model's vocabulary."""
    path, vocab = plan.config.data.path, plan.config.model.vocab_size
    splits = TokenData.open(path, "train"), TokenData.open(path, "val")
    if part := plan.config.data.tuning_split:
        border = round((1 - part) * splits[0].tokens)
        splits = splits[0].part(0, border), splits[0].part(border, splits[0].tokens)
    for data in splits:
        if data.max_token >= vocab:
            raise UserError(
                f"{path}: the {data.split} split has token {data.max_token}, but model.vocab_size is {vocab}; "
                f"set it to {data.vocab_size or data.max_token + 1} or more"
            )
    return splits
