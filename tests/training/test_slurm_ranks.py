"""One run over two nodes of a real SLURM, emulated on this machine."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from angpt.serialization import to_toml
from angpt.training.run import Run
from tests.studies.conftest import write_study
from tests.training.conftest import small, without_timing
from tests.training.ranks import spread
from tests.training.test_sharded import run_on_ranks

ROOT = Path(__file__).parents[2]
NODES = "cpus = 1\nnodes = 2"


def until(condition, slurm, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("disturb", [("scontrol", "requeue"), ("scancel", "--signal=USR2")], ids=["requeue", "warning"])
def test_fsdp_on_two_nodes_resumes_after_a_requeue(slurm_of_two_nodes, data, tmp_path, disturb):
    """As SLURM does with a job that it has pre-empted, and as it warns one of its time limit."""
    slurm, run = slurm_of_two_nodes, Run(tmp_path / "run")
    config = small(
        data, "ngpt", parallel="fsdp", tokens="100k", checkpoint_every=1000, eval_every=200, layers_every=200
    )
    file = tmp_path / "c.toml"
    file.write_text(to_toml(config))
    options = ["--slurm", "--slurm.nodes=2", "--slurm.gpus=0", "--slurm.cpus=1"]
    command = [sys.executable, "-m", "angpt", "train", f"--config={file}", f"--out={run.path}", *options]
    environment = os.environ | slurm.environment | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    assert "of 2 processes" in said
    (job,) = slurm.queue()
    until(lambda: run.metrics.exists() and run.metrics.stat().st_size > 5000, slurm)
    slurm.call(*disturb, job)
    until(lambda: job not in slurm.queue(), slurm)
    logs = tmp_path / "slurm" / "run"
    told = "".join(path.read_text() for path in sorted(logs.glob("*_log.*")))
    assert run.summary() is not None, told
    assert run.summary().status == "finished", told
    assert "steps 0 to 391" in told
    assert len([line for line in told.splitlines() if "to 391 of 256 tokens" in line]) > 1  # it was begun again
    assert run.summary().environment["ranks"] == "2"
    whole = Run(tmp_path / "whole")
    assert spread(run_on_ranks, 2, config, whole.path) == ["finished"] * 2
    assert without_timing(run) == without_timing(whole)


@pytest.mark.slow
@pytest.mark.long
def test_runs_of_a_study_may_have_several_processes(slurm_of_two_nodes, data, tmp_path):
    single = (('["gpt+", "angpt"]', '["gpt+"]'), ('["a", "b"]', '["b"]'), ("[128, 256]", "[128]"))
    file = write_study(tmp_path / "s.toml", data, *single, ("[0.004, 0.016, 0.064]", "[0.016]"), ("cpus = 1", NODES))
    environment = os.environ | slurm_of_two_nodes.environment | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "angpt", "study", "run", str(file), f"--out={tmp_path / 's'}", "--slurm"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr + slurm_of_two_nodes.logs()
    (folder,) = (tmp_path / "s" / "runs").iterdir()
    assert Run(folder).summary().status == "finished"
    assert Run(folder).summary().environment["ranks"] == "2"
