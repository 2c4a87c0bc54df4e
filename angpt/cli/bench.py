"""The commands `angpt bench …`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro
from rich.console import Console
from rich.text import Text
from tyro.conf import arg

from angpt.config import Device, Precision, Step, TrainConfig, TrainPrecision, Weights
from angpt.errors import UserError
from angpt.present.tables import Table, show
from angpt.present.terminal import terminal

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
ARCHITECTURES = ("gpt+", "ngpt", "angpt")
# Options of several commands.
Architectures = Annotated[
    tuple[str, ...],
    arg(help="Architectures to measure, the first is the baseline; angpt:muon is anGPT trained by Muon."),
]
Context = Annotated[int, arg(help="Tokens per sequence.")]
Rounds = Annotated[int, arg(help="Rounds; each measures everything once.")]
On = Annotated[Device, arg(help="Where to run; the GPU if there is one.")]
In = Annotated[Precision, arg(help="Precision of matrix products; bf16 on a GPU.")]
Out = Annotated[Path | None, arg(help="Also write the results as JSON.")]


def train(
    cases: Annotated[tuple[str, ...], tyro.conf.Positional] = ("32M:1",),
    architectures: Architectures = ARCHITECTURES,
    context: Context = 2048,
    warmup: int | None = None,
    rounds: Rounds = 12,
    steps: int = 5,
    device: On = "auto",
    precision: tuple[TrainPrecision, ...] = ("auto",),
    compile: Literal["auto", "on", "off"] = "auto",
    profile: int = 0,
    out: Out = None,
) -> None:
    """The training step: time, ratio to the baseline, MFU, memory, and its parts.

    All architectures of a case run in one process and take turns (A B C, C B A, B C A …), so that drift of the machine
    affects all equally; a multiple of six rounds gives three architectures every order equally often. A step is that of
    `angpt train` without reading data, logging and evaluation.

    Args:
        cases: SIZE:SEQUENCES, in one pass, or SIZE:SEQUENCES/SEQUENCES PER PASS; one or more, such as 32M:32
            0.5B:128/16.
        warmup: Steps of each architecture before the first measurement; 3, but 40 on a GPU, whose clocks take seconds
            to settle.
        steps: Steps in a round.
        precision: Precision of matrix products, bf16 on a GPU; several, such as bf16 fp8, take turns too.
        compile: Compile the blocks; auto does so on a GPU.
        profile: Also show this many kernels that take most of a step.
    """
    from angpt.bench.train import Case, bench_train, tables
    from angpt.fast.precision import stream_dtype
    from angpt.training.hardware import check_precision
    from angpt.training.plan import DTYPES

    chosen = [Case.parse(text) for text in cases]
    if not chosen:
        raise UserError("name at least one case, such as 32M:1")
    if profile < 0:
        raise UserError(f"--profile {profile}: must be 0 or more")
    least = {"warmup": 1 if warmup is None else warmup, "rounds": rounds, "steps": steps, "context": context}
    if not precision:
        raise UserError("--precision: name at least one")
    console, where, auto = _start(device, "auto", architectures, **least)
    if warmup is None:
        warmup = 40 if where.type == "cuda" else 3
    dtypes = {name: auto if name == "auto" else DTYPES[name] for name in precision}
    for name in dtypes:
        check_precision(where, name)
    subjects = {
        recipe if len(dtypes) == 1 else f"{recipe} {name}": (recipe, dtype)
        for recipe in architectures
        for name, dtype in dtypes.items()
    }
    _print_rates(console, where, stream_dtype(dtypes[precision[0]]))
    compiled = where.type == "cuda" if compile == "auto" else compile == "on"
    options = (subjects, context, where, compiled, warmup, rounds, steps, profile)
    measures = {f"{case.size}, {case.rows} sequences": partial(bench_train, case, *options) for case in chosen}
    _measure(console, where, out, measures, tables)
    console.print(
        "Parts are timed separately, without a CUDA graph; constraint is what it adds to the optimizer. MFU is\n"
        "relative to the matrix product above, with six FLOPs per matrix entry and token, causal attention at half.",
    )


def optimizer(
    size: str = "32M",
    architectures: Architectures = (*ARCHITECTURES, "gpt+:muon", "ngpt:muon", "angpt:muon"),
    rounds: Rounds = 10,
    device: On = "auto",
    precision: In = "auto",
    out: Out = None,
) -> None:
    """One step of Adam or Muon with clipping and constraint, compared with PyTorch's and with a lower bound: the bytes
    that it must move, and the matrix products of Muon.

    Args:
        size: Model size.
    """
    from angpt.bench.optimizer import bench_optimizer, tables

    console, where, dtype = _start(device, precision, architectures, rounds=rounds)
    _print_rates(console, where, dtype)
    _measure(console, where, out, {size: lambda _: bench_optimizer(size, architectures, where, dtype, rounds)}, tables)


def moments(
    case: Annotated[str, tyro.conf.Positional] = "32M:16",
    architectures: Architectures = ARCHITECTURES,
    context: Context = 2048,
    rounds: Rounds = 10,
    device: On = "auto",
    precision: In = "auto",
    out: Out = None,
) -> None:
    """Time that `--record-moments` adds to a training step, at the shortest interval between records.

    Args:
        case: SIZE:SEQUENCES, such as 32M:16.
    """
    from angpt.bench.moments import bench_moments, tables
    from angpt.bench.train import Case

    chosen = Case.parse(case)
    console, where, dtype = _start(device, precision, architectures, rounds=rounds, context=context)
    options = (architectures, chosen, context, where, dtype, rounds)
    _measure(console, where, out, {case: lambda _: bench_moments(*options)}, tables)


def data(
    path: Annotated[Path, tyro.conf.Positional],
    context: Context = 2048,
    sequences: tuple[int, ...] = (8, 64, 512),
    rounds: Rounds = 10,
    device: On = "auto",
    out: Out = None,
) -> None:
    """Tokens per second from a prepared folder to the device.

    Args:
        path: A folder made by `angpt data prepare`.
        sequences: Sequences per batch, one or more numbers.
    """
    from angpt.bench.data import bench_data, tables

    console, where, _ = _start(device, rounds=rounds, context=context, sequences=min(sequences, default=0))
    _measure(console, where, out, {str(path): lambda _: bench_data(path, context, sequences, where, rounds)}, tables)


def decode(
    size: str = "32M",
    architectures: Annotated[
        tuple[str, ...], arg(help="Architectures to measure, the first is the baseline.")
    ] = ARCHITECTURES,
    batches: tuple[int, ...] | None = None,
    prompts: tuple[int, ...] | None = None,
    weights: tuple[Weights, ...] = ("full",),
    steps: tuple[Step, ...] = ("auto",),
    tokens: int = 128,
    rounds: Rounds = 5,
    transformers: bool = True,
    device: On = "auto",
    precision: In = "auto",
    out: Out = None,
) -> None:
    """Decoding with folded models, in one table: time per token, ratio to the baseline, and the lower bound that
    reading weights and cache sets; time of the prompt, and the lower bound that its operations set; and transformers'
    own `generate` on an export of the last architecture, with a static cache and, on a GPU, compiled.

    All take turns (A B C, C B A, B C A …). Weights are random, which does not affect the time.

    Args:
        size: Model size.
        batches: Rows that are decoded together, one or more numbers; 1 8 32 128 on a GPU and 1 8 on the CPU unless
            given.
        prompts: Tokens of the prompt, one or more numbers; 128 2048 on a GPU and 128 on the CPU unless given.
        weights: Format of the matrices (see `angpt fold --help`), one or more, full first.
        steps: How a step is computed (see `angpt generate --help`), one or more.
        tokens: Tokens to generate.
        transformers: Also measure transformers, if it is installed.
    """
    import importlib.util

    from angpt.bench.decode import Models, bench_decode, kinds_of, tables

    if tokens < 2:
        raise UserError(f"--tokens {tokens}: at least 2 are needed, since the prefill gives the first")
    least = {"rounds": rounds, "steps": len(steps), "weights": len(weights)}
    given = {"batches": batches, "prompts": prompts}
    least |= {name: min(values, default=0) for name, values in given.items() if values is not None}
    for name in architectures:
        if ":" in name:
            raise UserError(f"--architectures {name}: decoding does not depend on the optimizer; leave out :muon")
    kinds = kinds_of(architectures, weights, steps)
    console, where, dtype = _start(device, precision, architectures, **least)
    on_gpu = where.type == "cuda"
    batches = batches or ((1, 8, 32, 128) if on_gpu else (1, 8))
    prompts = prompts or ((128, 2048) if on_gpu else (128,))
    reference = transformers and importlib.util.find_spec("transformers") is not None
    _print_rates(console, where, dtype)
    if transformers and not reference:
        console.print("transformers is not installed: no reference")
    with console.status("building and folding"):
        models = Models(size, kinds, max(prompts) + tokens, where, dtype, reference)
    measures = {
        f"{rows} rows after {prompt} tokens": partial(bench_decode, models, rows, prompt, tokens, rounds)
        for prompt in prompts
        for rows in batches
    }
    _measure(console, where, out, measures, tables, together=True)


def _start(
    device: Device, precision: Precision = "auto", architectures: Sequence[str] | None = None, **least: int
) -> tuple[Console, "torch.device", "torch.dtype"]:
    """Check the options (those of `least` must be at least 1), and print the machine."""
    import torch

    from angpt.models.variants import architecture
    from angpt.training.hardware import choose_device, present
    from angpt.training.run import environment

    for option, value in least.items():
        if value < 1:
            raise UserError(f"--{option} {value}: must be at least 1")
    if architectures is not None and not architectures:
        raise UserError("--architectures: name at least one")
    for name in architectures or ():
        architecture(TrainConfig().with_recipe(name).model.architecture)
    where, console = present(choose_device(device)), terminal()
    found = environment(where)
    console.print(f"{found.get('gpu', found['cpu'])}, torch {found['torch']}, angpt {found['angpt']}")
    low = precision == "bf16" or (precision == "auto" and where.type == "cuda")
    return console, where, torch.bfloat16 if low else torch.float32


def _print_rates(console: Console, device: "torch.device", dtype: "torch.dtype") -> None:
    """Print what the device reaches in the best case."""
    from angpt.training.hardware import bandwidth, peak_flops

    unit, size, digits = ("T", 1e12, (1, 2)) if device.type == "cuda" else ("G", 1e9, (0, 0))
    product, copied = peak_flops(device, dtype) / size, bandwidth(device) / size
    console.print(
        f"a large matrix product: {product:,.{digits[0]}f} {unit}FLOP/s; a copy: {copied:,.{digits[1]}f} {unit}B/s"
    )


def _measure(
    console: Console,
    device: "torch.device",
    out: Path | None,
    measures: Mapping[str, Callable[[Callable[[str], None]], list[T]]],
    tables: Callable[[list[T]], list[Table]],
    together: bool = False,
) -> None:
    """Measure one case after the other; show its tables, and write all results so far. `together`: show the tables of
    all cases at the end."""
    from angpt.bench.measure import write_json

    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"--out {out}: name a file in a folder that exists")
    results: list[T] = []
    for name, measure in measures.items():
        with console.status(Text(name)) as status:
            found = measure(lambda text, status=status, name=name: status.update(Text(f"{name}: {text}")))  # type: ignore[misc]
        results += found
        write_json(out, device, results)
        if not together:
            show(console, *tables(found))
    if together:
        show(console, *tables(results))
