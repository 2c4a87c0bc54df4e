"""The training loop, which is the same for every architecture.

The state of a run is its parameters, moments and number of steps. A run that is killed and resumed equals, bit by bit
on the CPU, one that was not.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from angpt.data.loader import Batch, Loader, Prefetcher, document_numbers, end_of_text, validation_starts
from angpt.data.shards import TokenData
from angpt.errors import UserError
from angpt.models.decoder import Decoder
from angpt.models.variants import build
from angpt.training import checkpoint
from angpt.training.engine import Engine
from angpt.training.hardware import peak_flops, peak_memory_gib, synchronize
from angpt.training.layers import float8_scalars, layer_scalars
from angpt.training.moments import MomentRecorder, default_interval
from angpt.training.plan import Plan
from angpt.training.reporter import Reporter
from angpt.training.run import Run, Status, Summary, environment
from angpt.training.sinks import MetricsFile, Sink, sinks_for
from angpt.training.strategy import Shard, Strategy

LAYER_TOKENS = 4096
"""Validation tokens over which the input norms of the layers are averaged; at most those of a batch."""


class Diverged(Exception):
    """The loss or the gradient of step `args[0]`, or the validation loss after it, is not finite."""


class Trainer:
    """Trains a run from its start, or from a checkpoint, to its end."""

    def __init__(
        self, plan: Plan, run: Run, train: TokenData, val: TokenData, reporter: Reporter, strategy: Strategy
    ) -> None:
        self.plan, self.config, self.run, self.reporter, self.strategy = plan, plan.config, run, reporter, strategy
        self.train_data, self.val_data = train, val
        torch.manual_seed(self.config.seed)  # seeds third-party code; this package draws nothing from it
        # Importing the compiler takes seconds, during which weights are drawn.
        importing = threading.Thread(target=import_module, args=("torch._inductor.compile_fx",), daemon=True)
        if plan.compile:
            importing.start()
        self.model: Decoder = build(self.config.model, self.config.seed)
        if plan.compile:
            importing.join()  # two threads must not import it at once: its modules import each other
            torch.compiler.reset()  # the compiler gives up on a block after eight versions, also of earlier runs
        wide = self.config.reduce == "fp32" or plan.micro_steps > 1
        options: dict[str, Any] = {"recompute": self.config.recompute, "strategy": strategy, "wide_reduce": wide}
        self.engine = Engine(self.model, self.config.optimizer, plan.matrix_dtype, plan.compile, **options)
        self.step = self.metrics_bytes = 0
        self.seconds = self.compile_seconds = 0.0
        self.val_loss: float | None = None
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        moments = self.engine.first_moments() if self.config.record_moments else {}
        self.moments = MomentRecorder(moments, default_interval(plan.steps), strategy.whole)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = checkpoint.read_state(path, verify=False)
        if not state.data_fingerprint:
            raise UserError(
                f"{path}: was imported, without the state of an optimizer, so that it cannot be resumed; generate, "
                "fold, eval, analyze and export take it"
            )
        for name, ours in self.identity().items():
            if (theirs := getattr(state, name)) != ours:
                what = {"validation_fingerprint": "validation split"}.get(name, name.removesuffix("_fingerprint"))
                raise UserError(f"{path}: the checkpoint has another {what} ({theirs}) than the run ({ours})")
        checkpoint.check_config(path, state, self.config)
        tensors = self.tensors()
        checkpoint.Reader(path).fill(tensors)
        torch.set_rng_state(tensors[checkpoint.RNG].rows)
        self.engine.optimizer.refresh()
        self.step, self.seconds, self.val_loss = state.step, state.seconds, state.val_loss
        self.metrics_bytes = state.metrics_bytes

    def identity(self) -> dict[str, Any]:
        """Entries of a checkpoint's state that stay the same in a run."""
        data = self.train_data
        return {
            "architecture": self.config.recipe,
            "data_fingerprint": data.fingerprint,
            "validation_fingerprint": self.val_data.fingerprint,
            "tokenizer_fingerprint": data.tokenizer_fingerprint,
        }

    def tensors(self) -> dict[str, Shard]:
        """This rank's shards of the parameters and moments, and the state of the random number generator."""
        rng = torch.get_rng_state()
        return self.engine.tensors() | {checkpoint.RNG: Shard(rng, tuple(rng.shape), 0, self.strategy.main)}

    def save(self) -> None:
        """Check that all replicas are equal, and begin to write a checkpoint."""
        self.strategy.compare_replicas(self.engine.tensors())
        progress: dict[str, Any] = {"step": self.step, "seconds": self.seconds, "val_loss": self.val_loss}
        progress |= {"metrics_bytes": self.metrics.sync(), "sha256": {}}
        state = checkpoint.State(**progress, **self.identity(), config=self.config)
        self.writer.save(self.tensors(), state)

    def train(self, signals: bool) -> Summary:
        """Train until the end or divergence, and write the summary; with `signals`, also until SIGINT or SIGTERM."""
        self.metrics, self.sinks = Sink(), list[Sink]()
        self.writer = checkpoint.Writer(self.strategy, self.run.checkpoints, self.config.keep_checkpoints)
        status: Status = "finished"
        try:
            with ExitStack() as closing, interrupts() if signals else never() as interrupted, self.writer:
                if self.strategy.main:
                    self.metrics = MetricsFile(self.run.metrics, self.metrics_bytes)
                    closing.callback(self.metrics.close)
                    self.sinks = sinks_for(self.config, self.run.path, self.step)
                    for sink in self.sinks:
                        closing.callback(sink.close)
                self.reporter.start(self.plan, self.step)
                closing.callback(self.reporter.stop)
                try:
                    if not self.loop(interrupted):
                        status = "interrupted"
                except Diverged as error:
                    status, self.step = "diverged", error.args[0]
        except OSError as error:
            raise UserError(f"{self.run.path}: {error}; fix the cause and continue with --resume") from error
        summary = self.strategy.share(lambda: self.summary(status))
        if self.strategy.main:
            self.run.write_summary(summary)
        return summary

    def loop(self, interrupted: Callable[[], bool]) -> bool:
        """Take the remaining steps; return False if interrupted before the last."""
        plan, config = self.plan, self.config
        self.strategy.compare_replicas(self.engine.tensors())
        loader = Loader(self.train_data, config.model.context, plan.sequences, config.seed)
        self.peak = peak_flops(plan.device, plan.dtype)
        if self.step == 0 and config.layers_every:
            self.record_layers()
        with self.prefetch(loader) as batches:
            self.compile_ahead(loader)
            self.mark = time.perf_counter(), self.step
            while self.step < plan.steps:
                batch = next(batches)
                self.strategy.beat(self.step)
                loss, norm = self.train_step(batch)
                self.step += 1
                self.pending.append((self.step, loss, norm))
                self.moments.note(self.step)
                last, stop = self.step == plan.steps, self.agreed(interrupted)
                evaluate = plan.due(config.eval_every, self.step)
                layers = plan.due(config.layers_every, self.step)
                save = stop or plan.due(config.checkpoint_every, self.step)
                if evaluate or layers or save or self.step % config.log_every == 0:
                    self.flush()
                if layers:
                    self.record_layers()
                if evaluate:
                    self.evaluate()
                if save:
                    self.save()
                if stop and not last:
                    return False
                if evaluate or layers or save:
                    self.mark = time.perf_counter(), self.step  # only steps count
        return True

    def prefetch(self, loader: Loader) -> Prefetcher:
        """This rank's share of the batches from the next step on."""
        rank, size, documents = self.strategy.rank, self.strategy.size, self.config.data.mask_documents
        return Prefetcher(loader, self.step, self.plan.device, rank=rank, world=size, documents=documents)

    def agreed(self, interrupted: Callable[[], bool]) -> bool:
        """True if the run stops after this step; several ranks agree on it only at steps that are logged."""
        return self.strategy.agree_to_stop(interrupted(), now=self.step % self.config.log_every == 0)

    def train_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Take one optimizer step; return the mean loss and the norm of the gradient, still on the device."""
        loss = self.engine.backward(batch, self.plan.micro_batch)
        return loss, self.engine.step(self.step + 1, self.plan.lr(self.step))

    def compile_ahead(self, loader: Loader) -> None:
        """Compile on the first batch before the clock starts; its gradients are dropped."""
        if not self.plan.compile and self.plan.device.type == "cpu":
            return
        start = time.perf_counter()
        with self.prefetch(loader) as batches:
            batch = next(batches)
        self.engine.backward(batch, self.plan.micro_batch)
        self.engine.optimizer.zero_grad()
        if self.engine.launch_bound(first := batch.rows(0, self.plan.micro_batch)):
            self.engine.record(first)
        reduced = self.strategy.size > 1 and self.config.reduce == "fp32"
        self.engine.optimizer.compile_kernels(gathered=self.plan.micro_steps > 1 or reduced)
        synchronize(self.plan.device)
        self.compile_seconds = time.perf_counter() - start

    def flush(self) -> None:
        """Read the losses that are still on the device and write them; raise `Diverged` if one is not finite."""
        losses = (self.strategy.sum(torch.stack([loss for _, loss, _ in self.pending])) / self.strategy.size).tolist()
        norms = torch.stack([norm for _, _, norm in self.pending]).tolist()
        now, (before, first) = time.perf_counter(), self.mark
        self.seconds += now - before
        tokens_per_s = (self.step - first) * self.plan.batch_tokens / (now - before)
        self.mark = now, self.step
        mfu = tokens_per_s * self.plan.flops_per_token / (self.peak * self.strategy.size)
        speed = {"tokens_per_s": tokens_per_s, "mfu": mfu, "seconds": self.seconds}
        for (step, _, _), loss, norm in zip(self.pending, losses, norms, strict=True):
            self.write("train", step, loss=loss, lr=self.plan.lr(step - 1), grad_norm=norm, **speed)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.metrics.sync()
                raise Diverged(step)
        for step, variances in self.moments.drain():
            self.write("moments", step, **variances)
        self.metrics.flush()
        self.pending.clear()
        self.reporter.train(self.step, losses[-1], tokens_per_s)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Compute and write the mean loss over `eval_tokens` tokens of the validation split, always the same ones."""
        total, rows = torch.zeros((), device=self.plan.device, dtype=torch.float64), 0
        for tokens, counted in self.validation_windows():
            self.strategy.beat(self.step)
            batch = self.validation_batch(tokens).padded(self.plan.micro_batch if self.plan.compile else 0)
            loss = self.engine.loss(batch)
            if counted:
                total += len(tokens) * loss
                rows += len(tokens)
        total, count = self.strategy.sum(torch.stack((total, total.new_tensor(rows)))).unbind()
        self.val_loss = (total / count).item()
        self.write("val", self.step, val_loss=self.val_loss, seconds=self.seconds)
        if not math.isfinite(self.val_loss):
            self.val_loss = None
            raise Diverged(self.step)
        self.metrics.flush()
        self.reporter.validation(self.step, self.val_loss)

    def validation_windows(self) -> Iterator[tuple[Tensor, bool]]:
        """This rank's batches of windows, each with False if it is a repetition: all ranks get equally many."""
        context, rank = self.config.model.context, self.strategy.rank
        windows = max(1, self.config.eval_tokens // context)
        starts = validation_starts(self.val_data, context, windows)
        batches = [starts[i : i + self.plan.micro_batch] for i in range(0, len(starts), self.plan.micro_batch)]
        for first in range(0, len(batches), self.strategy.size):
            counted = first + rank < len(batches)
            tokens = self.val_data.gather(batches[first + rank if counted else first], context + 1)
            yield torch.from_numpy(tokens).to(self.plan.device), counted

    def validation_batch(self, tokens: Tensor) -> Batch:
        """Inputs and targets of windows of validation tokens, with their documents if attention stays inside them."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        masked = self.config.data.mask_documents
        return Batch(inputs, targets, document_numbers(inputs, end_of_text(self.val_data)) if masked else None)

    def record_layers(self) -> None:
        """Write scalars of each layer, computed on the same validation tokens each time."""
        context, dtype, device = self.config.model.context, self.plan.dtype, self.plan.device
        count = max(1, min(LAYER_TOKENS, self.plan.batch_tokens) // context)
        windows = self.val_data.gather(validation_starts(self.val_data, context, count), context + 1)
        batch = self.validation_batch(torch.from_numpy(windows).to(device))
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            self.write("layers", self.step, **layer_scalars(self.model, batch, self.strategy))
        if self.config.record_fp8:
            self.write("fp8", self.step, **float8_scalars(self.engine.compute, batch))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Send a record to all sinks."""
        record = {"kind": kind, "step": step, "tokens": step * self.plan.batch_tokens, **values}
        for sink in (self.metrics, *self.sinks):
            sink.write(record)

    def summary(self, status: Status) -> Summary:
        """How the run ended."""
        good = checkpoint.newest(self.run.checkpoints)
        return Summary(
            status=status,
            step=self.step,
            steps=self.plan.steps,
            tokens=self.step * self.plan.batch_tokens,
            val_loss=self.val_loss,
            seconds=self.seconds,
            compile_seconds=self.compile_seconds,
            tokens_per_s=self.step * self.plan.batch_tokens / self.seconds if self.seconds else None,
            peak_memory_gib=peak_memory_gib(self.plan.device),
            parameters=self.plan.parameters,
            flops_per_token=self.plan.flops_per_token,
            checkpoint=good.name if good else None,
            environment=environment(self.plan.device) | self.strategy.environment() | self.engine.environment(),
        )


def never() -> AbstractContextManager[Callable[[], bool]]:
    """In place of `interrupts`: no handlers, which only the main thread may install."""
    return nullcontext(lambda: False)


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that is True after SIGINT or SIGTERM. A second SIGINT raises KeyboardInterrupt."""
    came = threading.Event()

    def note(number: int, frame: Any) -> None:
        came.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
