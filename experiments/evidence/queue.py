"""Runs what the protocol calls for and has not ended, in its order, in one process, within a time limit."""

import dataclasses
import gc
import gzip
import json
import os
import shutil
import signal
import statistics
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import Any

from angpt.config import TrainConfig
from angpt.evaluation.results import SCORES
from angpt.present.tables import Table
from angpt.present.words import duration, plural
from angpt.studies.jobs import Job, bring_to_end, ended
from angpt.training.plan import make_plan
from angpt.training.record import newest_values
from angpt.training.reporter import Quiet
from angpt.training.run import Run, Summary
from angpt.training.trainer import Trainer
from experiments.evidence import relatives
from experiments.evidence.inside import FORMS, is_measured, look_inside, measured
from experiments.evidence.items import EVIDENCE, KEPT_EVERY, STORED, Item
from experiments.evidence.protocol import DATA, Protocol

STAGES = {
    "tuning": "1 tuning trials",
    "final": "2 final runs: losses and speed-up",
    "ablation": "3 ablations and related work",
    "sensitivity": "4 sensitivity",
    "relatives": "relatives of Muon",
    "optimizers": "Muon at 100M tokens",
    "transfer": "rates of small models for larger ones",
    "rates": "test of these rates",
    "batches": "batch sizes of small models",
    "defaults": "the defaults at 32M",
    "scaling": "7 other sizes",
    "fp8": "losses in 8 bits",
}
"""Stages in words; those with a number are the parts of docs/evidence.md."""
BY_DEFAULT = ("tuning", "final", "ablation", "sensitivity")
"""Stages that run unless others are named. `defaults` and `scaling` have the settings of training/rules.toml, which
must first carry what the tuning found; the others answer questions beside the comparison."""
OVERHEAD_SECONDS = 6.0
"""Compiling, evaluation, and the start of a run; measured: 3 to 18."""
ANALYSIS_SECONDS, TASKS_SECONDS = 15.0, 35.0
"""Analysis of a model, not measured at this size; scoring all tasks took 34 s."""
MARGIN, RESERVE_SECONDS = 1.08, 8.0
"""A run is started if its estimate, times the margin, ends this long before the limit."""
ARCHIVE_BYTES = 15 << 20

Adapt = Callable[[TrainConfig], TrainConfig]


@dataclass(frozen=True)
class Speed:
    """Measured rates of training, from which the time of a run is estimated."""

    by_model: dict[tuple[int, int, int, bool], float]
    """Tokens per second by width, depth, tokens of a step and whether that is one pass."""
    flops: float
    """FLOP/s of other models."""

    @classmethod
    def measured(cls, evidence: Path = EVIDENCE) -> "Speed":
        rates: dict[tuple[int, int, int, bool], list[float]] = {}
        flops = []
        for path in evidence.glob("*/*/summary.json"):
            run = Run(path.parent)
            summary = run.summary()
            if summary is not None and summary.tokens_per_s:
                rates.setdefault(_model(run.config()), []).append(summary.tokens_per_s)
                flops.append(summary.tokens_per_s * summary.flops_per_token)
        return cls({key: statistics.median(r) for key, r in rates.items()}, statistics.median(flops or [2e14]))

    def seconds(self, item: Item, done: float = 0.0) -> float:
        """The time of a run, of which a part is done already."""
        plan = make_plan(dataclasses.replace(item.config, device="cpu"))
        rate = self.by_model.get(_model(plan.config)) or self.flops / plan.flops_per_token
        return (1 - done) * plan.steps * plan.batch_tokens / rate + OVERHEAD_SECONDS + afterwards(item)


def afterwards(item: Item) -> float:
    """The time that a model takes after its training: analysis and tasks."""
    scored = item.evaluated * (1 + item.quantized * len(FORMS))
    return ANALYSIS_SECONDS * item.analysed + TASKS_SECONDS * scored


def _model(config: TrainConfig) -> tuple[int, int, int, bool]:
    batch = config.batch_tokens or 0
    return config.model.d_model, config.model.n_layers, batch, config.micro_batch == batch // config.model.context


