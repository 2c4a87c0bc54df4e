"""A folded model on disk: a folder with the weights, their description and the tokenizer."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from angpt.config import ModelConfig, Weights
from angpt.data.shards import TOKENIZER
from angpt.errors import UserError
from angpt.models.design import Design
from angpt.models.folded import EIGHT_BITS, Folded
from angpt.serialization import read_json, sealed_json
from angpt.system import file_sha256, new_folder

WEIGHTS, ABOUT = "model.safetensors", "folded.json"
FORMAT = 1


@dataclass(frozen=True)
class Training:
    """How a model was trained, as far as that is known."""

    step: int | None = None
    tokens: int | None = None
    val_loss: float | None = None
    tokenizer_fingerprint: str | None = None
    mask_documents: bool = False
    """True if attention stayed inside each document."""


@dataclass(frozen=True)
class About:
    """The contents of folded.json."""

    format: int
    model: ModelConfig
    graph: Design
    made_from: str
    """The folder that was folded."""
    weights_sha256: str
    """`source.digest` of the weights before folding."""
    training: Training
    sha256: str
    """Checksum of model.safetensors."""
    weights: Weights = "full"
    """Format of the matrices."""


def save(
    path: Path, model: Folded, made_from: Path, weights_sha256: str, training: Training, tokenizer: Path | None
) -> None:
    """Write a new folder, complete or not at all. `made_from` and the following describe the model before folding."""
    with new_folder(path) as part:
        save_tensors(model.state_dict(), part / WEIGHTS)
        sha256 = file_sha256(part / WEIGHTS)
        origin = (str(made_from), weights_sha256, training)
        about = About(FORMAT, model.cfg, model.design, *origin, sha256, model.weights)
        (part / ABOUT).write_text(sealed_json(about), encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, part / TOKENIZER)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the metadata that transformers needs; errors, such as a full disk, are OSErrors."""
    try:
        save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_about(path: Path) -> About:
    return read_json(About, path / ABOUT, "fold the model again", FORMAT)


def load(path: Path) -> Folded:
    """The model in a folder, on the CPU, its weights checked against their checksum."""
    about = read_about(path)
    try:
        if file_sha256(path / WEIGHTS) != about.sha256:
            raise UserError("it has a wrong checksum")
        model = Folded(about.model, about.graph, about.weights)
        tensors = load_file(path / WEIGHTS)
        kind = tensors["W_h"].dtype
        if about.weights != "full" and kind != EIGHT_BITS[about.weights]:
            raise UserError(f"its matrices are {kind}, not {about.weights}")
        model.prepare("cpu", kind if about.weights == "full" else torch.float32).load_state_dict(tensors)
    except (UserError, OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise UserError(f"{path / WEIGHTS}: cannot be read ({error}); fold the model again") from error
    return model.eval()
