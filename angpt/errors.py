"""Errors that are told in one line: mistakes of the user, and what a disk, the memory or a file may do wrong."""

import difflib
import errno
import os
import re
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right. The message says what is wrong, where, and what to do."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk, a quota or a file size limit that is reached."""
NO_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA out of memory",
    "can't start new thread",
    "Cannot allocate memory",
    "Storage size calculation overflowed",
    "Overflow when unpacking long",
    "array is too big",
    "Maximum allowed",
)
"""What PyTorch, NumPy and Python say in a RuntimeError, TypeError or ValueError when memory is short."""


def explain(error: BaseException) -> str | None:
    """An error in one line; None for an error of the program itself, of which a traceback tells more."""
    text = str(error)
    if isinstance(error, UserError):
        return one_line(text)
    if isinstance(error, OSError):
        return one_line(_explain_os_error(error))
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | TypeError | ValueError) and any(words in text for words in NO_MEMORY)
    ):
        detail = f" ({text.splitlines()[0]})" if text else ""
        return one_line(f"not enough memory{detail}; lower the sizes, or use a machine with more")
    if isinstance(error, RecursionError):
        return "values are nested too deeply; is a file damaged?"
    if isinstance(error, UnicodeError):
        return one_line(f"text is not valid Unicode ({text}); correct it")
    if isinstance(error, OverflowError):
        return one_line(f"a number is too large ({text})")
    if type(error).__name__ == "SafetensorError":
        return one_line(f"a file of tensors cannot be read or written ({text})")
    return None


def _explain_os_error(error: OSError) -> str:
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    if error.errno in FULL:
        return f"{where}the disk is full, or a limit is reached ({error.strerror}); make room and try again"
    return where + (error.strerror or str(error) or type(error).__name__)


def one_line(text: str) -> str:
    """The text with line breaks, control characters and surrogates as escapes: a terminal must not obey them."""
    hidden = r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(hidden, lambda found: found[0].encode("unicode_escape").decode(), text)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the near ones, or all of them if none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
