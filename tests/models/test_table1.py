from pathlib import Path

from angpt.models import table1


def test_the_document_is_what_the_code_says_now():
    path = Path(__file__).parents[2] / "docs" / "table1.md"
    assert path.read_text(encoding="utf-8") == table1.generate(), "stale: run `make docs`"
