"""Write docs/dependencies.md: the packages of constraints.txt with their licences, as installed packages state them."""

import tomllib
from importlib.metadata import metadata, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dependencies.md"
HEAD = """# Dependencies and their licences

Made by `make docs` from `constraints.txt` and the metadata of the installed packages; licences are given as the
packages state them. "Needed by" is `core`, or the extras of `pip install 'angpt[…]'`; – if nothing needs it here. On a
machine with a GPU, torch also installs NVIDIA's CUDA libraries, under NVIDIA's own licences. `make audit` asks PyPI for
known vulnerabilities.

| package | version | licence | needed by |
|---|---|---|---|
"""

TAIL = """
## Files of others in this package

| name | version | licence | where |
|---|---|---|---|
| [uPlot](https://github.com/leeoniya/uPlot) | {uplot} | MIT | `angpt/reports/assets/uplot/`, unchanged from the npm \
package; draws the charts of the report, which contains it with its licence |
"""
UPLOT = ROOT / "angpt" / "reports" / "assets" / "uplot" / "uPlot.iife.min.js"

LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINNED = {canonicalize_name(line.split("==")[0]): line.split("==") for line in LINES if "==" in line}
"""Name and version of each line of constraints.txt, by canonical name."""


def licence(name: str) -> str:
    """The licence of an installed package: its expression, else its classifiers, else the first line of its text."""
    found = metadata(name)
    classifiers = [c.split(" :: ")[-1] for c in found.get_all("Classifier") or () if c.startswith("License ::")]
    text = (found.get("License") or "unknown").strip().splitlines()[0]
    return found.get("License-Expression") or ", ".join(classifiers) or text


def needed_by() -> dict[str, list[str]]:
    """The groups of requirements in pyproject.toml that a package belongs to, directly or through others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"core": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[str]] = {}
    for group, requirements in groups.items():
        for name in sorted(closure(requirements, set())):
            found.setdefault(name, []).append(group)
    return {name: ["core"] if "core" in names else names for name, names in found.items()}


def closure(requirements: list[str], seen: set[tuple[str, str]]) -> set[str]:
    """Canonical names of requirements and of all that they require; angpt itself is left out."""
    names = set()
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        for extra in requirement.extras or {""}:
            if name in PINNED and (name, extra) not in seen:
                seen.add((name, extra))
                needed = [text for text in requires(name) or () if applies(text, extra)]
                names |= {name} | closure(needed, seen)
    return names


def applies(text: str, extra: str) -> bool:
    marker = Requirement(text).marker
    return marker is None or marker.evaluate({"extra": extra})


def main() -> None:
    groups = needed_by()
    rows = [
        f"| {name} | {version} | {licence(name)} | {', '.join(groups.get(key, ['–']))} |"
        for key, (name, version) in sorted(PINNED.items())
    ]
    uplot = UPLOT.read_text(encoding="utf-8").partition("(v")[2].partition(")")[0]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n" + TAIL.format(uplot=uplot), encoding="utf-8")


if __name__ == "__main__":
    main()
