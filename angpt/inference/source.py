"""A trained model on disk in any of its forms: a run, a folded model, a Hugging Face export."""

import copy
import hashlib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from angpt.config import ModelConfig
from angpt.data.shards import TOKENIZER
from angpt.data.tokenizers import load_tokenizer, with_fingerprint
from angpt.errors import UserError
from angpt.inference import store
from angpt.inference.fold import fold
from angpt.inference.store import Training
from angpt.models.decoder import Decoder
from angpt.models.folded import Folded
from angpt.models.variants import architecture
from angpt.serialization import from_dict, json_values, shown, typed
from angpt.system import check_name
from angpt.training import checkpoint
from angpt.training.run import Run

EXPORT_CONFIG, EXPORT_WEIGHTS, EXPORT_SHARDS = "config.json", "model.safetensors", "model.safetensors.index.json"
"""File names of transformers."""
EXPORTED_SHA256 = "angpt_weights_sha256"
"""The key of config.json with the checksum of the weights that were exported."""


@dataclass(frozen=True)
class Source:
    """A model on disk, with its tokenizer and how it was trained."""

    path: Path
    kind: Literal["run", "folded", "export"]
    cfg: ModelConfig
    weights: tuple[Path, ...]
    """Files of tensors; for a run, the folder of its newest checkpoint."""
    tokenizer_path: Path | None
    recorded: Training
    """What the folder records of the training."""
    exported_sha256: str | None = None
    """Checksum of the weights that were exported, if that is recorded; the folder may hold others by now."""

    @cached_property
    def changed(self) -> bool:
        """True if the weights of an export are no longer those that were exported, for example after fine-tuning."""
        return self.exported_sha256 is not None and self.exported_sha256 != self.sha256()

    @property
    def training(self) -> Training:
        """How these weights were trained, as far as that is known."""
        known = self.recorded
        return Training(mask_documents=known.mask_documents) if self.changed else known

    def decoder(self) -> Decoder:
        """The model as it was trained, on the CPU."""
        if self.kind == "folded":
            raise UserError(f"{self.path}: is folded, which cannot be undone; give the run that it was made from")
        model = architecture(self.cfg.architecture)(self.cfg)
        try:
            model.load_state_dict(self.tensors())
        except RuntimeError as error:
            raise UserError(f"{self.weights[0]}: the weights do not fit the model of its configuration") from error
        return model.eval()

    def folded(self) -> Folded:
        """The model for inference, on the CPU."""
        return store.load(self.path) if self.kind == "folded" else fold(self.decoder())

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for path in self.weights:
            try:
                found |= checkpoint.load_model(path) if path.is_dir() else load_file(path)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: cannot be read as safetensors ({error})") from error
        return found

    def sha256(self) -> str:
        """Checksum of the trained weights: equal for a run, its export and the model folded from it in full precision.

        A model folded to 8 bits computes something else: it has the checksum of its own file.
        """
        if self.kind != "folded":
            return digest(self.tensors())
        about = store.read_about(self.path)
        return about.weights_sha256 if about.weights == "full" else about.sha256

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with."""
        if self.tokenizer_path is None:
            where = ", nor in the data folder that it was trained on" if self.kind == "run" else ""
            raise UserError(f"{self.path}: no {TOKENIZER} in it{where}; copy the {TOKENIZER} of its data there")
        found = load_tokenizer(self.tokenizer_path)
        tokenizer = with_fingerprint(found, self.recorded.tokenizer_fingerprint)
        if tokenizer is None and self.changed:  # perhaps with tokens that were added
            return found
        if tokenizer is None:
            raise UserError(f"{self.tokenizer_path}: is not the tokenizer that {self.path} was trained with")
        return tokenizer


@dataclass(frozen=True)
class Held(Source):
    """A model in memory."""

    model: Decoder = field(kw_only=True)

    def decoder(self) -> Decoder:
        return copy.deepcopy(self.model).to("cpu", torch.float32).eval()

    def tensors(self) -> dict[str, Tensor]:
        return self.decoder().state_dict()


def open_source(path: Path) -> Source:
    """The model in a folder; an error if the folder holds none or several."""
    if (path / "config.toml").exists():
        return _open_run(path)
    if (path / store.ABOUT).exists():
        about = store.read_about(path)
        return Source(path, "folded", about.model, (path / store.WEIGHTS,), _beside(path), about.training)
    if (path / EXPORT_CONFIG).exists():
        return _open_export(path)
    runs = sorted(p.parent for p in path.glob("runs/*/config.toml"))
    if runs:
        raise UserError(f"{path}: holds several runs; give one of them: {' '.join(map(str, runs))}")
    what = "no model in it" if path.exists() else "does not exist"
    raise UserError(f"{path}: {what}; give a run folder, a folded model or an export")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names, dtypes, shapes and values of tensors."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        found.update(t.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _open_run(path: Path) -> Source:
    run = Run.open(path)
    config = run.config()
    newest = checkpoint.newest(run.checkpoints)
    if newest is None:
        raise UserError(f"{path}: no good checkpoint in {run.checkpoints}; train the run, or continue it with --resume")
    state = checkpoint.read_state(newest, verify=False)
    checkpoint.check_config(newest, state, config)
    with suppress(UserError):  # a damaged summary takes nothing from the model
        if (summary := run.summary()) is not None and summary.status == "diverged":
            what = f"diverged after {summary.step:,} steps; its model is the last good one, of step {state.step:,}"
            warnings.warn(f"{path}: {what}", stacklevel=3)
    step = state.step or None  # 0: imported, so that the number is not known
    tokens = step * config.batch_tokens if step and config.batch_tokens else None
    mask = config.data.mask_documents
    training = Training(step, tokens, state.val_loss, state.tokenizer_fingerprint, mask)
    tokenizer = _beside(path) or _beside(Path(config.data.path))
    return Source(path, "run", config.model, (newest,), tokenizer, training)


def _open_export(path: Path) -> Source:
    where = path / EXPORT_CONFIG
    try:
        values = json_values(where)
        if values.get("model_type") != "angpt":
            raise UserError(f"model_type is {shown(values.get('model_type'))}; only exports of angpt can be read")
        if values.get("for_engines"):
            raise UserError("it was exported for engines, which cannot be undone; give the run that it was made from")
        cfg = from_dict(ModelConfig, values.get("angpt_model"), "angpt_model", finite=True)
        cfg = replace(cfg, vocab_size=typed(int, values.get("vocab_size", cfg.vocab_size), "vocab_size"))
        training = from_dict(Training, values.get("angpt_training"), "angpt_training", finite=True)
        sha256 = typed(str | None, values.get(EXPORTED_SHA256), EXPORTED_SHA256)
        weights = [EXPORT_WEIGHTS]
        if (path / EXPORT_SHARDS).exists():
            shards = json_values(path / EXPORT_SHARDS)
            names = typed(dict[str, str], shards.get("weight_map"), "weight_map").values()
            weights = sorted({check_name(name) for name in names})
    except UserError as error:
        raise UserError(f"{where}: cannot be read as an export of angpt ({error})") from error
    return Source(path, "export", cfg, tuple(path / name for name in weights), _beside(path), training, sha256)


def _beside(folder: Path) -> Path | None:
    path = folder / TOKENIZER
    return path if path.exists() else None
