"""README.md and the pages of docs/ agree with the package, with each other and with the stored results."""

import difflib
import re
import runpy
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
BLOCKS = (ROOT / "docs" / "blocks.md").read_text(encoding="utf-8")
EXAMPLES = [code for text in (README, BLOCKS) for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)]


@pytest.mark.parametrize("code", EXAMPLES, ids=["whole model", "parts"])
def test_examples_run(code, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_links_of_readme_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / ".ci" / "results.py"))


def test_tables_of_results_are_those_of_the_stored_runs(script):
    found = script["results"]()
    pages = {page.name: page.read_text(encoding="utf-8") for page in script["PAGES"]}
    marks = {name: re.findall("<!-- ((?!end|progress)[a-z]+) -->", text) for name, text in pages.items()}
    assert marks == {"README.md": ["optimizers"], "results.md": ["optimizers", "compare"]}
    for name, text in pages.items():
        assert script["generate"](text, found) == text, f"{name}: run `make docs`"


def test_numbers_of_readme_stand_in_a_page():
    """A measured number in the text has its command and its context in docs/; it is not written in two versions."""
    text = re.sub(r"```.*?```|<!-- \w+ -->.*?<!-- end -->|https?:\S+|\d+\.\d{5}", "", README, flags=re.DOTALL)
    numbers = set(re.findall(r"\d+\.\d{2,}|\d+,\d{3}", text))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert numbers >= {"1.008", "2,098", "36,442"}
    assert [number for number in numbers if not re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d)", pages)] == []


def named(tree: str) -> list[str]:
    """Folders and files of the package that the map names: at the beginning of a line, and modules in its text.

    Two spaces of indentation are a level; a file belongs to the folder above it.
    """
    names: list[str] = []
    folders: list[str] = []
    for line in tree.splitlines():
        text = line.strip()
        depth = (len(line) - len(line.lstrip())) // 2
        if depth == 0 and text and not text.startswith("angpt/"):
            break  # what follows lies beside the package
        del folders[depth:]
        begins = list(takewhile(re.compile(r"[\w-]+(/|\.\w+)").fullmatch, text.split()))
        if begins and begins[0].endswith("/"):
            folders.append(begins[0])
            names.append("".join(folders))
            begins = begins[1:]
        modules = re.findall(r"(?<![\w/.`-])\w+\.py\b", text)
        names += ["".join(folders) + name for name in dict.fromkeys([*begins, *modules])]
    return names


def in_the_package() -> list[str]:
    """Every folder of the package, and every module but those that Python itself asks for."""
    modules = [path for path in (ROOT / "angpt").rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    folders = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in (ROOT / "angpt").rglob("*.py")}
    return sorted([*folders, *(path.relative_to(ROOT).as_posix() for path in modules)])


def test_the_map_is_the_package():
    """Every folder and module is named once, in its place, and everything that is named exists."""
    tree = re.search(r"```\n(angpt/\n.*?)```", MAP, flags=re.DOTALL)[1]
    found = named(tree)
    listed = sorted(name for name in found if name.endswith(("/", ".py")))
    diff = [line for line in difflib.ndiff(in_the_package(), listed) if line[0] in "+-"]
    assert not diff, "\n".join(["- is missing in docs/map.md, + is no longer there", *diff])
    assert [name for name in found if not (ROOT / name).exists()] == []


def test_names_are_read_off_a_map():
    tree = "angpt/\n  a.py  b.py  text\n  c/   of c.toml\n    d.py    text; e.py: `f.py`, x/g.py\n  h.py\ndocs/   i.py"
    expected = ["angpt/", "angpt/a.py", "angpt/b.py", "angpt/c/", "angpt/c/d.py", "angpt/c/e.py", "angpt/h.py"]
    assert named(tree) == expected
