import pytest
import torch

from angpt.config import ModelConfig
from angpt.data.loader import Batch
from angpt.models.variants import build
from angpt.training.launch import start
from angpt.training.reporter import Quiet
from tests.training.conftest import small, write_tokens

VOCAB = 61


def tiny(architecture="angpt", seed=0, double=True, **changes):
    """A model of two layers, in float64 by default, so that rounding is negligible."""
    values = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": VOCAB, "context": 12} | changes
    model = build(ModelConfig(architecture=architecture, **values), seed)
    rng = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # away from the initial values, many of which are equal
        for p in model.parameters():
            p.mul_(1 + 0.3 * torch.randn(p.shape, generator=rng))
    return model.double() if double else model


def some_batches(rows=5, length=12, count=2, seed=3, vocab=VOCAB):
    rng = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(vocab, (rows, length + 1), generator=rng) for _ in range(count)]
    return [Batch(t[:, :-1], t[:, 1:], None) for t in tokens]


@pytest.fixture(scope="package")
def tokens(tmp_path_factory):
    """Raw tokens without a tokenizer."""
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="package")
def runs(tmp_path_factory, tokens):
    """A short run of each architecture that recorded everything, and one of GPT+ without warm-up."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "gpt+": {"architecture": "gpt+"},
        "gpt+nowarm": {"architecture": "gpt+", "optimizer__warmup": 0.0},
        "ngpt": {"architecture": "ngpt"},
        "angpt": {"architecture": "angpt"},
    }
    for name, changes in settings.items():
        start(small(tokens, record_moments=True, **changes), folder / name, Quiet())
    return {name: folder / name for name in settings}
