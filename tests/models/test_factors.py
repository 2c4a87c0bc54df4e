import dataclasses
import math

import pytest
import torch

from angpt.analysis.factor_report import activation, draw_concentration, factor_rows, factor_tables
from angpt.config import SIZES, ModelConfig
from angpt.models import angpt, factors
from angpt.models.factors import ACTIVATION_ASSUMPTIONS
from angpt.models.primitives import LerpFactor
from angpt.models.variants import build
from tests.models.conftest import TINY, some_tokens, tiny


def changed(field=None, residual=1.0, times=1.7):
    """A tiny float64 anGPT with one factor multiplied by a number that is no power of two."""

    class Block(angpt.Block):
        def constants(self, cfg):
            nu = super().constants(cfg)
            return dataclasses.replace(nu, **{field: times * getattr(nu, field)}) if field else nu

        def residual_factor(self):
            return LerpFactor(times=residual)

    model = type("Changed", (angpt.AnGPT,), {"Block": Block})(ModelConfig(**TINY)).double()
    model.load_state_dict(tiny("angpt").state_dict())
    return model


def logits_and_gradients(model):
    tokens, targets = some_tokens(2, 12), some_tokens(2, 12, seed=1)
    model(tokens, targets).backward()
    return model(tokens).detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("field", ["qkv", "p", "acf", "d"])
def test_factors_before_a_norm_are_no_ops(field):
    logits, gradients = logits_and_gradients(changed())
    other, other_gradients = logits_and_gradients(changed(field))
    torch.testing.assert_close(other, logits, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["uz", "lerp"])
def test_nu_uz_and_nu_alpha_change_the_function(kind):
    logits, _ = logits_and_gradients(changed())
    other, _ = logits_and_gradients(changed(residual=1.1) if kind == "lerp" else changed("uz"))
    assert float((other - logits).norm() / logits.norm()) > 1e-3


def test_attention_factor_is_a_no_op_too():
    model = tiny("angpt/attention-factor")
    model.load_state_dict(tiny("angpt").state_dict())
    tokens = some_tokens(2, 12)
    torch.testing.assert_close(model(tokens), tiny("angpt")(tokens), rtol=1e-12, atol=1e-12)


def test_attention_factor_makes_uniform_rows_unit_rows():
    """With equal scores row r of A is 1/r everywhere; times √r it has length 1, which identity values show."""
    block = build(ModelConfig(architecture="angpt/attention-factor", **TINY)).blocks[0]
    from angpt.models.primitives import make_context

    ctx = make_context(torch.zeros(1, 8, 1), 0, 1e4)
    q = torch.zeros(1, 1, 8, 8)
    rows = block.attend(q, q, torch.eye(8)[None, None], ctx)[0]
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(8))


@pytest.mark.parametrize("size", SIZES)
def test_values_are_those_of_the_paper(size):
    cfg = ModelConfig.size(size)
    nu = factors.constants(cfg)
    assert nu.qkv == pytest.approx(math.sqrt(cfg.d_model / 64))
    assert nu.p == pytest.approx(1 / nu.qkv)
    assert (nu.uz, nu.acf, nu.d) == (0.5, 3.74, 2.0)


def test_nu_lerp():
    alpha = torch.tensor([0.0, 0.05, 0.5, 1.0, -0.2], dtype=torch.float64)
    for a, nu in zip(alpha.tolist(), factors.nu_lerp(alpha).tolist(), strict=True):
        assert nu == pytest.approx(1 / math.sqrt(a**2 + (1 - a) ** 2), rel=1e-12)


def test_monte_carlo_agrees_with_the_formulas():
    rows = {row.symbol: row for row in factor_rows(ModelConfig.size("32M"), draws=8, seed=0)}
    for symbol in ("ν_qkv", "ν_p", "ν_uz", "ν_d", "ν(α)"):
        assert rows[symbol].estimate.nu == pytest.approx(rows[symbol].value, rel=0.01), symbol
    # E[1/‖·‖] lies above ν by 3/(4k) for k dimensions: 1.2 % for a head of 64, as the paper measures.
    assert rows["ν_qkv"].error == pytest.approx(3 / (4 * 64), rel=0.35)
    assert {symbol: row.matters for symbol, row in rows.items()} == {
        "ν_qkv": False,
        "ν_p": False,
        "ν_uz": True,
        "ν_d": False,
        "ν_acf": False,
        "ν(α)": True,
    }


def test_activation_assumptions():
    rng = torch.Generator().manual_seed(0)
    found = [activation(1024, name, 2, rng).nu for name in ACTIVATION_ASSUMPTIONS]
    # Near zero SiLU(z) = z/2; for standard normal z, E[SiLU(z)²] is 0.3557 by quadrature.
    assert found == pytest.approx([2, 1 / math.sqrt(0.3557), 2 * math.sqrt(1024), 2], rel=0.02)


def test_tables_and_figure(tmp_path):
    assert [len(table.rows) for table in factor_tables(ModelConfig(**TINY), 1, 0)] == [6, len(ACTIVATION_ASSUMPTIONS)]
    draw_concentration(tmp_path / "new" / "c.png", seed=0)
    assert (tmp_path / "new" / "c.png").read_bytes().startswith(b"\x89PNG")
