import os
import signal

import numpy as np
import pytest

from angpt.config import TrainConfig
from angpt.serialization import from_dict
from angpt.training.checkpoint import Reader
from angpt.training.reporter import Quiet

VOCAB = 61
RECIPES = ("gpt+", "ngpt", "angpt", "gpt+:muon", "ngpt:muon", "angpt:muon")


def small(data, architecture="angpt", **overrides):
    """A run of seconds: 12 steps of 256 tokens, a checkpoint every other step."""
    values = {
        "model": {
            "architecture": architecture,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 2,
            "vocab_size": VOCAB,
            "context": 32,
        },
        "data": {"path": str(data)},
        "optimizer": {"lr": 1e-2},
        "tokens": "3072",
        "batch_tokens": 256,
        "micro_batch": 4,
        "eval_tokens": 512,
        "eval_every": 5,
        "log_every": 3,
        "layers_every": 4,
        "checkpoint_every": 2,
        "device": "cpu",
    }
    for key, value in overrides.items():
        table, _, name = key.rpartition("__")
        (values[table] if table else values)[name] = value
    return from_dict(TrainConfig, values)


DIVERGES = {"optimizer__lr": 1e30, "optimizer__warmup": 0.6, "optimizer__clip": 1e30, "checkpoint_every": 1}
"""Settings with which GPT+ diverges after a few steps, with a checkpoint after each."""


def write_tokens(folder):
    """Raw tokens that can be learned: each follows from the one before it, now and then not."""
    rng = np.random.Generator(np.random.PCG64(0))
    stream = [1]
    for jump in rng.integers(0, VOCAB * 12, size=6000):
        stream.append(int(jump) if jump < VOCAB else (7 * stream[-1] + 3) % VOCAB)
    tokens = np.array(stream, dtype="<u2")
    tokens[:5000].tofile(folder / "train.bin")
    tokens[5000:].tofile(folder / "val.bin")
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


class Stops(Quiet):
    """Sends SIGTERM once a step is done."""

    def __init__(self, step):
        self.step = step

    def train(self, step, loss, tokens_per_s):
        if step >= self.step:
            os.kill(os.getpid(), signal.SIGTERM)


TIMING = {"tokens_per_s", "mfu", "seconds"}


def without_timing(run):
    """The records of a run, as written, less what a clock measured."""
    return [{k: v for k, v in record.items() if k not in TIMING} for record in run.records()]


def all_tensors(path):
    """All tensors of a checkpoint by name, whole: parameters, moments, the state of the random number generator."""
    reader = Reader(path)
    return {name: reader.read(name) for name in reader.pieces}


def parameters(run):
    """The bytes of the last checkpoint's tensors."""
    last = sorted(run.checkpoints.iterdir())[-1]
    return {p.name: p.read_bytes() for p in last.glob("*.safetensors")}
