import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from angpt.cli.inference import all_designs
from angpt.config import ModelConfig
from angpt.errors import UserError
from angpt.inference.fold import fold, operations
from angpt.models import folded as folded_module
from angpt.models.angpt import AnGPT, AnGPTBlock
from angpt.models.primitives import norm
from angpt.models.variants import ARCHITECTURES, build
from tests.models.conftest import some_tokens, tiny

NAMES = sorted(ARCHITECTURES)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_folded_model_has_the_same_logits(name: str) -> None:
    tokens = some_tokens(3, 16)
    for layers, d_model in ((4, 16), (2, 24)):  # √24 is no number that floats hold exactly
        model = tiny(name, n_layers=layers, d_model=d_model)
        assert relative_error(fold(model)(tokens), model(tokens)) < 1e-12
        model = model.float()
        assert relative_error(fold(model)(tokens), model(tokens)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt+", "ngpt", "angpt"])
def test_in_bf16_it_is_as_close_as_matrices_in_bf16_can_be(name: str) -> None:
    tokens, model = some_tokens(2, 16), tiny(name)
    exact = model(tokens)
    found = fold(model).prepare("cpu", torch.bfloat16)(tokens)
    assert found.dtype == torch.float32
    assert relative_error(found.double(), exact) < 0.03


@pytest.mark.parametrize("name", ["ngpt", "angpt"])
def test_of_a_model_in_bf16_the_vectors_are_those_in_fp32(name: str) -> None:
    """1 − α near 1 has no room in bf16."""
    model = tiny(name).to(torch.bfloat16)
    for layer, block in zip(fold(model).layers, model.blocks, strict=True):
        for which, alpha in (("a", block.alpha_a().detach().double()), ("m", block.alpha_m().detach().double())):
            nu = 1 / torch.sqrt(alpha**2 + (1 - alpha) ** 2) if name == "angpt" else 1.0
            for vector, exact in ((f"keep_{which}", (1 - alpha) * nu), (f"add_{which}", alpha * nu)):
                assert getattr(layer, vector).dtype == torch.float32
                assert relative_error(getattr(layer, vector).detach().double(), exact) < 1e-6


def test_vectors_stay_fp32_where_matrices_are_bf16() -> None:
    for name in ("ngpt", "gpt+/dyt"):
        for p in fold(tiny(name).float()).prepare("cpu", torch.bfloat16).parameters():
            assert p.dtype == (torch.bfloat16 if p.ndim == 2 else torch.float32)


@torch.no_grad()
def test_a_residual_update_is_two_vectors_by_hand() -> None:
    model = tiny("angpt")
    layer = fold(model).layers[0]
    alpha = model.blocks[0].alpha_a()
    nu = 1 / torch.sqrt(alpha**2 + (1 - alpha) ** 2)
    torch.testing.assert_close(layer.keep_a, (1 - alpha) * nu)
    torch.testing.assert_close(layer.add_a, alpha * nu)
    h, x = torch.randn(5, 16, dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)
    long = 4.0  # √d_m, by which the stream is longer
    expected = (h + alpha * (norm(x) - h)) * nu
    torch.testing.assert_close(layer.update(long * h, x, "a") / long, expected)


def test_folding_leaves_the_model_as_it_is() -> None:
    model = tiny("ngpt")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    folded = fold(model)
    folded.prepare("cpu", torch.bfloat16)
    for parameter in folded.parameters():
        parameter.data.zero_()
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_table_counts_what_runs(name: str) -> None:
    """Norms and tanh are counted in a forward pass, vectors among the parameters."""
    model = fold(tiny(name, n_layers=3))
    table = operations(model.design)
    with (
        mock.patch.object(folded_module, "rms", side_effect=folded_module.rms) as rms,
        mock.patch.object(torch, "tanh", side_effect=torch.tanh) as tanh,
    ):
        model(some_tokens(1, 4))
    joint = 0 if model.design.qk == "plain" else 1  # q and k are normed in one call
    assert rms.call_count == 3 * (table.norms - joint) + table.norms_at_head
    assert tanh.call_count == (3 * table.tanh + 1 if table.tanh else 0)
    vectors = [p for p in model.layers[0].parameters() if p.ndim != 2 and p.numel() > 1]
    assert len(vectors) == table.vectors


def test_angpt_has_no_more_norms_than_gpt_plus() -> None:
    designs = all_designs()
    ours, theirs = operations(designs["angpt"]), operations(designs["gpt+"])
    assert ours.norms <= theirs.norms
    assert ours.norms_at_head <= theirs.norms_at_head
    assert operations(designs["ngpt"]).norms > ours.norms


def test_the_documentation_has_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "inference.md").read_text(encoding="utf-8")
    for name, design in all_designs().items():
        o = operations(design)
        assert f"| {name} | {o.residual} | {o.norms} | {o.vectors} | {o.tanh} | {o.norms_at_head} |\n" in text


def test_the_design_has_the_scaled_factors_of_the_model() -> None:
    designs = all_designs()
    assert designs["angpt/all-x2"].update_factor == 2.0
    assert designs["angpt/const-x0.5"].nu_uz == designs["angpt"].nu_uz / 2
    assert not designs["angpt/no-residual-factor"].nu_alpha
    assert designs["angpt/attention-factor"] == designs["angpt"]


def test_a_model_that_does_not_compute_its_design_is_refused() -> None:
    class Odd(AnGPT):
        class Block(AnGPTBlock):
            def mlp(self, h: Tensor) -> Tensor:
                return torch.sin(h)

    class OddNu(AnGPT):
        class Block(AnGPTBlock):
            def forward(self, h: Tensor, ctx: Any) -> Tensor:
                return 1.01 * super().forward(h, ctx)

    cfg = ModelConfig(architecture="angpt/odd", d_model=16, n_layers=2, n_heads=2, vocab_size=8, context=8)
    for kind in (Odd, OddNu):
        model = kind(cfg)
        model.init_weights(torch.Generator().manual_seed(0))
        with pytest.raises(UserError, match=r"angpt/odd: its layer 1 does not compute what its design\(\) declares"):
            fold(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["angpt", "ngpt/lerp-factor", "angpt/all-x0.5"])
def test_deep_models_are_not_refused_for_their_rounding(name: str, dtype: torch.dtype) -> None:
    cfg = ModelConfig(architecture=name, d_model=64, n_layers=24, n_heads=2, vocab_size=32, context=32)
    fold(build(cfg).to(dtype))


def test_a_difference_that_only_long_sequences_show_is_seen() -> None:
    class Window(AnGPT):
        class Block(AnGPTBlock):
            def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Any, gain: Any) -> Tensor:
                near = (ctx.positions[:, None] - ctx.positions).abs() < 16
                return super().attend(q, k, v, ctx._replace(mask=near.tril()[None, None]), gain)

    cfg = ModelConfig(architecture="angpt/window", d_model=16, n_layers=2, n_heads=2, vocab_size=8, context=64)
    model = Window(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match=r"angpt/window: its layer 1 does not compute"):
        fold(model)


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(UserError, match="context is 16"):
        fold(tiny())(some_tokens(1, 17))


@torch.no_grad()
@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_any_part_of_a_head_can_be_rotated(fraction: float) -> None:
    model = tiny("angpt", rotary_fraction=fraction)
    tokens = some_tokens(2, 16)
    assert relative_error(fold(model)(tokens), model(tokens)) < 1e-12


def test_the_configuration_is_a_copy() -> None:
    model = tiny()
    assert fold(model).cfg == dataclasses.replace(model.cfg)
