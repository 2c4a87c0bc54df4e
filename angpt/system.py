"""What is asked of the operating system: files that are there whole or not at all, and cores."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """The file holds all of `text`, or what it held before, even if the machine stops in between."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
