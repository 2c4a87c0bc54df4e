from dataclasses import dataclass
from pathlib import Path

import pytest

from angpt.reports import write_report
from angpt.results import Result
from tests.reports.synthetic import make_data, make_result, make_study, run_results

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

COMMANDS = ["angpt data prepare", "angpt compare --budgets 40k 80k && echo <done>"]


@dataclass(frozen=True)
class Written:
    folder: Path
    runs: list[Path]
    result: Result
    page: Path

    @property
    def html(self) -> str:
        return self.page.read_text(encoding="utf-8")


@pytest.fixture(scope="package")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of a complete comparison."""
    folder = tmp_path_factory.mktemp("complete")
    results = run_results()
    runs = make_study(folder, results, make_data(folder / "data"))
    result = make_result(results)
    return Written(folder, runs, result, write_report(folder, runs, result, folder / "out", COMMANDS))
