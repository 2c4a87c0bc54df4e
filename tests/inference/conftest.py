from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from angpt.config import DataConfig, ModelConfig, TrainConfig
from angpt.data.tokenizers import fingerprint, load_tokenizer
from angpt.models.decoder import Decoder
from angpt.models.variants import build
from angpt.training import checkpoint
from angpt.training.run import Run

BYTES = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 260, "context": 64}


def moved(model: Decoder, seed: int = 1) -> Decoder:
    """The model with its learned vectors moved off their start, so that no term hides behind a one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.mul_(1 + 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model.eval()


def byte_model(architecture: str = "angpt", seed: int = 0, **overrides: int) -> Decoder:
    """A small model of bytes."""
    return moved(build(ModelConfig(architecture=architecture, **(BYTES | overrides)), seed))  # type: ignore[arg-type]


def write_run(path: Path, model: Decoder, step: int = 7, tokenizer: Tokenizer | None = None) -> Run:
    """A run folder as training leaves it, with a folder of data that holds the tokenizer, of bytes unless given."""
    data = path.parent / f"{path.name}-data"
    data.mkdir(parents=True)
    tokenizer = tokenizer or load_tokenizer("bytes")
    tokenizer.save(str(data / "tokenizer.json"))
    run = Run.create(path, TrainConfig(model=model.cfg, data=DataConfig(path=str(data)), batch_tokens=128))
    state = checkpoint.State(step, model.cfg.architecture, 0, 1.0, 2.5, "", fingerprint(tokenizer), {}, run.config())
    checkpoint.save(run.checkpoints, model.state_dict(), {}, state, keep=2)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_run(tmp_path / "run", byte_model())
