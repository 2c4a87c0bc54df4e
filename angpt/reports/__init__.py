"""A study as one page: `report.html`, which needs nothing but itself, and its figures as files."""

from collections.abc import Callable, Sequence
from pathlib import Path

from angpt.errors import UserError
from angpt.results import Result


def write_report(
    study: Path,
    runs: Sequence[Path],
    result: Result,
    out: Path,
    commands: Sequence[str] = (),
    tell: Callable[[str], None] = lambda stage: None,
) -> Path:
    """Write `report.html` and `figures/` into the folder `out`; the path of the page.

    `runs` are the run folders of the study, complete or under way; `commands` are what repeats it. `tell` is called
    with the name of each stage, which may take a minute in all.
    """
    try:
        from angpt.reports.page import write_page

        return write_page(study, runs, result, out, commands, tell)
    except ModuleNotFoundError as error:
        raise UserError(
            f"the report needs the package {error.name}, which is not installed; pip install 'angpt[report]'"
        ) from error
    except OSError as error:
        raise UserError(f"{out}: the page cannot be written ({error}); choose another --out") from error


def write_pages(
    study: Path,
    result: Result,
    out: Path,
    commands: Sequence[str],
    runs: Sequence[Path] | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> list[Path]:
    """Write the page of each size of a study: the runs at the best point of every architecture and budget.

    `runs` are the run folders, if they are not those of the study.
    """
    pages = []
    known = [study / "runs" / run.name for run in result.runs] if runs is None else runs
    for size in result.sizes:
        shown = result.of_size(size)
        target = out / (size if len(result.sizes) > 1 else "")
        names = {run.name for run in shown.runs}
        folders = [path for path in known if path.resolve().name in names and path.exists()]
        pages.append(write_report(study, folders, shown, target, commands, tell))
    return pages
