import errno
import hashlib
import math
import os
import random
import re
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from angpt.config import OptimizerConfig, TrainConfig
from angpt.errors import UserError
from angpt.training import checkpoint
from angpt.training.checkpoint import State, Writer
from angpt.training.run import Run, Summary
from angpt.training.strategy import Shard, SingleProcess
from tests.training.conftest import all_tensors

STATE = State(
    step=3,
    architecture="angpt",
    metrics_bytes=7,
    seconds=1.5,
    val_loss=2.5,
    data_fingerprint="d",
    tokenizer_fingerprint=None,
    sha256={},
    config=TrainConfig(),
)
MODEL, OPTIMIZER = {"w": torch.arange(6.0).view(2, 3)}, {"exp_avg/w": torch.ones(2, 3), "step/w": torch.tensor(3.0)}


def save(folder, step=3, keep=2):
    return checkpoint.save(folder, MODEL, OPTIMIZER, replace(STATE, step=step), keep)


def test_round_trip(tmp_path):
    path = save(tmp_path)
    assert torch.equal(checkpoint.load_model(path)["w"], MODEL["w"])
    assert all_tensors(path).keys() == (MODEL | OPTIMIZER).keys()
    assert replace(checkpoint.read_state(path), sha256={}) == STATE


def test_any_tensor_is_saved_and_files_have_their_checksums(tmp_path):
    """Several dtypes, tensors without dimensions or elements, and a view."""
    tensors = {
        "é": torch.randn(3, 5).T, "rng": torch.arange(13, dtype=torch.uint8), "b": torch.tensor(2.0),
        "a": torch.randn(7).bfloat16(), "empty": torch.zeros(0, 4), "d": torch.zeros(2, dtype=torch.float64),
    }  # fmt: skip
    path = checkpoint.save(tmp_path, tensors, {}, STATE, 1)
    found = all_tensors(path)
    assert found.keys() == tensors.keys()
    assert all(t.dtype == found[name].dtype and torch.equal(t, found[name]) for name, t in tensors.items())
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.glob("*.safetensors")}
    assert checkpoint.read_state(path).sha256 == sums
    assert load_file(path / "model.safetensors").keys() == tensors.keys() - {"rng"}


@pytest.fixture
def writer(tmp_path):
    return Writer(SingleProcess(), tmp_path, keep=2)


def test_a_checkpoint_is_of_the_moment_of_saving(tmp_path, writer, monkeypatch):
    """However long it takes to write: here until the tensor has changed."""
    changed, write_files = threading.Event(), checkpoint.write_files

    def slow(*args):
        assert changed.wait(30)
        return write_files(*args)

    monkeypatch.setattr(checkpoint, "write_files", slow)
    weight = torch.arange(6.0).view(2, 3)
    with writer:
        for step in (1, 2):
            changed.clear()
            writer.save({"w": SingleProcess().shard(weight)}, replace(STATE, step=step))
            assert checkpoint.newest(tmp_path / "none") is None
            assert len(checkpoint.found(tmp_path)) == step - 1
            weight += 1
            changed.set()
            writer.finish()
    for step, path in enumerate(checkpoint.found(tmp_path)):
        assert torch.equal(checkpoint.load_model(path)["w"], step + torch.arange(6.0).view(2, 3))


