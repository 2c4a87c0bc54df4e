import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from angpt.constraints import largest_violation
from angpt.errors import UserError
from angpt.models.variants import build
from angpt.serialization import to_toml
from angpt.training import checkpoint
from angpt.training.launch import resume, start
from angpt.training.plan import make_plan
from angpt.training.reporter import Quiet
from angpt.training.run import Run
from angpt.training.sinks import MetricsFile
from angpt.training.trainer import interrupts
from tests.command import angpt
from tests.training.conftest import RECIPES, Stops, parameters, small, without_timing

ROOT = Path(__file__).parents[2]


# The same number of threads as here: the order of a sum depends on it.
CHILD = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}, "text": True}


def command(*args):
    """angpt in a process of its own."""
    return [sys.executable, "-m", "angpt", *map(str, args)]


def train_command(config, out, folder):
    path = folder / f"{out.name}.toml"
    path.write_text(to_toml(config))
    return command("train", "--config", path, "--out", out)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_learns_and_leaves_its_folder(data, tmp_path, recipe):
    config = small(data, tokens="30720", checkpoint_every=50).with_recipe(recipe)
    summary = start(config, tmp_path / "run", Quiet())
    run = Run.open(tmp_path / "run")
    assert summary.status == "finished"
    assert run.summary() == summary
    assert (summary.step, summary.steps, summary.tokens) == (120, 120, 30720)
    records = list(run.records())
    train = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in train] == list(range(1, 121))
    assert [r["tokens"] for r in train] == [256 * s for s in range(1, 121)]
    assert [r["step"] for r in records if r["kind"] == "val"] == [*range(5, 121, 5)]
    assert [r["step"] for r in records if r["kind"] == "layers"] == [0, *range(4, 121, 4)]
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    assert summary.val_loss == [r for r in records if r["kind"] == "val"][-1]["val_loss"]
    plan = make_plan(config)
    assert [r["lr"] for r in train] == [plan.lr(s) for s in range(120)]
    model = build(config.model)
    model.load_state_dict(checkpoint.load_model(checkpoint.newest(run.checkpoints)))
    assert largest_violation(model, model.constraints()) < 1e-6
    layers = [r for r in records if r["kind"] == "layers"][-1]
    assert len(layers["input_norm"]) == 3
    assert all(len(layers[name]) == 2 for name in ("W_qkv", "W_p", "W_uz", "W_d"))


def test_validation_loss_is_the_mean_over_tokens(data, tmp_path):
    config = small(data, eval_tokens=10**9)
    start(config, tmp_path / "run", Quiet())
    run = Run.open(tmp_path / "run")
    model = build(config.model)
    model.load_state_dict(checkpoint.load_model(checkpoint.newest(run.checkpoints)))
    tokens = torch.from_numpy(np.fromfile(data / "val.bin", "<u2").astype(np.int64))
    windows = (len(tokens) - 1) // 32
    assert windows % config.micro_batch  # the last batch is a short one
    with torch.no_grad():
        losses = [
            model(tokens[None, i * 32 : i * 32 + 32], tokens[None, i * 32 + 1 : i * 32 + 33]) for i in range(windows)
        ]
    assert run.summary().val_loss == pytest.approx(float(sum(losses)) / windows, rel=1e-5)


def test_accumulation_gives_the_gradient_of_the_whole_batch(data, tmp_path):
    ends = []
    for micro in (8, 2):
        start(small(data, micro_batch=micro), tmp_path / str(micro), Quiet())
        ends.append(checkpoint.load_model(checkpoint.newest(tmp_path / str(micro) / "checkpoints")))
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name], rtol=1e-3, atol=1e-4)


