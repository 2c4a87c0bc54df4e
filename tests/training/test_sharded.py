"""Runs on many ranks: their files, their checkpoints, and what becomes of them when a rank is lost."""

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from angpt.config import OptimizerConfig
from angpt.errors import UserError
from angpt.inference.source import open_source
from angpt.training import checkpoint
from angpt.training.engine import Engine
from angpt.training.launch import resume, start
from angpt.training.reporter import Quiet
from angpt.training.run import Run
from angpt.training.strategy import choose_strategy
from tests.optim.test_adam import tiny
from tests.training.conftest import DIVERGES, all_tensors, small, without_timing
from tests.training.ranks import spread
from tests.training.test_checkpoint import STATE

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("gpt+", "ngpt", "angpt")


def run_on_ranks(config, out, until=None):
    """Train, or go on; `until` stops after a step, as SIGTERM would."""
    from angpt.training.trainer import Trainer

    if until is not None:
        Trainer.agreed = lambda self, interrupted: self.step == until
    return (resume(out, Quiet()) if out.exists() and until is None else start(config, out, Quiet())).status


def losses(run):
    return [r["loss"] for r in run.records() if r["kind"] == "train"]


def validation(run):
    return [r["val_loss"] for r in run.records() if r["kind"] == "val"]


def close(ours, theirs, rel=1e-5):
    assert losses(ours) == pytest.approx(losses(theirs), rel=rel)
    assert validation(ours) == pytest.approx(validation(theirs), rel=rel)
    first, second = (checkpoint.load_model(checkpoint.newest(run.checkpoints)) for run in (ours, theirs))
    assert first.keys() == second.keys()
    for name, p in second.items():
        torch.testing.assert_close(first[name], p, rtol=0, atol=5e-3, msg=name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_on_two_ranks_is_that_of_one_process(data, tmp_path, strategy):
    """Its records, too; and it is read as any other, and goes on in one process."""
    config = small(data, "ngpt", parallel=strategy, record_moments=True)
    start(config, tmp_path / "one", Quiet())
    assert spread(run_on_ranks, 2, config, tmp_path / "two") == ["finished"] * 2
    one, two = Run(tmp_path / "one"), Run(tmp_path / "two")
    close(two, one)
    for ours, theirs in zip(two.records(), one.records(), strict=True):
        assert ours.keys() == theirs.keys()
        if ours["kind"] == "layers":
            assert ours["W_qkv"] == pytest.approx(theirs["W_qkv"], rel=1e-4)
            assert ours["input_norm"] == pytest.approx(theirs["input_norm"], rel=1e-4)
        if ours["kind"] == "moments":
            assert ours["W_d"] == pytest.approx(theirs["W_d"], rel=1e-3)
    assert two.summary().environment["ranks"] == "2"
    assert [p.name for p in two.logs.iterdir()] == ["rank-00001.log"]
    assert open_source(two.path).decoder().W_h.weight.shape == (61, 32)
    path = checkpoint.newest(two.checkpoints)
    assert sorted(checkpoint.read_state(path).sha256) == sorted(p.name for p in path.glob("*.safetensors"))
    assert not list(path.glob(".metadata"))


def run_and_note_the_handler(config, out):
    """The status of a run without signals, that of the run that is asked for again, and the handler of SIGTERM."""
    first, again = (start(config, out, Quiet(), again=again, signals=False).status for again in (False, True))
    return first, again, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_records_in_bf16_are_those_of_parameters_in_fp32(data, tmp_path):
    """FSDP gathers matrices in bf16. The micro-batch fits two ranks only, and signals stay as they were."""
    rows = {}
    for strategy in ("ddp", "fsdp"):
        config = small(data, "angpt", parallel=strategy, precision="bf16", micro_batch=3)
        answers = spread(run_and_note_the_handler, 2, config, tmp_path / strategy)
        assert answers == [("finished", "finished", True)] * 2
        layers = [r for r in Run(tmp_path / strategy).records() if r["kind"] == "layers"]
        rows[strategy] = [record[name] for name in ("W_e", "W_h") for record in layers]
    assert len(rows["ddp"]) > 2
    assert rows["fsdp"] == pytest.approx(rows["ddp"], rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_8_bits_on_two_ranks(data, tmp_path, strategy):
    """A run that is stopped on two ranks goes on in one process; its records of products leave no gradient behind."""
    config = small(data, "angpt", parallel=strategy, precision="fp8", record_fp8=True, layers_every=4)
    start(config, tmp_path / "one", Quiet())
    assert spread(run_on_ranks, 2, config, tmp_path / "two", 8) == ["interrupted"] * 2
    assert resume(tmp_path / "two", Quiet()).status == "finished"
    one, two = Run(tmp_path / "one"), Run(tmp_path / "two")
    assert losses(two) == pytest.approx(losses(one), rel=0.01)
    first, second = ([r for r in run.records() if r["kind"] == "fp8"] for run in (one, two))
    assert [r["step"] for r in second] == [r["step"] for r in first] == [0, 4, 8, 12]
    for ours, theirs in zip(second, first, strict=True):
        assert ours["W_d_gradient_kurtosis"] == pytest.approx(theirs["W_d_gradient_kurtosis"], rel=0.2)


def test_a_damaged_shard_is_noticed(data, tmp_path):
    spread(run_on_ranks, 2, small(data, parallel="fsdp", tokens="1024"), tmp_path / "run")
    last = checkpoint.found(tmp_path / "run" / "checkpoints")[-1]
    file = last / "model-00002-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x40
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="the checksum of model-00002-of-00002"):
        assert checkpoint.newest(last.parent).name == "step-000000002"


def fail_on_one_rank(folder):
    """What each rank is told of an error of rank 0 in `share`, and of one of rank 1 in writing a checkpoint."""

    def fail(*args):
        raise UserError("something odd") if len(args) == 0 else ValueError("something odd")

    if os.environ["RANK"] == "1":
        checkpoint.write_files = fail
    said = []
    with choose_strategy(torch.device("cpu"), "ddp", None, 300) as strategy:
        try:
            strategy.share(fail)
        except UserError as error:
            said.append(str(error))
        try:
            with checkpoint.Writer(strategy, folder, 1) as writer:
                writer.save({"w": strategy.shard(torch.ones(2))}, STATE)
        except UserError as error:
            said.append(str(error).partition("written: ")[2].partition(".")[0])
        said.append(strategy.share(lambda: 5))
    return said


def test_an_error_on_one_rank_is_told_on_all(tmp_path):
    assert spread(fail_on_one_rank, 2, tmp_path) == [["something odd", "rank 1: something odd", 5]] * 2
    assert not list(tmp_path.iterdir())


def flip_one_bit(strategy, shard_ranks, victim):
    """What ranks say of their replicas before and after a bit of a parameter, and of a moment, changes on one rank."""
    said = []
    with choose_strategy(torch.device("cpu"), strategy, shard_ranks, 300) as chosen:
        engine = Engine(tiny("angpt"), OptimizerConfig(weight_decay=0.0), torch.float32, False, strategy=chosen)
        tensors = engine.tensors()
        for name in (None, "W_h.weight", "exp_avg_sq/s_z.stored"):
            if name is not None and chosen.rank == victim:
                tensors[name].rows.view(-1).view(torch.int32)[-1] ^= 1
            try:
                chosen.compare_replicas(tensors)
                said.append("equal")
            except UserError as error:
                said.append(str(error).partition(", which")[0])
            if name is not None and chosen.rank == victim:
                tensors[name].rows.view(-1).view(torch.int32)[-1] ^= 1
    return said


@pytest.mark.parametrize(("strategy", "size", "victim", "other"), [("ddp", 3, 0, 1), ("fsdp", 2, 1, 0)])
def test_a_rank_with_another_bit_is_named(strategy, size, victim, other):
    """By the majority where there is one. The rows of a sharded matrix are on one rank alone: nothing to compare."""
    first, *rest = spread(flip_one_bit, size, strategy, None, victim)
    said = f"rank {victim} differs from rank {other} in"
    matrix = f"{said} W_h.weight" if strategy == "ddp" else "equal"
    assert first == ["equal", matrix, f"{said} exp_avg_sq/s_z.stored"]
    assert all(answer == first for answer in rest)


@pytest.mark.slow
def test_replicas_of_shards_are_compared():
    """Two copies, each over two ranks: 1 and 3 hold the same rows."""
    for answer in spread(flip_one_bit, 4, "fsdp", 2, 3):
        assert answer[:2] == ["equal", "rank 3 differs from rank 1 in W_h.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_divergence_keeps_the_last_good_checkpoint(data, tmp_path, strategy):
    config = small(data, "gpt+", parallel=strategy, **DIVERGES)
    assert spread(run_on_ranks, 2, config, tmp_path / "run") == ["diverged"] * 2
    run = Run(tmp_path / "run")
    assert run.summary().checkpoint == f"step-{run.summary().step - 1:09d}"
    assert checkpoint.newest(run.checkpoints).name == run.summary().checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "precision"), [("angpt", "auto"), ("angpt:muon", "auto"), ("angpt", "fp8")])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_interrupted_and_resumed_is_bitwise_the_same(data, tmp_path, strategy, recipe, precision):
    config = small(data, parallel=strategy, checkpoint_every=100, precision=precision).with_recipe(recipe)
    whole, broken = Run(tmp_path / "whole"), Run(tmp_path / "broken")
    spread(run_on_ranks, 2, config, whole.path)
    assert spread(run_on_ranks, 2, config, broken.path, 6) == ["interrupted"] * 2
    assert spread(run_on_ranks, 2, config, broken.path) == ["finished"] * 2
    assert without_timing(broken) == without_timing(whole)
    ours, theirs = (checkpoint.newest(run.checkpoints) for run in (broken, whole))
    first, second = all_tensors(ours), all_tensors(theirs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*ARCHITECTURES, "ngpt:muon", "angpt:muon"])
