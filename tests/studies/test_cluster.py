"""A study on a real SLURM, which the tests start on this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from angpt.studies.study import Study
from angpt.training.run import Run
from tests.studies.conftest import ROOT, pretend, study_result, write_study
from tests.training.conftest import without_timing

pytestmark = [pytest.mark.slow, pytest.mark.long]

SINGLE = (
    ('baseline = "gpt+"', ""),
    ('["gpt+", "angpt"]', '["angpt"]'),
    ('sizes = ["a", "b"]', 'sizes = ["b"]'),
    ("[128, 256]", "[128]"),
    ("[0.004, 0.016, 0.064]", "[0.016]"),
    ('["2048"]', '["600k"]'),
    ("checkpoint_every = 4", "checkpoint_every = 1000000"),
)
"""One run, long enough to be disturbed, which saves only when it is told that its end is near."""


def call(file, out, *options):
    return [sys.executable, "-m", "angpt", "study", "run", str(file), "--out", str(out), "--slurm", *options]


def begin(slurm, file, out, *options):
    environment = os.environ | slurm.environment
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(call(file, out, *options), cwd=ROOT, env=environment, **streams)


def until(condition, slurm, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """The single run, trained here to its end."""
    folder = tmp_path_factory.mktemp("single")
    file = write_study(folder / "s.toml", data, *SINGLE)
    command = [*call(file, folder / "s")[:-1], "--workers", "1"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return Study.open(folder / "s").jobs()[0].folder


@pytest.fixture
def under_way(slurm, undisturbed, data, tmp_path):
    """The same as a job: the process that waits for it, the folder of the run, and the number of the job."""
    file, out = write_study(tmp_path / "s.toml", data, *SINGLE), tmp_path / "s"
    folder = out / "runs" / undisturbed.name
    process = begin(slurm, file, out)
    until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 5000, slurm)
    (job,) = slurm.queue()
    return process, folder, job


def test_a_study_through_slurm_gives_the_same(slurm, whole, data, tmp_path):
    """Its process is interrupted and killed on the way; the jobs go on, and none is queued twice."""
    file, out = write_study(tmp_path / "s.toml", data), tmp_path / "s"
    process = begin(slurm, file, out)
    until(lambda: len(list(out.glob("runs/*/summary.json"))) >= 2, slurm)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert "the jobs stay in the queue" in said
    assert slurm.queue()
    process = begin(slurm, file, out)
    until(lambda: len(list(out.glob("runs/*/summary.json"))) >= 5, slurm)
    process.kill()
    process.communicate()
    environment = os.environ | slurm.environment
    status = [sys.executable, "-m", "angpt", "study", "status", str(out)]
    told = subprocess.run(status, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    assert re.search(r"24 runs: .*queued", told), told
    process = begin(slurm, file, out)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said + slurm.logs()
    assert study_result(out) == study_result(whole[0])
    assert len(list((out / "slurm").glob("*_submission.sh"))) == 24


def test_warned_of_its_end_a_run_saves_goes_back_into_the_queue_and_resumes(slurm, undisturbed, under_way, tmp_path):
    process, folder, job = under_way
    slurm.call("scancel", "--signal=USR2", job)
    until(lambda: list(folder.glob("checkpoints/step-*")), slurm)
    saved = sorted(folder.glob("checkpoints/step-*"))[-1].name
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + slurm.logs()
    log = (tmp_path / "s" / "slurm" / f"{job}_0_log.out").read_text()
    assert f"steps {int(saved.removeprefix('step-')):,} to" in log  # it went on from there, in the same job
    assert json.loads((tmp_path / "s" / "slurm" / "jobs.json").read_text()) == {folder.name: job}
    assert without_timing(Run(folder)) == without_timing(Run(undisturbed))


def test_a_run_that_slurm_puts_back_into_the_queue_resumes(slurm, undisturbed, under_way, tmp_path):
    """As SLURM does with a pre-empted job: SIGTERM, and the job starts again later."""
    process, folder, job = under_way
    slurm.call("scontrol", "requeue", job)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + slurm.logs()
    assert without_timing(Run(folder)) == without_timing(Run(undisturbed))
    assert len(list((tmp_path / "s" / "slurm").glob("*_submission.sh"))) == 1


def test_a_cancelled_job_stays_cancelled_until_it_is_tried_again(slurm, undisturbed, under_way, tmp_path):
    process, folder, job = under_way
    slurm.call("scancel", job)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert f"job {job} was cancelled" in said
    assert Run(folder).summary().status == "interrupted"
    process = begin(slurm, tmp_path / "s.toml", tmp_path / "s", "--retry")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + slurm.logs()
    assert without_timing(Run(folder)) == without_timing(Run(undisturbed))


def test_a_job_that_fails_says_why(slurm, data, tmp_path):
    file, out = write_study(tmp_path / "s.toml", data, *SINGLE, ('["600k"]', '["2048"]')), tmp_path / "s"
    study = Study.read(file, out)
    study.begin(file, "", on_this_machine=False)
    pretend(study.jobs()[0], "interrupted")
    (study.jobs()[0].folder / "checkpoints").write_text("not a folder")
    for options, reason in (
        ((), "Not a directory"),
        (("--retry",), "Not a directory"),
        (("--retry", "--partition", "nowhere"), "invalid partition"),
    ):
        process = begin(slurm, file, out, *options)
        said, _ = process.communicate(timeout=120)
        assert (process.returncode, reason in said) == (2, True), said
    gone = write_study(tmp_path / "s.toml", data, *SINGLE, ("cpus = 1", 'cpus = 1\nsetup = ["exit 3"]'))
    process = begin(slurm, gone, tmp_path / "gone")
    said, _ = process.communicate(timeout=120)
    assert (process.returncode, "ended without a word; see" in said) == (2, True), said


def test_two_emulated_nodes(slurm_of_two_nodes, data, tmp_path):
    nodes = slurm_of_two_nodes.call("srun", "--nodes=2", "sh", "-c", "echo $SLURMD_NODENAME").split()
    assert sorted(nodes) == ["n1", "n2"]
    file = write_study(tmp_path / "s.toml", data, ('["gpt+", "angpt"]', '["gpt+"]'), ('["a", "b"]', '["b"]'))
    process = begin(slurm_of_two_nodes, file, tmp_path / "s")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + slurm_of_two_nodes.logs()
    assert Counter(run["status"] for run in study_result(tmp_path / "s")["runs"]) == {"finished": 6}
