from pathlib import Path

import pytest

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
