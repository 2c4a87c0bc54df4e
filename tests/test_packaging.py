"""What a user installs: the wheel has all files, and works with the packages that it declares and no others."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from angpt import __version__

ROOT = Path(__file__).parents[1]
TINY = ["--model.d-model", "16", "--model.n-layers", "1", "--model.n-heads", "2", "--model.context", "32"]
TINY += [
    "--model.vocab-size",
    "257",
    "--data.path",
    "data",
    "--batch-tokens",
    "256",
    "--eval-tokens",
    "512",
    "--device",
    "cpu",
]


def test_the_version_has_one_source():
    """version.py says it; what cannot read that file agrees."""
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1] == __version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "angpt", source / "angpt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source)
    return next(out.glob(f"angpt-{__version__}-py3-none-any.whl"))


def run(*command, cwd=None, code=0):
    """Run it without the paths of this process, and return what it printed."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "HOME": str(cwd or "/nonexistent"),
        "COLUMNS": "200",
    }
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def environment(folder, wheel, *extras):
    """The `angpt` command of a new environment with the wheel, and the packages that it declares as links to ours."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [name for extra in extras for name in project["optional-dependencies"][extra]]
    for package in runpy.run_path(str(ROOT / ".ci" / "dependencies.py"))["closure"](wanted, set()):
        files = distribution(package).files or ()
        for top in {Path(file).parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution(package).locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel)
    return folder / "bin" / "angpt"


def prepare(angpt, folder):
    for name in ("train.txt", "val.txt"):
        (folder / name).write_text("some text to train on\n" * 200)
    run(angpt, "data", "prepare", "train.txt", "val.txt", "--tokenizer", "bytes", "--out", "data", cwd=folder)


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("angpt/")}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "angpt").rglob("*") if path.is_file()}
    assert names == {name for name in files if "__pycache__" not in name}
    assert {"angpt/py.typed", "angpt/training/rules.toml"} <= names


@pytest.mark.slow
def test_core_dependencies_suffice_to_train_and_generate(wheel, tmp_path):
    angpt = environment(tmp_path / "env", wheel)
    assert "train" in run(angpt, "--help", cwd=tmp_path)
    prepare(angpt, tmp_path)
    assert "finished" in run(angpt, "train", "--tokens", "1024", *TINY, "--out", "run", cwd=tmp_path)
    run(angpt, "generate", "run", "--tokens", "4", cwd=tmp_path)
    run(angpt, "fold", "run", cwd=tmp_path)
    run(angpt, "export", "hf", "run", cwd=tmp_path)
    run(angpt, "import", "hf", "run-hf", "--out", "again", cwd=tmp_path)
    run(angpt, "eval", "run", "--data", "data", cwd=tmp_path)
    run(angpt, "models", cwd=tmp_path)
    # What shows and writes fits needs SciPy, as the fits do.
    text = "import angpt; [getattr(angpt, name) for name in {*angpt.__all__} - {'fit_tables', 'write_fit'}]"
    run(tmp_path / "env" / "bin" / "python", "-c", text, cwd=tmp_path)
    assert "pip install 'angpt[report]'" in run(angpt, "compare", *TINY, cwd=tmp_path, code=2)


@pytest.mark.slow
def test_the_extra_report_suffices_to_compare(wheel, tmp_path):
    angpt = environment(tmp_path / "env", wheel, "report")
    prepare(angpt, tmp_path)
    told = run(angpt, "compare", "--seeds", "0", "1", "--budgets", "512", "1024", *TINY, "--out", "s", cwd=tmp_path)
    assert "report: s/report.html" in told
    run(angpt, "factors", "--draws", "1", "--size", "32M", cwd=tmp_path)
