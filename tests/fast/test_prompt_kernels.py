"""Reading prompts by the kernels, against plain operations."""

import pytest
import torch
import torch.nn.functional as F

from angpt.models.folded import Folded
from tests.fast.test_decode_kernels import NAMES, agree, eight_bits, folded, needs_gpu
from tests.models.conftest import some_tokens
from tests.triton_anywhere import DEVICE, DTYPE, ON_GPU, kernels_apply  # noqa: F401


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
@needs_gpu
def test_the_output_of_attention_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from angpt.fast import prompt_kernels

    model, found = folded(d_model=128, n_heads=2, context=64), []
    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: found.append(plain(*a, **k)) or found[0])
    steps, qkv = prompt_kernels.PromptSteps(model), torch.randn(2, 32, 3 * 128, device=DEVICE).to(DTYPE)
    angles = steps.angles(torch.arange(32, device=DEVICE))
    out = prompt_kernels.attend_prompt(*steps.heads_of(qkv, model.layers[0], model.make_caches(2, 64)[0], angles), None)
    assert out.data_ptr() == found[0].data_ptr()


@torch.no_grad()
def test_the_last_layer_computes_only_what_follows_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from angpt.fast import prompt_kernels

    shapes, plain = [], prompt_kernels.attend_prompt
    monkeypatch.setattr(prompt_kernels, "attend_prompt", lambda q, *a: shapes.append(q.shape[:2]) or plain(q, *a))
    compare(folded(d_model=32, n_layers=3, context=64), 4, 9)
    assert shapes == [(4, 9), (4, 9), (4, 1)]


@torch.no_grad()
@pytest.mark.parametrize("sizes", [{"d_model": 48, "n_heads": 3, "d_ff": 80}, {"rotary_fraction": 0.0}, {"n_heads": 1}])
def test_other_dimensions(sizes: dict[str, int]) -> None:
    compare(folded(**({"d_model": 32, "context": 64} | sizes)), 3, 5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_8_bit_weights(kind: str) -> None:
    compare(eight_bits(folded(d_model=32, context=64), kind), 2, 5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_matrices_of_8_bits_are_scaled_in_fp32_and_rounded_once(kind: str) -> None:
    from angpt.fast.block_kernels import scale_rows

    layer = eight_bits(folded(d_model=32, context=64), kind).layers[0]
    expected = layer.W_uz.float() * layer.W_uz_scale[:, None]
    found = scale_rows(layer.W_uz, layer.W_uz_scale, torch.bfloat16)
    half_step = 2**-8 if ON_GPU else 2**-7  # the interpreter cuts digits off where a GPU rounds
    assert found.dtype == torch.bfloat16
    assert ((found - expected).abs() <= half_step * expected.abs()).all()
