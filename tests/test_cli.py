import re
import subprocess
import sys
from pathlib import Path

import pytest

import angpt
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
    documented = re.findall(r"^angpt (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(listed) == {*documented, "import"}


def test_every_public_name_can_be_imported():
    for name in angpt.__all__:
        assert getattr(angpt, name), name


def test_help_shows_what_to_type(capsys):
    _, text = run(capsys, "generate", "--help")
    for words in ("MODEL [PROMPTS]", "--top-p FLOAT", "--device {auto,cpu,cuda}"):
        assert words in text


def test_help_does_not_wait_for_torch():
    code = "import sys, angpt.cli.main; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_models_lists_sizes_and_architectures(capsys):
    code, out, _ = call(capsys, "models")
    assert code == 0
    for cell in ("0.5B", "505.73M 3.027", "506.00M", "505.78M"):
        assert cell in out


def test_models_lists_variants(capsys):
    _, out, _ = call(capsys, "models", "--list-variants")
    assert "angpt/no-lerp" in out


def test_factors(capsys):
    code, out, _ = call(capsys, "factors", "--size", "32M", "--draws", "1")
    assert code == 0
    assert "ν_qkv" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("models", "angtp"), "unknown architecture 'angtp': did you mean angpt"),
        (("factors", "--size", "33M"), "unknown model size '33M': did you mean 32M"),
        (("models", "--contxt", "3"), "--contxt"),
        (("nonsense",), "nonsense"),
    ],
)
def test_mistakes_exit_with_2_and_no_traceback(capsys, args, message):
    code, text = run(capsys, *args)
    assert code == 2
    assert message in text
    assert "Traceback" not in text
