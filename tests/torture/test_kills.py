"""Kill −9 at a random moment: the same command, or --resume, goes on, and the end is that of an undisturbed run."""

import json
import random
import time

import pytest

from angpt.training import checkpoint
from angpt.training.run import Run
from tests.torture.harness import CASES, Command, Limits, count, kill_after, run, seconds_of, snapshot, succeed
from tests.torture.material import PREPARE, TRAIN, copied
from tests.training.conftest import all_tensors, without_timing
from tests.training.ranks import environment, free_port

LONGER = ("--tokens", "12288", "--keep-checkpoints", "3")
"""48 steps, with a checkpoint after every other: most moments are inside the loop or a checkpoint."""
RECIPES = {
    "angpt": ("--arch", "angpt"),
    "ngpt": ("--arch", "ngpt"),
    "muon": ("--arch", "angpt", "--optimizer.name", "muon"),
}
MANY = {
    "study": ("study", "run", "s.toml", "--workers", "2"),
    "compare": ("compare", "--config", "c.toml", "--seeds", "0", "--budgets", "1024", "2048", "--workers", "2"),
}


def end_of(folder):
    """What a run has left: its records without timing, and all tensors of its last checkpoint."""
    found = Run(folder)
    tensors = all_tensors(checkpoint.newest(found.checkpoints))
    return without_timing(found), {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def again(folder, *options):
    """The command that goes on with a run, which may not have begun."""
    return ("train", "--resume", "run") if (folder / "run").exists() else (*TRAIN, "run", *options)


def check_end(folder, expected):
    assert end_of(folder / "run") == expected
    left = [path for path in folder.rglob("*") if ".part" in path.name]
    assert not left, f"remains of a killed process: {left}"


@pytest.fixture(scope="module")
def undisturbed(material):
    """Seconds and ends of the runs that are killed below, by recipe."""
    with copied(material, "c.toml", "data") as folder:
        return {
            name: (seconds_of(folder, *TRAIN, name, *LONGER, *options), end_of(folder / name))
            for name, options in RECIPES.items()
        }


@pytest.mark.parametrize("seed", count(9, 100))
def test_training(material, undisturbed, seed):
    rng = random.Random(seed)
    name = list(RECIPES)[seed % len(RECIPES)]
    seconds, expected = undisturbed[name]
    options = (*LONGER, *RECIPES[name])
    with copied(material, "c.toml", "data") as folder:
        for _ in range(rng.randint(1, 3)):
            if (ended := kill_after(folder, rng.uniform(0, seconds), *again(folder, *options))) is not None:
                assert ended.code == 0, ended
        outcome = run(folder, *again(folder, *options))
        assert outcome.code == 0, outcome
        check_end(folder, expected)


def ranks(folder, *args, size=2):
    """The command on several ranks of this machine, as torchrun would start them."""
    port = free_port()
    return [Command(folder, args, Limits(environment=environment(rank, size, port))) for rank in range(size)]


def train_on_ranks(folder, *args):
    for process in ranks(folder, *args):
        outcome = process.wait()
        assert outcome is not None, "hangs"
        assert outcome.code == 0, outcome


@pytest.fixture(scope="module")
def undisturbed_ranks(material):
    with copied(material, "c.toml", "data") as folder:
        found = {}
        for parallel in ("ddp", "fsdp"):
            for recipe in ("angpt", "muon"):
                start, name = time.monotonic(), f"{parallel}-{recipe}"
                train_on_ranks(folder, *TRAIN, name, *LONGER, "--parallel", parallel, *RECIPES[recipe])
                found[parallel, recipe] = time.monotonic() - start, end_of(folder / name)
        return found


@pytest.mark.parametrize("seed", count(4, 60))
def test_ranks(material, undisturbed_ranks, seed):
    rng = random.Random(seed)
    parallel, recipe = list(undisturbed_ranks)[seed % len(undisturbed_ranks)]
    seconds, expected = undisturbed_ranks[parallel, recipe]
    options = (*LONGER, "--parallel", parallel, *RECIPES[recipe], "--timeout", "60")
    with copied(material, "c.toml", "data") as folder:
        processes = ranks(folder, *again(folder, *options))
        time.sleep(rng.uniform(0.1, 0.9) * seconds)
        killed = rng.choice([[0], [1], [0, 1]])
        for number in killed:
            processes[number].kill()
        CASES["kills of ranks"] += 1
        for number, process in enumerate(processes):
            outcome = process.wait()
            assert outcome is not None, f"rank {number} hangs after {killed} were killed: {process.stack()}"
            assert number in killed or outcome.problem is None, outcome
        train_on_ranks(folder, *again(folder, *options))
        check_end(folder, expected)


@pytest.mark.parametrize("seed", count(5, 40))
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


@pytest.fixture(scope="module")
def undisturbed_studies(material):
    with copied(material, "s.toml", "c.toml", "data") as folder:
        return {
            kind: (seconds_of(folder, *command, "--out", kind), results(folder / kind))
            for kind, command in MANY.items()
        }


@pytest.mark.parametrize("seed", count(1, 6))
@pytest.mark.parametrize("kind", MANY)
def test_many_runs(material, undisturbed_studies, kind, seed):
    rng = random.Random(seed)
    seconds, expected = undisturbed_studies[kind]
    command = (*MANY[kind], "--out", "again")
    with copied(material, "s.toml", "c.toml", "data") as folder:
        for _ in range(2):
            kill_after(folder, rng.uniform(0, seconds), *command)
        succeed(folder, *command)
        assert results(folder / "again") == expected
        assert expected[0], "not complete"
