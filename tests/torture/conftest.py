from collections import Counter
from pathlib import Path

import pytest

from tests.torture.harness import CASES
from tests.torture.material import make


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.torture)


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    root = tmp_path_factory.mktemp("material")
    make(root)
    return root


@pytest.fixture(autouse=True)
def counted(record_property):
    """Hands the number of cases of a test to the summary, also from a process of pytest-xdist."""
    CASES.clear()
    yield
    for kind, number in CASES.items():
        record_property(kind, number)


def pytest_terminal_summary(terminalreporter):
    cases = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                cases.update(dict(report.user_properties))
    if cases:
        terminalreporter.line(f"cases: {', '.join(f'{number:,} {kind}' for kind, number in sorted(cases.items()))}")
