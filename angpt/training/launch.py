"""Starts and resumes runs: connects the processes, and checks settings and data before anything is written."""

import dataclasses
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from angpt.config import RESUME_SETTINGS, TrainConfig, differences
from angpt.data.loader import count_windows, end_of_text
from angpt.data.shards import TokenData
from angpt.errors import UserError
from angpt.operations import kernels
from angpt.present.terminal import terminal
from angpt.training import checkpoint
from angpt.training.hardware import check_precision, present
from angpt.training.plan import Plan, make_plan
from angpt.training.ranks import launched_ranks, log_to, restarted
from angpt.training.reporter import PlainReporter, Reporter
from angpt.training.run import Run, Summary
from angpt.training.sinks import check_sinks
from angpt.training.strategy import Strategy, choose_strategy
from angpt.training.trainer import Trainer

Data = tuple[TokenData, TokenData]
"""Training and validation tokens."""


def start(config: TrainConfig, out: Path, reporter: Reporter, again: bool = False, signals: bool = True) -> Summary:
    """Train a new run into the folder `out`; with `again`, or after a restart by the launcher, continue its run.

    With `signals`, SIGINT and SIGTERM end the run after the current step, saved. Otherwise Ctrl-C raises
    KeyboardInterrupt at once, and the run can be continued from its last checkpoint.
    """
    if again and out.exists() and (summary := ended_as(Run.open(out), config)) is not None:
        return summary
    with launched(config, signals) as (plan, data, strategy):
        if (again or restarted()) and strategy.share(out.exists):
            return proceed(config, plan, data, Run.open(out), reporter, strategy, signals)
        run = strategy.share(lambda: Run.create(out, plan.config))
        trainer = None
        try:
            with opened(run, reporter, strategy) as reporter:
                trainer = Trainer(plan, run, *data, reporter, strategy)
                return trainer.train(signals)
        except (MemoryError, RuntimeError):
            # Of a model that does not fit, nothing is left; of several ranks, the logs stay.
            if strategy.size == 1 and (trainer is None or trainer.step == 0):
                shutil.rmtree(run.path, ignore_errors=True)
            raise


def resume(out: Path, reporter: Reporter, signals: bool = True) -> Summary:
    """Continue a run; an ended run stays as it is."""
    return start(Run.open(out).config(), out, reporter, again=True, signals=signals)


def ended_as(run: Run, config: TrainConfig) -> Summary | None:
    """The summary of a run with this configuration if it has ended; then its data may be gone."""
    summary = run.summary()
    if summary is None or not summary.ended:
        return None
    if config != (stored := run.config()):
        plan = make_plan(dataclasses.replace(config, micro_batch=None))  # which may fit another number of processes
        if differences(stored, plan.config, RESUME_SETTINGS):
            return None
    return summary


def proceed(
    config: TrainConfig, plan: Plan, data: Data, run: Run, reporter: Reporter, strategy: Strategy, signals: bool
) -> Summary:
    """Continue a run on the processes of this launch."""
    check_same(run.config(), plan.config, run.path)
    summary = strategy.share(run.summary)
    if summary is not None and summary.ended:
        return summary  # before the lock, which a folder without permission to write cannot have
    with opened(run, reporter, strategy) as reporter:
        trainer = Trainer(plan, run, *data, reporter, strategy)
        if (path := strategy.share(lambda: newest_checkpoint(run))) is not None:
            trainer.load(path)
        if strategy.main:  # the micro-batch as given, not reduced to a divisor of this rank's share
            run.write_config(dataclasses.replace(plan.config, micro_batch=config.micro_batch or plan.micro_batch))
            run.remove_summary()
        return trainer.train(signals)


def newest_checkpoint(run: Run) -> Path | None:
    """The checkpoint to continue from; None before the first, and an error if all of them are damaged."""
    path = checkpoint.newest(run.checkpoints)
    if path is None and checkpoint.found(run.checkpoints):
        raise UserError(
            f"{run.checkpoints}: every checkpoint is damaged; restore one, remove the folder to start from step 0, or "
            f"start a new run with --config {run.path / 'config.toml'}"
        )
    return path


@contextmanager
def launched(config: TrainConfig, signals: bool) -> Iterator[tuple[Plan, Data, Strategy]]:
    """The plan, the data and the strategy of a run, for the processes of this launch."""
    plan = make_plan(config, launched_ranks())
    data = check(plan)
    strategy = choose_strategy(plan.device, config.parallel, config.shard_ranks, config.timeout)
    with kernels(config.kernels), strategy:
        yield plan, data, strategy
        if signals and strategy.size > 1:
            # torchrun sends SIGTERM to the others when the first rank ends with an exit code: until they end, too.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def opened(run: Run, reporter: Reporter, strategy: Strategy) -> Iterator[Reporter]:
    """Rank 0 holds the lock of the run and reports to the user; other ranks write to their logs."""
    with run.lock() if strategy.main else log_to(run.logs / f"rank-{strategy.rank:05d}.log"):
        yield reporter if strategy.main else PlainReporter(terminal())


def check_same(stored: TrainConfig, wanted: TrainConfig, folder: Path) -> None:
    """Raise an error if settings differ that would change the numbers of a run."""
    if changed := differences(stored, wanted, RESUME_SETTINGS):
        why = " (another budget changes the learning rate of every step)" if "tokens" in changed else ""
        raise UserError(
            f"{folder}: a run cannot be resumed with other values of {', '.join(changed)}{why}; "
            f"start a new run with --config {folder / 'config.toml'} and the change"
        )


def check(plan: Plan) -> Data:
    """Raise the errors that would stop the run later; return its training and validation tokens."""
    check_precision(present(plan.device), plan.config.precision)
    train, val = open_data(plan)
    for data in (train, val):
        count_windows(data, plan.config.model.context)
    if plan.config.data.mask_documents:
        end_of_text(train)
    check_sinks(plan.config)
    return train, val


def open_data(plan: Plan) -> Data:
    """Training and validation tokens, checked against the model's vocabulary."""
    path, vocab = plan.config.data.path, plan.config.model.vocab_size
    splits = TokenData.open(path, "train"), TokenData.open(path, "val")
    if part := plan.config.data.tuning_split:
        border = round((1 - part) * splits[0].tokens)
        if not 0 < border < splits[0].tokens:
            raise UserError(f"data.tuning_split = {part} of {splits[0].tokens:,} tokens leaves a part without tokens")
        splits = splits[0].part(0, border), splits[0].part(border, splits[0].tokens)
    for data in splits:
        if data.max_token >= vocab:
            raise UserError(
                f"{path}: the {data.split} split has token {data.max_token}, but model.vocab_size is {vocab}; "
                f"set it to {data.vocab_size or data.max_token + 1} or more"
            )
    return splits