def test_document_masks_reach_the_model(tmp_path):
    """With masks on, a model trained on prepared documents has another loss than without, and other lengths of the
    residual stream at its start already."""
    from tests.data.corpora import prepare

    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i:02}.txt").write_text(f"document {i} says {i * i} " * 3)
    prepare((str(text),), tmp_path / "tokens", tokenizer="bytes", val_fraction=0.2)
    losses, lengths = [], []
    for mask in (False, True):
        config = small(tmp_path / "tokens", data__mask_documents=mask, model__vocab_size=257)
        losses.append(start(config, tmp_path / f"run-{mask}", Quiet()).val_loss)
        records = Run.open(tmp_path / f"run-{mask}").records()
        lengths.append(next(record["input_norm"] for record in records if record["kind"] == "layers"))
    assert losses[0] != losses[1]
    assert lengths[0][0] == lengths[1][0]
    assert lengths[0][1:] != lengths[1][1:]


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        *((name, "fp32") for name in RECIPES),
        *((name, precision) for name in ("angpt", "angpt:muon") for precision in ("bf16", "fp8")),
        ("gpt+", "fp8"),
    ],
)
def test_interrupted_and_resumed_is_as_if_undisturbed(data, tmp_path, recipe, precision):
    config = small(data, precision=precision).with_recipe(recipe)
    start(config, tmp_path / "whole", Quiet())
    summary = start(config, tmp_path / "parts", Stops(3))
    assert summary.status == "interrupted"
    assert summary.step < 12
    assert resume(tmp_path / "parts", Stops(9)).status == "interrupted"
    assert resume(tmp_path / "parts", Quiet()).status == "finished"
    whole, parts = Run.open(tmp_path / "whole"), Run.open(tmp_path / "parts")
    assert without_timing(parts) == without_timing(whole)
    assert parameters(parts) == parameters(whole)


def test_a_run_that_goes_on_has_no_end(data, tmp_path):
    """While it is running, and after a kill, its summary is not that of the interruption before."""

    class Killed(Quiet):
        def train(self, *args, **kwargs):
            raise ZeroDivisionError

    start(small(data), tmp_path / "run", Stops(3))
    assert Run(tmp_path / "run").summary().status == "interrupted"
    with pytest.raises(ZeroDivisionError):
        resume(tmp_path / "run", Killed())
    assert Run(tmp_path / "run").summary() is None
    assert resume(tmp_path / "run", Quiet()).status == "finished"


def newest_name(out):
    return max((p.name for p in (out / "checkpoints").glob("step-*")), default="")


def kill_and_resume(data, tmp_path, recipe, kills, seed):
    """Killed with SIGKILL at random moments, a checkpoint being written at nearly all of them."""
    config = small(data, tokens=str(256 * 20 * (kills + 1)), checkpoint_every=1).with_recipe(recipe)
    start(config, tmp_path / "whole", Quiet())
    out, rng = tmp_path / "parts", random.Random(seed)
    call, killed = train_command(config, out, tmp_path), 0
    while True:
        process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **CHILD)
        before = newest_name(out)
        if killed < kills:
            while newest_name(out) == before and process.poll() is None:  # until it is under way
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.15))
            process.kill()
        _, errors = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
        assert newest_name(out) > before
        killed += 1
        call = command("train", "--resume", out)
    assert killed == kills
    whole, parts = Run.open(tmp_path / "whole"), Run.open(out)
    assert without_timing(parts) == without_timing(whole)
    assert parameters(parts) == parameters(whole)


@pytest.mark.parametrize("recipe", ["gpt+", "ngpt", "angpt", "angpt:muon"])
def test_killed_and_resumed_is_as_if_undisturbed(data, tmp_path, recipe):
    kill_and_resume(data, tmp_path, recipe, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_ten_times(data, tmp_path, recipe):
    kill_and_resume(data, tmp_path, recipe, kills=10, seed=2)


def test_a_damaged_last_checkpoint_costs_steps_but_not_the_run(data, tmp_path):
    start(small(data), tmp_path / "whole", Quiet())
    start(small(data), tmp_path / "run", Stops(7))
    run = Run.open(tmp_path / "run")
    last = checkpoint.found(run.checkpoints)[-1]
    (last / "model.safetensors").write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="damaged"):
        assert resume(run.path, Quiet()).status == "finished"
    assert parameters(run) == parameters(Run.open(tmp_path / "whole"))
    assert without_timing(run) == without_timing(Run.open(tmp_path / "whole"))


