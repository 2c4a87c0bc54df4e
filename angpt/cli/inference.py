"""The commands `angpt fold`, `generate`, `export hf` and `import hf`: call the library and print."""

import io
import sys
import warnings
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from angpt.config import Device, Precision, Step, Weights
from angpt.errors import UserError
from angpt.inference.sampling import Sampling
from angpt.present.tables import Table, show
from angpt.present.terminal import terminal

if TYPE_CHECKING:
    from angpt.models.design import Design
    from angpt.models.folded import Folded

DEFAULT_TOKENS = 200


def fold_command(
    model: Annotated[Path | None, tyro.conf.Positional] = None,
    out: Path | None = None,
    weights: Weights = "full",
    table: bool = False,
) -> None:
    """Fold a trained model for inference: multiply constants, learned scales and α into the weights.

    Args:
        model: A run folder or an export.
        out: New folder; unless given, the name of the model with -folded, or with -fp8 or -int8.
        weights: Matrices as they were trained (full), or with 8 bits and a scale per row (fp8, int8): half the memory
            of bf16.
        table: Only print the operations of a folded layer of every architecture and variant.
    """
    from angpt.inference import store
    from angpt.inference.fold import fold
    from angpt.inference.quantize import quantize
    from angpt.inference.source import open_source

    console = terminal()
    if table:
        show(console, operations_table(all_designs()))
        return
    if model is None:
        raise UserError("which model? Give a run folder or an export, or --table")
    source = open_source(model)
    folded = fold(source.decoder())
    if weights != "full":
        folded = quantize(folded, weights)
    folder = out or beside(model, "folded" if weights == "full" else weights)
    store.save(folder, folded, source.path, source.sha256(), source.training, source.tokenizer_path)
    warn_without_tokenizer(model, folder)
    show(console, operations_table({source.cfg.architecture: folded.design}))
    console.print(f"{folder}: folded; try: angpt generate {folder}")


def warn_without_tokenizer(model: Path, folder: Path) -> None:
    """Tell that a new folder has no tokenizer, before somebody needs it."""
    if not (folder / "tokenizer.json").exists():
        warnings.warn(
            f"{folder}: has no tokenizer.json, because none was found in {model} or, from the current folder, in "
            "its folder of data; copy it there to generate text",
            stacklevel=2,
        )


def beside(model: Path, ending: str) -> Path:
    """The folder beside that of a model, with its name and an ending."""
    if model.name in ("", ".."):  # . and .. have no name
        model = model.resolve()
    return model.with_name(f"{model.name}-{ending}")


def all_designs() -> "dict[str, Design]":
    """The designs of all architectures and variants."""
    import torch

    from angpt.config import ModelConfig
    from angpt.models.variants import ARCHITECTURES, build

    small = {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 8, "context": 8}
    with torch.device("cpu"):
        return {name: build(ModelConfig(architecture=name, **small)).design() for name in ARCHITECTURES}


def operations_table(designs: "dict[str, Design]") -> Table:
    """A table of the operations of a folded layer, with a row per design."""
    from angpt.inference.fold import operations

    rows = [(name, *map(str, astuple(operations(design)))) for name, design in designs.items()]
    columns = ("architecture", "residual update", "norms", "vectors", "tanh", "at head")
    return Table(columns, rows, "A folded layer: 4 matrices, rotation, attention, SiLU, and", left=(0, 1))


def generate_command(
    model: Annotated[Path, tyro.conf.Positional],
    prompts: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    tokens: int | None = None,
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling(),  # noqa: B008
    stop: tuple[str, ...] = (),
    seed: int = 0,
    sliding: bool = False,
    device: Device = "auto",
    precision: Precision = "auto",
    step: Step = "auto",
) -> None:
    """Generate text from a trained model, and print it as it is generated.

    Args:
        model: A run folder, a folded model or an export.
        prompts: Texts to continue, as one batch; the beginning of a document unless given.
        tokens: Largest number of new tokens; 200, or as many as fit the model's context, unless given.
        sampling: How the next token is chosen. The filters apply in this order.
        stop: Strings that end the text; they are not part of it.
        seed: Seed of the first prompt; each further prompt has the next seed.
        sliding: Exceed the model's context; each token attends to as many before it as fit.
        device: cpu, cuda, or auto: cuda if there is a GPU.
        precision: Precision of the matrices: fp32, bf16, or auto: bf16 on a GPU.
        step: How a token is computed: plain operations, hand-written kernels (in bf16 on a GPU), or compiled (a minute
            before the first token, then faster than plain). auto: kernels where they support the model, all but DyT and
            unusual head sizes, otherwise plain.
    """
    from angpt.data.tokenizers import end_token
    from angpt.inference.generate import encode, generate_text
    from angpt.inference.source import open_source

    source = open_source(model)
    tokenizer = source.tokenizer()
    end = end_token(tokenizer)
    texts = prompts or ("",)
    if tokens is None:
        longest = max(len(encode(tokenizer, text, end)) for text in texts)
        tokens = DEFAULT_TOKENS if sliding else max(1, min(DEFAULT_TOKENS, source.cfg.context + 1 - longest))
    folded = place(source.folded(), device, precision)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may generate what the terminal cannot show
    pieces = iter(texts)  # a single prompt is printed with its first piece, when nothing can fail any more

    def emit(row: int, piece: str) -> None:
        print(next(pieces, ""), piece, sep="", end="", flush=True)

    try:
        made = generate_text(
            folded, tokenizer, texts, tokens, sampling, seed=seed, end=end, stop=stop, sliding=sliding, step=step,
            emit=emit if len(texts) == 1 else None,
        )  # fmt: skip
    except UserError as error:
        message = str(error).replace("sliding=True", "--sliding").replace("step='auto'", "--step auto")
        raise UserError(message) from error
    if len(texts) == 1:
        emit(0, "\n")
        return
    numbered = enumerate(zip(texts, made, strict=True), start=1)
    print("\n".join(f"[{number}] {text}{new.text}\n" for number, (text, new) in numbered), end="")


def export_hf(model: Annotated[Path, tyro.conf.Positional], out: Path | None = None, engine: bool = False) -> None:
    """Export a trained model for Hugging Face transformers, which loads it with trust_remote_code=True.

    The model card has the results of `angpt eval` for these weights.

    Args:
        model: A run folder, or an export that was trained further.
        out: New folder; the name of the model with -hf, or with -engine, unless given.
        engine: For engines that run transformers' models and compute logits as one product, such as vLLM: s_z is
            multiplied into the head, so that the folder cannot be imported again.
    """
    from angpt import api

    folder = api.export(model, out or beside(model, "engine" if engine else "hf"), engine=engine)
    warn_without_tokenizer(model, folder)
    terminal().print(f"{folder}: exported")


def import_hf(model: Annotated[Path, tyro.conf.Positional], out: Path) -> None:
    """Turn an export into a run folder again, with the same weights byte for byte.

    Args:
        model: A folder made by `angpt export hf`, or saved again by transformers.
        out: New run folder.
    """
    from angpt.inference.hf import import_run
    from angpt.inference.source import open_source

    import_run(open_source(model), out)
    terminal().print(f"{out}: imported; try: angpt generate {out}")


def place(model: "Folded", device: Device, precision: Precision) -> "Folded":
    """The model on the chosen device and in the chosen precision."""
    import torch

    from angpt.training.hardware import choose_device, present

    where = present(choose_device(device))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}
    chosen = precision if precision != "auto" else "bf16" if where.type == "cuda" else "fp32"
    return model.prepare(where, dtype[chosen])
