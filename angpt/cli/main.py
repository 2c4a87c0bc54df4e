"""The `angpt` command: one sub-command per verb. Each parses, calls the library and prints."""

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.extras import SubcommandApp

from angpt.cli import bench as benches
from angpt.cli.analysis import analyze
from angpt.cli.data import info, prepare
from angpt.cli.evaluation import evaluate
from angpt.cli.fits import hparams, scaling
from angpt.cli.inference import export_hf, fold_command, generate_command, import_hf
from angpt.cli.studies import compare_command, report, study_plan, study_run, study_status
from angpt.cli.train import train_command
from angpt.config import SIZES, ModelConfig
from angpt.errors import UserError
from angpt.present.tables import Table, show
from angpt.version import __version__

out = Console()
err = Console(stderr=True)

EXTRAS = {
    "report": ("scipy", "matplotlib", "jinja2"),
    "data": ("datasets", "pyarrow"),
    "eval": ("lm_eval", "transformers"),
    "slurm": ("submitit",),
}
"""Optional packages, by the extra that installs them."""

DESCRIPTION = f"""angpt {__version__}: train and compare GPT+, nGPT and anGPT, the approximately normalized transformer.

`angpt COMMAND --help` explains a command and all its options; `angpt --version` prints the version."""

MARKERS = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)
"""An option that may be left out shows its type alone, an argument its name."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. A user's mistake is one line on stderr and exit code 2, never a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    if args == ["--version"]:
        print(f"angpt {__version__}")
        return
    try:
        make_app(args).cli(prog="angpt", description=DESCRIPTION, args=args or ["--help"], config=MARKERS)
    except UserError as error:
        err.print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        extra = next((name for name, packages in EXTRAS.items() if error.name in packages), None)
        if extra is None:
            raise
        err.print(f"[bold red]error:[/] this needs {error.name}: pip install 'angpt\\[{extra}]'", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `angpt … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def models(
    architectures: Annotated[tuple[str, ...], tyro.conf.Positional] = ("gpt+", "ngpt", "angpt"),
    context: int = 2048,
    list_variants: bool = False,
) -> None:
    """Sizes and architectures: parameter counts and training FLOPs per token.

    Args:
        architectures: Which ones to show, variants included.
        context: Sequence length at which attention is counted.
        list_variants: List every architecture and variant with what it changes, and stop.
    """
    import torch

    from angpt.models.variants import ARCHITECTURES, build

    if list_variants:
        known = [(name, " ".join((cls.__doc__ or "").split())) for name, cls in ARCHITECTURES.items()]
        show(out, Table(("name", "what it is"), known, prose=True))
        return
    rows = []
    for size, dimensions in SIZES.items():
        cells = []
        for name in architectures:
            with torch.device("meta"):
                model = build(ModelConfig.size(size, architecture=name, context=context))
            cells.append(f"{model.parameter_count() / 1e6:,.2f}M {model.flops_per_token() / 1e9:.3f}")
        rows.append((size, *map(str, dimensions), *cells))
    title = f"Parameters, and training GFLOPs per token at a context of {context:,}"
    show(out, Table(("size", "d_m", "layers", "heads", *architectures), rows, title, left=()))


def factors(size: str = "0.5B", draws: int = 16, seed: int = 0, figure: Path | None = None) -> None:
    """The normalizing factors ν: formula, value, Monte-Carlo check, and whether they can change the function at all.

    Args:
        size: Model size whose dimensions to use.
        draws: Fresh weight matrices per estimate (with 512 inputs each).
        seed: Of the Monte-Carlo estimate.
        figure: Also draw how the length of a vector concentrates as the dimension grows, into this file.
    """
    from angpt.analysis.factor_report import draw_concentration, factor_tables

    if draws < 1:
        raise UserError(f"draws = {draws}: at least one is needed")
    if figure is not None and figure.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{figure}: a figure is a .png, .svg or .pdf file")
    show(out, *factor_tables(ModelConfig.size(size), draws, seed))
    if figure is not None:
        draw_concentration(figure, seed)
        out.print(f"figure: {figure}")


def make_app(args: Sequence[str]) -> SubcommandApp:
    """All commands, in the order of a project. What a command says of itself is in full where it is asked for, and its
    first paragraph in the list of all."""
    asked, app = args[0] if args else None, SubcommandApp()

    def single(name: str, command: Callable[..., None]) -> None:
        first = inspect.cleandoc(command.__doc__ or "").split("\n\n")[0]
        app.command(name=name, help=None if name == asked else first)(command)

    def several(name: str, text: str, **commands: Callable[..., None]) -> None:
        group = SubcommandApp()
        for inner, command in commands.items():
            group.command(name=inner)(command)
        app.command(group, name=name, help=text)

    several("data", "Text to tokens: prepare a folder to train from, look into one.", prepare=prepare, info=info)
    single("train", train_command(args if asked == "train" else []))
    single("compare", compare_command(args if asked == "compare" else []))
    text = "Grids of runs from a file: run them, see how far they are, what they would cost."
    several("study", text, run=study_run, status=study_status, plan=study_plan)
    text = "Laws from many runs: best batch size and learning rate over size, loss over compute."
    several("fit", text, hparams=hparams, scaling=scaling)
    single("report", report)
    single("analyze", analyze)
    single("eval", evaluate)
    single("generate", generate_command)
    single("fold", fold_command)
    several("export", "A model for other tools: hf, a folder for Hugging Face transformers.", hf=export_hf)
    several("import", "A model back from other tools: hf, from such a folder.", hf=import_hf)
    single("models", models)
    single("factors", factors)
    text = "How fast the parts are, each measured in turns and against its floor."
    names = ("train", "optimizer", "data", "decode", "moments")
    several("bench", text, **{name: getattr(benches, name) for name in names})
    return app
