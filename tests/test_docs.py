"""The documentation site: it builds without a warning, and the notebooks in it run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_navigation_has_every_page():
    docs = ROOT / "docs"
    pages = [page for page in docs.rglob("*") if page.suffix in (".md", ".ipynb") and page.name != "result.md"]
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.(?:md|ipynb))$", nav, flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(docs).as_posix() for page in pages)


def run_notebook(name):
    """Run the code of a notebook; its names at the end."""
    names = {"__name__": "notebook"}
    for cell in json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "clear the outputs before you commit"
            exec(compile("".join(cell["source"]), name, "exec"), names)
    return names


@pytest.mark.slow
def test_the_quick_start_runs(capsys):
    run_notebook("quickstart.ipynb")
    ours, theirs, none = map(float, re.findall(r"(?:anGPT|GPT\+|model) (\d\.\d+)", capsys.readouterr().out))
    assert ours < theirs < none == pytest.approx(5.545)


@pytest.mark.slow
def test_the_notebook_that_converts_a_llama_runs(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    monkeypatch.chdir(tmp_path)
    names = run_notebook("convert-llama.ipynb")
    assert names["losses"][-1] < 0.75 * names["losses"][0]
    assert names["angpt"].largest_violation(names["model"]) < 1e-6
    windows = names["windows"][:2]
    assert names["again"](windows).logits.equal(names["model"](windows).logits)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """The folder of the site, and what mkdocs says of it."""
    pytest.importorskip("mkdocstrings", reason="needs pip install 'angpt[docs]'")
    out = tmp_path_factory.mktemp("site")
    return out, mkdocs("--site-dir", out)


def mkdocs(*options, folder=ROOT):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(build):
    _, done = build
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_links_have_the_titles_of_their_pages(build):
    pages = [page.read_text(encoding="utf-8") for page in build[0].rglob("index.html")]
    assert [name for page in pages for name in re.findall(r"<a [^>]*>([\w-]+\.(?:md|ipynb))</a>", page)] == []


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(build):
    import angpt

    text = (build[0] / "api" / "index.html").read_text(encoding="utf-8")
    documented = re.findall(r'<h3 id="angpt\.[\w.]+\.(\w+)"', text)
    assert sorted(documented) == sorted(set(angpt.__all__) - {"__version__"})


@pytest.mark.slow
@pytest.mark.parametrize("link", ["missing.md", "../angpt/missing.py", "install.md#missing"])
def test_a_broken_link_is_an_error(build, tmp_path, link):
    """The check of links sees pages, code and anchors."""
    for name in ("angpt", ".ci", "experiments", "tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    for page in ("index.md", "install.md"):
        (tmp_path / "docs" / page).write_text("# A page\n")
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[text]({link})\n")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(f"{config}\nnav: [index.md, install.md]\n")
    done = mkdocs(folder=tmp_path)
    assert done.returncode != 0
    assert link in done.stderr or link.partition("#")[2] in done.stderr
