"""Models to evaluate: a run, a folded model, an export, or only what another machine has scored of one. Nothing is
loaded before it is needed, since the answers of a model may be there already."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from angpt.data.shards import TOKENIZER
from angpt.data.tokenizers import fingerprint, load_tokenizer
from angpt.errors import UserError
from angpt.evaluation.results import Evaluated, read_results
from angpt.evaluation.scoring import Model
from angpt.inference.hf import run_configuration
from angpt.inference.source import Source, open_source
from angpt.models.decoder import Decoder
from angpt.models.folded import Folded
from angpt.models.primitives import wide
from angpt.training.run import Run

Load = Callable[[torch.device, torch.dtype], Model]
"""The model on a device, with its matrix products in a dtype."""


@dataclass(frozen=True)
class Subject:
    """A model by its folder."""

    path: Path
    model: Evaluated
    load: Load
    tokenizer_path: Path | None
    data: Path | None
    """Training data, where it is known."""
    mask_documents: bool
    """It was trained with attention inside documents only."""

    def tokenizer(self, given: str | None) -> Tokenizer:
        """The one that the user names, else the model's own."""
        if given is None and self.tokenizer_path is None:
            beside = " nor in ".join(str(folder) for folder in (self.path, self.data) if folder is not None)
            raise UserError(f"{self.path}: there is no {TOKENIZER} in {beside}; name the file with --tokenizer")
        tokenizer = load_tokenizer(given or str(self.tokenizer_path))
        if self.model.tokenizer not in (None, fingerprint(tokenizer)):
            raise UserError(
                f"{given or self.tokenizer_path}: is not the tokenizer that {self.path} was trained with; "
                "name that one with --tokenizer"
            )
        return tokenizer


def open_subject(path: Path) -> Subject:
    """The model in a folder, or what is known of it where its weights are not there."""
    try:
        return _of_source(open_source(path))
    except UserError:
        results = read_results(path)
        if results is None:
            raise
    config = Run.open(path).config() if (path / "config.toml").exists() else None
    beside = [path / TOKENIZER] + ([] if config is None else [Path(config.data.path) / TOKENIZER])
    return Subject(
        path=path,
        model=results.model,
        load=_elsewhere(path),
        tokenizer_path=next((file for file in beside if file.exists()), None),
        data=None if config is None else Path(config.data.path),
        mask_documents=config is not None and config.data.mask_documents,
    )


def _of_source(source: Source) -> Subject:
    config = run_configuration(source)
    model = Evaluated(
        name=source.path.resolve().name,
        kind=source.kind,
        weights=source.sha256(),
        context=source.cfg.context,
        vocab_size=source.cfg.vocab_size,
        tokenizer=source.training.tokenizer_fingerprint,
    )

    def load(device: torch.device, dtype: torch.dtype) -> Model:
        if source.kind == "folded":
            return of_folded(source.folded().prepare(device, dtype))
        return of_decoder(source.decoder().to(device), dtype)

    return Subject(
        path=source.path,
        model=model,
        load=load,
        tokenizer_path=source.tokenizer_path,
        data=None if config is None else Path(config.data.path),
        mask_documents=config is not None and config.data.mask_documents,
    )


def of_decoder(model: Decoder, dtype: torch.dtype) -> Model:
    """A model as it was trained. The head is in fp32 at the least: it is the one product whose rounding would be seen
    in every log-probability, and there are few places to compute it at."""
    device = model.W_h.weight.device

    def states(tokens: Tensor, documents: Tensor | None) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
            h, ctx = model.start(tokens, documents)
            for block in model.blocks:
                h = block(h, ctx)
        return h

    return Model(states, lambda h: model.head(wide(h)), model.cfg.vocab_size, device)


def of_folded(model: Folded) -> Model:
    """A model for inference, in the arithmetic that it generates text with."""

    def states(tokens: Tensor, documents: Tensor | None) -> Tensor:
        if documents is not None:
            raise UserError("a folded model cannot keep attention inside documents; evaluate the run in its place")
        return model.stream(tokens)

    return Model(states, model.head, model.cfg.vocab_size, model.device)


def _elsewhere(path: Path) -> Load:
    """A model of which only the answers are available."""

    def load(device: torch.device, dtype: torch.dtype) -> Model:
        raise UserError(
            f"{path}: its weights are not here, and what is in {path / 'eval'} does not answer this; "
            "score it where they are: write the requests here with --write-requests, score them there with --requests"
        )

    return load
