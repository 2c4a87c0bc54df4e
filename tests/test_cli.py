import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

import angpt
import angpt.__main__
from angpt.cli.main import main
from angpt.config import TrainConfig, settings_of
from angpt.errors import UserError
from angpt.version import __version__
from tests.command import angpt as run
from tests.command import call

ROOT = Path(__file__).parents[1]


def test_version(capsys):
    assert call(capsys, "--version") == (0, f"angpt {__version__}\n", "")


@pytest.mark.parametrize("args", [(), ("--help",)])
def test_help_names_every_command(capsys, args):
    code, out, _ = call(capsys, *args)
    assert code == 0
    listed = re.search(r"\{([\w,\s]+)\}", out)[1].replace("\n", "").replace(" ", "").split(",")
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    documented = re.findall(r"^angpt (\w+)", page, flags=re.MULTILINE)
    assert set(listed) == set(documented)


def test_every_public_name_can_be_imported():
    for name in angpt.__all__:
        assert getattr(angpt, name), name


def test_help_shows_what_to_type(capsys):
    _, text = run(capsys, "generate", "--help")
    for words in ("MODEL [PROMPTS]", "--top-p FLOAT", "--device {auto,cpu,cuda}"):
        assert words in text


def test_help_does_not_wait_for_large_packages():
    names = {"torch", "matplotlib", "scipy", "tokenizers", "pyarrow"}
    code = f"import sys, angpt.cli.main; print({names} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("command", ["train", "compare", "study run", "eval", "bench train", "generate", "fit scaling"])
