import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from angpt.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, preset
from angpt.errors import UserError
from angpt.serialization import from_dict
from angpt.studies.compare import Comparison
from angpt.studies.config import Grid

BAD = {
    "n_heads = 3 does not divide model.d_model = 256": {"n_heads": 3},
    "gives 3 rotary dimensions": {"d_model": 12, "n_heads": 2},
    "gives 19.2 rotary dimensions": {"rotary_fraction": 0.3},
    "rotary_fraction must be in [0, 1], not 1.5": {"rotary_fraction": 1.5},
    "n_layers must be positive and at most 10,000, not -1": {"n_layers": -1},
    "d_model must be positive and at most 67,108,864, not 0": {"d_model": 0},
    "vocab_size must be positive and at most 67,108,864, not -5": {"vocab_size": -5},
    "d_ff must be positive and at most 67,108,864, not -5": {"d_ff": -5},
    "stored_scale must be between 1e-30 and 1e+30, not 0.0": {"stored_scale": 0.0},
    "g_init must be between 1e-30 and 1e+30, not 2.7e+236": {"g_init": 2.7e236},
    "alpha_init must be between 1e-30 and 1e+30, not inf": {"alpha_init": float("inf")},
    "unknown key 'n_layer': did you mean n_layers": {"n_layer": 3},
    "unknown key 'zzz': known: alpha_init, architecture": {"zzz": 3},
    "n_layers must be a whole number, not 2.5": {"n_layers": 2.5},
    "n_layers must be a whole number, not True": {"n_layers": True},
    "architecture must be a string, not 3": {"architecture": 3},
    "g_init must be a number, not 'x'": {"g_init": "x"},
}


@pytest.mark.parametrize(("message", "values"), BAD.items())
def test_bad_values_get_one_clear_line(message, values):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        from_dict(ModelConfig, values)
    assert "\n" not in str(caught.value)


WRONG = {
    "eval_every must be a whole number, not 1000.0": lambda: TrainConfig(eval_every=1e3),
    "compile must be 'auto' or 'on' or 'off', not True": lambda: TrainConfig(compile=True),
    "tokens must be a string, not 20000": lambda: TrainConfig(tokens=20_000),
    "seed must be a whole number, not np.float64(3.0)": lambda: TrainConfig(seed=np.float64(3)),
    "record_moments must be true or false, not 1": lambda: TrainConfig(record_moments=1),
    "optimizer.lr must be a number, not True": lambda: OptimizerConfig(lr=True),
    "optimizer.name must be 'adam' or 'muon', not 'sgd'": lambda: OptimizerConfig(name="sgd"),
    "data.path must be a string, not PosixPath('d')": lambda: DataConfig(path=Path("d")),
    "model.architecture must be a string, not None": lambda: ModelConfig(architecture=None),
    "grid.seeds[0] must be a whole number, not 1.0": lambda: Grid(seeds=(1.0,)),
}


@pytest.mark.parametrize(("message", "make"), WRONG.items())
def test_configurations_made_in_python_have_the_right_types(message, make):
    with pytest.raises(UserError, match=re.escape(message)):
        make()


def test_whole_numbers_are_numbers():
    assert isinstance(OptimizerConfig(lr=1).lr, float)
    config = TrainConfig(seed=np.int64(3), optimizer=OptimizerConfig(lr=np.float32(0.5)))
    assert (type(config.seed), type(config.optimizer.lr), config.optimizer.lr) == (int, float, 0.5)
    assert from_dict(ModelConfig, {"rotary_base": 500}).rotary_base == 500.0


def test_sizes_by_name():
    cfg = ModelConfig.size("0.5B", architecture="gpt+")
    assert (cfg.d_model, cfg.n_layers, cfg.n_heads, cfg.d_mlp, cfg.d_head) == (1024, 24, 16, 4096, 64)
    with pytest.raises(UserError, match=r"unknown size '0\.6B': did you mean 0\.5B"):
        ModelConfig.size("0.6B")
    assert ModelConfig.size("32M", d_ff=512).d_mlp == 512
    assert ModelConfig.size("32m") == ModelConfig.size("32M")
    assert ModelConfig.size("Laptop") == preset("LAPTOP").model


def test_architectures_in_any_case():
    config = TrainConfig(model=ModelConfig(architecture="anGPT/no-LERP"))
    assert config.recipe == "angpt/no-lerp"
    assert config.with_recipe("GPT+:Muon").recipe == "gpt+:muon"
    comparison = Comparison(architectures=("GPT+", "anGPT"), lrs={"anGPT": 0.01}, train=preset("laptop"))
    assert comparison.study() == replace(comparison, architectures=("gpt+", "angpt"), lrs={"angpt": 0.01}).study()
    with pytest.raises(UserError, match=r"grid.architectures = gpt\+, gpt\+ names one twice"):
        Grid(architectures=("gpt+", "GPT+"))
