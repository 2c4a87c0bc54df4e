"""The commands `angpt fold`, `generate`, `export hf` and `import hf`: call the library and print."""

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from angpt.config import Device, Precision, Step
from angpt.errors import UserError
from angpt.inference.sampling import Sampling
from angpt.present.tables import show

if TYPE_CHECKING:
    from angpt.inference.folded import Folded
    from angpt.inference.graph import Graph
    from angpt.present.tables import Table

DEFAULT_TOKENS = 200


def fold_command(
    model: Annotated[Path | None, tyro.conf.Positional] = None, out: Path | None = None, table: bool = False
) -> None:
    """Fold a trained model for inference: constants, learned scales and α go into the weights, once.

    Args:
        model: A run folder or an export.
        out: The new folder; the name of the model with -folded unless given.
        table: Print what is left of a layer in every architecture and variant, and stop.
    """
    from angpt.inference import store
    from angpt.inference.fold import fold
    from angpt.inference.source import open_source

    console = Console()
    if table:
        show(console, operations_table(all_graphs()))
        return
    if model is None:
        raise UserError("which model? Give a run folder or an export (or --table)")
    source = open_source(model)
    folded = fold(source.decoder())
    folder = out or model.with_name(f"{model.name}-folded")
    store.save(folder, folded, source.path, source.sha256(), source.training, source.tokenizer_path)
    show(console, operations_table({source.cfg.architecture: folded.graph}))
    console.print(f"{folder}: folded; try: angpt generate {folder}", highlight=False, soft_wrap=True)


def all_graphs() -> "dict[str, Graph]":
    """Of every architecture and variant."""
    import torch

    from angpt.config import ModelConfig
    from angpt.inference.graph import read_graph
    from angpt.models.variants import ARCHITECTURES, build

    small = {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 8, "context": 8}
    with torch.device("cpu"):
        return {name: read_graph(build(ModelConfig(architecture=name, **small))) for name in ARCHITECTURES}


def operations_table(graphs: "dict[str, Graph]") -> "Table":
    """What is left of each layer."""
    from angpt.inference.graph import operations
    from angpt.present.tables import Table

    rows = []
    for name, graph in graphs.items():
        found = operations(graph)
        counts = (found.norms, found.vectors, found.tanh, found.norms_at_head)
        rows.append((name, found.residual, *map(str, counts)))
    columns = ("architecture", "residual update", "norms", "vectors", "tanh", "at head")
    return Table(columns, rows, "Left of a layer: 4 matrices, rotation, attention, SiLU, and", left=(0, 1))


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
    """Text from a trained model, as it comes.

    Args:
        model: A run folder, a folded model or an export.
        prompts: Texts to go on with, all at once where there are several; the beginning of a document unless given.
        tokens: At most this many new tokens; 200, or as many as fit the model's context, unless given.
        sampling: How the next token is chosen. The filters apply in this order.
        stop: End where one of these strings is written.
        seed: Of the first prompt; each further one has the next.
        sliding: Go beyond the model's context, each token seeing as many before it as fit.
        device: cpu, cuda, or auto: cuda where there is one.
        precision: Of the matrices: fp32, bf16, or auto: bf16 on a GPU.
        step: How a token is computed: plain operations, hand-written kernels (a few prompts on a GPU), or compiled (a
            minute before the first token, then faster than plain). auto: kernels where they apply, else plain.
    """
    from angpt.inference.generate import encode, generate_text
    from angpt.inference.source import end_token, open_source

    source = open_source(model)
    tokenizer = source.tokenizer()
    end = end_token(tokenizer)
    texts = prompts or ("",)
    if tokens is None:
        longest = max(len(encode(tokenizer, text, end)) for text in texts)
        tokens = DEFAULT_TOKENS if sliding else max(1, min(DEFAULT_TOKENS, source.cfg.context + 1 - longest))
    folded = place(source.folded(), device, precision)
    alone = len(texts) == 1

    begun = False
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal cannot show

    def write(row: int, piece: str) -> None:
        nonlocal begun
        sys.stdout.write(piece if begun or not alone else texts[0] + piece)
        sys.stdout.flush()
        begun = True

    made = generate_text(
        folded, tokenizer, texts, tokens, sampling, seed=seed, end=end, stop=stop, sliding=sliding, step=step,
        emit=write if alone else None,
    )  # fmt: skip
    if alone:
        write(0, "\n")
        return
    for number, (text, found) in enumerate(zip(texts, made, strict=True)):
        write(number, f"{'' if number == 0 else chr(10)}[{number + 1}] {text}{found.text}\n")


def export_hf(model: Annotated[Path, tyro.conf.Positional], out: Path | None = None) -> None:
    """Export a trained model for Hugging Face transformers, which loads it with trust_remote_code=True.

    Args:
        model: A run folder, or an export that was trained further.
        out: The new folder; the name of the model with -hf unless given.
    """
    from angpt.inference.hf import export
    from angpt.inference.source import open_source

    folder = out or model.with_name(f"{model.name}-hf")
    export(open_source(model), folder)
    Console().print(f"{folder}: exported", highlight=False, soft_wrap=True)


def import_hf(model: Annotated[Path, tyro.conf.Positional], out: Path) -> None:
    """Bring an export back as a run folder, with the same weights byte for byte.

    Args:
        model: A folder made by `angpt export hf`, also one that transformers saved again.
        out: The new run folder.
    """
    from angpt.inference.hf import import_run
    from angpt.inference.source import open_source

    import_run(open_source(model), out)
    Console().print(f"{out}: imported; try: angpt generate {out}", highlight=False, soft_wrap=True)


def place(model: "Folded", device: Device, precision: Precision) -> "Folded":
    """Bring a model to where it will run."""
    import torch

    from angpt.training.hardware import choose_device, present

    where = present(choose_device(device))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}
    chosen = precision if precision != "auto" else "bf16" if where.type == "cuda" else "fp32"
    return model.prepare(where, dtype[chosen])
