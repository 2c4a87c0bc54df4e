import pytest
import torch

from angpt.config import ModelConfig
from angpt.models.variants import build

TINY = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 23, "context": 16}


@pytest.fixture(params=["gpt+", "ngpt", "angpt"])
def architecture(request):
    return request.param


def tiny(architecture="angpt", seed=0, **overrides):
    """A small float64 model whose learned vectors are moved off their start, so that no term hides behind a one."""
    cfg = ModelConfig(architecture=architecture, **(TINY | overrides))
    torch.set_default_dtype(torch.float64)  # while it is built: constants that it keeps as tensors are exact, too
    try:
        model = build(cfg)
    finally:
        torch.set_default_dtype(torch.float32)
    model.load_state_dict(build(cfg, seed).state_dict())
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.mul_(1 + 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def some_tokens(*shape, vocab=TINY["vocab_size"], seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))