def test_saved_by_four_ranks_goes_on_with_any_number(data, tmp_path, recipe):
    """12 sequences per step: 1, 2, 3 and 4 ranks can share them."""
    config = small(data, batch_tokens=384, micro_batch=3, parallel="fsdp", checkpoint_every=100).with_recipe(recipe)
    whole = Run(tmp_path / "whole")
    start(replace(config, parallel="auto"), whole.path, Quiet())
    spread(run_on_ranks, 4, config, tmp_path / "four", 5)
    for size in (0, 1, 2, 3):
        path = tmp_path / f"then-{size}"
        subprocess.run(["cp", "-r", tmp_path / "four", path], check=True)
        if size == 0:  # no launcher at all
            resume(path, Quiet())
        else:
            assert spread(run_on_ranks, size, config, path) == ["finished"] * size
        close(Run(path), whole)


@pytest.mark.slow
def test_begun_by_one_process_goes_on_with_three_ranks(data, tmp_path):
    config = small(data, "ngpt", batch_tokens=384, micro_batch=3, parallel="fsdp", checkpoint_every=4)
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    start(config, whole.path, Quiet())
    start(config, run.path, Quiet())
    for path in (run.path / "summary.json", *checkpoint.found(run.checkpoints)[1:]):
        subprocess.run(["rm", "-r", path], check=True)
    assert spread(run_on_ranks, 3, config, run.path) == ["finished"] * 3
    close(run, whole)


def run_with_a_full_disk(config, out):
    """Rank 1 cannot write the checkpoint of step 4."""
    write = checkpoint.write_files

    def full(part, *args):
        if "000000004" in part.name and os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        return write(part, *args)

    checkpoint.write_files = full
    try:
        return run_on_ranks(config, out)
    except UserError as error:
        return str(error)


@pytest.mark.slow
def test_a_full_disk_is_told_by_all_and_leaves_the_last_good_one(data, tmp_path):
    run = Run(tmp_path / "run")
    first, second = spread(run_with_a_full_disk, 2, small(data, parallel="fsdp"), run.path)
    assert "step-000000004: the checkpoint could not be written: rank 1: the disk is full. The last good one" in first
    assert second.endswith("step-000000004: the checkpoint could not be written: rank 1: the disk is full")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000000002"]
    assert spread(run_on_ranks, 2, small(data, parallel="fsdp"), run.path) == ["finished"] * 2
