"""The commands `angpt bench …`: parse, call, print."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro
from rich.console import Console
from rich.status import Status

from angpt.config import Device, Precision, Step
from angpt.errors import UserError
from angpt.present.tables import Table, show

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
ARCHITECTURES = ("gpt+", "ngpt", "angpt")


def train(
    cases: Annotated[tuple[str, ...], tyro.conf.Positional] = ("32M:1",),
    architectures: tuple[str, ...] = ARCHITECTURES,
    context: int = 2048,
    warmup: int | None = None,
    rounds: int = 12,
    steps: int = 5,
    device: Device = "auto",
    precision: Precision = "auto",
    compile: Literal["auto", "on", "off"] = "auto",
    profile: int = 0,
    out: Path | None = None,
) -> None:
    """The training step: time, ratio to the first architecture, MFU, memory, and its parts.

    All architectures of a case are in one process and take turns (A B C, C B A, B C A …), so that drift of the machine
    falls on all alike, and each comes after each. The work is that of `angpt train` with all sequences in one pass,
    without reading data, logging and evaluation.

    Args:
        cases: SIZE:SEQUENCES, one or more, such as 0.5B:8 32M:32.
        architectures: What to measure; the first is what the others are compared with.
        context: Tokens per sequence.
        warmup: Steps of each before any is timed; 3, but 40 on a GPU, where step times of the first seconds are not
            those of the rest, because clocks settle and weights leave their start.
        rounds: How many turns each architecture gets; six, or a multiple, give three every order equally often.
        steps: Steps in a turn.
        device: Where to run; the GPU if there is one.
        precision: Of matrix products; bf16 on a GPU.
        compile: Whether blocks are compiled; on a GPU they are.
        profile: Also show that many kernels that take most of a step.
        out: Also write the results as JSON.
    """
    from angpt.bench.measure import positive
    from angpt.bench.train import Case, bench_train, tables
    from angpt.models.variants import architecture
    from angpt.training.hardware import bandwidth, peak_flops

    positive(warmup=1 if warmup is None else warmup, rounds=rounds, steps=steps, context=context)
    for name in architectures:
        architecture(name)
    chosen = [Case.parse(text) for text in cases]
    console, where = _start(device)
    dtype = _dtype(precision, where)
    if warmup is None:
        warmup = 40 if where.type == "cuda" else 3
    console.print(
        f"a large matrix product: {peak_flops(where, dtype) / 1e12:,.1f} TFLOP/s; "
        f"a copy: {bandwidth(where) / 1e12:.2f} TB/s",
        highlight=False,
    )
    compiled = where.type == "cuda" if compile == "auto" else compile == "on"
    options = (architectures, context, where, dtype, compiled, warmup, rounds, steps, profile)
    measures = {f"{case.size}, {case.rows} sequences": partial(bench_train, case, *options) for case in chosen}
    _measure(console, where, out, measures, tables)
    console.print(
        "Parts are timed apart, and without a CUDA graph; constraint is what it adds to the optimizer. MFU is of the\n"
        "matrix product above, with six FLOPs per matrix entry and token, causal attention at half.",
        highlight=False,
    )


def optimizer(
    size: str = "32M",
    architectures: tuple[str, ...] = ARCHITECTURES,
    rounds: int = 10,
    device: Device = "auto",
    precision: Precision = "auto",
    out: Path | None = None,
) -> None:
    """One optimizer step with clipping and constraint: against PyTorch's own, and against the bytes that it must move.

    Args:
        size: Model size.
        architectures: Whose parameters and constraints.
        rounds: How many turns each of the two gets.
        device: Where to run; the GPU if there is one.
        precision: Of the copies that the model computes with; bf16 on a GPU.
        out: Also write the results as JSON.
    """
    from angpt.bench.measure import positive
    from angpt.bench.optimizer import bench_optimizer, tables

    positive(rounds=rounds)
    console, where = _start(device)
    dtype = _dtype(precision, where)
    _measure(console, where, out, {size: lambda _: bench_optimizer(size, architectures, where, dtype, rounds)}, tables)


def moments(
    case: Annotated[str, tyro.conf.Positional] = "32M:16",
    architectures: tuple[str, ...] = ARCHITECTURES,
    context: int = 2048,
    rounds: int = 10,
    device: Device = "auto",
    precision: Precision = "auto",
    out: Path | None = None,
) -> None:
    """What `--record-moments` adds to a training step, at the closest interval that a run uses.

    Args:
        case: SIZE:SEQUENCES, such as 32M:16.
        architectures: What to measure.
        context: Tokens per sequence.
        rounds: How many turns step and record get.
        device: Where to run; the GPU if there is one.
        precision: Of matrix products; bf16 on a GPU.
        out: Also write the results as JSON.
    """
    from angpt.bench.measure import positive
    from angpt.bench.moments import bench_moments, tables
    from angpt.bench.train import Case
    from angpt.config import ModelConfig

    positive(rounds=rounds, context=context)
    chosen = Case.parse(case)
    configs = [ModelConfig.size(chosen.size, architecture=name, context=context) for name in architectures]
    console, where = _start(device)
    options = (where, _dtype(precision, where), where.type == "cuda", rounds)
    _measure(console, where, out, {case: lambda _: bench_moments(configs, chosen.rows, *options)}, tables)


def data(
    path: Annotated[Path, tyro.conf.Positional],
    context: int = 2048,
    sequences: tuple[int, ...] = (8, 64, 512),
    rounds: int = 10,
    device: Device = "auto",
    out: Path | None = None,
) -> None:
    """Tokens per second from a prepared folder to the device.

    Args:
        path: A folder made by `angpt data prepare`.
        context: Tokens per sequence.
        sequences: Sequences per batch, one or more.
        rounds: How many times each is measured.
        device: Where batches go; the GPU if there is one.
        out: Also write the results as JSON.
    """
    from angpt.bench.data import bench_data, tables
    from angpt.bench.measure import positive

    positive(rounds=rounds, context=context, **{"sequences": min(sequences, default=0)})
    console, where = _start(device)
    measures = {str(path): lambda _: bench_data(path, context, sequences, where, rounds)}
    _measure(console, where, out, measures, tables)


def decode(
    size: str = "32M",
    architectures: tuple[str, ...] = ARCHITECTURES,
    batches: tuple[int, ...] = (1, 32),
    steps: tuple[Step, ...] = ("auto",),
    prompt: int = 128,
    tokens: int = 256,
    rounds: int = 5,
    transformers: bool = True,
    device: Device = "auto",
    precision: Precision = "auto",
    out: Path | None = None,
) -> None:
    """Writing tokens with folded models: time per token, ratio to the first architecture, and the floor that the bytes
    of weights and cache set; reading the prompt; and transformers' own `generate` on an export.

    All take turns (A B C, C B A, B C A …). Weights are random, which makes no difference to the time.

    Args:
        size: Model size.
        architectures: What to measure; the first is what the others are compared with.
        batches: Rows that are written at once, one or more numbers.
        steps: How a step is computed (see `angpt generate --help`), one or more to be compared.
        prompt: Tokens that are read before.
        tokens: Tokens that are written.
        rounds: How many turns each gets.
        transformers: Also measure transformers, where it is installed.
        device: Where to run; the GPU if there is one.
        precision: Of matrices and cache; bf16 on a GPU.
        out: Also write the results as JSON.
    """
    import importlib.util

    from angpt.bench.decode import bench_decode, tables
    from angpt.bench.measure import positive
    from angpt.models.variants import architecture
    from angpt.training.hardware import bandwidth

    positive(rounds=rounds, prompt=prompt, batches=min(batches, default=0), steps=len(steps))
    if tokens < 2:
        raise UserError(f"--tokens {tokens}: at least 2 are needed, since the first comes with the prompt")
    for name in architectures:
        architecture(name)
    reference = transformers and importlib.util.find_spec("transformers") is not None
    console, where = _start(device)
    dtype = _dtype(precision, where)
    console.print(f"a copy: {bandwidth(where) / 1e12:.2f} TB/s", highlight=False)
    if transformers and not reference:
        console.print("transformers is not installed: no reference", highlight=False)
    options = (steps, prompt, tokens, where, dtype, rounds, reference)
    measures = {f"{size}, {rows} rows": partial(bench_decode, size, architectures, rows, *options) for rows in batches}
    _measure(console, where, out, measures, tables)


def _start(device: Device) -> tuple[Console, "torch.device"]:
    """The console, which says what machine this is, and the device to measure on."""
    from angpt.training.hardware import choose_device, present
    from angpt.training.run import environment

    where, console = present(choose_device(device)), Console()
    found = environment(where)
    console.print(f"{found.get('gpu', found['cpu'])}, torch {found['torch']}, angpt {found['angpt']}", highlight=False)
    return console, where


def _measure(
    console: Console,
    device: "torch.device",
    out: Path | None,
    measures: Mapping[str, Callable[[Callable[[str], None]], list[T]]],
    tables: Callable[[list[T]], list[Table]],
) -> None:
    """Measure one case after the other, each with its name; show its tables, and write all results so far."""
    from angpt.bench.measure import write_json

    results: list[T] = []
    for name, measure in measures.items():
        with console.status(name) as status:
            found = measure(partial(_update, status, name))
        show(console, *tables(found))
        results += found
        write_json(out, device, results)


def _update(status: Status, name: str, text: str) -> None:
    status.update(f"{name}: {text}")


def _dtype(precision: Precision, device: "torch.device") -> "torch.dtype":
    import torch

    low = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if low else torch.float32
