"""`angpt bench train`: training steps of several architectures, measured in turns in one process."""

import copy
import dataclasses
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from angpt.bench.measure import between, in_turns, median, ratio, timed
from angpt.config import ModelConfig, Recipe, TrainConfig, size_name
from angpt.data.loader import Batch
from angpt.errors import UserError
from angpt.fast.precision import stream_dtype
from angpt.models.variants import build
from angpt.optim.optimizer import total_norm
from angpt.present.tables import Table
from angpt.stats import Interval
from angpt.training.engine import Engine, attention_backends
from angpt.training.hardware import peak_flops, peak_memory_gib, synchronize

PARTS = ("forward", "backward", "clip", "optimizer", "constraint")
LR = 1e-3
MUON_LR = 0.03
"""Muon's rate, with which a row turns per step about as far as with LR and Adam: weights that hardly move from their
initial values would make products slower (docs/performance.md)."""
BATCHES = 32
"""Number of different batches."""
GROUPS = {
    "attention": r"cudnn|flash|fmha|aten::_?scaled_dot",  # before products: some attention kernels use CUTLASS
    "matrix products": r"nvjet|gemm|cublas|cutlass|aten::(add|b)?mm",
    "SwiGLU": r"^_swiglu",
    "conversion to 8 bits": r"^_quantize",
    "norm of rotated q and k": r"^_heads",
    "residual update, gradient of norms": r"^_(update|rms)",
    "scaled rows": r"^_scale_rows",
    "cross-entropy": r"^_(cross_entropy|multiply)",
    "optimizer": r"^_(step_rows|step_columns|squares|momentum|symmetric)|multi_tensor",
    "compiled": r"^triton_",
}
"""Patterns of kernel names by purpose; the first match counts, the rest is other."""


@dataclass(frozen=True)
class Case:
    """A model size, and the number of sequences per step and per forward pass."""

    size: str
    rows: int
    pass_rows: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        match = re.fullmatch(r"([^:]+):([0-9]{1,9})(?:/([0-9]{1,9}))?", text)
        size, rows, pass_rows = (match[1], int(match[2]), int(match[3] or match[2])) if match else (text, 0, 1)
        if match is None or not pass_rows or not rows or rows % pass_rows:
            raise UserError(
                f"{text!r}: a case is SIZE:SEQUENCES, such as 0.5B:8, or SIZE:SEQUENCES/SEQUENCES PER PASS, such as "
                "0.5B:128/16"
            )
        return cls(size_name(size), rows, pass_rows)


@dataclass(frozen=True)
class Result:
    """Measurements of one recipe in one case."""

    architecture: str
    """The recipe; followed by its precision if several were measured."""
    size: str
    rows: int
    passes: int
    """Forward passes per step."""
    context: int
    step_ms: Interval
    ratio: Interval
    """Step time relative to the baseline."""
    tokens_per_s: float
    mfu: float
    """Model FLOPs utilization, relative to the measured rate of a large matrix product."""
    memory_gib: float
    """Peak memory of this model and its step, without a CUDA graph; on the CPU that of the whole process."""
    graph: bool
    """True if a pass is a CUDA graph (`fast.graphs`)."""
    rounds_ms: list[float]
    """Milliseconds per step of each round."""
    first_step_s: float
    """Seconds from building the model to the end of its first step."""
    parts_ms: dict[str, float]
    """Time of each part, measured separately and without a CUDA graph; forward and backward are those of one pass,
    `constraint` is what it adds to `optimizer`."""
    kernels: list[tuple[str, int, float]]
    """Name, calls per step and milliseconds per step of the longest kernels, if profiled."""
    groups_ms: dict[str, float]
    """Milliseconds per step of the kernels in each of `GROUPS`."""


