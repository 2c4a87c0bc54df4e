import dataclasses
import pickle
import re
import shutil

import pytest
import torch

from angpt.config import ModelConfig
from angpt.constraints import constrain
from angpt.errors import UserError
from angpt.models.primitives import rms
from angpt.models.variants import ARCHITECTURES, architecture, build
from tests.models.conftest import TINY, some_tokens, tiny

COLLAPSING = {"angpt/all-x0.5": 0.5, "angpt/all-x2": 2.0}
NAMES = {
    *("gpt+", "ngpt", "angpt"),
    *("gpt+/no-qk-norm", "gpt+/ln-scaling", "gpt+/dyt"),
    *("ngpt/lerp-factor", "ngpt/bounded"),
    *("angpt/const-x0.5", "angpt/const-x2", "angpt/all-x0.5", "angpt/all-x2"),
    *("angpt/no-const", "angpt/no-residual-factor", "angpt/no-factors", "angpt/no-lerp", "angpt/attention-factor"),
    *("angpt/no-lerp-with-factor", "angpt/no-output-norm", "angpt/no-output-norm-no-const", "angpt/scale-before-head"),
}


def test_all_variants_of_the_paper_are_there_and_say_what_they_are():
    assert set(ARCHITECTURES) == NAMES
    assert all(cls.__doc__ and not cls.__doc__.startswith("Embedding, blocks") for cls in ARCHITECTURES.values())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_models_of_every_variant_can_be_pickled(name):
    model = tiny(name)
    again, tokens = pickle.loads(pickle.dumps(model)), some_tokens(1, 12)
    assert type(again) is type(model)
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize("name", sorted(NAMES - set(COLLAPSING)))
def test_training_lowers_the_loss(name):
    model = build(ModelConfig(architecture=name, d_model=32, n_layers=2, n_heads=2, vocab_size=64, context=32))
    tokens = some_tokens(4, 33, vocab=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    constrain(optimizer, model, model.constraints())
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3, losses
    assert losses[-1] < min(losses[:10])


@pytest.mark.parametrize(("name", "factor"), COLLAPSING.items())
def test_scaling_all_factors_scales_the_residual_with_every_update(name, factor):
    model = build(ModelConfig(architecture=name, d_model=256, n_layers=3, n_heads=4, vocab_size=64, context=64))
    with torch.no_grad():
        lengths = model.hidden_states(some_tokens(2, 64, vocab=64)).norm(dim=-1).mean((1, 2))
    # The update adds α = 0.05 of a unit vector to what is left of h; where h has shrunk to 0.1 that is a third.
    torch.testing.assert_close(lengths[1] / lengths[0], torch.tensor(factor**2), rtol=0.05, atol=0)
    assert ((lengths[1:] < 0.5 * lengths[:-1]) if factor < 1 else (lengths[1:] > 3 * lengths[:-1])).all()


def test_every_variant_differs_from_its_base_but_the_attention_factor():
    """So that equality with its restatement (test_models) says something."""
    tokens = some_tokens(1, 12)
    for name in NAMES:
        base = name.partition("/")[0]
        if name not in (base, "angpt/attention-factor"):
            model, reference = tiny(name), tiny(base)
            model.load_state_dict(reference.state_dict(), strict=False)
            assert not torch.allclose(model(tokens), reference(tokens), rtol=1e-9), name


def test_ngpt_bounded_differs_in_its_constraint_only():
    bounded, lerp = tiny("ngpt/bounded").constraints(), tiny("ngpt/lerp-factor").constraints()
    assert {n: c.dim for n, c in bounded.items()} == {n: c.dim for n, c in lerp.items()}
    assert {c.kind for c in bounded.values()} == {"bound"}
    assert {c.kind for c in lerp.values()} == {"unit"}


def test_ln_scaling_divides_the_norms_of_layer_l_by_root_l():
    model, h = tiny("gpt+/ln-scaling", n_layers=4), torch.randn(2, 16, dtype=torch.float64)
    for l, block in enumerate(model.blocks, start=1):  # noqa: E741
        for layer in (block.norm_a, block.norm_m):
            torch.testing.assert_close(layer(h), rms(h) * layer.gamma / l**0.5)
    torch.testing.assert_close(model.norm_h(h), rms(h) * model.norm_h.gamma)


def test_dyt_is_a_scaled_tanh_and_scales_the_embedding():
    model, h = build(ModelConfig(architecture="gpt+/dyt", **TINY)).double(), torch.randn(2, 16, dtype=torch.float64)
    torch.testing.assert_close(model.blocks[0].norm_a(h), torch.tanh(h))
    tokens = some_tokens(1, 4)
    torch.testing.assert_close(model.embed(tokens), model.W_e.weight[tokens] * 4)


def test_the_attention_factor_scales_row_r_by_root_r():
    """The norm behind W_p removes it again, so it is looked for in what W_p receives."""
    received = {}
    for name in ("angpt", "angpt/attention-factor"):
        model = tiny(name)
        handle = model.blocks[0].W_p.register_forward_pre_hook(
            lambda _, args, name=name: received.update({name: args[0]})
        )
        model(some_tokens(2, 12))
        handle.remove()
    roots = torch.arange(1, 13, dtype=torch.float64).sqrt()[:, None]
    torch.testing.assert_close(received["angpt/attention-factor"], received["angpt"] * roots)


def test_the_factor_of_a_sum_keeps_the_length_of_the_stream():
    lengths = {}
    for name in ("angpt/no-lerp", "angpt/no-lerp-with-factor"):
        model = build(ModelConfig(architecture=name, d_model=256, n_layers=6, n_heads=4, vocab_size=64, context=64))
        lengths[name] = model.input_lengths(some_tokens(2, 64, vocab=64)).detach()
    counts = torch.arange(7.0)
    torch.testing.assert_close(lengths["angpt/no-lerp"], (1 + 2 * counts).sqrt(), rtol=0.1, atol=0)
    torch.testing.assert_close(lengths["angpt/no-lerp-with-factor"], torch.ones(7), rtol=0.1, atol=0)


def test_without_norms_after_the_blocks_every_constant_changes_the_function():
    """With them, only ν_uz does."""
    tokens, factors = some_tokens(1, 12), ("qkv", "p", "uz", "acf", "d")
    for name, effective in (("angpt", {"uz"}), ("angpt/no-output-norm", set(factors))):
        model = tiny(name)
        expected, changed = model(tokens), set()
        for factor in factors:
            before = [block.nu for block in model.blocks]
            for block in model.blocks:
                block.nu = dataclasses.replace(block.nu, **{factor: 2 * getattr(block.nu, factor)})
            if not torch.allclose(model(tokens), expected, rtol=1e-9):
                changed.add(factor)
            for block, nu in zip(model.blocks, before, strict=True):
                block.nu = nu
        assert changed == effective


def test_the_scale_before_the_head_has_an_entry_per_dimension():
    model = tiny("angpt/scale-before-head")
    assert not hasattr(model, "s_z")
    h = torch.randn(2, 3, 16, dtype=torch.float64)
    torch.testing.assert_close(model.head(h), (h * model.s_h()) @ model.W_h.weight.T)


def test_variants_without_a_part_do_not_carry_its_parameters():
    assert not any(".g." in name for name, _ in tiny("gpt+/no-qk-norm").named_parameters())
    assert not any("alpha" in name for name, _ in tiny("angpt/no-lerp").named_parameters())


@pytest.mark.parametrize(
    ("wrong", "near"), [("angtp", "angpt"), ("gpt+/dty", "gpt+/dyt"), ("angpt/no-lrp", "angpt/no-lerp")]
)
def test_an_unknown_name_lists_the_near_ones(wrong, near):
    with pytest.raises(UserError, match=re.escape(near)):
        architecture(wrong)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
@pytest.mark.filterwarnings("default")  # inductor and its dependencies warn about themselves
@pytest.mark.parametrize("name", ["gpt+", "ngpt", "angpt"])
def test_compiled_in_one_graph_the_loss_is_the_same(name):
    model = build(ModelConfig(architecture=name, d_model=32, n_layers=2, n_heads=2, vocab_size=64, context=32))
    tokens, targets = some_tokens(2, 32, vocab=64), some_tokens(2, 32, vocab=64, seed=1)
    loss = model(tokens, targets)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)(tokens, targets)
    compiled.backward()
    assert compiled.item() == pytest.approx(loss.item(), rel=1e-5)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], rtol=1e-3, atol=1e-6)
