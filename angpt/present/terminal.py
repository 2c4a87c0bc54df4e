"""The terminal, to which text is printed as it is."""

from typing import Any

from rich.console import Console


def terminal(**options: Any) -> Console:
    """The console of this process, with further options of rich. Text is never markup: brackets, colons and numbers in
    paths are only characters."""
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)
