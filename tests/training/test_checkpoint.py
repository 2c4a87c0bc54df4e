import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from angpt.errors import UserError
from angpt.training import checkpoint
from angpt.training.checkpoint import State

STATE = State(
    step=3,
    architecture="angpt",
    metrics_bytes=7,
    seconds=1.5,
    val_loss=2.5,
    data_fingerprint="d",
    tokenizer_fingerprint=None,
    sha256={},
)
MODEL, OPTIMIZER = {"w": torch.arange(6.0).view(2, 3)}, {"exp_avg/w": torch.ones(2, 3), "step/w": torch.tensor(3.0)}


def save(folder, step=3, keep=2):
    return checkpoint.save(folder, MODEL, OPTIMIZER, replace(STATE, step=step), keep)


def test_round_trip(tmp_path):
    path = save(tmp_path)
    assert torch.equal(checkpoint.load_model(path)["w"], MODEL["w"])
    assert checkpoint.load_tensors(path).keys() == (MODEL | OPTIMIZER).keys()
    assert replace(checkpoint.read_state(path), sha256={}) == STATE


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


def test_none(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing") is None


def fill(folder):
    """Save in a process of its own whose files may not grow past 64 KiB: writing fails there as on a full disk."""
    code = f"""
import resource, signal, torch
from pathlib import Path
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
