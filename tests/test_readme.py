import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run(code, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_examples_of_both_uses():
    assert len(EXAMPLES) >= 2


def test_the_map_names_every_module():
    listed = set(re.findall(r"\w+\.py", README))
    missing = {p.name for p in (ROOT / "angpt").rglob("*.py")} - listed - {"__init__.py", "__main__.py", "version.py"}
    assert not missing