class Queue:
    """The runs below `runs` on this machine, beside those that are stored in `evidence`."""

    def __init__(
        self,
        runs: Path,
        evidence: Path = EVIDENCE,
        adapt: Adapt | None = None,
        speed: Speed | None = None,
        names: str = "*",
    ) -> None:
        """`names`: a pattern of the names of runs; others are left to other processes."""
        self.runs, self.evidence, self.adapt, self.names = runs, evidence, adapt, names
        self.speed = speed or Speed.measured()
        self.walls: list[tuple[float, float]] = []
        """Estimated and measured seconds of each run of this process."""

    def protocol(self) -> Protocol:
        return Protocol((self.evidence, self.runs), self.adapt)

    def pending(self, stages: Sequence[str] = ()) -> Iterator[Item]:
        """The runs that are not complete, in order. One that has ended but was not analysed is analysed on the machine
        that has its weights, and repeated on another one, after all others."""
        repeated = []
        for item in self.protocol().items():
            places = [root / item.folder for root in (self.evidence, self.runs)]
            if (stages and item.stage not in stages) or not fnmatch(item.name, self.names):
                continue
            if any(complete(item, folder) for folder in places):
                continue
            if any(map(ended, places)) and not self._saved(item):
                repeated.append(item)
            else:
                yield item
        yield from repeated

    def seconds(self, item: Item) -> float:
        """The expected time of a run, by its model and by how the runs of this process compared with estimates."""
        recent = [took / expected for expected, took in self.walls[-3:]]
        return self._estimate(item) * max(1.0, statistics.median(recent or [1.0]))

    def _estimate(self, item: Item) -> float:
        plan = make_plan(dataclasses.replace(item.config, device="cpu"))
        done = newest_values(self.runs / item.folder).get("step", 0) / plan.steps if self._saved(item) else 0.0
        return self.speed.seconds(item, done)

    def _saved(self, item: Item) -> bool:
        return any((self.runs / item.folder / "checkpoints").glob("step-*"))

    def run(
        self,
        seconds: float,
        archive: Path,
        *,
        stages: Sequence[str] = (),
        requests: Path | None = None,
        carry_over: bool = False,
        commit: str = "",
        start: float | None = None,
    ) -> None:
        """Run what is pending until all is done or nothing else would end before the limit.

        A run that takes longer than expected is stopped with a checkpoint, early enough for its analysis. With
        `carry_over`, the next run is started at the end although it cannot end: the folder of runs must still be there
        when the queue goes on.
        """
        begin = time.monotonic() if start is None else start
        failed: set[Path] = set()
        with kept_compilation(), ExitStack() as at_end:
            at_end.callback(pack, self.runs, archive, self.names, self.evidence)  # also after Ctrl-C
            while True:
                left = seconds - RESERVE_SECONDS - (time.monotonic() - begin)
                called = self.pending(stages or BY_DEFAULT)
                ready = (i for i in called if not waits_for(i, requests) and i.folder not in failed)
                first = next(ready, None)
                item = next((i for i in chain([first], ready) if i and MARGIN * self.seconds(i) < left), None)
                if item is None and carry_over and first and left > 4 * OVERHEAD_SECONDS + afterwards(first):
                    item = first
                if item is None:
                    break
                expected, now = self._estimate(item), time.monotonic()
                try:
                    summary = self.train(item, left - OVERHEAD_SECONDS - afterwards(item), commit)
                    if summary.status == "finished" and item.analysed:
                        pack(self.runs, archive, self.names, self.evidence)  # whatever becomes of the analysis
                        if not self.finish(item, requests):
                            failed.add(item.folder)
                except Exception as error:  # one run must not cost the others their time
                    failed.add(item.folder)
                    print(f"{item.folder}: failed: {type(error).__name__}: {error}", flush=True)
                    if "CUDA error" in str(error):  # of which this process does not recover
                        break
                    continue
                took = time.monotonic() - now
                if summary.ended:
                    self.walls.append((expected, took))
                loss = "–" if summary.val_loss is None else f"{summary.val_loss:.4f}"
                print(f"{now - begin:5.0f} s + {took:5.1f} s  {item.folder}: {summary.status}, loss {loss}", flush=True)
                pack(self.runs, archive, self.names, self.evidence)
        print("\n".join(self.lines(stages or BY_DEFAULT)), flush=True)
        if why := next((text for i in self.pending(stages or BY_DEFAULT) if (text := waits_for(i, requests))), ""):
            print(f"runs wait for: {why}", flush=True)

    def train(self, item: Item, limit: float, commit: str = "") -> Summary:
        """Bring one run to its end, or to a checkpoint at the limit. Ctrl-C and SIGTERM end it with a checkpoint, too,
        and then the queue."""
        folder = self.runs / item.folder
        gc.collect()  # memory of the run before, CUDA graphs included
        end = nullcontext() if item.analysed else no_last_checkpoint()
        with relatives.installed(item.change), stopped_after(limit) as over, end:
            summary = bring_to_end(Job(item.config, folder), Quiet())
        if not summary.ended:
            if not over.is_set():
                raise KeyboardInterrupt
            return summary
        if commit and "commit" not in summary.environment:
            summary = dataclasses.replace(summary, environment=summary.environment | {"commit": commit})
            Run(folder).write_summary(summary)
        if summary.status == "diverged" or not item.analysed:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return summary

    def finish(self, item: Item, requests: Path | None) -> bool:
        """Look inside a model, and remove its weights; if that fails, they stay for the next call. True if the run is
        complete."""
        folder = self.runs / item.folder
        if self._saved(item) and look_inside(item, folder, requests):
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return complete(item, folder)

    def table(self, stages: Sequence[str] = ()) -> Table:
        """A row for each pending run: its expected time, and what it waits for."""
        rows = []
        for item in self.pending(stages):
            rows.append((str(item.folder), f"{self.seconds(item):.0f}", waits_for(item)))
        return Table(("run", "s", "waits for"), rows, left=(0, 2))

    def lines(self, stages: Sequence[str] = ()) -> list[str]:
        """The time that each part of the protocol still needs, and the whole."""
        totals: dict[str, list[float]] = {}
        for item in self.pending(stages):
            budget = f": {item.config.tokens}" if item.stage == "final" else ""
            totals.setdefault(STAGES.get(item.stage, item.stage) + budget, []).append(self.seconds(item))
        lines = [f"{plural(len(times), 'run')}, {duration(sum(times))}: {name}" for name, times in totals.items()]
        every = [seconds for times in totals.values() for seconds in times]
        return [*lines, f"left in all: {plural(len(every), 'run')}, {duration(sum(every))}"]


