"""The terminal: text is printed as text, whatever characters it has."""

from typing import TYPE_CHECKING, Any

from angpt.present.words import printable

if TYPE_CHECKING:
    from rich.console import Console


def terminal(**options: Any) -> "Console":
    """The console of this process, with further options of rich. Text is only characters: neither markup nor control
    characters."""
    from rich.console import Console

    class Terminal(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)

    return Terminal(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)
