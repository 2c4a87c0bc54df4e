"""Disks that are full, at a random size of a file: one line says so, nothing that was there is lost, and the same
command succeeds when there is room."""

import random

import pytest

from tests.torture.harness import CASES, Limits, changes, count, run, snapshot
from tests.torture.material import PREPARE, TRAIN, copied

WRITERS = {
    "train": (*TRAIN, "new"),
    "resume": ("train", "--resume", "runs/cut"),
    "prepare": (*PREPARE, "new"),
    "continue": (*PREPARE, "half"),
    "study": ("study", "run", "s.toml", "--out", "new", "--workers", "0"),
    "report": ("report", "study", "--out", "new"),
    "analyze": ("analyze", "runs/a", "--out", "new", "--tokens", "256"),
    "eval": ("eval", "runs/b", "--data", "data"),
    "fold": ("fold", "runs/a", "--out", "new"),
    "export": ("export", "hf", "runs/a", "--out", "new"),
    "import": ("import", "hf", "export", "--out", "new"),
    "hparams": ("fit", "hparams", "sweep.csv", "--out", "new", "--write-rules", "rules.toml"),
    "scaling": ("fit", "scaling", "sweep.csv", "--out", "new", "--bootstrap", "10"),
    "bench": ("bench", "data", "data", "--context", "16", "--rounds", "1", "--out", "new.json"),
    "figure": ("factors", "--size", "32M", "--draws", "1", "--figure", "new.png"),
}
OWN = {"resume": ["runs/cut"], "continue": ["half"], "eval": ["runs/b/eval"], "hparams": ["new"]}
"""What a command may change, where that is not `new`."""


@pytest.mark.parametrize("seed", count(15, 100))
def test_full_disks(material, seed):
    rng = random.Random(seed)
    name = list(WRITERS)[seed % len(WRITERS)]
    command = WRITERS[name]
    size = int(10 ** rng.uniform(0, 5.5))
    with copied(material) as folder:
        before = snapshot(folder)
        CASES["full disks"] += 1
        outcome = run(folder, *command, limits=Limits(file_bytes=size))
        assert outcome.problem is None, f"files of {size} bytes: angpt {command}: {outcome.problem}"
        assert outcome.code in (0, 2)
        changed = changes(before, snapshot(folder), OWN.get(name, ["new", ".new"]))
        assert not changed, f"files of {size} bytes: angpt {command} changed {changed}"
        left = [path for path in folder.rglob("*") if ".part" in path.name]
        assert not left, f"files of {size} bytes: angpt {command} left {left}"
        if outcome.code == 2:
            again = ("train", "--resume", "new") if name == "train" and (folder / "new").exists() else command
            options = ("--retry",) if name == "study" else ()
            final = run(folder, *again, *options)
            assert final.code == 0, f"files of {size} bytes, then room: angpt {command}: {final}"
