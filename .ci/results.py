"""Write the tables of results in README.md and docs/results.md, between their marks, from what docs/ stores.

`python .ci/results.py studies/compare` takes over a new result of `make compare` first, with its figures.
"""

import shutil
import sys
from pathlib import Path

from angpt.present.tables import Table, replace_marked
from angpt.present.words import interval, label, overhead, speedup
from angpt.results import RESULT, Result
from angpt.studies.folders import summarise_runs

ROOT = Path(__file__).parents[1]
COMPARE = ROOT / "docs" / "results" / "compare"
PAGES = ROOT / "README.md", ROOT / "docs" / "results.md"
FIGURES = {"loss": "compare-loss", "input-norms": "compare-input-norms"}
"""Figures of a report, and their names in docs/figures."""


def results() -> dict[str, Result]:
    """The results that the pages show, by their mark."""
    folder = ROOT / "docs" / "evidence" / "optimizers"
    runs = [run for name in ("gpt+", "ngpt", "angpt") for run in sorted(folder.glob(f"{name}-*"))]
    found = {"optimizers": summarise_runs(runs, "gpt+:muon")}
    return found | ({"compare": Result.read(COMPARE)} if COMPARE.exists() else {})


def table(result: Result) -> str:
    """A row for each budget and architecture."""
    rows = sorted(result.rows, key=lambda row: row.tokens)
    columns = {
        "": [label(row.architecture) for row in rows],
        "tokens": [row.budget for row in rows],
        "seeds": [str(row.val_loss.n if row.val_loss else 0) for row in rows],
        "learning rate": [f"{row.lr:.3g}" for row in rows],
        "validation loss": ["–" if row.val_loss is None else interval(row.val_loss, 3) for row in rows],
        "change": ["baseline" if row.change is None else overhead(row.change, digits=2) for row in rows],
    }
    if len(result.budgets) > 1:
        needed = [row.speedup_tokens and speedup(**vars(row.speedup_tokens)) for row in rows]
        columns["speed-up in tokens"] = [text or "–" for text in needed]
    return f"{Table(list(columns), list(zip(*columns.values(), strict=True))).markdown()}\n"


def generate(text: str, found: dict[str, Result]) -> str:
    """The text of a page with up-to-date tables."""
    for name, result in found.items():
        text = replace_marked(text, name, table(result))
    return text


def take_over(study: Path) -> None:
    """Copy the result of a comparison and its figures to docs/."""
    COMPARE.mkdir(parents=True, exist_ok=True)
    for name in (RESULT, "study.toml"):
        shutil.copyfile(study / name, COMPARE / name)
    for name, target in FIGURES.items():
        shutil.copyfile(study / "figures" / f"{name}.png", ROOT / "docs" / "figures" / f"{target}.png")


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        take_over(Path(folder))
    found = results()
    for page in PAGES:
        page.write_text(generate(page.read_text(encoding="utf-8"), found), encoding="utf-8")
