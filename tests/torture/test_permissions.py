"""Files and folders that may not be read or written, as a user without rights; and paths that cannot be."""

import os
import random

import pytest

from tests.torture.harness import CASES, NOBODY, Limits, changes, count, run, snapshot
from tests.torture.material import copied
from tests.torture.test_disks import WRITERS

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
MORE = {
    "info": ("data", "info", "data"),
    "status": ("study", "status", "study"),
    "plan": ("study", "plan", "s.toml"),
    "generate": ("generate", "runs/a", "tree", "--tokens", "4"),
    "finished": ("train", "--resume", "runs/a"),
}
COMMANDS = WRITERS | MORE


@needs_root
@pytest.mark.parametrize("seed", count(15, 100))
def test_permissions(material, seed):
    """A file or folder of the material that cannot be read, or not be written."""
    rng = random.Random(seed)
    name = list(COMMANDS)[seed % len(COMMANDS)]
    with copied(material) as folder:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
        named = [word for word in COMMANDS[name] if (folder / word).exists()]
        below = [path for word in named for path in [folder / word, *(folder / word).rglob("*")]]
        path = rng.choice([*below, folder, folder / "data"])
        mode = rng.choice([0o000, 0o500 if path.is_dir() else 0o400])
        path.chmod(mode)
        CASES["permissions"] += 1
        outcome = run(folder, *COMMANDS[name], limits=Limits(user=NOBODY))
        where = f"{path.relative_to(folder)} {mode:o}: angpt {COMMANDS[name]}"
        assert outcome.problem is None, f"{where}: {outcome.problem}"


@needs_root
def test_a_finished_run_that_cannot_be_written_says_that_it_is_finished(material):
    with copied(material, "runs", "data") as folder:
        (folder / "runs" / "a" / ".lock").unlink()
        before = snapshot(folder)
        outcome = run(folder, "train", "--resume", "runs/a", limits=Limits(user=NOBODY))
        assert (outcome.code, outcome.err) == (0, "")
        assert "runs/a: finished: validation loss" in outcome.out
        assert not changes(before, snapshot(folder))


IMPOSSIBLE = ("c.toml/x", "dangling/x", "dangling", "x" * 300, "/proc/nowhere/x", "/dev/null/x")
PAIRS = [(name, out) for out in IMPOSSIBLE for name, command in WRITERS.items() if "--out" in command]
PAIRS.remove(("bench", "dangling"))  # a file takes the place of the link


@pytest.mark.parametrize("number", count(9, len(PAIRS)))
def test_paths_that_cannot_be(material, number):
    name, out = PAIRS[number * len(PAIRS) // len(count(9, len(PAIRS)))]
    with copied(material) as folder:
        (folder / "dangling").symlink_to("nowhere/at/all")
        command = list(WRITERS[name])
        command[command.index("--out") + 1] = out
        before = snapshot(folder)
        CASES["impossible paths"] += 1
        outcome = run(folder, *command)
        assert outcome.problem is None, f"angpt {command}: {outcome.problem}"
        assert outcome.code == 2, f"angpt {command}: {outcome}"
        assert not changes(before, snapshot(folder)), f"angpt {command}: {outcome.err}"
