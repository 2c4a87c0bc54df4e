"""Checksum and largest token of token files: computed once for each version of a file, and remembered."""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from angpt.errors import UserError
from angpt.serialization import json_values, seal, typed, unseal
from angpt.system import available_cores, write_atomically

VERIFIED = ".verified.json"
"""File beside the tokens, with the contents of each file and the version of it that was read."""
BLOCK_BYTES = 1 << 22
LARGE_BYTES = 20 << 30
"""Amount of data above which a message says that it is being read."""


Memory = dict[str, tuple[str, str, int]]
"""The version of each file that was read, the checksum of its tokens and the largest of them, by the file's name."""


class Contents(NamedTuple):
    """What is in a file of tokens."""

    sha256: str
    """Checksum of the tokens."""
    max_token: int


def contents(files: Sequence[tuple[Path, int]], dtype: np.dtype[Any], again: bool = False) -> list[Contents]:
    """The contents of files of one folder, each with the offset of its tokens. A file is read, on all cores, if it has
    changed since it was read last, or with `again`.

    What was read is remembered beside the files, or in the user's cache folder if that cannot be written to.
    """
    folder = files[0][0].parent
    with _alone(folder):
        versions = {path.name: _version(path, offset, dtype) for path, offset in files}
        known = {} if again else _remembered(folder)
        changed = [file for file in files if known.get(file[0].name, ("",))[0] != versions[file[0].name]]
        if changed:
            if (size := sum(path.stat().st_size for path, _ in changed)) > LARGE_BYTES:
                print(f"note: {folder}: verifying {size / 1e9:,.0f} GB of tokens, once", file=sys.stderr)
            with ThreadPoolExecutor(available_cores()) as pool:
                found = list(pool.map(lambda file: _read(file[0], file[1], dtype), changed))
            new = {path.name: (versions[path.name], *read) for (path, _), read in zip(changed, found, strict=True)}
            known = _remembered(folder) | new
            _remember(folder, known)
        return [Contents(*known[path.name][1:]) for path, _ in files]


def _read(path: Path, offset: int, dtype: np.dtype[Any]) -> Contents:
    digest, largest, block = hashlib.sha256(), 0, memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb") as file:
        file.seek(offset)
        while count := file.readinto(block):
            digest.update(block[:count])
            tokens = np.frombuffer(block, dtype, count // dtype.itemsize)
            largest = max(largest, int(tokens.max(initial=0)))
    return Contents(digest.hexdigest(), largest)


def _version(path: Path, offset: int, dtype: np.dtype[Any]) -> str:
    """Changes whenever the file is written to or replaced."""
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino} {offset} {dtype.name}"


def _memory(folder: Path) -> Path:
    if os.access(folder, os.W_OK):
        return folder / VERIFIED
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "angpt" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()}.json"


def _remembered(folder: Path) -> Memory:
    with suppress(UserError):
        return typed(Memory, unseal(json_values(_memory(folder))), VERIFIED)
    return {}


def _remember(folder: Path, known: Memory) -> None:
    with suppress(OSError):  # then the files are read again next time
        _memory(folder).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_memory(folder), json.dumps(seal(known)) + "\n")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: the ranks of a machine do not read the same files at once."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock folders
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