def complete(item: Item, folder: Path) -> bool:
    """True if the run in a folder has ended, and what its model is measured for is there."""
    if (summary := ended(folder)) is None:
        return False
    if summary.status != "finished":
        return True  # there is no model
    return all(is_measured(folder / file) for file in measured(item))


def waits_for(item: Item, requests: Path | None = None) -> str:
    """What a run needs before it can start; empty if nothing is missing."""
    path = item.config.data.path if not item.provisional else ""
    if item.provisional:
        return "runs that decide its settings"
    if not Path(path).exists():
        return f"{path} ({plural(DATA.get(path, 1), 'part')} of the text)"
    return "--requests, since its weights are removed" if item.evaluated and requests is None else ""


@contextmanager
def kept_compilation() -> Iterator[None]:
    """Let code that was compiled for one run serve the next: `Trainer` resets the compiler because of its limits."""
    import torch

    reset, limit = torch.compiler.reset, torch._dynamo.config.recompile_limit
    torch.compiler.reset = lambda: None  # type: ignore[assignment]
    torch._dynamo.config.recompile_limit = 64
    try:
        yield
    finally:
        torch.compiler.reset, torch._dynamo.config.recompile_limit = reset, limit


@contextmanager
def no_last_checkpoint() -> Iterator[None]:
    """Let runs save only if they are stopped: writing weights that are removed at once would take a second of each."""
    save = Trainer.save

    def unless_last(self: Trainer) -> None:
        if self.step < self.plan.steps:
            save(self)

    Trainer.save = unless_last  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.save = save  # type: ignore[method-assign]


