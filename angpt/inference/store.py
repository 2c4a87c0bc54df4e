"""A folded model as a folder: weights, what they are, and the tokenizer. It gets its name when it is complete."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from angpt.config import ModelConfig, from_dict
from angpt.errors import UserError
from angpt.inference.folded import Folded
from angpt.inference.graph import Graph
from angpt.training.checkpoint import digest_and_sync, sync_folder

WEIGHTS, ABOUT = "model.safetensors", "folded.json"
FORMAT = 1


@dataclass(frozen=True)
class About:
    """What folded.json says."""

    format: int
    model: ModelConfig
    graph: Graph
    made_from: str
    """The folder that was folded."""
    weights_sha256: str
    """Of the weights that were folded, as `angpt eval` shows it."""
    sha256: str
    """Of model.safetensors."""
    training: dict[str, float | int | None]
    """Steps, tokens and validation loss of the training, as far as they are known."""


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when all of it is on the disk; after an error nothing is left of it."""
    if path.exists():
        raise UserError(f"{path}: exists; choose another --out, or remove it")
    part = path.with_name(f".{path.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir(parents=True)
        yield part
        for file in part.rglob("*"):
            if file.is_file():
                digest_and_sync(file)
        sync_folder(part)
        part.rename(path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def save(path: Path, model: Folded, made_from: str, weights_sha256: str, training: dict[str, Any]) -> Iterator[Path]:
    raise NotImplementedError
