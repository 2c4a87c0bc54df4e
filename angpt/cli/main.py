"""The `angpt` command: one sub-command per verb. Each parses, calls the library and prints."""

import contextlib
import inspect
import io
import os
import re
import select
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro
from rich.text import Text
from tyro.extras import SubcommandApp

from angpt.cli import bench as benches
from angpt.cli.analysis import analyze
from angpt.cli.data import info, prepare
from angpt.cli.evaluation import evaluate
from angpt.cli.fits import hparams, scaling
from angpt.cli.help import REGISTRY, bound
from angpt.cli.inference import export_hf, fold_command, generate_command, import_hf
from angpt.cli.serving import serve_command
from angpt.cli.studies import compare_command, report, study_plan, study_run, study_status
from angpt.cli.train import train_command
from angpt.config import SIZES, ModelConfig
from angpt.errors import UserError, explain, one_line
from angpt.present.tables import Table, show
from angpt.present.terminal import terminal
from angpt.version import __version__

EXTRAS = {
    "report": ("scipy", "matplotlib", "jinja2"),
    "data": ("datasets", "pyarrow"),
    "eval": ("lm_eval", "transformers"),
    "slurm": ("submitit",),
    "serve": ("aiohttp",),
}
"""Optional packages, by the extra that installs them."""

DESCRIPTION = f"""angpt {__version__}: train and compare GPT+, nGPT and anGPT, the approximately normalized transformer.

`angpt COMMAND --help` explains a command and all its options; `angpt --version` prints the version."""

MARKERS = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)
"""Help shows options without None among their values, and positional arguments by name."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. A mistake of the user, a full disk or too little memory is one line on stderr and exit
    code 2; ANGPT_DEBUG=1 in the environment shows the traceback instead."""
    args = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # its retries without a network; the error comes at the end
    warnings.formatwarning = lambda message, *_, **__: f"warning: {one_line(str(message))}\n"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold what the terminal cannot show
    try:
        if args == ["--version"]:
            print(f"angpt {__version__}")
        else:
            parse(args)()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError as error:
        if not _nobody_reads():
            _exit(f"{error}: another process has ended")
        _discard_output()
        sys.exit(1)  # `angpt … | head`; Rich ends in the same way
    except Exception as error:
        message = _missing_extra(error) if isinstance(error, ModuleNotFoundError) else explain(error)
        if message is None or os.environ.get("ANGPT_DEBUG") == "1":
            raise
        _exit(message)


def parse(args: Sequence[str]) -> Callable[[], None]:
    """The command that the arguments name, with its options bound. The parser's error becomes one line."""
    panel = io.StringIO()
    try:
        with contextlib.redirect_stderr(panel):
            options: dict[str, Any] = {"prog": "angpt", "description": DESCRIPTION, "config": MARKERS}
            options["registry"] = REGISTRY
            command: Callable[[], None] = make_app(args).cli(args=args or ["--help"], **options)
            return command
    except SystemExit as end:
        if end.code != 2:
            raise
        raise UserError(_parser_message(panel.getvalue())) from end


def _parser_message(panel: str) -> str:
    """The parser's error, a title and sections in a box, in one line."""
    lines = (line.strip(" │╭╮╰╯") for line in panel.splitlines())
    text = "\n".join(re.sub(r"^─ .* ─+$", "-----", line) for line in lines)
    _, problem, *rest = (
        " ".join(part.split()) for part in re.split("^[─-]{5,}$", f"{text}\n-----", flags=re.MULTILINE)
    )
    problem = problem.rstrip(".")
    for section in rest:
        if section.startswith("Perhaps you meant"):
            problem += f"; did you mean {' or '.join(dict.fromkeys(re.findall(r'--(?!help)[-a-z0-9.]+', section)))}?"
        elif section.startswith("Available subcommands"):
            problem += f"; {section}"
    return f"{problem} (see angpt --help)"


def _missing_extra(error: ModuleNotFoundError) -> str | None:
    extra = next((name for name, packages in EXTRAS.items() if error.name in packages), None)
    return None if extra is None else f"this needs {error.name}: pip install 'angpt[{extra}]'"


