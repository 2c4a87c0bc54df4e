"""Random bytes changed in every file that is written: what reads it succeeds or names the problem in one line, leaves
the file as it is, and gives the numbers of undamaged files wherever there are checksums: in data, checkpoints,
summaries, results, evaluations and folded models. Settings, metrics and exports, which others may change, have none."""

import random

import pytest

from tests.torture.harness import CASES, changes, count, run, run_briefly, snapshot
from tests.torture.material import PREPARE, TRAIN, copied
from tests.torture.test_kills import end_of

GENERATE = ("--tokens", "8", "--temperature", "0")
SERVE = ("--port", "0", "--batch", "2")
ANALYZE = ("--out", "new", "--tokens", "256")
READERS = {
    "c.toml": [(*TRAIN, "new")],
    "s.toml": [("study", "plan", "s.toml")],
    "sweep.csv": [("fit", "hparams", "sweep.csv", "--out", "new"), ("fit", "scaling", "sweep.csv", "--out", "new")],
    "rules.toml": [("fit", "hparams", "sweep.csv", "--out", "new", "--write-rules", "rules.toml")],
    "text": [(*PREPARE, "new")],
    "data": [(*TRAIN, "new"), ("data", "info", "data"), ("eval", "runs/b", "--data", "data")],
    "half": [(*PREPARE, "half")],
    "runs/a": [
        ("eval", "runs/a"),
        ("export", "hf", "runs/a", "--out", "new"),
        ("generate", "runs/a", "tree", *GENERATE),
        ("serve", "runs/a", *SERVE),
    ],
    "runs/cut": [("train", "--resume", "runs/cut")],
    "study": [("study", "status", "study"), ("study", "run", "study", "--workers", "0")],
    "folded": [("generate", "folded", "tree", *GENERATE), ("serve", "folded", *SERVE)],
    "export": [
        ("generate", "export", "tree", *GENERATE),
        ("import", "hf", "export", "--out", "new"),
        ("serve", "export", *SERVE),
    ],
}
"""Commands that read a file or folder."""
SLOW_READERS = {
    "runs/a": [
        ("report", "runs/a", "runs/b", "--out", "new"),
        ("analyze", "runs/a", *ANALYZE),
    ],
    "study": [("report", "study", "--out", "new"), ("analyze", "study", *ANALYZE)],
}
"""Those that draw, for every fourth flip."""
NOT_READ = (".html", ".svg", ".png", ".md", ".lock", "fits", "modeling_angpt.py", "generation_config.json")
"""Ends of the names of files that no command reads."""


def flip(rng, file):
    """Change one byte, or a few, or cut the file off."""
    content = bytearray(file.read_bytes())
    if not content:
        return
    if rng.random() < 0.1:
        content = content[: rng.randrange(len(content))]
    for _ in range(rng.choice([1, 1, 1, 8])):
        if content:
            content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    file.write_bytes(content)


@pytest.fixture(scope="module")
def expected(material):
    """The end of the run that is cut and that of a new one without damage, and what commands print."""
    with copied(material) as folder:
        assert run(folder, "train", "--resume", "runs/cut").code == 0
        assert run(folder, *TRAIN, "new").code == 0
        ends = {name: end_of(folder / name) for name in ("runs/cut", "new")}
        commands = [command for name in ("runs/a", "folded", "study", "data") for command in READERS[name]]
        printed = [command for command in commands if command[0] in ("generate", "data") or "status" in command]
        return ends, {command: run(folder, *command).out for command in printed}


def has_checksum(file):
    if "export" in file.parts:
        return False
    return file.suffix in (".safetensors", ".bin") or file.name in (
        "state.json",
        "index.json",
        "summary.json",
        "result.json",
        "results.json",
        "folded.json",
        "analysis.json",
        "tokenizer.json",
    )


@pytest.mark.parametrize("seed", count(40, 500))
def test_flips(material, expected, seed):
    rng = random.Random(seed)
    name = list(READERS)[seed % len(READERS)]
    command = rng.choice(SLOW_READERS[name] if name in SLOW_READERS and rng.random() < 0.25 else READERS[name])
    with copied(material) as folder:
        below = folder / name
        files = [below] if below.is_file() else sorted(path for path in below.rglob("*") if path.is_file())
        file = rng.choice([path for path in files if not path.name.endswith(NOT_READ)])
        flip(rng, file)
        where = str(file.relative_to(folder))
        before = snapshot(folder)
        CASES["flips"] += 1
        outcome = (run_briefly if command[0] == "serve" else run)(folder, *command)
        assert outcome.problem is None, f"{where}: angpt {command}: {outcome.problem}"
        if outcome.code == 2:
            allowed = ["new", "study/result", "half/"] if name in ("study", "half") else ["new"]
            assert not changes(before, snapshot(folder), allowed), f"{where}: angpt {command}: {outcome.err}"
        elif outcome.code == 0 and has_checksum(file) and "damaged" not in outcome.err:  # of an earlier checkpoint
            ends, texts = expected
            assert outcome.out == texts.get(command, outcome.out), f"{where}: angpt {command}: other text"
            if command[0] == "train":
                ended = command[-1]
                assert end_of(folder / ended) == ends[ended], f"{where}: angpt {command}: another end"
