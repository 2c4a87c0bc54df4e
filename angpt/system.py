"""What is asked of the operating system: files and folders that are there whole or not at all, cores, a terminal."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from angpt.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """The file holds all of `text`, or what it held before, even if the machine stops in between."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `path` when all of it is on the disk; after an error nothing is left."""
    if path.exists():
        raise UserError(f"{path}: exists; choose another --out, or remove it")
    part = path.with_name(f".{path.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir(parents=True)
        yield part
        for entry in [*part.rglob("*"), part]:
            _sync(entry)
        part.rename(path)
        _sync(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
