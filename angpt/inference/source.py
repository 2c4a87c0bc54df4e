"""A trained model on disk, whichever way it is stored: a run, a folded model, a Hugging Face export."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from angpt.config import ModelConfig, from_dict
from angpt.data.shards import TOKENIZER
from angpt.data.tokenizers import END_NAMES, fingerprint, load_tokenizer
from angpt.errors import UserError
from angpt.inference import store
from angpt.inference.fold import fold
from angpt.inference.folded import Folded
from angpt.models.decoder import Decoder
from angpt.models.variants import build
from angpt.training import checkpoint
from angpt.training.run import Run

EXPORT_CONFIG = "config.json"
EXPORT_WEIGHTS = "model.safetensors"
"""Names that transformers looks for."""

Kind = Literal["run", "folded", "export"]


@dataclass(frozen=True)
class Source:
    """A model on disk and what belongs to it."""

    path: Path
    kind: Kind
    cfg: ModelConfig
    weights: tuple[Path, ...]
    """Files of tensors."""
    tokenizer_path: Path | None
    tokenizer_fingerprint: str | None
    """Of the tokenizer that it was trained with, where that is known."""
    facts: dict[str, Any]
    """How it was trained: step, tokens, validation loss, as far as it is known."""

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for path in self.weights:
            try:
                found |= load_file(path)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: cannot be read as safetensors ({error})") from error
        return found

    def decoder(self) -> Decoder:
        """The model as it was trained, on the CPU."""
        if self.kind == "folded":
            raise UserError(f"{self.path}: is folded, which cannot be undone; give the run that it was made from")
        with torch.device("meta"):
            model = build(self.cfg)
        tensors = self.tensors()
        try:
            model = model.to_empty(device="cpu")
            refill(model, self.cfg)
            model.load_state_dict({name: t.float() for name, t in tensors.items()})
        except RuntimeError as error:
            where = "config.toml" if self.kind == "run" else EXPORT_CONFIG
            raise UserError(f"{self.path}: the weights do not fit the model of {where}: {_first_line(error)}") from error
        return model.eval()

    def folded(self) -> Folded:
        """The model for inference, on the CPU."""
        return store.load(self.path) if self.kind == "folded" else fold(self.decoder())

    def sha256(self) -> str:
        """Of the weights, by name and value: the same for a run and its export."""
        return digest(self.tensors())

    def tokenizer(self) -> Tokenizer:
        if self.tokenizer_path is None:
            raise UserError(f"{self.path}: there is no tokenizer beside the model or in the folder it was trained on")
        tokenizer = load_tokenizer(self.tokenizer_path)
        if self.tokenizer_fingerprint not in (None, fingerprint(tokenizer)):
            raise UserError(f"{self.tokenizer_path}: is not the tokenizer that {self.path} was trained with")
        return tokenizer


def refill(model: Decoder, cfg: ModelConfig) -> None:
    """Give values to what a state dictionary does not hold."""
    fresh = dict(build(cfg).named_buffers()) if any(True for _ in model.buffers()) else {}
    for name, buffer in model.named_buffers():
        buffer.copy_(fresh[name])