def _exit(message: str) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:  # the disk that the output goes to is full
        _discard_output()
    with contextlib.suppress(OSError, SystemExit):  # nobody reads it; Rich would exit with another code
        terminal(stderr=True).print(Text.assemble(("error:", "bold red"), " ", message))
        sys.stderr.flush()
    sys.exit(2)


def _open_streams() -> None:
    """Open standard streams that are closed (`angpt … >&-`): the next file would get their number, and their text."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout, sys.stderr = (
        os.fdopen(place, "w", closefd=False) if stream is None else stream
        for place, stream in enumerate((sys.stdout, sys.stderr), start=1)
    )


def _nobody_reads() -> bool:
    """True if standard output is a pipe whose reader is gone."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are always reported
    return any(event & select.POLLERR for _, event in output.poll(0))


def _discard_output() -> None:
    """Drop what standard output has not taken, or Python would try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def models(
    architectures: Annotated[tuple[str, ...], tyro.conf.Positional] = ("gpt+", "ngpt", "angpt"),
    context: int = 2048,
    list_variants: bool = False,
) -> None:
    """Sizes and architectures: parameter counts and training FLOPs per token.

    Args:
        architectures: Architectures or variants to show.
        context: Sequence length for the FLOPs of attention.
        list_variants: Only list every architecture and variant with what it changes.
    """
    import torch

    from angpt.models.variants import ARCHITECTURES, build

    if list_variants:
        known = [(name, " ".join((cls.__doc__ or "").split())) for name, cls in ARCHITECTURES.items()]
        show(terminal(), Table(("name", "what it is"), known, prose=True))
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
    show(terminal(), Table(("size", "d_m", "layers", "heads", *architectures), rows, title, left=()))


def factors(size: str = "0.5B", draws: int = 16, seed: int = 0, figure: Path | None = None) -> None:
    """The normalizing factors ν: formula, value, Monte-Carlo estimate, and which of them change the function.

    Args:
        size: Model size whose dimensions to use.
        draws: Random weight matrices per estimate, with 512 inputs each.
        seed: Seed of the Monte-Carlo estimate.
        figure: File for a figure of how the length of a random vector concentrates with growing dimension.
    """
    from angpt.analysis.factor_report import draw_concentration, factor_tables

    if draws < 1:
        raise UserError(f"draws must be at least 1, not {draws}")
    if figure is not None and figure.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{figure}: a figure must be a .png, .svg or .pdf file")
    show(terminal(), *factor_tables(ModelConfig.size(size), draws, seed))
    if figure is not None:
        draw_concentration(figure, seed)
        terminal().print(f"figure: {figure}")


def make_app(args: Sequence[str]) -> SubcommandApp:
    """All commands, in the order of a project. The list of commands shows the first paragraph of a command's
    documentation, its own help all of it."""
    asked, app = args[0] if args else None, SubcommandApp()

    def single(name: str, command: Callable[..., None]) -> None:
        first = inspect.cleandoc(command.__doc__ or "").split("\n\n")[0]
        app.command(name=name, help=None if name == asked else first)(bound(command))

    def several(name: str, text: str, **commands: Callable[..., None]) -> None:
        group = SubcommandApp()
        for inner, command in commands.items():
            group.command(name=inner)(bound(command))
        app.command(group, name=name, help=text)

    several("data", "Text to tokens: prepare a folder to train from, or describe one.", prepare=prepare, info=info)
    single("train", train_command(args if asked == "train" else []))
    single("compare", compare_command(args if asked == "compare" else []))
    text = "Grids of runs from a file: run them, show their progress, estimate their cost."
    several("study", text, run=study_run, status=study_status, plan=study_plan)
    text = "Fits over many runs: best batch size and learning rate by model size, loss by compute."
    several("fit", text, hparams=hparams, scaling=scaling)
    single("report", report)
    single("analyze", analyze)
    single("eval", evaluate)
    single("generate", generate_command)
    single("serve", serve_command)
    single("fold", fold_command)
    several("export", "Export a model: hf, a folder for Hugging Face transformers.", hf=export_hf)
    several("import", "Import an exported model: hf, from a folder for Hugging Face transformers.", hf=import_hf)
    single("models", models)
    single("factors", factors)
    text = "Benchmarks, each interleaved with its baseline and compared with its lower bound."
    names = ("train", "optimizer", "data", "decode", "moments")
    several("bench", text, **{name: getattr(benches, name) for name in names})
    return app
