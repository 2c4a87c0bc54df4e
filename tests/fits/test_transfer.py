"""docs/evidence/transfer: the files that describe its runs, and the laws that follow from it."""

import json
from pathlib import Path

import pytest

from angpt.config import TrainConfig
from angpt.serialization import read_toml
from angpt.studies.study import Study
from angpt.training.plan import make_plan

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "docs" / "evidence" / "transfer"
FILES = sorted((ROOT / "experiments" / "evidence").glob("transfer-*.toml"))


def settings(config):
    """What decides the loss of a run; the device and what follows from it may differ."""
    o, plan = config.optimizer, make_plan(config)
    rates = o.lr, o.adam_lr, o.momentum, o.beta1, o.beta2, o.eps, plan.config.optimizer.weight_decay, o.clip, o.final_lr
    return config.model, config.data, config.recipe, rates, plan.steps, plan.batch_tokens, config.seed


def test_the_files_describe_the_runs():
    """Every run is planned by one of the files, with the settings it was trained with, and no other is."""
    planned = {job.folder.name: job.config for path in FILES for job in Study.read(path, Path("nowhere")).jobs()}
    trained = {path.parent.name: read_toml(TrainConfig, path) for path in RUNS.glob("*/config.toml")}
    assert {name: settings(c) for name, c in planned.items()} == {name: settings(c) for name, c in trained.items()}
    assert len(trained) >= 48
