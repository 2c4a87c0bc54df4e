import dataclasses
import math
import re
from dataclasses import replace

import pytest
import torch

from angpt.config import TrainConfig, parse_budget, preset
from angpt.errors import UserError
from angpt.models.variants import ARCHITECTURES, build
from angpt.serialization import read_toml, to_toml
from angpt.training.plan import Rule, make_plan, read_rules, rule_for
from tests.training.conftest import small


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("100M", 100_000_000),
        ("2e9", 2_000_000_000),
        ("1_000", 1000),
        ("20x", 640),
        ("0.5X", 16),
        ("1.5k", 1500),
        ("3B", 3 * 10**9),
    ],
)
def test_budgets(text, tokens):
    assert parse_budget(text, parameters=32) == tokens


@pytest.mark.parametrize("text", ["", "x", "-5M", "ten", "0", "5 Mio", "nan", "1e400", "1_", "1__0"])
def test_wrong_budgets(text):
    with pytest.raises(UserError, match="tokens = "):
        parse_budget(text, parameters=32)


def test_learning_rate_is_warm_up_then_cosine():
    plan = make_plan(small("x", "gpt+", tokens="25600", optimizer__lr=2.0, optimizer__warmup=0.1))
    assert (plan.steps, plan.warmup_steps) == (100, 10)
    for step in range(100):
        if step < 10:
            expected = 2.0 * (step + 1) / 10
        else:
            expected = 2.0 * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 89)))
        assert plan.lr(step) == pytest.approx(expected, rel=1e-12)
    assert plan.lr(9) == plan.lr(10) == 2.0
    assert plan.lr(99) == pytest.approx(0.02)


def test_defaults_of_the_architectures():
    """Warm-up and weight decay for GPT+ alone; variants like their base."""
    for name in ARCHITECTURES:
        o = make_plan(small("x", name)).config.optimizer
        assert (o.warmup, o.weight_decay) == ((0.1, 0.1) if name.startswith("gpt+") else (0.0, 0.0)), name
        assert (o.beta1, o.beta2, o.eps, o.final_lr, o.clip) == (0.9, 0.95, 1e-9, 0.01, 1.0)


def test_rules_are_power_laws_anchored_at_32m():
    rule = Rule(lr=8e-3, lr_exponents=(0.25, -0.5), batch_tokens=2**17, batch_exponent=0.5, weight_decay=0, warmup=0)
    tokens = 100_000_000
    assert rule.lr_at(32_000_000, tokens, 2**17) == 8e-3
    assert rule.lr_at(128_000_000, tokens, 2**17) == 4e-3
    assert rule.lr_at(2_000_000, tokens, 2**17) == 4e-3
    assert rule.lr_at(32_000_000, 16 * tokens, 2**19) == 8e-3  # no exponent over tokens and batch
    assert rule.batch_at(32_000_000, tokens, 2048) == 2**17
    assert rule.batch_at(128_000_000, tokens, 2048) == 2**18
    assert rule.adam_lr_at(tokens) is None
    over_tokens = replace(rule, lr_tokens_exponent=-0.5, lr_batch_exponent=1.5, batch_tokens_exponent=0.5, adam_lr=2e-3)
    assert over_tokens.lr_at(32_000_000, 16 * tokens, 2**17) == 2e-3
    assert over_tokens.lr_at(32_000_000, 16 * tokens, 2**15) == 2.5e-4  # a quarter of the rule's batch
    assert over_tokens.adam_lr_at(16 * tokens) == 2e-3
    assert replace(over_tokens, adam_lr_tokens_exponent=-0.25).adam_lr_at(16 * tokens) == 1e-3
    assert over_tokens.batch_at(32_000_000, 4 * tokens, 2048) == 2**18
    assert over_tokens.lr_at(32_000_000, 10_000 * tokens, 2**17) == 8e-5  # not clamped to what was measured
    assert rule_for("angpt/no-lerp") == rule_for("angpt")