class TrainingModel:
    """A model in training on random tokens with the frequencies of words, different in each step: the speed of a GPU at
    its power limit depends on the numbers that it multiplies."""

    def __init__(
        self, recipe: Recipe, case: Case, context: int, device: torch.device, dtype: torch.dtype, compiled: bool
    ) -> None:
        start = time.perf_counter()
        train = TrainConfig(model=ModelConfig.size(case.size, context=context)).with_recipe(recipe)
        config, rows = train.model, case.rows
        with device:  # weights need not equal those drawn on the CPU
            model = build(config)
        by_muon = train.optimizer.name == "muon"
        self.lr, adam_lr = (MUON_LR, LR) if by_muon else (LR, None)
        optimizer = dataclasses.replace(train.optimizer, weight_decay=0.0, lr=self.lr, adam_lr=adam_lr)
        self.engine = Engine(model, optimizer, dtype, compiled)
        frequencies = 1 / torch.arange(1.0, config.vocab_size + 1, device=device)
        tokens = torch.multinomial(frequencies, BATCHES * rows * (config.context + 1), replacement=True)
        tokens = tokens.view(BATCHES, rows, config.context + 1)
        self.batches = [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous(), None) for x in tokens]
        self.case, self.device, self.number = case, device, 0
        self.step()
        synchronize(device)
        self.first_step_s = time.perf_counter() - start
        self.memory_gib = self.peak_gib()

    @property
    def batch(self) -> Batch:
        """The batch of the next step."""
        return self.batches[self.number % BATCHES]

    @property
    def pass_batch(self) -> Batch:
        """The part of it in one forward pass."""
        return self.batch.rows(0, self.case.pass_rows)

    def step(self) -> Tensor:
        self.engine.backward(self.batch, self.case.pass_rows)
        self.number += 1
        return self.engine.step(self.number, self.lr)

    def peak_gib(self) -> float:
        """Memory of parameters, copies and moments, and what a step adds, without other models in the process. On the
        CPU, the peak of the process."""
        if self.device.type != "cuda":
            return peak_memory_gib(self.device)
        gc.collect()  # compilation leaves reference cycles that hold tensors
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.step()
        step = torch.cuda.max_memory_allocated(self.device) - before
        states = ((s.weight, s.copy, s.exp_avg, s.exp_avg_sq) for s in self.engine.optimizer.states)
        return (step + sum(x.nbytes for state in states for x in state if x is not None)) / 2**30

    def parts(self, rounds: int) -> dict[str, float]:
        """Milliseconds of each part of a step."""
        seconds: dict[str, list[float]] = {name: [] for name in PARTS}
        optimizer = self.engine.optimizer
        free = copy.copy(optimizer)
        free.states = [dataclasses.replace(state, constraint=None) for state in optimizer.states]
        for i in range(rounds):
            with attention_backends():
                with timed(self.device, seconds["forward"]):
                    loss = self.engine.compute(*self.pass_batch)
                with timed(self.device, seconds["backward"]):
                    torch.autograd.backward(loss)
            del loss
            gradients = optimizer.gradients()
            with torch.no_grad():
                with timed(self.device, seconds["clip"]):
                    norm = total_norm(gradients)
                clip = (1 / norm).clamp(max=1.0)
                both = [("constraint", free), ("optimizer", optimizer)]
                for name, which in both if i % 2 else reversed(both):
                    with timed(self.device, seconds[name]):
                        which.update(gradients, clip, 1, self.lr)
            optimizer.zero_grad()
        found = {name: 1e3 * median(values).mean for name, values in seconds.items()}
        found["constraint"] = found["optimizer"] - found["constraint"]
        return found

    def profile(self, steps: int = 3) -> list[tuple[str, int, float]]:
        """Name, calls and milliseconds of the kernels (on the CPU: operations) of a step, the longest first."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
            for _ in range(steps):
                self.step()
            synchronize(self.device)
        rows = [
            (e.key, e.count // steps, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3 / steps)
            for e in found.key_averages()
        ]
        return sorted(rows, key=lambda row: -row[2])


def record_alike(subjects: Sequence[TrainingModel]) -> None:
    """Record a CUDA graph for all models if `angpt train` would for any; otherwise near the limit they would differ."""
    if any(subject.engine.launch_bound(subject.pass_batch) for subject in subjects):
        for subject in subjects:
            subject.engine.record(subject.pass_batch)


def grouped(kernels: Sequence[tuple[str, int, float]]) -> dict[str, float]:
    """Milliseconds of the kernels in each of GROUPS, in other, and of all."""
    found = dict.fromkeys((*GROUPS, "other"), 0.0) if kernels else {}
    for name, _, ms in kernels:
        found[next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "other")] += ms
    return found | ({"all": sum(found.values())} if found else {})


def bench_train(
    case: Case,
    recipes: Mapping[str, tuple[Recipe, torch.dtype]],
    context: int,
    device: torch.device,
    compiled: bool,
    warmup: int,
    rounds: int,
    steps: int,
    profile: int,
    progress: Callable[[str], None],
) -> list[Result]:
    """Measure all recipes, each with the dtype of its matrices, in one case; the first is the baseline."""
    torch.compiler.reset()  # the compiler gives up after eight versions of a block
    subjects: dict[str, TrainingModel] = {}
    for name, (recipe, dtype) in recipes.items():
        progress(f"{name}: building, compiling, first step")
        subjects[name] = TrainingModel(recipe, case, context, device, dtype, compiled)
    record_alike([*subjects.values()])
    progress(f"{warmup} steps to warm up")
    functions = {name: subject.step for name, subject in subjects.items()}
    in_turns(functions, device, rounds=1, calls=warmup)
    progress(f"{rounds} rounds of {steps} steps each")
    seconds = in_turns(functions, device, rounds, steps)
    progress("parts of a step")
    first, (_, dtype) = next(iter(recipes.items()))
    peak, tokens = peak_flops(device, stream_dtype(dtype)), case.rows * context
    results = []
    for name, subject in subjects.items():
        step = median(seconds[name])
        kernels = subject.profile() if profile else []
        flops = subject.engine.model.flops_per_token(context) * tokens
        results.append(
            Result(
                architecture=name,
                size=case.size,
                rows=case.rows,
                passes=case.rows // case.pass_rows,
                context=context,
                step_ms=step.times(1e3),
                ratio=ratio(seconds[name], seconds[first]),
                tokens_per_s=tokens / step.mean,
                mfu=flops / step.mean / peak,
                memory_gib=subject.memory_gib,
                graph=subject.engine.recorded is not None,
                rounds_ms=[1e3 * s for s in seconds[name]],
                first_step_s=subject.first_step_s,
                parts_ms=subject.parts(min(5, rounds)),
                kernels=kernels[:profile],
                groups_ms=grouped(kernels),
            )
        )
    return results


def tables(results: Sequence[Result]) -> list[Table]:
    first = results[0]
    steps = Table(
        ("", "ms/step", "quartiles", f"÷ {first.architecture}", "95 %", "tokens/s", "MFU %", "GiB", "first s"),
        [
            (
                r.architecture + (" (graph)" if r.graph else ""),
                *between(r.step_ms, ".2f"),
                *between(r.ratio, ".3f", ends=r.architecture != first.architecture),
                f"{r.tokens_per_s:,.0f}",
                f"{100 * r.mfu:.1f}",
                f"{r.memory_gib:.1f}",
                f"{r.first_step_s:.1f}",
            )
            for r in results
        ],
        f"{first.size}, {first.rows} × {first.context:,} tokens per step"
        + (f" in {first.passes} passes" if first.passes > 1 else ""),
    )
    rows = [(r.architecture, *(f"{r.parts_ms[name]:.2f}" for name in PARTS)) for r in results]
    title = "Parts of a step, ms" if first.passes == 1 else "Parts of a step, ms; forward and backward of one pass"
    found = [steps, Table(("", *PARTS), rows, title)]
    if first.kernels:
        shown = [group for group in first.groups_ms if any(r.groups_ms[group] > 0 for r in results)]
        rows = [(group, *(f"{r.groups_ms[group]:.2f}" for r in results)) for group in shown]
        found.append(Table(("", *(r.architecture for r in results)), rows, "Kernels of a step by purpose, ms"))
    for r in results if first.kernels else ():
        rows = [
            (f"{ms:.2f}", str(calls), name if len(name) <= 60 else name[:59] + "…") for name, calls, ms in r.kernels
        ]
        found.append(Table(("ms", "calls", "kernel"), rows, f"{r.architecture}: longest kernels of a step", left=(2,)))
    return found
