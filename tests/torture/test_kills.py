"""Kill −9 at a random moment: the same command, or --resume, goes on, and the end is that of an undisturbed run."""

import json
import random
import shutil
import time

import pytest

from angpt.training import checkpoint
from angpt.training.run import Run
from tests.torture.harness import Command, Limits, count, kill_after, run, seconds_of, snapshot, succeed
from tests.torture.material import PREPARE, TRAIN, copied
from tests.training.conftest import all_tensors, without_timing
from tests.training.ranks import environment, free_port

LONGER = ("--tokens", "12288", "--keep-checkpoints", "3")
"""48 steps, with a checkpoint after every other: most moments are inside the loop or a checkpoint."""


def end_of(folder):
    """What a run has left: its records without timing, and all tensors of its last checkpoint."""
    found = Run(folder)
    tensors = all_tensors(checkpoint.newest(found.checkpoints))
    return without_timing(found), {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def again(folder, out, *options):
    """The command that goes on with a run, which may not have begun."""
    return ("train", "--resume", out) if (folder / out).exists() else (*TRAIN, out, *options)


@pytest.fixture(scope="module")
def undisturbed(material):
    """Seconds and ends of the runs that are killed below, by architecture."""
    with copied(material, "c.toml", "data") as folder:
        found = {}
        for name in ("angpt", "ngpt"):
            seconds = seconds_of(folder, *TRAIN, name, *LONGER, "--arch", name)
            found[name] = seconds, end_of(folder / name)
        return found


@pytest.mark.parametrize("seed", count(8, 200))
def test_training(material, undisturbed, seed):
    rng = random.Random(seed)
    name = rng.choice(["angpt", "ngpt"])
    seconds, expected = undisturbed[name]
    options = (*LONGER, "--arch", name)
    with copied(material, "c.toml", "data") as folder:
        for _ in range(rng.randint(1, 3)):
            if (ended := kill_after(folder, rng.uniform(0, seconds), *again(folder, "run", *options))) is not None:
                assert ended.code == 0, ended
        outcome = run(folder, *again(folder, "run", *options))
        assert outcome.code == 0, outcome
        assert end_of(folder / "run") == expected
        assert not list((folder / "run").rglob("*.part*")), "remains of a killed process"


def ranks(folder, size, *args):
    """The command on several ranks of this machine, as torchrun would start them."""
    port = free_port()
    return [Command(folder, args, Limits(environment=environment(rank, size, port))) for rank in range(size)]


def train_on_ranks(folder, *args, size=2):
    for process in ranks(folder, size, *args):
        outcome = process.wait()
        assert outcome is not None, "hangs"
        assert outcome.code == 0, outcome


@pytest.fixture(scope="module")
def undisturbed_ranks(material):
    with copied(material, "c.toml", "data") as folder:
        found = {}
        for parallel in ("ddp", "fsdp"):
            start = time.monotonic()
            train_on_ranks(folder, *TRAIN, parallel, *LONGER, "--parallel", parallel)
            found[parallel] = time.monotonic() - start, end_of(folder / parallel)
        return found


@pytest.mark.parametrize("seed", count(3, 60))
def test_ranks(material, undisturbed_ranks, seed):
    rng = random.Random(seed)
    parallel = rng.choice(["ddp", "fsdp"])
    seconds, expected = undisturbed_ranks[parallel]
    options = (*LONGER, "--parallel", parallel, "--timeout", "60")
    with copied(material, "c.toml", "data") as folder:
        processes = ranks(folder, 2, *again(folder, "run", *options))
        time.sleep(rng.uniform(0, seconds))
        killed = rng.choice([[0], [1], [0, 1]])
        for number in killed:
            processes[number].kill()
        for number, process in enumerate(processes):
            outcome = process.wait()
            assert outcome is not None, f"rank {number} hangs after {killed} were killed"
            assert number in killed or outcome.problem is None, outcome
        train_on_ranks(folder, *again(folder, "run", *options))
        assert end_of(folder / "run") == expected


@pytest.mark.parametrize("seed", count(5, 60))
def test_preparation(material, seed):
    rng = random.Random(seed)
    with copied(material, "text") as folder:
        seconds = seconds_of(folder, *PREPARE, "whole")
        for _ in range(rng.randint(1, 3)):
            kill_after(folder, rng.uniform(0, seconds), *PREPARE, "data")
        succeed(folder, *PREPARE, "data")
        assert snapshot(folder / "data") == snapshot(folder / "whole")


def results(folder):
    """The losses of the runs of a study, and whether it is complete."""
    found = json.loads((folder / "result.json").read_text())
    return found["complete"], {run["name"]: run["val_loss"] for run in found["runs"]}


@pytest.mark.parametrize("seed", count(1, 12))
@pytest.mark.parametrize("kind", ["study", "compare"])
def test_many_runs(material, kind, seed):
    rng = random.Random(seed)
    command = {
        "study": ("study", "run", "s.toml", "--workers", "2", "--out"),
        "compare": (
            "compare",
            "--config",
            "c.toml",
            "--seeds",
            "0",
            "--budgets",
            "1024",
            "2048",
            "--workers",
            "2",
            "--out",
        ),
    }[kind]
    with copied(material, "s.toml", "c.toml", "data") as folder:
        seconds = seconds_of(folder, *command, "whole")
        for _ in range(2):
            kill_after(folder, rng.uniform(0, seconds), *command, "again")
        succeed(folder, *command, "again")
        assert results(folder / "again") == results(folder / "whole")
        assert results(folder / "again")[0], "not complete"
        shutil.rmtree(folder / "again")
