"""What the commands do, as functions: `import angpt` offers them, and the commands call them.

They return typed results, raise `UserError` where a command would exit with 2, and print only with `progress`. They run
in any thread. Without `signals`, Ctrl-C raises KeyboardInterrupt; the same call then continues where checkpoints allow.
"""

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from angpt.config import PrepareConfig, TrainConfig
from angpt.data import prepare as preparation
from angpt.data.shards import Index
from angpt.data.tokenizers import end_token
from angpt.errors import UserError, nearest
from angpt.inference.generate import generate_text
from angpt.inference.sampling import Sampling
from angpt.inference.source import Held, Source, open_source
from angpt.inference.store import Training
from angpt.models.decoder import Decoder
from angpt.present.terminal import terminal
from angpt.reports import write_pages
from angpt.results import Result, RunResult, State
from angpt.slurm import SlurmConfig
from angpt.studies.cluster import Cluster
from angpt.studies.compare import Comparison
from angpt.studies.config import StudyConfig
from angpt.studies.executor import InProcess, Pool, Processes, default_workers
from angpt.studies.folders import summarise_runs
from angpt.studies.outcome import markdown
from angpt.studies.overview import overview_for
from angpt.studies.study import FILE, Study, file_of, folder_of
from angpt.training import launch
from angpt.training.record import RunRecord
from angpt.training.reporter import TrainProgress, reporter_for
from angpt.training.run import Run

if TYPE_CHECKING:
    from angpt.fits.hparams import HparamFit
    from angpt.fits.records import Count, RunTable
    from angpt.fits.scaling import ScalingFit

PathLike = str | os.PathLike[str]


def prepare(
    sources: PathLike | Sequence[PathLike],
    out: PathLike | None = None,
    config: PrepareConfig | None = None,
    *,
    progress: bool = False,
) -> Index:
    """Tokenize text into a folder to train from; return its counts. A folder that is complete is left as it is.

    Args:
        sources: stdlib, hf:NAME, files or folders, as for `angpt data prepare`.
        out: Folder to write; data/ and the name of the source unless given.
        config: Tokenizer, splits, columns.
        progress: Print how far it is.
    """
    listed = [sources] if isinstance(sources, str | os.PathLike) else sources
    names = tuple(os.fspath(source) for source in listed)
    folder = Path("data") / preparation.default_name(names) if out is None else Path(out)
    return preparation.prepare(names, folder, config, console=terminal(quiet=not progress))


