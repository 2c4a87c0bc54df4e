"""A comparison as one page: `report.html`, which needs nothing but itself, and its figures as files."""

from collections.abc import Sequence
from pathlib import Path

from angpt.errors import UserError
from angpt.studies.results import Result


def write_report(study: Path, runs: Sequence[Path], result: Result, out: Path, commands: Sequence[str] = ()) -> Path:
    """Write `report.html` and `figures/` into the folder `out`; the path of the page.

    `runs` are the run folders of the comparison, complete or under way; `commands` are what repeats it.
    """
    try:
        from angpt.report.page import write_page
    except ModuleNotFoundError as error:
        raise UserError(
            f"the report needs the package {error.name}, which is not installed; pip install 'angpt[report]'"
        ) from error
    return write_page(study, runs, result, out, commands)
