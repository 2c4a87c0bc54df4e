"""experiments/decode_profile.py leaves out the kernels that it names, and restores them."""

import pytest
import torch

from tests.fast.test_decode_kernels import folded
from tests.models.conftest import some_tokens
from tests.triton_anywhere import DEVICE, kernels_apply  # noqa: F401


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what a kernel left out has not written is any number
@pytest.mark.parametrize(
    ("rows", "kernels"),
    [(1, {"_read", "_attend", "_project", "_down", "_advance"}), (3, {"_product", "_attend_whole", "_advance"})],
)
def test_kernels_are_left_out_by_the_matrix_that_they_read(rows: int, kernels: set[str]) -> None:
    from angpt.fast.decode import by_kernels
    from experiments.decode_profile import MATRICES, first_layer_everywhere, left_out, reads

    model = folded(d_model=32, n_layers=3, d_ff=80, context=64)
    tokens, positions = some_tokens(rows).to(DEVICE), torch.full((rows,), 5, device=DEVICE)

    def logits() -> torch.Tensor:
        return by_kernels(model, tokens, positions, model.make_caches(rows, 64), 64)

    launched: list[str] = []

    def seen(name, args) -> bool:
        launched.append(name)
        return False

    expected = logits()
    with left_out(seen):
        assert torch.equal(logits(), expected)
    assert set(launched) == kernels
    for name in MATRICES:
        chosen, left = reads(getattr(model.layers[0], name).shape), 0

        def leave(kernel, args, chosen=chosen) -> bool:
            nonlocal left
            left += chosen(kernel, args)
            return chosen(kernel, args)

        with left_out(leave):
            logits()
        assert left == len(model.layers)
    with first_layer_everywhere(model):
        assert not torch.equal(logits(), expected)
    assert torch.equal(logits(), expected)