@dataclass(frozen=True)
class TrainedRun(RunRecord):
    """A run folder: its configuration, its losses, how it ended, and its model."""

    @property
    def status(self) -> str:
        """finished, diverged, interrupted; or unfinished: running, or killed."""
        return "unfinished" if self.summary is None else self.summary.status

    @property
    def val_loss(self) -> float | None:
        """The loss of the last evaluation; None before the first, and if it was not finite."""
        if self.summary is not None:
            return self.summary.val_loss
        return self.evaluations[-1].loss if self.evaluations else None

    @cached_property
    def source(self) -> Source:
        """The newest checkpoint at the first use, with the tokenizer."""
        return open_source(self.path)

    def model(self) -> Decoder:
        """The model with its trained weights, on the CPU."""
        return self.source.decoder()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training data."""
        return self.source.tokenizer()

    def generate(self, prompt: str = "", new_tokens: int = 64, sampling: Sampling | None = None, seed: int = 0) -> str:
        """Text that the model generates after a prompt; an empty prompt begins a document."""
        tokenizer = self.tokenizer()
        folded, end = self.source.folded(), end_token(tokenizer)
        return generate_text(folded, tokenizer, [prompt], new_tokens, sampling, seed=seed, end=end)[0].text


def export(
    model: PathLike | Decoder, out: PathLike, tokenizer: PathLike | None = None, *, engine: bool = False
) -> Path:
    """Write a model as a new folder for Hugging Face transformers, which `angpt` reads too; return the folder.

    Args:
        model: A model in memory, or the folder of a run or an export, whose results of `angpt eval` are stated.
        out: The new folder.
        tokenizer: A tokenizer.json; that of the folder unless given.
        engine: For engines that compute logits as one product: s_z is multiplied into the head.
    """
    from angpt.evaluation.results import lines, read_results, with_error
    from angpt.inference import hf

    folder, given, found = Path(out), None if tokenizer is None else Path(tokenizer), []
    if isinstance(model, Decoder):
        source: Source = Held(folder, "export", model.cfg, (), given, Training(), model=model)
    elif isinstance(model, str | os.PathLike):
        source = open_source(Path(model))
        source = dataclasses.replace(source, tokenizer_path=given or source.tokenizer_path)
        results = read_results(Path(model))
        found = lines([results]) if results is not None and results.model.weights == source.sha256() else []
    else:
        raise UserError(f"export takes a folder or a model of angpt.build, not {type(model).__name__}")
    hf.export(source, folder, [(x.label, x.metric, x.samples, with_error(x.values[0])) for x in found], engine)
    return folder


def load(run: PathLike) -> TrainedRun:
    """The run in a folder, ended or under way."""
    return TrainedRun.open(Path(run))


def train(
    config: TrainConfig | None = None,
    out: PathLike | None = None,
    *,
    resume: bool = False,
    progress: bool | Callable[[TrainProgress], object] = False,
    signals: bool = False,
) -> TrainedRun:
    """Train one model into a run folder.

    Args:
        config: Settings of the run, such as `angpt.preset("laptop")`; those of the folder for a run that continues.
        out: The run folder; a name under runs/ made of architecture, size and seed unless given.
        resume: Continue the run if the folder exists; a run that has ended is returned as it is.
        progress: True: show a progress bar in a terminal, lines elsewhere. A function is called with the progress.
        signals: Finish the step and save at SIGINT and SIGTERM, as the command does; the run is then `interrupted`.
            Only in the main thread.
    """
    if config is None and (out is None or not resume):
        raise UserError(
            "give a configuration, such as angpt.preset('laptop'); only resume=True with a folder needs none"
        )
    reporter = reporter_for(progress)
    if config is None:
        assert out is not None
        folder = Path(out)
        summary = launch.resume(folder, reporter, signals=signals)
    else:
        folder = Path("runs") / config.default_name if out is None else Path(out)
        summary = launch.start(config, folder, reporter, again=resume, signals=signals)
    return TrainedRun(folder, Run.open(folder).config(), summary)


@dataclass(frozen=True)
class StudyOutcome:
    """A study folder and what its runs found."""

    folder: Path
    result: Result
    """A row per architecture, size and budget, costs, notes, a verdict and every run."""

    @property
    def runs(self) -> tuple[TrainedRun, ...]:
        """The runs that have started."""
        folders = (self.folder / "runs" / run.name for run in self.result.runs)
        return tuple(load(folder) for folder in folders if folder.exists())

    def __str__(self) -> str:
        """The table of losses as Markdown, as in result.md."""
        return markdown(self.result)

    _repr_markdown_ = __str__  # what a notebook shows


class RunsFailed(UserError):
    """Runs of a study failed; the others have ended."""

    outcome: StudyOutcome


StudyProgress = bool | Callable[[Mapping[str, State]], object]
"""True: a table in a terminal, lines elsewhere. A function is called with the state of every run by its name, whenever
one has changed."""


def compare(
    comparison: Comparison,
    out: PathLike,
    *,
    workers: int | None = None,
    progress: StudyProgress = False,
    signals: bool = False,
    command: str | None = None,
) -> StudyOutcome:
    """Train architectures side by side on the same tokens. Called again, it continues; ended runs are not repeated, and
    further architectures, budgets or seeds add their runs.

    Args:
        comparison: Architectures, budgets, seeds and the settings of the runs.
        out: Folder of the comparison, which is a study.
        workers: Runs at a time, each in its own process; 0: in this process. One per GPU, or two on the CPU, unless
            given.
        progress: Show the runs, or call a function with their states.
        signals: Raise `angpt.studies.executor.Interrupted` at SIGINT and SIGTERM once all runs have saved. Only in the
            main thread.
        command: What the page of the comparison states as the command that repeats it.
    """
    study = Study(Path(out), comparison.study())
    pool = _pool(study, workers, progress, signals)
    earlier = Study.open(study.folder) if (study.folder / FILE).exists() else None
    if earlier is not None and not study.extends(earlier):
        raise UserError(f"{study.folder}: holds another study (see its {FILE}); choose another --out")
    if earlier is None or earlier.config != study.config:
        repeat = command or shlex.join(["angpt", "study", "run", str(study.folder / FILE)])
        study.begin(None, repeat, on_this_machine=True)
    study.retry()
    return _execute(study, pool, progress, signals, "(the same command tries again)", live=workers != 0)


def study(
    study: PathLike | StudyConfig,
    out: PathLike | None = None,
    *,
    workers: int | None = None,
    retry: bool = False,
    slurm: SlurmConfig | None = None,
    progress: StudyProgress = False,
    signals: bool = False,
) -> StudyOutcome:
    """Train every run of a study (docs/studies.md). Called again, it continues; ended runs are not repeated.

    Args:
        study: A study file, the folder of a study, or a `StudyConfig`, which needs `out`.
        out: Its folder; studies/ and the name of the file unless given.
        workers: Runs at a time, each in its own process; 0: in this process. One per GPU, or two on the CPU, unless
            given.
        retry: Try the runs again that failed before.
        slurm: Resources of each run as a job of a SLURM cluster; runs are trained on this machine unless given.
        progress: Show the runs, or call a function with their states.
        signals: Raise `angpt.studies.executor.Interrupted` at SIGINT and SIGTERM once all runs have saved. Only in the
            main thread.
    """
    if isinstance(study, StudyConfig):
        if out is None:
            raise UserError("a StudyConfig has no name: give the folder of the study with out")
        file, opened = None, Study(Path(out), study)
        command = ["angpt", "study", "run", str(opened.folder / FILE)]
    else:
        given = Path(study)
        file = file_of(given)
        opened = Study.read(file, folder_of(given) if out is None else Path(out))
        command = ["angpt", "study", "run", str(given), *(["--out", str(out)] if out is not None else [])]
    pool = _pool(opened, workers, progress, signals, slurm)
    opened.begin(file, shlex.join(command), on_this_machine=slurm is None)
    if retry:
        opened.retry()
    return _execute(opened, pool, progress, signals, "(--retry tries again)", live=workers != 0)


def _pool(
    study: Study, workers: int | None, progress: StudyProgress, signals: bool, slurm: SlurmConfig | None = None
) -> Pool:
    threads = study.config.threads
    if slurm is not None:
        return Cluster(study.folder, slurm, threads)
    if workers == 0:
        return InProcess(lambda: reporter_for(progress is True), threads, signals)
    return Processes(default_workers() if workers is None else workers, threads)


def _execute(study: Study, pool: Pool, progress: StudyProgress, signals: bool, advice: str, live: bool) -> StudyOutcome:
    """Bring the runs of a study to their end; an error with the first reason if some failed."""
    with overview_for(progress, live) as overview:
        outcome = StudyOutcome(study.folder, study.execute(pool, overview.tick, signals))
    if failures := study.failures():
        name, reason = next(iter(failures.items()))
        others = f"; `angpt study status {study.folder}` tells why the others did" if len(failures) > 1 else ""
        count = f"{len(failures)} of {len(outcome.result.runs)} runs failed"
        error = RunsFailed(f"{study.folder}: {count} {advice}: {name}: {reason}{others}")
        error.outcome = outcome
        raise error
    return outcome


def report(
    folders: PathLike | Sequence[PathLike],
    out: PathLike | None = None,
    baseline: str | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> list[Path]:
    """Write the page of a study or of runs, ended or under way; return the paths of the pages, one for each size.

    Args:
        folders: The folder of a study, or run folders.
        out: Folder for report.html and figures/; that of the study, or report, unless given.
        baseline: What speed-ups refer to, for run folders; gpt+ where there is one, else the first.
        progress: Called with what is done next.
    """
    paths = _paths(folders)
    if not paths:
        raise UserError("name the folder of a study, or run folders")
    if len(paths) == 1 and (paths[0] / FILE).exists():
        opened = Study.open(paths[0])
        return write_pages(opened.folder, opened.result(), Path(out or opened.folder), opened.commands(), tell=progress)
    names = [Run.open(path).config().recipe for path in paths]
    chosen = (baseline or ("gpt+" if "gpt+" in names else names[0])).lower()
    if chosen not in names:
        raise UserError(f"--baseline {chosen}: none of the runs is of this architecture")
    command, target = ["angpt", "report", *map(str, paths)], Path(out or "report")
    command += [*(["--out", str(out)] if out is not None else []), *(["--baseline", chosen] if baseline else [])]
    return write_pages(target, summarise_runs(paths, chosen), target, [shlex.join(command)], paths, progress)


def fit_hparams(
    sources: PathLike | Sequence[PathLike], *, architectures: Sequence[str] = (), multiple: float | None = None
) -> "HparamFit":
    """Best learning rate as a function of model size, tokens and batch size, and best batch size of the first two.

    Args:
        sources: Study folders, run folders, or CSV files (docs/fits.md lists their columns).
        architectures: Fit only these; all unless given.
        multiple: Use only the runs with this many tokens per parameter: laws over the model size alone.
    """
    from angpt.fits import hparams

    if multiple is not None and not 0 < multiple < float("inf"):
        raise UserError(f"--multiple {multiple}: must be positive and finite")
    return hparams.fit_hparams(_read(sources, ("batch_tokens", "lr"), architectures), multiple)


def fit_scaling(
    sources: PathLike | Sequence[PathLike],
    *,
    architectures: Sequence[str] = (),
    baseline: str | None = None,
    count: "Count" = "all",
    attention: bool = False,
    curves: bool = False,
    bootstrap: int = 1000,
    huber: float = 0.001,
    seed: int = 0,
    paper: bool = False,
    bins: int = 1500,
) -> "ScalingFit":
    """Loss as a function of compute, and the best size and tokens for it: three approaches, architectures compared.

    Args:
        sources: Study folders, run folders, or CSV files (docs/fits.md lists their columns).
        architectures: Fit only these; all unless given.
        baseline: Architecture that the others are compared with; gpt+ if present, otherwise the first.
        count: What counts as N in C = 6·N·D: all parameters, all but the embedding (head), none of embedding and head
            (none), or all, with the compute that the records state (given).
        attention: Also count the FLOPs of attention.
        curves: Use all evaluations during runs for the frontier, instead of complete runs.
        bootstrap: Bootstrap samples for the intervals of the parametric fit.
        huber: δ of the Huber loss of the parametric fit.
        seed: Seed of the bootstrap.
        paper: Also follow the paper's procedure to the letter.
        bins: Bins of equal logarithmic width for `paper`.
    """
    from angpt.fits import scaling
    from angpt.fits.compute import Counting

    options = scaling.Options(Counting(count, attention), curves, bootstrap, seed, huber, paper, bins)
    return scaling.fit_scaling(_read(sources, (), architectures, curves), options, baseline)


def _read(
    sources: PathLike | Sequence[PathLike], needed: Sequence[str], chosen: Sequence[str], curves: bool = False
) -> "RunTable":
    """The runs of the chosen architectures, or of all."""
    from angpt.fits.reading import read_table

    table = read_table(run_folders(_paths(sources), lambda result: result.runs), needed, curves)
    known = table.architectures()
    for name in chosen:
        if name not in known:
            raise UserError(f"--architectures {name}: no run has this architecture: {nearest(name, known)}")
    if not chosen:
        return table
    cells = tuple(c for c in table.cells if c.record.architecture in chosen)
    diverged = tuple(r for r in table.diverged if r.architecture in chosen)
    return dataclasses.replace(table, cells=cells, diverged=diverged)


def run_folders(folders: Sequence[Path], chosen: Callable[[Result], Sequence[RunResult]]) -> list[Path]:
    """The folders, with that of each study replaced by those runs of its result that are `chosen`."""
    found: list[Path] = []
    for folder in folders:
        if not (folder / FILE).exists():
            found.append(folder)
            continue
        runs = [folder / "runs" / run.name for run in chosen(Study.open(folder).result())]
        started = [path for path in runs if path.exists()]
        if not started:
            raise UserError(f"{folder}: no run has started yet; start them with `angpt study run {folder}`")
        found += started
    return found


def _paths(given: PathLike | Sequence[PathLike]) -> list[Path]:
    return [Path(given)] if isinstance(given, str | os.PathLike) else [Path(path) for path in given]
