"""Several models on the GPUs of one machine: a process for each GPU evaluates a part of them by the same command."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

PART = "ANGPT_EVAL_PART"
"""Tells a process which part of the models is its own: 1/4 is the second of four."""


def gpus(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else 0


def own_part(models: Sequence[T]) -> Sequence[T] | None:
    """What this process is to evaluate, on its GPU, if it was started for a part; None in the command itself."""
    if PART not in os.environ:
        return None
    index, count = map(int, os.environ[PART].split("/"))
    if torch.cuda.is_available():
        torch.cuda.set_device(index % torch.cuda.device_count())
    return models[index::count]


def evaluate_parts(count: int) -> None:
    """This command again in `count` processes, each with its part of the models. Results are in the folders of the
    models afterwards; what one could not do is left to this process, which says why."""
    if count < 2:
        return
    command = [sys.executable, "-m", "angpt", *sys.argv[1:]]
    processes = [subprocess.Popen(command, env=os.environ | {PART: f"{i}/{count}"}) for i in range(count)]
    try:
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.terminate()
            process.wait()