@contextmanager
def stopped_after(seconds: float) -> Iterator[threading.Event]:
    """Send SIGTERM to this process after so many seconds, until the block ends: a run in its loop saves and ends, and
    outside the loop the signal is ignored. Yields an event that is set from the first such signal on; one that comes
    before is somebody else's, and ends the queue."""
    over, block_over = threading.Event(), threading.Event()

    def stop() -> None:
        if not block_over.wait(seconds):
            over.set()
            while not block_over.wait(1.0):
                os.kill(os.getpid(), signal.SIGTERM)

    def outside_the_loop(*_: object) -> None:
        if not over.is_set():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, outside_the_loop)
    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        yield over
    finally:
        block_over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)


def pack(runs: Path, archive: Path, names: str = "*", evidence: Path | None = None) -> None:
    """Write the folders of all ended runs with such names, without weights, to a compressed .tar file, whole or not at
    all; those of which `evidence` has every file are left out. Scores of single samples do not count, because evidence
    keeps none. Of a run that was repeated because its model was not measured, the first loss stays: its configuration,
    summary and records in `evidence` are not replaced."""
    part = archive.with_name(f".{archive.name}.part")
    with tarfile.open(part, "w:gz", compresslevel=1) as tar:
        for summary in sorted(runs.glob("*/*/summary.json")):
            folder = summary.parent
            if not fnmatch(folder.name, names) or ended(folder) is None:
                continue
            records = folder / STORED.removesuffix(".gz")
            if not (folder / STORED).exists() and records.exists():
                folder.joinpath(f".{STORED}").write_bytes(thinned(records.read_bytes()))
                folder.joinpath(f".{STORED}").rename(folder / STORED)
            named = [folder / name for name in ("config.toml", "summary.json", STORED, "analysis.json")]
            files = [file for file in named if file.exists()] + sorted(folder.glob("**/eval/**/*.*"))
            kept = [file for file in files if SCORES.name not in file.relative_to(folder).parts]
            if evidence is None or not all((evidence / file.relative_to(runs)).exists() for file in kept):
                for file in files:
                    stays = file in named[:3] and evidence is not None and (evidence / file.relative_to(runs)).exists()
                    if not stays:
                        tar.add(file, file.relative_to(runs))
    if (size := part.stat().st_size) > ARCHIVE_BYTES:
        print(f"{archive}: {size / 1e6:.1f} MB are more than {ARCHIVE_BYTES / 1e6:.0f}", flush=True)
    part.rename(archive)


def thinned(metrics: bytes) -> bytes:
    """The records of a run, of training steps every tenth and the last, compressed; equal for equal records."""
    lines = metrics.splitlines(keepends=True)
    steps = [json.loads(line)["step"] if line.startswith(b'{"kind": "train"') else None for line in lines]
    last = max((step for step in steps if step is not None), default=0)
    kept = (line for line, s in zip(lines, steps, strict=True) if s is None or s % KEPT_EVERY == 0 or s in (1, last))
    return gzip.compress(b"".join(kept), 9, mtime=0)


def rehearsal(data: Path) -> Adapt:
    """Configurations of the same runs with a tiny model and few tokens, in seconds on a CPU."""

    def adapt(config: TrainConfig) -> TrainConfig:
        tokens = max(2, round(float(make_plan(dataclasses.replace(config, device="cpu")).config.tokens) / 20e6))
        model = dataclasses.replace(
            config.model, d_model=32, n_layers=2, n_heads=2, vocab_size=61, context=32, d_ff=None
        )
        settings: dict[str, Any] = {"tokens": str(256 * tokens), "batch_tokens": 256, "micro_batch": 8, "device": "cpu"}
        settings |= {"eval_tokens": 512, "eval_every": tokens, "checkpoint_every": tokens, "log_every": 1}
        moved = dataclasses.replace(
            config.data, path=str(data / config.data.path), tuning_split=config.data.tuning_split * 5
        )
        return dataclasses.replace(config, model=model, data=moved, **settings)

    return adapt
