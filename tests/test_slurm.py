"""What can be told of jobs without a cluster; tests/studies/test_cluster.py has the rest."""

import os
import signal
import stat
from types import SimpleNamespace

import pytest

from angpt import slurm
from angpt.errors import UserError
from angpt.slurm import Resumable, SlurmConfig, submit


@pytest.fixture
def requeued():
    """Stands for submitit's handler; what it was called with."""
    calls = []
    before = {s: signal.getsignal(s) for s in (signal.SIGUSR2, signal.SIGTERM)}
    signal.signal(signal.SIGUSR2, lambda *args: calls.append(args))
    yield calls
    for number, handler in before.items():
        signal.signal(number, handler)


def listening(warning, finish=False):
    """A task that hears SIGTERM, as a training does, and to which this signal comes."""

    def task():
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        if warning is not None:
            os.kill(os.getpid(), warning)
        return finish or not heard

    return task


@pytest.mark.parametrize(
    ("task", "times"),
    [
        (listening(None), 0),
        (listening(signal.SIGUSR2), 1),  # warned: it saves, and goes back into the queue
        (listening(signal.SIGUSR2, finish=True), 0),  # warned in its last step
        (listening(signal.SIGTERM), 0),  # scancel, or SLURM puts it back itself
    ],
)
def test_only_a_warned_and_unfinished_task_goes_back_into_the_queue(requeued, task, times):
    Resumable(task)()
    assert requeued == [(signal.SIGUSR2, None)] * times


def test_called_again_it_is_the_same_task():
    task = listening(None)
    assert Resumable(task).checkpoint().function.task is task


def fake_cluster(folder, monkeypatch, answer, code=0):
    """A PATH with an sbatch that gives this answer."""
    for name in ("sbatch", "srun", "squeue"):
        path = folder / name
        path.write_text(f"#!/bin/sh\necho '{answer}' {'>&2' if code else ''}\nexit {code}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_what_is_asked_of_slurm(tmp_path, monkeypatch):
    fake_cluster(tmp_path, monkeypatch, "Submitted batch job 77")
    config = SlurmConfig(
        "gpu", hours=1.5, nodes=4, gpus=2, cpus=7, memory_gb=10, account="us", qos="low", setup=("module load x",),
        extra={"constraint": "a100"},
    )  # fmt: skip
    assert submit(print, tmp_path / "logs", "angpt/x y", config) == "77"
    lines = (tmp_path / "logs" / "77_submission.sh").read_text().splitlines()
    expected = {
        "partition=gpu", "time=90", "gpus-per-node=2", "cpus-per-task=3", "mem=10240M", "account=us", "qos=low",
        "constraint=a100", "job-name=angpt-x-y", "signal=USR2@120", "open-mode=append", "nodes=4", "ntasks-per-node=2",
    }  # fmt: skip
    assert {f"#SBATCH --{option}" for option in expected} <= set(lines)
    assert "#SBATCH --requeue" in lines
    assert "module load x" in lines
    assert not any("wckey" in line for line in lines)
    assert any(line.startswith("srun") and "--cpus-per-task=3 --kill-on-bad-exit=1" in line for line in lines)
    assert (config.ranks, config.threads) == (8, 3)
    assert (SlurmConfig(gpus=0, nodes=2, cpus=4).ranks, SlurmConfig(gpus=0, nodes=2, cpus=4).threads) == (2, 4)


def test_little_is_asked_unless_given(tmp_path, monkeypatch):
    fake_cluster(tmp_path, monkeypatch, "Submitted batch job 78")
    submit(print, tmp_path / "logs", "x", SlurmConfig(gpus=0))
    text = (tmp_path / "logs" / "78_submission.sh").read_text()
    assert not any(f"--{option}" in text for option in ("partition", "gpus", "mem", "account", "qos"))


def test_a_refusal_is_told_in_a_line(tmp_path, monkeypatch):
    fake_cluster(tmp_path, monkeypatch, "sbatch: error: invalid partition specified: gpuu", code=1)
    with pytest.raises(UserError, match=r"SLURM rejects the job x: .*invalid partition specified: gpuu"):
        submit(print, tmp_path / "logs", "x", SlurmConfig(partition="gpuu"))


def test_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch here"):
        submit(print, tmp_path / "logs", "x", SlurmConfig())
    assert slurm.in_queue() is None
    assert not slurm.cancelled("1")


def test_the_queue(tmp_path, monkeypatch):
    fake_cluster(tmp_path, monkeypatch, "12 RUNNING\n 13_4 PENDING")
    assert slurm.in_queue() == {"12": "RUNNING", "13_4": "PENDING"}
    fake_cluster(tmp_path, monkeypatch, "slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert slurm.in_queue() is None  # which is not an empty queue


@pytest.mark.parametrize(
    ("states", "expected"), [("JobState=CANCELLED Reason=None", True), ("JobState=PREEMPTED", False)]
)
def test_cancelled(monkeypatch, states, expected):
    monkeypatch.setattr(slurm.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=f"JobId=1 {states}"))
    assert slurm.cancelled("1") == expected


def test_processes_of_a_job_find_each_other(tmp_path, monkeypatch):
    """As torchrun would tell them, from what SLURM tells them."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("""#!/bin/sh
case "$*" in
    "show hostnames n[1-2]") printf 'n1\\nn2\\n' ;;
    "--oneliner show node n1") echo 'NodeName=n1 NodeAddr=10.0.0.7 NodeHostName=n1' ;;
    *) exit 1 ;;
esac
""")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = {
        "NTASKS": "4",
        "PROCID": "3",
        "LOCALID": "1",
        "JOB_ID": "12",
        "JOB_NODELIST": "n[1-2]",
        "RESTART_COUNT": "2",
    }
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert slurm.rank_environment() == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "20086",
    }  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_NODELIST", "elsewhere")
    with pytest.raises(UserError, match="does not give the address of the nodes elsewhere"):
        slurm.rank_environment()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert slurm.rank_environment() == {}
