"""Checksum and largest token of token files: computed once for each version of a file, and remembered."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from angpt.errors import UserError
from angpt.present.terminal import terminal
from angpt.serialization import json_values, seal, typed, unseal
from angpt.system import available_cores, remove_parts, try_lock, write_atomically

VERIFIED = ".verified.json"
"""File beside the tokens, with the contents of each file and the version of it that was read."""
BLOCK_BYTES = 1 << 22
LARGE_BYTES = 2 << 30
"""Amount of data above which a message says that it is being read."""
WAIT_SECONDS, POLL_SECONDS = 600.0, 0.2
"""How long a process waits for another one that reads the same files; then it reads them, too."""


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
    versions = {path.name: _version(path, offset, dtype) for path, offset in files}
    known = {} if again else _remembered(folder)
    if any(_changed(known, versions, path) for path, _ in files):
        with _one_process(folder):
            known = {} if again else _remembered(folder)  # another process may have read them meanwhile
            changed = [(path, offset) for path, offset in files if _changed(known, versions, path)]
            known |= _read_files(folder, changed, dtype, versions)
    return [Contents(*known[path.name][1:]) for path, _ in files]


def _changed(known: Memory, versions: dict[str, str], path: Path) -> bool:
    return path.name not in known or known[path.name][0] != versions[path.name]


def _read_files(
    folder: Path, files: Sequence[tuple[Path, int]], dtype: np.dtype[Any], versions: dict[str, str]
) -> Memory:
    """Read files on all cores, and remember what is in them."""
    console = terminal(stderr=True)
    if (size := sum(path.stat().st_size for path, _ in files)) > LARGE_BYTES:
        console.print(f"note: {folder}: verifying {size / 1e9:,.0f} GB of tokens, once")
    with ThreadPoolExecutor(available_cores()) as pool:
        found = list(pool.map(lambda file: _read(file[0], file[1], dtype), files))
    new = {path.name: (versions[path.name], *read) for (path, _), read in zip(files, found, strict=True)}
    before = _remembered(folder)
    if before | new == before:  # a process that is killed while it writes leaves work for the next one, which cleans up
        return new
    try:
        _remember(folder, before | new)
    except (OSError, RuntimeError) as error:
        console.print(f"note: {folder}: that its tokens are verified cannot be remembered ({error})")
    return new


def _read(path: Path, offset: int, dtype: np.dtype[Any]) -> Contents:
    """The contents of a file."""
    digest, largest, block = hashlib.sha256(), 0, memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb") as file:
        file.seek(offset)
        while count := file.readinto(block):
            digest.update(block[:count])
            tokens = np.frombuffer(block, dtype, count // dtype.itemsize)
            largest = max(largest, int(tokens.max(initial=0)))
    return Contents(digest.hexdigest(), largest)


def _version(path: Path, offset: int, dtype: np.dtype[Any]) -> str:
    """A text that changes whenever the file is written to or replaced."""
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino} {offset} {dtype.name}"


def _cache_file(folder: Path) -> Path:
    """Where the contents of the files of a folder are remembered; a RuntimeError if the user has no home."""
    if os.access(folder, os.W_OK):
        return folder / VERIFIED
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "angpt" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()}.json"


def _remembered(folder: Path) -> Memory:
    with suppress(UserError, RuntimeError):
        return typed(Memory, unseal(json_values(_cache_file(folder))), VERIFIED)
    return {}


def _remember(folder: Path, known: Memory) -> None:
    path = _cache_file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(seal(known)) + "\n")


@contextmanager
def _one_process(folder: Path) -> Iterator[None]:
    """One process at a time, so that the ranks of a machine do not read the same files at once. It is no promise: some
    network file systems cannot lock folders, and a process that waits for long goes on."""
    handle, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + WAIT_SECONDS
    try:
        with suppress(UserError):
            while not (alone := try_lock(handle, fcntl.LOCK_EX)) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if alone:
                remove_parts(folder, VERIFIED)
        yield
    finally:
        os.close(handle)
