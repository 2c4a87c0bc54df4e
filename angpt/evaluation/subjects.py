"""Models to evaluate: a run, a folded model, an export, or only the scores that another machine computed. Weights are
loaded when they are needed, since the scores may already exist."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from angpt.data.shards import TOKENIZER
from angpt.data.tokenizers import load_tokenizer, with_fingerprint
from angpt.errors import UserError
from angpt.evaluation.results import Evaluated, read_results
from angpt.evaluation.scoring import Model
from angpt.inference.hf import run_configuration
from angpt.inference.source import Source, open_source
from angpt.models.decoder import Decoder
from angpt.models.folded import Folded
from angpt.models.primitives import wide
from angpt.training.run import Run


@dataclass(frozen=True)
class Subject:
    """A model to evaluate, by its folder."""

    path: Path
    model: Evaluated
    load: Callable[[torch.device, torch.dtype], Model]
    """Loads the model to a device, with matrix products in a dtype."""
    tokenizer_path: Path | None
    data: Path | None
    """Training data, if known."""
    mask_documents: bool
    """True if it was trained with attention restricted to documents."""

    def tokenizer(self, given: str | None) -> Tokenizer:
        """The given tokenizer, or the model's own."""
        if given is None and self.tokenizer_path is None:
            beside = " nor in ".join(str(folder) for folder in (self.path, self.data) if folder is not None)
            raise UserError(f"{self.path}: no {TOKENIZER} in {beside}; name the file with --tokenizer")
        tokenizer = with_fingerprint(load_tokenizer(given or str(self.tokenizer_path)), self.model.tokenizer)
        if tokenizer is None:
            raise UserError(
                f"{given or self.tokenizer_path}: is not the tokenizer that {self.path} was trained with; "
                "name that one with --tokenizer"
            )
        return tokenizer


def open_subject(path: Path) -> Subject:
    """The model in a folder, or, if its weights are not there, what its results say about it."""
    try:
        source = open_source(path)
    except UserError:
        results = read_results(path)
        if results is None:
            raise
        config = Run.open(path).config() if (path / "config.toml").exists() else None
        folders = [path, *([] if config is None else [Path(config.data.path)])]
        tokenizer = next((folder / TOKENIZER for folder in folders if (folder / TOKENIZER).exists()), None)
        model, load = results.model, partial(_no_weights, path)
        mask = config is not None and config.data.mask_documents
    else:
        config, tokenizer = run_configuration(source), source.tokenizer_path
        cfg, known = source.cfg, source.training.tokenizer_fingerprint
        name = source.path.resolve().name
        model = Evaluated(name, source.kind, source.sha256(), cfg.context, cfg.vocab_size, known)
        load, mask = partial(_load, source), source.recorded.mask_documents
    data = None if config is None else Path(config.data.path)
    return Subject(path, model, load, tokenizer, data, mask)


def _load(source: Source, device: torch.device, dtype: torch.dtype) -> Model:
    if source.kind == "folded":
        return of_folded(source.folded().prepare(device, dtype))
    return of_decoder(source.decoder().to(device), dtype)


def _no_weights(path: Path, device: torch.device, dtype: torch.dtype) -> Model:
    raise UserError(
        f"{path}: has no weights, and {path / 'eval'} has no scores for this; write the requests here with "
        "--write-requests, and score them with --requests where the weights are"
    )


def of_decoder(model: Decoder, dtype: torch.dtype) -> Model:
    """A model as it was trained. The head is at least fp32: its rounding would show in every log-probability, and it is
    computed at few positions."""
    device = model.W_h.weight.device

    def states(tokens: Tensor, documents: Tensor | None) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
            h, ctx = model.start(tokens, documents)
            for block in model.blocks:
                h = block(h, ctx)
        return h

    return Model(states, lambda h: model.head(wide(h)), model.cfg.vocab_size, device)


def of_folded(model: Folded) -> Model:
    """A folded model, with the precision of generation."""

    def states(tokens: Tensor, documents: Tensor | None) -> Tensor:
        return model.stream(tokens, documents=documents)

    return Model(states, model.head, model.cfg.vocab_size, model.device)
