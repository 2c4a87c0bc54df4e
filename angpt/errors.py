"""The one exception that is meant for the user's eyes: the command line prints it as a single line and exits with 2."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right. The message says what is wrong, where, and what to do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the near ones, or all of them if none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