@pytest.mark.filterwarnings("ignore:skipping a damaged checkpoint")
def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(data, tmp_path):
    start(small(data), tmp_path / "run", Stops(7))
    run = Run.open(tmp_path / "run")
    for path in checkpoint.found(run.checkpoints):
        (path / "model.safetensors").write_bytes(b"nonsense")
    before = sorted(run.checkpoints.rglob("*"))
    with pytest.raises(UserError, match="every checkpoint is damaged; restore one"):
        resume(run.path, Quiet())
    assert sorted(run.checkpoints.rglob("*")) == before


@pytest.mark.parametrize(("every", "saved"), [(1, ["step-000000001"]), (12, [])])
def test_divergence_stops_and_is_marked(data, tmp_path, every, saved):
    """The first step writes weights of 1e29, whose squares overflow: the gradient of the second is not finite.

    Twelve steps are planned. Losses are looked at before each checkpoint and every third step.
    """
    config = small(
        data, "gpt+", optimizer__lr=1e30, optimizer__warmup=0.6, optimizer__clip=1e30, checkpoint_every=every,
        layers_every=12, eval_every=12,
    )  # fmt: skip
    summary = start(config, tmp_path / "run", Quiet())
    assert (summary.status, summary.step, summary.steps) == ("diverged", 2, 12)
    assert summary.checkpoint == (saved[-1] if saved else None)
    run = Run.open(tmp_path / "run")
    assert [path.name for path in run.checkpoints.glob("*")] == saved
    train = [r for r in run.records() if r["kind"] == "train"]
    assert [r["step"] for r in train] == [1, 2]
    assert None not in (train[0]["loss"], train[0]["grad_norm"])
    assert train[1]["grad_norm"] is None
    files = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert resume(run.path, Quiet()) == summary
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == files


def test_the_second_interrupt_stops_at_once():
    with interrupts() as came:
        assert not came()
        os.kill(os.getpid(), signal.SIGINT)
        assert came()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_has_an_exit_code_of_its_own_and_the_run_goes_on(data, tmp_path, capsys):
    config = small(data, tokens="512000", checkpoint_every=10_000)
    call = train_command(config, tmp_path / "run", tmp_path)
    process = subprocess.Popen(call, stdout=subprocess.PIPE, **CHILD)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").stat().st_size:
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert f"continue with: angpt train --resume {tmp_path / 'run'}" in out
    code, text = angpt(capsys, "train", "--resume", tmp_path / "run", "--tokens", "1M")
    assert code == 2
    assert "other values of tokens (another budget changes the learning rate of every step)" in text


def test_tensorboard_gets_the_same_numbers(data, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    start(small(data, tensorboard=True), tmp_path / "run", Quiet())
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    written = [r["loss"] for r in Run.open(tmp_path / "run").records() if r["kind"] == "train"]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(written, rel=1e-6)


def test_a_half_written_record_is_passed_over(data, tmp_path):
    start(small(data), tmp_path / "run", Quiet())
    run = Run.open(tmp_path / "run")
    whole = list(run.records())
    with run.metrics.open("a") as file:
        file.write(json.dumps({"kind": "train"})[:9])
    assert list(run.records()) == whole


@pytest.mark.parametrize("architecture", ["gpt+/dyt", "angpt/no-factors"])
def test_a_validation_loss_that_is_not_finite_is_divergence(data, tmp_path, architecture):
    """A single step at an absurd rate: its own loss is still finite, what it leaves behind is not."""
    config = small(data, architecture, tokens="256", optimizer__lr=1e30, optimizer__warmup=0.0)
    summary = start(config, tmp_path / "run", Quiet())
    assert (summary.status, summary.val_loss) == ("diverged", None)
    assert Run.open(tmp_path / "run").summary() == summary


def test_a_full_disk_stops_the_run_with_one_clear_line(data, tmp_path, monkeypatch):
    """Closing the file fails as well, because records are left that could not be written."""

    def full(self):
        self.file.close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsFile, "flush", full)
    monkeypatch.setattr(MetricsFile, "close", full)
    with pytest.raises(UserError, match=r"run: .*No space left on device; fix the cause and continue with --resume"):
        start(small(data), tmp_path / "run", Quiet())


def test_lost_metrics_are_noticed(data, tmp_path):
    start(small(data), tmp_path / "run", Stops(5))
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="shorter than the last checkpoint"):
        resume(tmp_path / "run", Quiet())
