"""The training loop, the same for every architecture: what differs lies in the model and its configuration.

The state of a run is its parameters, the optimizer's moments and the number of steps done. Everything else follows from
these: a run that is killed and resumed repeats, bit by bit on the CPU, what an undisturbed one does.
"""

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from angpt.data.loader import Batch, Loader, Prefetcher, document_numbers, end_of_text, validation_batches
from angpt.data.shards import TokenData
from angpt.errors import UserError
from angpt.models.decoder import Decoder
from angpt.models.variants import build
from angpt.training import checkpoint
from angpt.training.engine import Engine
from angpt.training.hardware import peak_flops, peak_memory_gib, synchronize
from angpt.training.layers import layer_scalars
from angpt.training.moments import MomentRecorder, default_interval
from angpt.training.plan import Plan
from angpt.training.reporter import Reporter
from angpt.training.run import MetricsWriter, NoMetrics, Run, Status, Summary, environment
from angpt.training.sinks import Sink, sinks_for
from angpt.training.strategy import Shard, Strategy

LAYER_TOKENS = 4096
"""Validation tokens over which the input norms of the layers are averaged, but never more than a batch has."""


class Diverged(Exception):
    """A loss or gradient that is not finite."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step:,}: the loss or the gradient is not finite")
        self.step = step


class Trainer:
    """Trains one run, from its start or from a checkpoint, to its end."""

    def __init__(
        self, plan: Plan, run: Run, train: TokenData, val: TokenData, reporter: Reporter, strategy: Strategy
    ) -> None:
        self.plan, self.config, self.run, self.reporter, self.strategy = plan, plan.config, run, reporter, strategy
        self.train_data, self.val_data = train, val
        torch.manual_seed(self.config.seed)  # seeds third-party code; this package draws nothing from it
        importing = threading.Thread(target=import_compiler, name="import", daemon=True)
        if plan.compile:
            importing.start()
        self.model: Decoder = build(self.config.model, self.config.seed)
        if plan.compile:
            importing.join()  # two threads must not import it at once: its modules import each other
            torch.compiler.reset()  # the compiler keeps eight versions of a block, and then none
        self.engine = Engine(
            self.model,
            self.config.optimizer,
            plan.dtype,
            plan.compile,
            recompute=self.config.recompute,
            strategy=strategy,
            wide_reduce=self.config.reduce == "fp32" or plan.micro_steps > 1,
        )
        self.step = 0
        self.seconds = self.compile_seconds = 0.0
        self.metrics_bytes = 0
        self.val_loss: float | None = None
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.moments: MomentRecorder | None = None
        if self.config.record_moments:
            every = default_interval(plan.steps)
            self.moments = MomentRecorder(self.engine.first_moments(), every, strategy.whole)

    def load(self, path: Path) -> None:
        """Take over the state of a checkpoint."""
        state = checkpoint.read_state(path, verify=False)
        expected = (self.config.model.architecture, self.train_data.fingerprint, self.train_data.tokenizer_fingerprint)
        found = (state.architecture, state.data_fingerprint, state.tokenizer_fingerprint)
        for what, ours, theirs in zip(("architecture", "data", "tokenizer"), expected, found, strict=True):
            if ours != theirs:
                raise UserError(f"{path}: the checkpoint belongs to another {what} ({theirs}; the run has {ours})")
        tensors = self.tensors()
        checkpoint.Reader(path).fill(tensors)
        torch.set_rng_state(tensors[checkpoint.RNG].rows)
        self.engine.optimizer.refresh()
        self.step, self.seconds, self.metrics_bytes = state.step, state.seconds, state.metrics_bytes
        self.val_loss = state.val_loss

    def tensors(self) -> dict[str, Shard]:
        """What this rank holds of the parameters, the state of the optimizer, and that of the random numbers."""
        rng = torch.get_rng_state()
        return self.engine.tensors() | {checkpoint.RNG: Shard(rng, tuple(rng.shape), 0, self.strategy.main)}

    def save(self) -> None:
        """Begin to write a checkpoint of the steps done, of which all replicas must have the same."""
        self.strategy.compare_replicas(self.engine.tensors())
        state = checkpoint.State(
            step=self.step,
            architecture=self.config.model.architecture,
            metrics_bytes=self.metrics.sync(),
            seconds=self.seconds,
            val_loss=self.val_loss,
            data_fingerprint=self.train_data.fingerprint,
            tokenizer_fingerprint=self.train_data.tokenizer_fingerprint,
            sha256={},
        )
        self.writer.save(self.tensors(), state)

    def train(self) -> Summary:
        """Run to the end, to an interrupt, or to divergence, and leave a summary of it."""
        self.metrics: MetricsWriter | NoMetrics = NoMetrics()
        self.sinks: list[Sink] = []
        if self.strategy.main:
            self.metrics = MetricsWriter(self.run.metrics, self.metrics_bytes)
            self.sinks = sinks_for(self.config, self.run.path, dataclasses.asdict(self.config), self.step)
        self.reporter.start(self.plan, self.step)
        status: Status = "finished"
        self.writer = checkpoint.Writer(self.strategy, self.run.checkpoints, self.config.keep_checkpoints)
        try:
            with interrupts() as interrupted, self.writer:
                try:
                    if not self.loop(interrupted):
                        status = "interrupted"
                except Diverged as error:
                    status, self.step = "diverged", error.step
        except OSError as error:
            raise UserError(f"{self.run.path}: {error}; fix that and go on with --resume") from error
        finally:
            self.reporter.stop()
            self.metrics.close()
            for sink in self.sinks:
                sink.close()
        summary = self.strategy.share(lambda: self.summary(status))
        if self.strategy.main:
            self.run.write_summary(summary)
        return summary

    def loop(self, interrupted: Callable[[], bool]) -> bool:
        """All steps that are left; False if interrupted before the last."""
        plan, config = self.plan, self.config
        self.strategy.compare_replicas(self.engine.tensors())
        loader = Loader(self.train_data, config.model.context, plan.sequences, config.seed)
        self.peak = peak_flops(plan.device, plan.dtype)
        self.layer_tokens = self.layer_windows()
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
                if self.moments is not None:
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
                    self.mark = time.perf_counter(), self.step  # not the steps' own time
        return True

    def prefetch(self, loader: Loader) -> Prefetcher:
        """This rank's part of the batches from the next step on."""
        rank, size, documents = self.strategy.rank, self.strategy.size, self.config.data.mask_documents
        return Prefetcher(loader, self.step, self.plan.device, rank=rank, world=size, documents=documents)

    def agreed(self, interrupted: Callable[[], bool]) -> bool:
        """True if the run stops after this step; ranks ask each other only when they look at the losses."""
        return self.strategy.agree_to_stop(interrupted(), now=self.step % self.config.log_every == 0)

    def train_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One optimizer step over the whole batch; its mean loss and the norm of its gradient, still on the device."""
        loss = self.engine.backward(batch, self.plan.micro_batch)
        return loss, self.engine.step(self.step + 1, self.plan.lr(self.step))

    def compile_ahead(self, loader: Loader) -> None:
        """Compile on the first batch before the clock starts; its gradients are thrown away."""
        if not self.plan.compile and self.plan.device.type == "cpu":
            return
        start = time.perf_counter()
        with self.prefetch(loader) as batches:
            batch = next(batches)
        self.engine.backward(batch, self.plan.micro_batch)
        self.engine.optimizer.zero_grad()
        if self.engine.launch_bound(first := batch.rows(0, self.plan.micro_batch)):
            self.engine.record(first)
        self.engine.optimizer.compile_kernels(gathered=self.plan.micro_steps > 1)
        synchronize(self.plan.device)
        self.compile_seconds = time.perf_counter() - start

    def flush(self) -> None:
        """Read the losses that are still on the device, write them down, and stop at one that is not finite."""
        if not self.pending:
            return
        losses = (self.strategy.sum(torch.stack([loss for _, loss, _ in self.pending])) / self.strategy.size).tolist()
        norms = torch.stack([norm for _, _, norm in self.pending]).tolist()
        now, (before, first) = time.perf_counter(), self.mark
        self.seconds += now - before
        tokens_per_s = (self.step - first) * self.plan.batch_tokens / (now - before)
        self.mark = now, self.step
        for (step, _, _), loss, norm in zip(self.pending, losses, norms, strict=True):
            self.write(
                "train",
                step,
                loss=loss,
                lr=self.plan.lr(step - 1),
                grad_norm=norm,
                tokens_per_s=tokens_per_s,
                mfu=tokens_per_s * self.plan.flops_per_token / (self.peak * self.strategy.size),
                seconds=self.seconds,
            )
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.metrics.sync()
                raise Diverged(step)
        for step, variances in self.moments.drain() if self.moments is not None else ():
            self.write("moments", step, **variances)
        self.metrics.flush()
        self.pending.clear()
        self.reporter.train(self.step, losses[-1], tokens_per_s)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean loss over `eval_tokens` of the validation split, the same ones each time."""
        total, rows = torch.zeros((), device=self.plan.device, dtype=torch.float64), 0
        for tokens, counted in self.validation_windows():
            self.strategy.beat(self.step)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            documents = (
                document_numbers(inputs, end_of_text(self.val_data)) if self.config.data.mask_documents else None
            )
            batch = Batch(inputs, targets, documents).padded(self.plan.micro_batch if self.plan.compile else 0)
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
        """(micro_batch, context + 1) tokens each, the last perhaps fewer. Ranks take turns, and all have as many,
        because they compute together; False comes with one that another rank counts."""
        context, rank = self.config.model.context, self.strategy.rank
        windows = max(1, self.config.eval_tokens // context)
        batches = validation_batches(self.val_data, context, self.plan.micro_batch, windows)
        while turn := list(islice(batches, self.strategy.size)):
            tokens = turn[rank] if rank < len(turn) else turn[0]
            yield torch.from_numpy(tokens).to(self.plan.device), rank < len(turn)

    def layer_windows(self) -> Tensor:
        context = self.config.model.context
        count = max(1, min(LAYER_TOKENS, self.plan.batch_tokens) // context)
        windows = next(validation_batches(self.val_data, context, count, count))
        return torch.from_numpy(windows[:, :-1]).to(self.plan.device)

    def record_layers(self) -> None:
        reduced = self.plan.dtype != torch.float32
        with torch.autocast(self.plan.device.type, self.plan.dtype, enabled=reduced):
            self.write("layers", self.step, **layer_scalars(self.model, self.layer_tokens, self.strategy))

    def write(self, kind: str, step: int, **values: Any) -> None:
        record = {"kind": kind, "step": step, "tokens": step * self.plan.batch_tokens, **values}
        self.metrics.write(record)
        for sink in self.sinks:
            sink.write(record)

    def summary(self, status: Status) -> Summary:
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


def import_compiler() -> None:
    """What compiling needs takes seconds to import; weights are drawn meanwhile, which does not need Python."""
    import torch._inductor.compile_fx  # noqa: F401


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM has come. The first lets the step finish; a second SIGINT stops at once."""
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
