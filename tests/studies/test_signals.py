"""Signals to the whole process group, as Ctrl-C, `timeout`, systemd and docker send them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from angpt.serialization import to_toml
from tests.studies.conftest import ONE, ROOT, tiny, write_study

COMMANDS = {
    "study": lambda folder, data: ["study", "run", write_study(folder / "s.toml", data, *ONE, ("2048", "65536"))],
    "compare": lambda folder, data: ["compare", "--config", write_config(folder / "c.toml", data), *TWO_RUNS],
}
TWO_RUNS = ("--architectures", "gpt+", "angpt", "--seeds", "0", "--budgets", "65536")


def write_config(path, data):
    path.write_text(to_toml(tiny(data).train))
    return path


def starting(process, _):
    """True while the server from which runs are forked is importing."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(path.name)) == process.pid and b"forkserver" in (path / "cmdline").read_bytes():
                return True
    return False


def training(_, folder):
    """True when two runs have a checkpoint each."""
    return len({path.parent for path in folder.glob("runs/*/checkpoints/step-*")}) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number", "moment"),
    [
        ("study", signal.SIGTERM, starting),
        ("study", signal.SIGTERM, training),
        ("compare", signal.SIGINT, starting),
        ("compare", signal.SIGTERM, training),
    ],
)
def test_a_signal_to_the_process_group_stops_runs_and_the_same_command_goes_on(data, tmp_path, command, number, moment):
    folder = tmp_path / "out"
    call = [sys.executable, "-m", "angpt", *map(str, COMMANDS[command](tmp_path, data))]
    call += ["--out", str(folder), "--workers", "2"]
    environment = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(call, start_new_session=True, **environment)
    while not moment(process, folder) and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 3, said
    assert "stopped; the same command goes on" in said
    assert "Traceback" not in said
    assert not (folder / "failed").exists()
    done = subprocess.run(call, timeout=300, **environment)
    assert done.returncode == 0, done.stdout
