"""Ranks that die, hang or are stopped, under torchrun."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from angpt.serialization import to_toml
from angpt.training import checkpoint
from angpt.training.launch import start
from angpt.training.reporter import Quiet
from angpt.training.run import Run
from tests.training.conftest import DIVERGES, all_tensors, small, without_timing
from tests.training.ranks import free_port

ROOT = Path(__file__).parents[2]


def torchrun(*arguments, size=2, restarts=0, module="tests.training.faulty", fault="none:0:0"):
    """The arguments of `angpt` on several ranks, one of which may go wrong."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", f"--max-restarts={restarts}"]
    environment = os.environ | {"FAULT": fault, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, f"--master-port={free_port()}", "-m", module, "train", *map(str, arguments)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture
def config(data, tmp_path, request):
    """The file with the configuration of a run with FSDP; a test can choose its recipe."""
    file = tmp_path / "c.toml"
    file.write_text(to_toml(small(data, parallel="fsdp").with_recipe(getattr(request, "param", "ngpt"))))
    return file


def ends(process, seconds=400):
    said, _ = process.communicate(timeout=seconds)
    return process.returncode, said


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["die:1:6", "save:1:6"])
@pytest.mark.parametrize("config", ["ngpt", "ngpt:muon"], indirect=True)
def test_a_lost_rank_leaves_the_previous_checkpoint_and_torchrun_goes_on(config, tmp_path, fault):
    whole, broken, mended = (Run(tmp_path / name) for name in ("whole", "broken", "mended"))
    assert ends(torchrun("--config", config, "--out", whole.path))[0] == 0
    code, said = ends(torchrun("--config", config, "--out", broken.path, fault=fault))
    assert code != 0
    assert "rank 0 of 2: lost another rank" in said
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9", said)
    assert checkpoint.newest(broken.checkpoints).name == "step-000000004"
    code, said = ends(torchrun("--config", config, "--out", mended.path, fault=fault, restarts=1))
    assert code == 0, said
    code, said = ends(torchrun("--resume", broken.path))
    assert code == 0, said
    for run in (mended, broken):
        assert without_timing(run) == without_timing(whole)
        assert not list(run.checkpoints.glob(".part*"))
        ours, theirs = (all_tensors(checkpoint.newest(r.checkpoints)) for r in (run, whole))  # with the moments
        assert ours.keys() == theirs.keys()
        assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "silent"), [("hang:1:6", False), ("freeze:1:6", True), ("freeze:0:6", True)])
def test_a_rank_that_hangs_is_named(config, tmp_path, fault, silent):
    code, said = ends(torchrun("--config", config, "--out", tmp_path / "run", "--timeout", 25, fault=fault))
    assert code != 0
    rank = fault.split(":")[1]
    why = "no sign of life" if silent else "the others wait for it"
    assert re.search(rf"error: no progress for 25 s in step \d+: rank {rank} hangs: {why}", said), said
    assert checkpoint.newest(tmp_path / "run" / "checkpoints").name == "step-000000004"


@pytest.mark.slow
def test_a_rank_with_other_parameters_is_named(config, tmp_path):
    code, said = ends(torchrun("--config", config, "--out", tmp_path / "run", fault="flip:1:5"))
    assert code != 0
    assert re.search(r"error: rank 1 differs from rank 0 in \w+", " ".join(said.split())), said
    assert re.search(r"exitcode +: 2", said)
    assert "compare_replicas" not in said  # no traceback
    assert checkpoint.newest(tmp_path / "run" / "checkpoints").name == "step-000000004"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_divergence_keeps_the_checkpoint_that_is_being_written(data, tmp_path, parallel, rank):
    """The second step diverges while a rank still writes the checkpoint of the first."""
    file, run = tmp_path / "c.toml", Run(tmp_path / "run")
    file.write_text(to_toml(small(data, "gpt+", parallel=parallel, layers_every=12, eval_every=12, **DIVERGES)))
    _, said = ends(torchrun("--config", file, "--out", run.path, fault=f"slow:{rank}:1"))
    summary = run.summary()
    assert (summary.status, summary.step, summary.checkpoint) == ("diverged", 2, "step-000000001"), said
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000000001"]
    assert checkpoint.newest(run.checkpoints) is not None
    assert re.findall(r"exitcode +: (-?\d+)", said) == ["4", "4"], said
    assert (run.logs / "rank-00001.log").exists()
    assert not any(path.stat().st_mode & 0o111 for path in run.path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on(data, tmp_path):
    file, run = tmp_path / "c.toml", Run(tmp_path / "run")
    file.write_text(to_toml(small(data, tokens="200k", eval_every=1000, checkpoint_every=1000, layers_every=0)))
    process = torchrun("--config", file, "--out", run.path, module="angpt")
    while not (run.metrics.exists() and run.metrics.stat().st_size > 1000):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = ends(process)
    assert run.summary().status == "interrupted", said
    saved = run.summary().step
    assert 0 < saved < 781
    assert checkpoint.newest(run.checkpoints).name == f"step-{saved:09d}"
    process = torchrun("--resume", run.path, "--parallel", "fsdp", size=4, module="angpt")
    assert ends(process)[0] == 0
    assert run.summary().status == "finished"


@pytest.mark.slow
def test_mistakes_are_told(data, tmp_path, config):
    run = Run(tmp_path / "run")
    start(small(data), run.path, Quiet())
    for options, words in (
        (("--config", config, "--out", run.path), "exists; continue with"),
        (("--config", config, "--out", tmp_path / "a", "--batch-tokens", 96), "2 processes cannot share evenly"),
        (("--config", config, "--out", tmp_path / "b", "--shard-ranks", 3), "shard_ranks = 3 does not divide"),
    ):
        code, said = ends(torchrun(*options, module="angpt"))
        assert code != 0
        assert words in " ".join(said.split()), said
        assert "lost another rank" not in said