def test_an_error_of_the_writer_is_raised_by_the_next_save_and_at_the_end(tmp_path, writer, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    shards = {"w": SingleProcess().shard(torch.zeros(2))}
    writer.save(shards, replace(STATE, step=1))
    writer.finish()
    monkeypatch.setattr(checkpoint, "write_files", full)
    writer.save(shards, replace(STATE, step=2))
    words = r"step-000000002: .* the disk is full\. The last good one is step-000000001; fix the cause and continue"
    with pytest.raises(UserError, match=words):
        writer.save(shards, replace(STATE, step=3))
    with pytest.raises(UserError, match=words), writer:
        pass
    with pytest.raises(KeyError), writer:  # an error of the loop is not hidden by one of the writer
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_any_rows_are_read_from_the_files_that_have_them(tmp_path):
    """A matrix of 7 rows over three ranks as 3, 3, 1; a vector on the first alone."""
    whole, vector = torch.arange(28.0).view(7, 4), torch.ones(3)
    for rank in range(3):
        shards = {"w": Shard(whole[3 * rank : 3 * rank + 3], (7, 4), 3 * rank, True, split=True)}
        if rank == 0:
            shards["v"] = Shard(vector, (3,), 0, True)
        names = checkpoint.write_files(tmp_path, shards, rank, 3)
        assert f"model-0000{rank + 1}-of-00003.safetensors" in names
    reader = checkpoint.Reader(tmp_path)
    assert reader.shape("w") == (7, 4)
    for first in range(8):
        for rows in range(8 - first):
            assert torch.equal(reader.read("w", first, rows), whole[first : first + rows])
    assert all(torch.equal(checkpoint.load_model(tmp_path)[name], t) for name, t in (("w", whole), ("v", vector)))
    half = Shard(torch.zeros(3, 4), (7, 4), 2, True, split=True)
    reader.fill({"w": half, "v": SingleProcess().shard(torch.zeros(3))})
    assert torch.equal(half.rows, whole[2:5])
    with pytest.raises(UserError, match="does not fit the model"):
        reader.fill({"w": half})
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="lacks rows of w"):
        checkpoint.load_model(tmp_path)


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    assert [p.name for p in checkpoint.found(tmp_path)] == ["step-000000003", "step-000000004"]


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_ones_ahead_do_not_push_out_a_good_one(tmp_path, keep):
    for step in (28, 30):
        (save(tmp_path, step, keep) / "model.safetensors").write_bytes(b"nonsense")
    for step in (2, 4):
        save(tmp_path, step, keep)
        assert checkpoint.newest(tmp_path).name == f"step-{step:09d}"
    assert len(checkpoint.found(tmp_path)) == keep