def test_help_is_in_paragraphs_and_states_defaults(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = call(capsys, *command.split(), "--help")
    assert "None" not in out
    assert "(default: )" not in out
    if command == "train":
        assert "--slurm.gpus GPUs each. It continues by itself" in out  # not broken as in the source
        assert "attention scale g; √d_h unless given." in out


@pytest.mark.parametrize(
    "command", ["", "train", "compare", "study run", "data prepare", "eval", "serve", "bench train"]
)
def test_help_fits_a_screen(capsys, monkeypatch, command):
    """No line is longer than the terminal is wide, and no box of options is higher than a screen of 50 lines."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(capsys, *command.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    boxes = re.findall(r"^╭─ (.*?) ─+╮\n((?:│.*\n)+)", out, flags=re.MULTILINE)
    assert "options" in dict(boxes)
    assert max(text.count("\n") for _, text in boxes) <= 50
    assert not re.search(r"^│ +│$", out, flags=re.MULTILINE)


def test_every_setting_of_a_run_is_an_option(capsys):
    _, out, _ = call(capsys, "train", "--help")
    for name in settings_of(TrainConfig()):
        assert f"--{name.replace('_', '-')} " in out.replace(",", " "), name


def test_help_is_also_a_command(capsys):
    assert call(capsys, "help", "data", "info") == call(capsys, "data", "info", "--help")


def test_common_options_have_short_names(monkeypatch):
    seen = []
    monkeypatch.setattr("angpt.cli.train.run_here", lambda *call, **_: seen.append(call))
    short = "--size 62m --arch nGPT --lr 0.01 --batch 4096 --data d --optimizer muon --context 64"
    long = "--preset 62M --model.architecture ngpt --optimizer.lr 0.01 --batch-tokens 4096 --data.path d"
    main(["train", *short.split()])
    main(["train", *long.split(), "--optimizer.name", "muon", "--model.context", "64"])
    assert seen[0] == seen[1]
    config, folder, _ = seen[0]
    assert (config.optimizer.lr, config.model.d_model, folder.name) == (0.01, 384, "ngpt-muon-62M-s0")


def test_models_lists_sizes_and_architectures(capsys):
    code, out, _ = call(capsys, "models")
    assert code == 0
    for cell in ("laptop", "0.84M", "0.5B", "505.73M 3.027", "506.00M", "505.78M"):
        assert cell in out


def test_models_lists_variants(capsys):
    _, out, _ = call(capsys, "models", "--list-variants")
    assert "angpt/no-lerp" in out


def test_factors(capsys):
    code, out, _ = call(capsys, "factors", "--size", "32M", "--draws", "1")
    assert code == 0
    assert "ν_qkv" in out


def test_a_figure_of_factors_without_matplotlib_is_told_first(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("angpt.analysis.factor_report.factor_tables", lambda *_: pytest.fail("estimates first"))
    said = (2, "", "error: this needs matplotlib: pip install 'angpt[report]'\n")
    assert call(capsys, "factors", "--figure", "x.png") == said


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "a/b"), "a/b: Permission denied"),
        (OSError(28, "No space left on device", "a/b"), "a/b: the disk is full, or a limit is reached (No space left"),
        (OSError(36, "File name too long", "a\nb\udcff"), "a\\nb\\udcff: File name too long"),
        (MemoryError(), "not enough memory; lower the sizes, or use a machine with more"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            "not enough memory (DefaultCPUAllocator",
        ),
        (RuntimeError("Storage size calculation overflowed with sizes=[4]"), "not enough memory (Storage size"),
        (ValueError("array is too big; `arr.size"), "not enough memory (array is too big"),
        (TypeError("zeros(): Overflow when unpacking long\nframe #0"), "not enough memory (zeros(): Overflow when"),
        (ValueError("Maximum allowed size exceeded"), "not enough memory (Maximum allowed"),
        (RecursionError("maximum recursion depth exceeded"), "values are nested too deeply"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), "text is not valid Unicode"),
        (OverflowError("int too large to convert to float"), "a number is too large (int too large"),
        (
            SafetensorError("IoError\nin two lines"),
            "a file of tensors cannot be read or written (IoError\\nin two lines)",
        ),
        (UserError("first\nsecond"), "first\\nsecond"),
    ],
)
def test_what_the_machine_does_wrong_is_one_line(capsys, monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("angpt.analysis.factor_report.factor_tables", fail)
    code, out, err = call(capsys, "factors")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    monkeypatch.setenv("ANGPT_DEBUG", "1")
    with pytest.raises(type(error)):
        main(["factors"])


@pytest.mark.parametrize("mistake", [KeyboardInterrupt(), ModuleNotFoundError("No module named 'version'")])
def test_ctrl_c_while_a_package_is_imported_is_no_error(capsys, monkeypatch, mistake):
    """Some packages catch everything while they are imported, and fail in another way."""

    def imports(*_):
        try:
            raise KeyboardInterrupt
        except BaseException:
            raise mistake  # noqa: B904

    monkeypatch.setattr("angpt.cli.main.parse", imports)
    assert call(capsys, "models") == (130, "", "")


def test_ctrl_c_before_the_command_is_there(monkeypatch):
    class Interrupts:
        def find_spec(self, name, *_):
            if name == "angpt.cli.main":
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "angpt.cli.main")
    with pytest.raises(SystemExit) as end:
        angpt.__main__.main()
    assert end.value.code == 130


def test_an_error_of_the_program_itself_has_its_traceback(monkeypatch):
    monkeypatch.setattr("angpt.analysis.factor_report.factor_tables", lambda *_: [][0])
    with pytest.raises(IndexError):
        main(["factors"])


def test_output_that_cannot_be_written_is_one_line():
    command = [sys.executable, "-m", "angpt", "models", "--list-variants"]
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.returncode == 2
    assert process.stderr.startswith("error: the disk is full, or a limit is reached (No space left on device)")
    assert process.stderr.count("\n") == 1


def test_the_reader_of_the_output_may_go():
    command = [sys.executable, "-m", "angpt", "models", "--list-variants"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    process.stdout.close()
    assert (process.wait(), process.stderr.read()) == (1, "")
    process.stderr.close()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("models --list-variants >&-", 0),
        ("models --list-variants <&- >&- 2>&-", 0),
        ("data info nowhere 2>&-", 2),
        ("data info nowhere 2>/dev/full", 2),
        ("data info nowhere 2> >(exec true)", 2),
        ("--version >/dev/full 2>/dev/null", 2),
        ("--version > >(exec true)", 1),
    ],
)
def test_streams_that_are_closed_full_or_gone(command, code):
    """Neither a traceback nor another exit code, also where nobody can read the error."""
    line = f"{shlex.quote(sys.executable)} -m angpt {command}"
    process = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert (process.returncode, process.stdout, process.stderr) == (code, "", "")


def test_a_pipe_to_another_process_that_breaks_is_one_line(capfd, monkeypatch):
    def fail(*_, **__):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr("angpt.analysis.factor_report.factor_tables", fail)
    with pytest.raises(SystemExit, match="2"):
        main(["factors"])
    assert capfd.readouterr().err == "error: [Errno 32] Broken pipe: another process has ended\n"


def test_text_is_never_markup(capsys, tmp_path):
    folder = tmp_path / "[" / "x] [bold]:smile:"
    folder.mkdir(parents=True)
    code, out, _ = call(capsys, "factors", "--size", "32M", "--draws", "1", "--figure", folder / "[red]f.png")
    assert code == 0
    assert f"figure: {folder}/[red]f.png\n" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("models", "angtp"), "unknown architecture 'angtp': did you mean angpt"),
        (("factors", "--size", "33M"), "unknown size '33M': did you mean 32M"),
        (("generate", "x", "--prompt", "y"), "unknown option --prompt: give PROMPTS without an option (see angpt gen"),
        (("data", "info", "x", "--path=x"), "unknown option --path=x: give PATH without an option (see angpt"),
        (("generate", "x", "--temp", "1"), "unknown option --temp: did you mean --temperature? (see angpt generate"),
        (("compare", "--archs", "gpt+"), "unknown option --archs: did you mean --architectures? (see angpt compare"),
        (("compare", "--arch", "gpt+"), "unknown option --arch: did you mean --architectures? (see angpt compare"),
        (("compare", "--model.architecture", "x"), "unknown option --model.architecture: did you mean --architectures"),
        (("compare", "--seed", "1"), "unknown option --seed: did you mean --seeds? (see angpt compare --help)"),
        (("compare", "--optimizer.lr", "1"), "unknown option --optimizer.lr: did you mean --lrs? (see angpt compare"),
        (("compare", "--optimizer", "muon"), "unknown option --optimizer: did you mean --architectures angpt:muon? (s"),
        (("compare", "--tokens", "1M", "--budgets", "2M"), "--tokens and --budgets both set the budgets; give one"),
        (("train", "-arch", "gpt+"), "unknown option -arch: did you mean --arch? (see angpt train --help)"),
        (("train", "--archs", "gpt+"), "unknown option --archs: did you mean --arch? (see angpt train --help)"),
        (("train", "--steps", "3"), "unknown option --steps: did you mean --tokens? (see angpt train --help)"),
        (("train", "--epochs", "3"), "unknown option --epochs: did you mean --tokens? (see angpt train --help)"),
        (("train", "--layers", "3"), "unknown option --layers: did you mean --model.n-layers? (see angpt train"),
        (("train", "--vocab", "3"), "unknown option --vocab: did you mean --model.vocab-size? (see angpt train"),
        (("train", "--batch_size", "3"), "unknown option --batch_size: did you mean --batch? (see angpt train --help)"),
        (("train", "-3"), "unexpected '-3' (see angpt train --help)"),
        (("version",), "unknown command 'version': did you mean --version? (see angpt --help)"),
        (("export", "runs/x"), "unknown command 'runs/x': did you mean angpt export hf runs/x? (see angpt export"),
        (("export", "fh"), "unknown command 'fh': did you mean hf? (see angpt export --help)"),
        (("help", "trian"), "unknown command 'trian': did you mean train? (see angpt --help)"),
        (("help", "study", "rnu"), "unknown command 'rnu': did you mean run? (see angpt study --help)"),
        (("trian", "--help"), "unknown command 'trian': did you mean train? (see angpt --help)"),
        (("report", "nosuch"), "nosuch: no run folder (it does not exist)"),
        (("models", "--contxt", "3"), "unknown option --contxt: did you mean --context? (see angpt models --help)"),
        (("train", "--d_model", "3"), "unknown option --d_model: did you mean --model.d-model? (see angpt train"),
        (("train", "--learning-rate", "3"), "unknown option --learning-rate: did you mean --lr?"),
        (("data", "info", "x", "--hlep"), "unknown option --hlep: did you mean --help? (see angpt data info --help)"),
        (("train", "extra"), "unexpected 'extra' (see angpt train --help)"),
        (("nonsense",), "unknown command 'nonsense': known: analyze, bench, compare,"),
        (("trian",), "unknown command 'trian': did you mean train? (see angpt --help)"),
        (("study", "rnu"), "unknown command 'rnu': did you mean run? (see angpt study --help)"),
        (("study",), "a command is missing: one of run, status, plan (see angpt study --help)"),
        (("train", "--seed", "x"), "--seed: 'x' is not a whole number (see angpt train --help)"),
        (("train", "--seed", "9" * 19), f"--seed: '{'9' * 19}' must be a number of at most 18 digits (see angpt train"),
        (("train", "--seed", "9" * 5000), "--seed: Exceeds the limit (4300 digits)"),
        (("train", "--lr", "x"), "--lr: 'x' is not a number (see angpt train --help)"),
        (("train", "--device", "tpu"), "--device: 'tpu' is not one of auto, cpu, cuda (see angpt train --help)"),
        (("data", "info"), "PATH is missing: a prepared folder"),
        (("train", "--seed"), "--seed: its value is missing (see angpt train --help)"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(capsys, args, message):
    code, out, err = call(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