@pytest.mark.parametrize("recipe", read_rules())
def test_any_rule_can_have_a_term_for_tokens(recipe, monkeypatch):
    """Of any architecture and optimizer, and of variants: with four times the tokens the batch is twice as large and
    Adam's rate beside Muon half; the rate is a quarter by its tokens, times √2 by its batch."""
    exponents = {"lr_tokens_exponent": -1.0, "lr_batch_exponent": 0.5, "batch_tokens_exponent": 0.5}
    rule = replace(read_rules()[recipe], **exponents, adam_lr_tokens_exponent=-0.5)
    monkeypatch.setattr("angpt.training.plan.read_rules", lambda: {recipe: rule})
    architecture, colon, optimizer = recipe.partition(":")
    for name in (name for name in ARCHITECTURES if name.partition("/")[0] == architecture):
        cfg = small("x", batch_tokens=None, micro_batch=None, optimizer__lr=None).with_recipe(name + colon + optimizer)
        few, many = (make_plan(replace(cfg, tokens=tokens)) for tokens in ("20M", "80M"))
        assert many.peak_lr == pytest.approx(few.peak_lr / 4 * math.sqrt(2), rel=0.1)  # both rounded to two digits
        smaller = make_plan(replace(cfg, tokens="80M", batch_tokens=many.batch_tokens // 4))
        assert smaller.peak_lr == pytest.approx(many.peak_lr / 2, rel=0.1)  # follows --batch-tokens
        assert many.batch_tokens == 2 * few.batch_tokens
        if optimizer:
            assert many.config.optimizer.adam_lr == pytest.approx(few.config.optimizer.adam_lr / 2, rel=0.1)
        assert few.peak_lr == pytest.approx(rule.lr_at(few.parameters, 10**8, few.batch_tokens) * 5, rel=0.1)


def test_a_written_plan_gives_the_same_plan_again(tmp_path):
    for cfg in (small("x"), small("x", optimizer__clip=float("inf")), preset("laptop"), preset("125M"), TrainConfig()):
        plan = make_plan(cfg)
        (tmp_path / "c.toml").write_text(to_toml(plan.config))
        again = make_plan(read_toml(TrainConfig, tmp_path / "c.toml"))
        assert again == plan


def test_micro_batches_divide_the_batch():
    plan = make_plan(small("x", micro_batch=None))
    assert plan.sequences == 8
    assert plan.micro_steps * plan.micro_batch == 8
    assert make_plan(small("x", micro_batch=2)).micro_steps == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"micro_batch": 3}, "micro_batch = 3 does not divide the 8 sequences"),
        ({"batch_tokens": 1 << 40}, "batch_tokens = 1,099,511,627,776: at most 134,217,728 tokens are possible"),
        ({"batch_tokens": 100}, "batch_tokens = 100 is no multiple of model.context = 32"),
        ({"device": "gpu"}, "device must be 'auto' or 'cpu' or 'cuda', not 'gpu'"),
        ({"seed": -1}, "seed must be in [0, 2⁶³), not -1"),
        ({"optimizer__lr": -1.0}, "optimizer.lr must be between 1e-30 and 1e+30, not -1.0"),
        ({"optimizer__beta2": 1.5}, "optimizer.beta2 must be in [0, 1), not 1.5"),
        ({"optimizer__betas": 1.5}, "unknown key 'optimizer.betas': did you mean beta"),
        ({"precision": "fp4"}, "precision must be 'auto' or 'fp32' or 'bf16' or 'fp8', not 'fp4'"),
        ({"log_every": 0}, "log_every must be positive, not 0"),
        ({"model__architecture": "angtp"}, "did you mean angpt"),
    ],
)
def test_mistakes_get_one_clear_line(overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_plan(small("x", **overrides))


def test_toml_that_cannot_be_read(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("tokens = [")
    with pytest.raises(UserError, match=re.escape(f"{path}: cannot be read as TOML")):
        read_toml(TrainConfig, path)
    path.write_text("[modle]\n")
    with pytest.raises(UserError, match=re.escape(f"{path}: unknown key 'modle': did you mean model")):
        read_toml(TrainConfig, path)


@pytest.mark.parametrize("recipe", ["gpt+", "ngpt", "angpt", "angpt/no-lerp:muon"])
def test_the_configuration_of_a_run_leaves_nothing_open(recipe):
    """Except what has no meaning for it: Adam's rate beside Muon, and the ranks of a shard."""
    given = preset("laptop").with_recipe(recipe)
    config = make_plan(given).config
    values = dataclasses.asdict(config)
    tables = [values, values["model"], values["data"], values["optimizer"]]
    left = {name for table in tables for name, value in table.items() if value in (None, "auto")}
    assert left == {"shard_ranks", "parallel", "kernels"} | (set() if "muon" in recipe else {"adam_lr"})
    m = config.model
    assert (m.d_ff, m.g_init, m.nu_p) == (4 * 96, math.sqrt(32), math.sqrt(32 / 96))
    assert m.stored_scale == (1 / math.sqrt(96) if recipe == "ngpt" else 0.01)
    ours, theirs = (build(model, seed=0).state_dict() for model in (given.model, m))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_model_from_the_configuration_of_a_run_has_its_own_derived_settings():
    config = make_plan(preset("laptop")).config
    other = config.with_settings({"model.d_model": 48, "model.architecture": "ngpt"})
    assert (other.model.d_ff, other.model.g_init, other.model.stored_scale, other.model.nu_p) == (None,) * 4
    given = config.with_settings({"model.g_init": 2.0})
    assert given.with_settings({"model.d_model": 48}).model.g_init == 2.0