def test_links_to_checkpoints_are_removed_and_what_they_point_to_stays(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for step in (1, 2):
        save(folder, step)
    (folder / "step-000000001").rename(elsewhere)
    for name in ("step-000000001", ".part-000000003", ".part-000000002-old"):
        (folder / name).symlink_to(elsewhere)
    (folder / "step-000000000").symlink_to(tmp_path / "nowhere")
    (folder / "step-000000002").rename(tmp_path / "two")
    (folder / "step-000000002").symlink_to(tmp_path / "two")
    assert checkpoint.newest(folder).name == "step-000000002"
    save(folder, 2)  # as if it had been damaged
    save(folder, 3)
    assert sorted(path.name for path in folder.glob("*0*")) == ["step-000000000", "step-000000002", "step-000000003"]
    assert sorted(path.name for path in elsewhere.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert checkpoint.read_state(tmp_path / "two").step == 2


def test_an_unfinished_one_is_not_seen_and_cleared_by_the_next(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".part-000000002").mkdir()
    (tmp_path / ".part-000000002" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path).name == "step-000000001"
    save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000001", "step-000000002"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_one_is_skipped_with_a_warning_and_replaced(tmp_path, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x40
    match damage:
        case "flip":
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[: len(content) // 2])
        case "remove":
            file.unlink()
    with pytest.warns(UserWarning, match="step-000000002: the checkpoint is damaged"):
        assert checkpoint.newest(tmp_path).name == "step-000000001"
    save(tmp_path, 2)
    assert checkpoint.newest(tmp_path).name == "step-000000002"


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_one_that_cannot_be_read_is_not_skipped(tmp_path, monkeypatch, name):
    save(tmp_path, 1)
    save(tmp_path, 2)
    open_file = Path.open

    def fail(self, *args, **kwargs):
        if self.parent.name == "step-000000002" and self.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return open_file(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(UserError, match=r"step-000000002: the checkpoint cannot be read .*Input/output error"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path, monkeypatch, number):
    """Otherwise a run would start over, and replace its checkpoints."""
    save(tmp_path, 1)

    def fail(path="."):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "listdir", fail)  # the one that pathlib calls, by its version
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(UserError, match=rf"checkpoints cannot be listed .{os.strerror(number)}.; try again"):
        checkpoint.newest(tmp_path)


def test_a_disk_that_can_neither_be_written_nor_read_is_one_error(tmp_path, monkeypatch):
    """The thread that writes reads the checkpoint before, to name it; what it raises there would be a traceback."""
    save(tmp_path, 1)

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(checkpoint, "file_sha256", fail)
    with pytest.raises(UserError, match=r"step-000000002: the checkpoint could not be written: .*step-000000001: the"):
        save(tmp_path, 2)


def test_every_changed_character_of_the_state_is_found(tmp_path):
    """The checkpoint counts as damaged, or its state is the same."""
    save(tmp_path, 1)
    file, rng = save(tmp_path, 2) / "state.json", random.Random(0)
    state, content = checkpoint.read_state(file.parent), file.read_bytes()
    for _ in range(100):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        with suppress(UserError):
            assert checkpoint.read_state(file.parent) == state
    text = content.decode()
    for name in ("step", "metrics_bytes", "seconds", "val_loss"):
        file.write_text(re.sub(rf'("{name}": )', r"\g<1>1", text))
        with pytest.warns(UserWarning, match="step-000000002: the checkpoint is damaged .the checksum is wrong"):
            assert checkpoint.newest(tmp_path).name == "step-000000001"


def test_none(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing") is None


def fill(folder):
    """Save in a process of its own whose files may not grow past 64 KiB: writing fails there as on a full disk."""
    code = f"""
import resource, signal, torch
from pathlib import Path
from angpt.config import OptimizerConfig, TrainConfig
from angpt.errors import UserError
from tests.training.test_checkpoint import STATE, checkpoint
from dataclasses import replace
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path({str(folder)!r})
checkpoint.save(folder, {{"w": torch.zeros(4)}}, {{}}, STATE, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    checkpoint.save(folder, {{"w": torch.zeros(100_000)}}, {{}}, replace(STATE, step=4), 2)
except UserError as error:
    print(error)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_writer_that_runs_out_of_room_leaves_the_last_good_one(tmp_path):
    message = fill(tmp_path)
    assert re.search(
        r"step-000000004: the checkpoint could not be written: .*The last good one is step-000000003", message
    )
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000003"]
    assert checkpoint.newest(tmp_path) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_named(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path]).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        save(tmp_path, 1)
        with pytest.raises(UserError, match=r"the disk is full\. The last good one is step-000000001"):
            checkpoint.save(tmp_path, {"w": torch.zeros(100_000)}, {}, replace(STATE, step=2), 2)
        assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]
        save(tmp_path, 2)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_settings_may_be_infinite(tmp_path):
    """Gradients are not clipped with clip = inf; the state itself is finite."""
    config = TrainConfig(optimizer=OptimizerConfig(clip=math.inf))
    path = checkpoint.save(tmp_path, MODEL, OPTIMIZER, replace(STATE, config=config), keep=2)
    assert checkpoint.newest(tmp_path) == path
    assert checkpoint.read_state(path).config == config
    for changes in ({"seconds": math.inf}, {"val_loss": math.nan}):
        with pytest.raises(UserError):
            replace(STATE, **changes)


def test_a_changed_summary_is_found_and_a_loss_of_zero_is_none(tmp_path):
    values = {"status": "finished", "step": 1, "steps": 1, "tokens": 1, "val_loss": 0.0, "seconds": 1.0}
    values |= {"compile_seconds": 0.0, "tokens_per_s": None, "peak_memory_gib": None, "parameters": 1}
    run = Run(tmp_path)
    run.write_summary(Summary(**values, flops_per_token=1, checkpoint=None, environment={}))
    assert run.summary().val_loss == 0.0
    path = tmp_path / "summary.json"
    path.write_text(path.read_text().replace('"val_loss": 0.0', '"val_loss": 0.5'))
    with pytest.raises(UserError, match="the checksum is wrong"):
        run.summary()
