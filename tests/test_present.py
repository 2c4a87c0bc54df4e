import io

import pytest
from rich.console import Console

from angpt.present.style import log_ticks
from angpt.present.tables import Strong, Table, show

TABLE = Table(
    ("", "a|b", "what"), [("x", "1.5", "no"), ("long", "12.25", Strong("yes"))], "Title", "A note.", left=(0, 2)
)


def printed(*tables, width=20):
    console = Console(file=io.StringIO(), width=width)
    show(console, *tables)
    return console.file.getvalue().splitlines()


def test_numbers_are_aligned_to_the_right_and_no_line_is_wrapped():
    wide = Table(("name", "n"), [("x" * 60, "1"), ("y", "100")])
    rows = [line for line in printed(TABLE, wide) if "x" in line or "y" in line]
    assert [line.rstrip() for line in rows[:2]] == [" x       1.5  no", " long  12.25  yes"]
    assert [line.rstrip() for line in rows[2:]] == [f" {'x' * 60}    1", f" {'y':60}  100"]


def test_tables_of_sentences_are_wrapped():
    lines = printed(Table(("says",), [("one two three four five",), ("six",)], prose=True))
    assert all(len(line) <= 20 for line in lines)
    assert [line.strip() for line in lines][-5:-1] == ["one two three", "four five", "", "six"]


def test_markdown():
    assert TABLE.markdown().splitlines() == [
        "**Title**", "", r"|  | a\|b | what |", "| --- | ---: | --- |", "| x | 1.5 | no |",
        "| long | 12.25 | **yes** |", "", "A note.",
    ]  # fmt: skip
    assert Table(("a",), [("b",)]).markdown() == "| a |\n| --- |\n| b |"


def test_brackets_in_cells_are_text():
    assert any("[bold]" in line for line in printed(Table(("[bold]",), [("[/]",)])))


@pytest.mark.parametrize("high", [0.0042, 0.0046, 0.0061, 0.0084, 0.012, 0.02, 0.2, 20])
def test_ticks_of_logarithmic_axes_are_few_and_tell_the_scale(high):
    low, digits = 0.0041, (1, 2, 3, 5, 7)
    ticks = [tick for tick in log_ticks(low, high, digits).tick_values(low, high) if low <= tick <= high]
    assert 2 <= len(ticks) <= (10 if high > 8 * low else 5)
    assert len({f"{tick:.2g}" for tick in ticks}) == len(ticks)
