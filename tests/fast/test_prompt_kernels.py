"""Reading prompts by the kernels, against plain operations."""

import pytest
import torch

from angpt.models.folded import Folded
from tests.fast.test_decode_kernels import NAMES, agree, eight_bits, folded
from tests.models.conftest import some_tokens
from tests.triton_anywhere import DEVICE, kernels_apply  # noqa: F401


def compare(model: Folded, rows: int, length: int) -> None:
    """Logits and the slots of the cache that were read."""
    from angpt.fast.prompt_kernels import prefill

    tokens, lengths = some_tokens(rows, length).to(DEVICE), torch.arange(length, length - rows, -1, device=DEVICE)
    found = []
    for read in (model.prefill, lambda *args: prefill(model, *args)):
        caches = model.make_caches(rows, 64)
        found.append((read(tokens, lengths, caches), caches))
    agree(found)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_read_prompts_as_plain_operations_do(name: str) -> None:
    compare(folded(name, d_model=32, n_layers=2, context=64), 2, 7)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [{"d_model": 48, "n_heads": 3, "d_ff": 80}, {"rotary_fraction": 0.0}, {"n_heads": 1}])
def test_other_dimensions(sizes: dict[str, int]) -> None:
    compare(folded(**({"d_model": 32, "context": 64} | sizes)), 3, 5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_8_bit_weights(kind: str) -> None:
    compare(eight_bits(folded(d_model=32, context=64), kind), 2, 5)
