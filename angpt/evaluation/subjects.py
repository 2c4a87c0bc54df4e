"""Models to evaluate, whatever they come as: a run folder or an export. Nothing is loaded before it is needed, since
the answers of a model may be there already."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from angpt.data.shards import TOKENIZER
from angpt.data.tokenizers import fingerprint, load_tokenizer
from angpt.errors import UserError
from angpt.evaluation.results import Evaluated, read_results
from angpt.evaluation.scoring import Model
from angpt.models.decoder import Decoder
from angpt.models.primitives import wide
from angpt.models.variants import build
from angpt.training import checkpoint
from angpt.training.run import Run


@dataclass(frozen=True)
class Subject:
    """A model by its folder."""

    path: Path
    model: Evaluated
    load: Callable[[torch.device, torch.dtype], Model]
    """The model on a device, with its matrix products in a dtype."""
    data: Path | None = None
    """What it was trained on."""
    mask_documents: bool = False
    """It was trained with attention inside of documents only."""

    def tokenizer(self, given: str | None) -> Tokenizer:
        """The one that the user names, else that of the export or of the training data."""
        beside = [folder / TOKENIZER for folder in (self.path, self.data) if folder is not None]
        found = next((path for path in beside if path.exists()), None)
        if given is None and found is None:
            raise UserError(
                f"{self.path}: its tokenizer is not to be found in {' or '.join(map(str, beside))}; "
                "name the tokenizer.json with --tokenizer"
            )
        tokenizer = load_tokenizer(given or str(found))
        if self.model.tokenizer not in (None, fingerprint(tokenizer)):
            raise UserError(f"{given or found}: is not the tokenizer that {self.path} was trained with")
        return tokenizer


def open_subject(path: Path, trust_remote_code: bool = False) -> Subject:
    """A run folder, an export, or a folder with the evaluation of a model whose weights are elsewhere."""
    if (path / "config.toml").exists():
        return _open_run(path)
    if (path / "config.json").exists():
        return _open_export(path, trust_remote_code)
    if (results := read_results(path)) is not None:
        return Subject(path, results.model, _elsewhere(path))
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    raise UserError(f"{path}: neither a run folder (config.toml) nor an export (config.json)")


def _open_run(path: Path) -> Subject:
    config = Run.open(path).config()
    newest = checkpoint.newest(Run.open(path).checkpoints)
    if newest is None:
        results = read_results(path)
        if results is None:
            raise UserError(f"{path}: no good checkpoint; train the run, or go on with --resume")
        return Subject(path, results.model, _elsewhere(path), Path(config.data.path), config.data.mask_documents)
    state = checkpoint.read_state(newest, verify=False)
    model = Evaluated(
        name=path.resolve().name,
        kind="run",
        weights=state.sha256[checkpoint.MODEL],
        context=config.model.context,
        vocab_size=config.model.vocab_size,
        tokenizer=state.tokenizer_fingerprint,
    )

    def load(device: torch.device, dtype: torch.dtype) -> Model:
        made = build(config.model)
        try:
            made.load_state_dict(checkpoint.load_model(newest))
        except RuntimeError as error:
            raise UserError(f"{newest}: the checkpoint does not fit the model of config.toml") from error
        return of_decoder(made, device, dtype)

    return Subject(path, model, load, Path(config.data.path), config.data.mask_documents)


def _open_export(path: Path, trust_remote_code: bool) -> Subject:
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        context = next(config[name] for name in ("n_positions", "max_position_embeddings", "n_ctx") if name in config)
        vocab_size = int(config["vocab_size"])
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise UserError(f"{path / 'config.json'}: says nothing of a context and a vocabulary ({error!r})") from error
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"{path}: has no weights (*.safetensors)")
    tokenizer = path / TOKENIZER
    model = Evaluated(
        name=path.resolve().name,
        kind="export",
        weights=_digest(files),
        context=int(context),
        vocab_size=vocab_size,
        tokenizer=fingerprint(load_tokenizer(tokenizer)) if tokenizer.exists() else None,
    )

    def load(device: torch.device, dtype: torch.dtype) -> Model:
        if "auto_map" in config and not trust_remote_code:
            raise UserError(
                f"{path}: to load it is to run the Python code that lies in it; "
                "look at it, and pass --trust-remote-code if you do trust it"
            )
        from transformers import AutoModelForCausalLM

        made: Any = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=trust_remote_code, dtype=torch.float32)
        return of_transformers(made, device, dtype)

    return Subject(path, model, load)


def of_decoder(model: Decoder, device: torch.device, dtype: torch.dtype) -> Model:
    """One of our models. The head is in fp32 at the least: it is the one product whose rounding would be seen in every
    log-probability, and there are few places to compute it at."""
    model = model.eval().to(device)

    def states(tokens: Tensor, documents: Tensor | None) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
            h, ctx = model.start(tokens, documents)
            for block in model.blocks:
                h = block(h, ctx)
        return h

    return Model(states, lambda h: model.head(wide(h)), model.cfg.vocab_size, device)


def of_transformers(model: Any, device: torch.device, dtype: torch.dtype) -> Model:
    model = model.eval().to(device)

    def states(tokens: Tensor, documents: Tensor | None) -> Tensor:
        if documents is not None:
            raise UserError("a model of transformers cannot keep attention inside of documents")
        with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
            logits: Tensor = model(tokens, use_cache=False).logits
        return logits

    return Model(states, wide, model.config.vocab_size, device, everywhere=True)


def _elsewhere(path: Path) -> Callable[[torch.device, torch.dtype], Model]:
    """For a model of which only answers are here."""

    def load(device: torch.device, dtype: torch.dtype) -> Model:
        raise UserError(
            f"{path}: its weights are not here, and what is in {path / 'eval'} does not answer this; "
            "score it where they are: write the requests here with --write-requests, score them there with --requests"
        )

    return load


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            found = hashlib.file_digest(handle, "sha256").hexdigest()
        digest.update(found.encode())
    return found if len(files) == 1 else digest.hexdigest()
