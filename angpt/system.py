"""Operating system: atomic writes of files and folders, locks, checksums of files, available cores."""

import fcntl
import glob
import hashlib
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from angpt.errors import UserError

LOCK = ".lock"
"""File in a folder that the process that writes to the folder holds locked."""
NAME_BYTES = 8
"""Random bytes in the name of a temporary file."""


def write_atomically(path: Path, text: str) -> None:
    """Write a file. After a crash it holds either all of `text` or what it held before."""
    with written_at_end(path, text):
        pass


@contextmanager
def written_at_end(path: Path, text: str) -> Iterator[None]:
    """Write a file when a `with` block ends, atomically; after an error in it, the file holds what it held before.

    The text is on the disk before the block begins, so that a full disk or a missing permission is found first.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(NAME_BYTES)}.part")
    with part.open("x", encoding="utf-8", errors="surrogateescape") as file:  # new, not a link; text may hold paths
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            yield
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def open_to_append(path: Path) -> int:
    """A handle that writes to the end of a file, which is made if it does not exist; an error if it is a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `path` when all of it is on the disk; after an error nothing is left of it, and what
    a killed process has left is removed by the next one with the same `path`."""
    check_new_name(path)
    if path.exists():
        raise UserError(f"{path}: exists; choose another --out, or remove it")
    part, handle = path.with_name(f".{path.name}.{secrets.token_hex(NAME_BYTES)}.part"), None
    try:
        part.mkdir(parents=True)
        handle = os.open(part, os.O_RDONLY)
        with suppress(UserError):  # no locks here: then nothing that others left is removed
            try_lock(handle, fcntl.LOCK_EX)
            _remove_abandoned(path)
        yield part
        for entry in [*part.rglob("*"), part]:
            sync(entry)
        part.rename(path)
        sync(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error})") from error
    finally:
        if handle is not None:
            os.close(handle)
        shutil.rmtree(part, ignore_errors=True)


def _remove_abandoned(path: Path) -> None:
    """Remove folders that were to become `path` and that no process fills any more."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 2 * NAME_BYTES}.part"):
        with suppress(OSError):
            handle = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if try_lock(handle, fcntl.LOCK_EX):
                    shutil.rmtree(part, ignore_errors=True)
            finally:
                os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link, which leaves what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def remove_parts(folder: Path, name: str = "*") -> None:
    """Remove the temporary files of a killed process, of files of this name; nobody else may be writing them."""
    for part in folder.glob(f".{name}.{'?' * 2 * NAME_BYTES}.part"):
        with suppress(OSError):  # a folder, or removed meanwhile
            part.unlink()


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock of the file `path` in a `with` block; the kernel releases it however the process ends. Temporary
    files that a killed process has left in the folder are removed.

    If another process holds it, raise an error: the folder, `busy`, and that process.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UserError(f"{path}: cannot be locked ({error.strerror}); give permission to write here") from error
    with os.fdopen(handle, "r+", encoding="utf-8") as file:
        if not try_lock(handle, fcntl.LOCK_EX):
            time.sleep(0.1)  # a process that asks whether it is locked holds it for a moment
            if not try_lock(handle, fcntl.LOCK_EX):
                raise UserError(f"{path.parent}: {busy} ({file.read().strip() or 'it has not said which'})")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        remove_parts(path.parent)
        yield


def try_lock(handle: int, kind: int) -> bool:
    """Try to lock an open file until it is closed; True if that succeeded."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(f"a lock is not possible here ({error.strerror}); use a file system with flock") from error
    return True


def check_name(name: str) -> str:
    """A file name that another file states; an error if it would lead out of the folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or not name.isprintable():
        raise UserError(f"{name!r} is not the name of a file in its folder")
    return name


def check_new_name(path: Path) -> None:
    """Raise an error if the name of a new folder for weights has control characters, or is not UTF-8."""
    check_characters(path)
    if os.fsencode(path).decode(errors="replace") != str(path):
        raise UserError(f"{path}: is not UTF-8, and safetensors could not open the files in it; choose another --out")


def check_characters(path: Path) -> None:
    """Raise an error if the name of a new folder has control characters."""
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


def available_threads() -> int:
    """Number of threads for the operations of PyTorch: one per core, at most OMP_NUM_THREADS."""
    most = os.environ.get("OMP_NUM_THREADS", "")
    return min(available_cores(), int(most)) if most.isdecimal() and int(most) > 0 else available_cores()
