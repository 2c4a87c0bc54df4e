"""A new variant is one class: it trains, folds, generates, exports and is analysed without a change anywhere else."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from angpt.analysis.factors import FactorProbe
from angpt.analysis.norms import NormProbe
from angpt.analysis.probe import observe
from angpt.config import ModelConfig
from angpt.inference.fold import fold
from angpt.inference.generate import generate
from angpt.inference.sampling import GREEDY
from angpt.models.angpt import AnGPT, AnGPTBlock
from angpt.models.factors import LerpFactor
from angpt.models.primitives import lerp, norm
from angpt.models.variants import ARCHITECTURES, build, variant
from tests.analysis.conftest import some_batches

NAME = "angpt/exact-norm"
SIZES = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 61, "context": 12}


@pytest.fixture(autouse=True)
def exact_norm() -> Iterator[None]:
    @variant(NAME)
    class ExactNorm(AnGPT):
        """anGPT with a norm after each residual update in place of ν(α)."""

        class Block(AnGPTBlock):
            computes = replace(AnGPTBlock.computes, update_norm=True)

            def residual_factor(self) -> LerpFactor:
                return LerpFactor(of_alpha=False)

            def forward(self, h: Tensor, ctx: Any) -> Tensor:
                h = norm(lerp(h, self.attention(h, ctx), self.alpha_a()))
                return norm(lerp(h, self.mlp(h), self.alpha_m()))

    yield
    del ARCHITECTURES[NAME]


def test_it_trains() -> None:
    model = build(ModelConfig(architecture=NAME, **SIZES))
    [batch] = some_batches(count=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@torch.no_grad()
def test_it_folds_and_generates() -> None:
    model = build(ModelConfig(architecture=NAME, **SIZES)).double()
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fold(model)(tokens), model(tokens), rtol=1e-10, atol=1e-10)
    [made] = generate(model, [[1, 2, 3]], 5, GREEDY)
    row = [1, 2, 3]
    for token in made:
        assert int(model(torch.tensor([row]))[0, -1].argmax()) == token
        row.append(token)


@torch.no_grad()
def test_transformers_computes_the_same_logits() -> None:
    pytest.importorskip("transformers")
    from angpt.inference.hf import as_transformers

    model = build(ModelConfig(architecture=NAME, **SIZES))
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    found = as_transformers(model, torch.device("cpu"), torch.float32)(tokens).logits
    torch.testing.assert_close(found, model(tokens), rtol=1e-4, atol=1e-5)


def test_what_an_export_cannot_store_is_refused() -> None:
    from angpt.errors import UserError
    from angpt.inference.hf import config_json
    from angpt.inference.store import Training

    model = build(ModelConfig(architecture="angpt", **SIZES))
    model.blocks[1].alpha_m.scale = 0.5
    with pytest.raises(UserError, match="alpha_a has several stored scales"):
        config_json(model, None, Training())
    model = build(ModelConfig(architecture="angpt", **SIZES))
    for block in model.blocks:
        block.g.scale = 2 * block.g.init
    with pytest.raises(UserError, match=r"not divided by 0\.5"):
        config_json(model, None, Training())


def test_it_is_analysed() -> None:
    model = build(ModelConfig(architecture=NAME, **SIZES)).double()
    norms, factors = NormProbe(2), FactorProbe()
    loss = observe(model, some_batches(), [norms, factors])
    assert loss is not None
    assert all(stats.mean == pytest.approx(1.0) for stats in norms.stream()[1:])  # a norm after each update
    assert {f.activation for f in factors.results()} >= {"q", "p", "u", "d", "lerp_a"}
