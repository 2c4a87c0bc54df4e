import json
import subprocess
import sys
from pathlib import Path

import pytest

from angpt.config import TrainConfig
from angpt.serialization import from_dict
from angpt.studies.compare import Comparison
from angpt.studies.study import Study
from angpt.training.plan import make_plan
from angpt.training.run import Run, Summary
from tests.training.conftest import VOCAB, write_tokens

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def tiny(data, **overrides):
    """Options of a comparison with runs of a second: 8 and 16 steps of 256 tokens."""
    model = {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": VOCAB, "context": 32}
    train = {
        "model": model,
        "data": {"path": str(data)},
        "batch_tokens": 256,
        "eval_tokens": 512,
        "checkpoint_every": 2,
        "device": "cpu",
    }
    values = {"seeds": (0, 1), "budgets": ("2048", "4096"), "train": from_dict(TrainConfig, train)}
    return Comparison(**(values | overrides))


def compare(data, folder, **overrides):
    """The study of such a comparison."""
    return Study(folder, tiny(data, **overrides).study())


def pretend(job, status="finished", val_loss=2.0, seconds=10.0):
    """Leave the folder of a run that has ended so."""
    plan = make_plan(job.config)
    run = Run(job.folder) if job.folder.exists() else Run.create(job.folder, plan.config)
    tokens = plan.steps * plan.batch_tokens
    run.write_summary(
        Summary(
            status=status,
            step=plan.steps,
            steps=plan.steps,
            tokens=tokens,
            val_loss=val_loss,
            seconds=seconds,
            compile_seconds=0.0,
            tokens_per_s=tokens / seconds,
            peak_memory_gib=None,
            parameters=plan.parameters,
            flops_per_token=plan.flops_per_token,
            checkpoint=None,
            environment={},
        )
    )


STUDY = """
baseline = "gpt+"
threads = 1

[[grid]]
architectures = ["gpt+", "angpt"]
sizes = ["a", "b"]
budgets = ["2048"]
batches = [128, 256]
lrs = [0.004, 0.016, 0.064]

[shapes.a]
d_model = 16
n_layers = 1
n_heads = 2

[shapes.b]
d_model = 32
n_layers = 1
n_heads = 2

[slurm]
gpus = 0
cpus = 1

[train]
eval_tokens = 512
checkpoint_every = 4
device = "cpu"

[train.model]
vocab_size = 61
context = 32

[train.data]
path = "DATA"
"""
"""2 architectures × 2 sizes × 2 batches × 3 learning rates, a second per run."""
ONE = ('["gpt+", "angpt"]', '["gpt+"]'), ('sizes = ["a", "b"]', 'sizes = ["a"]'), ("[128, 256]", "[128]")
"""A study of one architecture, size and batch: three rates."""


def ignore(*_):
    """For who shows progress."""


def write_study(path, data, *changes, text=STUDY):
    """The file of a study; `changes` are pairs of what is replaced by what."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text.replace("DATA", str(data)))
    return path


@pytest.fixture
def make(data, tmp_path):
    """A study, changed as for `write_study`."""

    def make(*changes):
        return Study.read(write_study(tmp_path / "s.toml", data, *changes), tmp_path / "s")

    return make


def study_result(folder):
    """What a study left, less what a clock or the memory of the process had a part in."""
    result = json.loads((folder / "result.json").read_text())
    del result["costs"], result["verdicts"], result["sources"], result["checksum"]
    for run in result["runs"]:
        del run["seconds"], run["memory_gib"]
    for row in result["rows"]:
        del row["speedup_seconds"]
    return result


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """The folder of the study, executed by two processes of the command, and what was printed."""
    folder = tmp_path_factory.mktemp("whole")
    file = write_study(folder / "study.toml", data)
    call = [sys.executable, "-m", "angpt", "study", "run", str(file), "--out", str(folder / "s"), "--workers", "2"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "s", done.stdout
