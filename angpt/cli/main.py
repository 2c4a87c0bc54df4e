"""The `angpt` command: one sub-command per verb. Each parses, calls the library and prints."""

import contextlib
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
from angpt.cli.help import Page, bound, first_paragraph, registry
from angpt.cli.inference import export_hf, fold_command, generate_command, import_hf
from angpt.cli.mistakes import parser_message
from angpt.cli.serving import serve_command
from angpt.cli.studies import SET_BY_COMPARISON, compare_command, report, study_plan, study_run, study_status
from angpt.cli.train import train_command
from angpt.config import PRESETS, ModelConfig
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

Run `angpt COMMAND --help` for a command and all its options, and `angpt --version` for the version."""

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
        if _interrupted(error):
            sys.exit(130)
        message = _missing_extra(error) if isinstance(error, ModuleNotFoundError) else explain(error)
        if message is None or os.environ.get("ANGPT_DEBUG") == "1":
            raise
        _exit(message)


def parse(args: Sequence[str]) -> Callable[[], None]:
    """The command that the arguments name, with its options bound. The parser's error becomes one line."""
    panel, page = io.StringIO(), Page(sys.stdout)
    args = [*args[1:], "--help"] if args[:1] == ["help"] else args
    app, asked, complete = make_app(args)
    if not complete and (next_word := args[len(asked) :][:1]) and not next_word[0].startswith("-"):
        args = [*asked, *next_word]  # an unknown command is an error, also where help is asked for
    try:
        with contextlib.redirect_stderr(panel), contextlib.redirect_stdout(page):
            options: dict[str, Any] = {"prog": "angpt", "description": DESCRIPTION, "config": MARKERS}
            options["registry"] = registry(SET_BY_COMPARISON if asked == ["compare"] else ())
            command: Callable[[], None] = app.cli(args=args or ["--help"], **options)
            return command
    except SystemExit as end:
        if end.code != 2:
            print(page.wrapped(), end="")
            raise
        raise UserError(parser_message(panel.getvalue(), asked, _options_of)) from end


def _options_of(command: Sequence[str]) -> set[str]:
    """The options of a command, and in capitals its arguments without one, read off its help."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        parse([*command, "--help"])
    arguments = re.findall(r"^  \[?([A-Z]{2,})\]?(?:  |$)", page.getvalue(), flags=re.MULTILINE)
    return {*arguments, *re.findall(r"--[a-z](?:[-.]?[a-z0-9]+)*", page.getvalue())}


def _interrupted(error: BaseException) -> bool:
    """True if an error came of Ctrl-C: packages that catch everything while they are imported raise another one."""
    return isinstance(error, KeyboardInterrupt) or (error.__context__ is not None and _interrupted(error.__context__))


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
    for size in PRESETS:
        config, cells = ModelConfig.size(size), []
        for name in architectures:
            with torch.device("meta"):
                model = build(ModelConfig.size(size, architecture=name, context=context))
            cells.append(f"{model.parameter_count() / 1e6:.2f}M {model.flops_per_token() / 1e9:.3f}")
        rows.append((size, str(config.d_model), str(config.n_layers), str(config.n_heads), *cells))
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
    if figure is not None:
        import matplotlib  # noqa: F401  # here, so that a missing package is told before the estimate
    show(terminal(), *factor_tables(ModelConfig.size(size), draws, seed))
    if figure is not None:
        draw_concentration(figure, seed)
        terminal().print(f"figure: {figure}")


Commands = dict[str, Callable[..., None]]


def commands(args: Sequence[str]) -> dict[str, Callable[..., None] | tuple[str, Commands]]:
    """All commands, in the order of a project: a function, or a text and the functions of a group."""
    asked = args[0] if args else None
    benchmarks = {name: getattr(benches, name) for name in ("train", "optimizer", "data", "decode", "moments")}
    return {
        "data": (
            "Text to tokens: prepare a folder to train from, or describe one.",
            {"prepare": prepare, "info": info},
        ),
        "train": train_command(args if asked == "train" else []),
        "compare": compare_command(args if asked == "compare" else []),
        "study": (
            "Grids of runs from a file: run them, show their progress, estimate their cost.",
            {"run": study_run, "status": study_status, "plan": study_plan},
        ),
        "fit": (
            "Fits over many runs: best batch size and learning rate by model size, loss by compute.",
            {"hparams": hparams, "scaling": scaling},
        ),
        "report": report,
        "analyze": analyze,
        "eval": evaluate,
        "generate": generate_command,
        "serve": serve_command,
        "fold": fold_command,
        "export": ("Export a model: hf, a folder for Hugging Face transformers.", {"hf": export_hf}),
        "import": ("Import an exported model: hf, from a folder for Hugging Face transformers.", {"hf": import_hf}),
        "models": models,
        "factors": factors,
        "bench": ("Benchmarks, each interleaved with its baseline and compared with its lower bound.", benchmarks),
    }


def make_app(args: Sequence[str]) -> tuple[SubcommandApp, list[str], bool]:
    """The parser, the words of the command that the arguments name, and whether these are all the words of a command.
    A list of commands shows the first paragraph of a command's documentation, its own help all of it."""
    app, known = SubcommandApp(), commands(args)
    asked = [word for word in args[:1] if word in known]
    complete = bool(asked) and not isinstance(known[asked[0]], tuple)
    for name, entry in known.items():
        if not isinstance(entry, tuple):
            app.command(name=name, help=None if [name] == asked else first_paragraph(entry))(bound(entry))
            continue
        text, members = entry
        group, verb = SubcommandApp(), args[1] if [name] == asked and len(args) > 1 else None
        for inner, command in members.items():
            group.command(name=inner, help=None if inner == verb else first_paragraph(command))(bound(command))
        app.command(group, name=name, help=text)
        if verb in members:
            asked, complete = [name, verb], True
    return app, asked, complete
