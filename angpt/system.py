"""Operating system: atomic writes of files and folders, checksums, available cores."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from angpt.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """Write a file. After a crash it holds either all of `text` or what it held before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # another process may write the same file
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `path` when all of it is on the disk; after an error nothing is left of it."""
    check_name(path)
    if path.exists():
        raise UserError(f"{path}: exists; choose another --out, or remove it")
    part = path.with_name(f".{path.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)  # left by a killed process
        part.mkdir(parents=True)
        yield part
        for entry in [*part.rglob("*"), part]:
            sync(entry)
        part.rename(path)
        sync(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_name(path: Path) -> None:
    """Raise an error if the name of a new folder has line breaks or other control characters."""
    if any(ord(character) < 32 or ord(character) == 127 for character in str(path)):
        raise UserError(f"{path}: has control characters in its name; choose another --out")


def sync(path: Path) -> None:
    """Flush a file or the entries of a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
