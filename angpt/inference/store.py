"""A folded model as a folder: weights, what they are, and the tokenizer."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from angpt.config import ModelConfig, from_dict
from angpt.data.shards import TOKENIZER
from angpt.errors import UserError
from angpt.models.design import Design
from angpt.models.folded import Folded
from angpt.system import new_folder

WEIGHTS, ABOUT = "model.safetensors", "folded.json"
FORMAT = 1


@dataclass(frozen=True)
class Training:
    """How a model was trained, as far as it is known."""

    step: int | None = None
    tokens: int | None = None
    val_loss: float | None = None
    tokenizer_fingerprint: str | None = None


@dataclass(frozen=True)
class About:
    """What folded.json says."""

    format: int
    model: ModelConfig
    graph: Design
    made_from: str
    """The folder that was folded."""
    weights_sha256: str
    """Of the weights before they were folded, by name and value."""
    training: Training
    sha256: str
    """Of model.safetensors."""


def save(
    path: Path, model: Folded, made_from: Path, weights_sha256: str, training: Training, tokenizer: Path | None
) -> None:
    """Write a new folder, complete or not at all."""
    with new_folder(path) as part:
        save_tensors(model.state_dict(), part / WEIGHTS)
        about = About(
            FORMAT, model.cfg, model.design, str(made_from), weights_sha256, training, _sha256(part / WEIGHTS)
        )
        (part / ABOUT).write_text(json.dumps(asdict(about), indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, part / TOKENIZER)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """With the metadata that transformers asks for. What safetensors raises where a disk is full becomes an OSError."""
    try:
        save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_about(path: Path) -> About:
    try:
        values = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise UserError(f"it has format {values['format']!r}, this version reads format {FORMAT}")
        return from_dict(About, values)
    except (UserError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path / ABOUT}: cannot be read ({error}); fold the model again") from error


def load(path: Path) -> Folded:
    """The model in a folder, on the CPU, its weights checked against their checksum."""
    about = read_about(path)
    try:
        if _sha256(path / WEIGHTS) != about.sha256:
            raise UserError("its checksum is wrong")
        model = Folded(about.model, about.graph)
        tensors = load_file(path / WEIGHTS)
        model.prepare("cpu", tensors["W_h"].dtype).load_state_dict(tensors)
    except (UserError, OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise UserError(f"{path / WEIGHTS}: cannot be read ({error}); fold the model again") from error
    return model.eval()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
