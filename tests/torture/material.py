"""Everything that the commands read and write, made once and copied for each case. Paths are relative."""

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.torture.harness import succeed

CONFIG = """
tokens = "3072"
batch_tokens = 256
micro_batch = 4
eval_tokens = 512
eval_every = 4
log_every = 3
layers_every = 4
checkpoint_every = 2
device = "cpu"

[model]
d_model = 32
n_layers = 2
n_heads = 2
vocab_size = 257
context = 32

[data]
path = "data"

[optimizer]
lr = 0.01
"""
"""A run of 12 steps, with a checkpoint after every other."""

STUDY = """
threads = 1

[[grid]]
architectures = ["gpt+", "angpt"]
sizes = ["tiny"]
budgets = ["2048"]
batches = [256]
seeds = [0, 1]
tune = 2
lr_limits = [1e-3, 1e-1]

[shapes.tiny]
d_model = 16
n_layers = 1
n_heads = 2

[train]
eval_tokens = 512
checkpoint_every = 4
device = "cpu"

[train.model]
vocab_size = 257
context = 32

[train.data]
path = "data"
"""
"""Trials of the learning rate, then four runs of 8 steps."""

PREPARE = ("data", "prepare", "text", "--tokenizer", "bytes", "--val-fraction", "0.2", "--out")
TRAIN = ("train", "--config", "c.toml", "--out")


def make(root: Path) -> None:
    """Write text, data, runs, a study, models in all forms, and what was measured on them."""
    rng = random.Random(0)
    words = ["tree", "naïve", "runs", "漢字", "of", "the", "<|endoftext|>", "\n", "[bold]"]
    (root / "text").mkdir()
    for number in range(40):
        (root / "text" / f"{number:02d}.txt").write_text(" ".join(rng.choices(words, k=80)), encoding="utf-8")
    (root / "c.toml").write_text(CONFIG)
    (root / "s.toml").write_text(STUDY)
    (root / "sweep.csv").write_text(sweep())
    succeed(root, *PREPARE, "data")
    succeed(root, *TRAIN, "runs/a")
    succeed(root, *TRAIN, "runs/b", "--arch", "gpt+")
    succeed(root, "study", "run", "s.toml", "--out", "study", "--workers", "0")
    succeed(root, "fold", "runs/a", "--out", "folded")
    succeed(root, "export", "hf", "runs/a", "--out", "export")
    succeed(root, "eval", "runs/a", "--data", "data")
    succeed(root, "analyze", "study", "--tokens", "512")
    succeed(root, "report", "study")
    succeed(root, "fit", "hparams", "sweep.csv", "--out", "fits", "--write-rules", "rules.toml")
    cut(root)
    shutil.copytree(root / "data", root / "half")  # as a preparation leaves it that was killed before its last step
    lines = list(journal(root / "data"))
    (root / "half" / "journal.log").write_text("".join(lines))
    (root / "half" / "index.json").unlink()


def cut(root: Path) -> None:
    """runs/cut: runs/a as it was before its last checkpoint, killed two steps later."""
    run = root / "runs" / "cut"
    shutil.copytree(root / "runs" / "a", run)
    (run / "summary.json").unlink()
    shutil.rmtree(run / "eval")
    shutil.rmtree(sorted((run / "checkpoints").iterdir())[-1])


def journal(data: Path) -> Iterator[str]:
    """The lines of the journal of a prepared folder just before its index was written."""
    import dataclasses
    import json

    from angpt.data.journal import Finished
    from angpt.data.shards import SPLITS, Index

    index = Index.read(data)
    yield json.dumps(dataclasses.asdict(index.recipe)) + "\n"
    for split in SPLITS:
        for shard in index.split(split).shards:
            yield json.dumps(dataclasses.asdict(Finished(split, shard))) + "\n"


def sweep() -> str:
    """Runs over sizes, batch sizes and learning rates whose losses have a minimum inside."""
    lines = ["architecture,parameters,tokens,batch_tokens,lr,loss"]
    for parameters in (1e6, 4e6, 16e6, 64e6):
        for b in range(5):
            for r in range(5):
                batch, lr = 2.0 ** (14 + b), 2.0**-10 * 2.0**r
                best_b, best_r = 1.5 + 0.2 * parameters**0.1, 3.0 - 0.1 * parameters**0.15
                loss = 2 + 400 / parameters**0.3 + 0.02 * (b - best_b) ** 2 + 0.03 * (r - best_r) ** 2
                lines.append(f"angpt,{parameters:.0f},{20 * parameters:.0f},{batch:.0f},{lr},{loss:.6f}")
    return "\n".join(lines) + "\n"


@contextmanager
def copied(root: Path, *names: str) -> Iterator[Path]:
    """A copy of the material, or of these parts of it, that any user may enter; it is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="angpt-torture-"))
    folder.chmod(0o755)
    try:
        for path in root.iterdir() if not names else (root / name for name in names):
            target = folder / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(path, target, symlinks=True) if path.is_dir() else shutil.copy2(path, target)
        yield folder
    finally:
        for path in folder.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(folder)
