"""Several models on the GPUs of one machine: one process per GPU runs `angpt eval` for its share of the models."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

PART = "ANGPT_EVAL_PART"
"""Environment variable with the share of a process: 1/4 is the second of four."""


def gpus(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else 0


def own_part(models: Sequence[T]) -> Sequence[T] | None:
    """The models that this process evaluates on its GPU; None in the process that the user started."""
    if PART not in os.environ:
        return None
    index, count = map(int, os.environ[PART].split("/"))
    if torch.cuda.is_available():
        torch.cuda.set_device(index % torch.cuda.device_count())
    return models[index::count]


def command_line(models: Sequence[Path], **options: Any) -> list[str]:
    """The arguments of `angpt` that evaluate these models with these options; None and () are left out."""
    found = ["eval", *map(str, models)]
    for name, value in options.items():
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        if values:
            found += [f"--{name.replace('_', '-')}", *map(str, values)]
    return found


def evaluate_parts(device: torch.device, models: int, arguments: Sequence[str], quiet: bool = False) -> None:
    """Run `angpt` with these arguments in one process per GPU, if there are several, each with its share of the models.

    They leave results in the folders of the models; this process repeats what failed, and reports the error.
    """
    count = min(gpus(device), models)
    if count < 2:
        return
    command = [sys.executable, "-m", "angpt", *arguments]
    output = subprocess.DEVNULL if quiet else None
    parts = [os.environ | {PART: f"{i}/{count}"} for i in range(count)]
    processes = [subprocess.Popen(command, env=part, stdout=output, stderr=output) for part in parts]
    try:
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.terminate()
            process.wait()
