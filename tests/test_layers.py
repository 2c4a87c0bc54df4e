"""The contract of layers in pyproject.toml, which `make lint` checks, notices every kind of upward import."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

IN_A_FUNCTION = "\n\ndef upwards() -> None:\n    import {target}\n"
FOR_TYPES = "\n\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {target}\n"


def lint(folder: Path) -> tuple[int, str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with the package and its contract."""
    shutil.copytree(ROOT / "angpt", tmp_path / "angpt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "code", "target"),
    [
        pytest.param("models/primitives.py", IN_A_FUNCTION, "angpt.training.run", id="inside a function"),
        pytest.param("errors.py", IN_A_FUNCTION, "angpt.config", id="between leaves"),
        pytest.param("fits/compute.py", IN_A_FUNCTION, "angpt.bench.measure", id="in the same row"),
        pytest.param("optim/adam.py", FOR_TYPES, "angpt.fast.graphs", id="for types"),
    ],
)
def test_an_upward_import_breaks_the_contract(copied: Path, file: str, code: str, target: str) -> None:
    path = copied / "angpt" / file
    path.write_text(path.read_text(encoding="utf-8") + code.format(target=target), encoding="utf-8")
    status, text = lint(copied)
    module = f"angpt.{file.removesuffix('.py').replace('/', '.')}"
    assert f"{module} -> {target} (l." in text
    assert status == 1


def test_a_package_without_a_layer_is_refused(copied: Path) -> None:
    (copied / "angpt" / "newcomer.py").write_text("import json\n")
    status, text = lint(copied)
    assert "newcomer" in text
    assert status == 1
