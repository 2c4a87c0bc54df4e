import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from angpt.errors import UserError
from angpt.serialization import read_toml
from angpt.studies.config import StudyConfig
from angpt.studies.executor import InProcess, Processes
from angpt.studies.progress import progress
from angpt.studies.study import Study
from angpt.training.run import Run
from tests.command import angpt
from tests.studies.conftest import ONE, ROOT, ignore, pretend, study_result, write_study


def test_a_study_leaves_its_folder(whole):
    folder, printed = whole
    result = study_result(folder)
    assert result["complete"]
    assert Counter(r["status"] for r in result["runs"]) == {"finished": 24}
    assert {(r["architecture"], r["size"]) for r in result["rows"]} == {(a, s) for a in ("gpt+", "angpt") for s in "ab"}
    for row in result["rows"]:
        own = [r for r in result["runs"] if (r["architecture"], r["size"]) == (row["architecture"], row["size"])]
        best = min(own, key=lambda r: r["val_loss"])
        assert row["val_loss"]["mean"] == pytest.approx(best["val_loss"])
        assert (row["batch"], row["lr"], row["points"]) == (best["batch"], best["lr"], 6)
        assert row["batch_side"] == (-1 if best["batch"] == 128 else 1)
        assert row["lr_side"] == {0.004: -1, 0.016: 0, 0.064: 1}[best["lr"]]
        base = next(r for r in result["rows"] if (r["architecture"], r["size"]) == ("gpt+", row["size"]))
        if row is base:
            assert row["change"] is None
        else:
            assert row["change"]["mean"] == pytest.approx(row["val_loss"]["mean"] / base["val_loss"]["mean"] - 1)
    table = (folder / "result.md").read_text()
    arrows = {-1: " ↓", 0: "", 1: " ↑"}
    heading = table.splitlines()[0].split(" | ")
    for name in ("batch", "lr"):
        cells = [f"{row[name]}{arrows[row[f'{name}_side']]}" for row in result["rows"]]
        assert (name in heading) == (len(set(cells)) > 1)  # a column that says the same everywhere is left out
        assert name not in heading or all(f"| {cell} |" in table for cell in cells)
    assert all(f"{math.exp(row['val_loss']['mean']):.2f}" in table for row in result["rows"])
    assert "is the highest of those tried: see" in table or "is the lowest of those tried: see" in table
    assert "result.md" in printed


def test_killed_and_called_again_it_gives_the_same(whole, data, tmp_path):
    file = write_study(tmp_path / "study.toml", data)
    call = [sys.executable, "-m", "angpt", "study", "run", str(file), "--out", str(tmp_path / "s"), "--workers", "2"]
    for ended in (3, 12):
        process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.DEVNULL)
        while len(list(tmp_path.glob("s/runs/*/summary.json"))) < ended and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        process.wait()
    subprocess.run(call, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert study_result(tmp_path / "s") == study_result(whole[0])


def test_in_this_process_it_gives_the_same(whole, make):
    study = make()
    study.begin(study.folder.with_suffix(".toml"), "angpt study run", on_this_machine=True)
    study.execute(InProcess(threads=1), ignore)
    assert study_result(study.folder) == study_result(whole[0])


def test_called_again_it_repeats_nothing_and_adds_what_is_new(whole, data, tmp_path, capsys):
    folder = whole[0]
    before = {p: p.stat().st_mtime_ns for p in folder.glob("runs/*/*") if p.is_file() and p.name != ".lock"}
    file = write_study(tmp_path / "s.toml", data)
    assert angpt(capsys, "study", "run", file, "--out", folder, "--workers", "1")[0] == 0
    assert before == {p: p.stat().st_mtime_ns for p in folder.glob("runs/*/*") if p.is_file() and p.name != ".lock"}
    grown = write_study(tmp_path / "s.toml", data, ("lrs = [0.004,", "lrs = [0.001, 0.004,"))
    assert "8 of 32 runs to do" in angpt(capsys, "study", "plan", grown, "--out", folder)[1]


def test_a_study_has_a_report_for_each_size(whole, tmp_path, capsys):
    code, said = angpt(capsys, "report", whole[0], "--out", tmp_path / "page")
    assert code == 0
    for size in "ab":
        page = (tmp_path / "page" / size / "report.html").read_text()
        assert "angpt study run" in page
    assert said.count("report.html") == 2


def test_a_grid_grows_by_what_comes_out(make):
    """With losses planted on disk, the runs that are called for are those of the search."""
    study = make(*ONE, ("lrs = [0.004, 0.016, 0.064]", "lrs = [0.004, 0.008]\nlr_limits = [0.001, 0.1]"))
    tried = []
    while todo := [job for job in study.jobs() if not job.folder.exists()]:
        for job in todo:
            tried.append(job.config.optimizer.lr)
            pretend(job, val_loss=2 + math.log(job.config.optimizer.lr / 0.03) ** 2)
    assert tried == [0.004, 0.008, 0.016, 0.032, 0.064]
    row = study.result().rows[0]
    assert (row.lr, row.lr_side, row.points) == (0.032, 0, 5)
    assert study.result().notes == ()
    assert len(study.growth()) == 2  # 0.001 and 0.002, which nothing called for


def test_a_growing_study_trains_what_it_grows_by(make):
    study = make(*ONE, ("lrs = [0.004, 0.016, 0.064]", "lrs = [0.0001, 0.0002]\nlr_limits = [0.0001, 0.0008]"))
    study.begin(study.folder.with_suffix(".toml"), "", on_this_machine=True)
    study.execute(Processes(2, threads=1), ignore)
    assert sorted(job.config.optimizer.lr for job in study.jobs()) == [0.0001, 0.0002, 0.0004, 0.0008]
    result = study.result()
    assert result.complete
    assert result.rows[0].lr_side == 1
    assert result.notes[0].startswith("GPT+ a 2.048k: the best learning rate, 0.0008, is the highest of those tried")


def test_any_study_can_be_tuned(make):
    """Each architecture and size has its trials, at the smallest budget, on the held-out part of the training data."""
    study = make(
        (
            "batches = [128, 256]\nlrs = [0.004, 0.016, 0.064]",
            "batches = [128]\nlrs = [0.01]\ntune = 2\nseeds = [3, 4]",
        ),
        ('budgets = ["2048"]', 'budgets = ["4k", "2048"]'),
        ("threads = 1", "threads = 1\ntuning_split = 0.25"),
    )
    trials = study.jobs()
    assert [job.folder.name for job in trials] == [
        f"{name}-{size}-2.048k-b128-lr{lr}-trial"
        for size in "ab"
        for name in ("gpt+", "angpt")
        for lr in (0.00707, 0.0141)
    ]
    assert {job.folder.parent.name for job in trials} == {"tuning"}
    assert {(job.config.data.tuning_split, job.config.seed) for job in trials} == {(0.25, 3)}
    assert len(study.planned()) == 8 + 2 * 2 * 2 * 2
    tried = 0
    while todo := [job for job in trials if not job.folder.exists()]:
        tried += len(todo)
        for job in todo:
            best = 0.03 if job.config.model.d_model == 16 else 0.014
            pretend(job, val_loss=2 + abs(math.log(job.config.optimizer.lr / best)))
        trials = [job for job in study.jobs() if job.folder.parent.name == "tuning"]
    assert tried == 2 * (4 + 3)  # to 0.0561 and 0.0281
    runs = [job for job in study.jobs() if job.folder.parent.name == "runs"]
    assert len(runs) == 16
    assert {(job.config.model.d_model, job.config.optimizer.lr) for job in runs} == {(16, 0.0281), (32, 0.0141)}
    assert {job.config.data.tuning_split for job in runs} == {0.0}
    assert "angpt-b-4k-b128-lr0.0141-s4" in {job.folder.name for job in runs}
    assert {row.lr_side for row in study.result().rows} == {0}


def test_a_failed_run_is_reported_and_tried_again_on_demand(make, capsys):
    study = make(*ONE)
    file = study.folder.with_suffix(".toml")
    study.begin(file, "", on_this_machine=True)
    spoiled = study.jobs()[1]
    pretend(spoiled, "interrupted")
    (spoiled.folder / "checkpoints").write_text("not a folder")
    call = ("study", "run", file, "--out", study.folder, "--workers", "2")
    code, said = angpt(capsys, *call)
    assert code == 2
    assert f"1 of 3 runs failed (--retry tries again): {spoiled.folder.name}:" in said
    assert "Traceback" not in said
    assert Counter(r.status for r in study.result().runs) == {"finished": 2, "failed": 1}
    assert f"failed: {spoiled.folder.name}:" in angpt(capsys, "study", "status", study.folder)[1]
    (spoiled.folder / "checkpoints").unlink()
    assert angpt(capsys, *call)[0] == 2  # left alone
    assert angpt(capsys, *call, "--retry")[0] == 0
    assert study.result().complete


def test_a_process_that_dies_is_a_failure(make, monkeypatch):
    monkeypatch.setattr("angpt.studies.executor.POLL_SECONDS", 0.01)  # a run takes less than a second
    study = make(*ONE)
    study.begin(study.folder.with_suffix(".toml"), "", on_this_machine=True)
    first = study.jobs()[0]
    killed = []

    def tick(_, running):
        lock = first.folder / ".lock"
        if first.folder in running and lock.exists() and Run(first.folder).busy() and not killed:
            pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _holds(p, lock)]
            for pid in pids:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

    study.execute(Processes(1, threads=1), tick)
    assert len(killed) == 1
    assert [job.folder for job in study.failed()] == [first.folder]
    assert "the training process died (exit code -9)" in first.failure.read_text()
    assert Counter(r.status for r in study.result().runs) == {"finished": 2, "failed": 1}


def _holds(process, lock):
    try:
        return any(link.resolve() == lock.resolve() for link in (process / "fd").iterdir())
    except OSError:
        return False


def test_one_process_at_a_time_executes_a_study(make):
    study = make(*ONE)
    study.begin(study.folder.with_suffix(".toml"), "", on_this_machine=True)
    with study.lock(), pytest.raises(UserError, match="another process executes this study"):
        study.execute(Processes(1), ignore)


def test_settings_that_changed_are_found_before_anything_runs(make):
    study = make(*ONE)
    study.begin(study.folder.with_suffix(".toml"), "", on_this_machine=True)
    pretend(study.jobs()[2])
    changed = make(*ONE, ("eval_tokens = 512", "eval_tokens = 256"))
    with pytest.raises(UserError, match=r"was begun with other settings \(eval_tokens; see its config.toml\)"):
        changed.execute(Processes(1), ignore)
    assert len(list(study.folder.glob("runs/*"))) == 1


def test_a_run_of_another_device_is_the_same_run(make):
    """Begun on a GPU, looked at where there is none."""
    study = make(*ONE, ('device = "cpu"', 'device = "auto"'))
    job = study.jobs()[0]
    pretend(job)
    config = job.folder / "config.toml"
    text = config.read_text().replace('device = "cpu"', 'device = "cuda"').replace('"fp32"', '"bf16"')
    config.write_text(text.replace('compile = "off"', 'compile = "on"'))
    study.folder.mkdir(exist_ok=True)
    study.execute(Processes(2, threads=1), ignore)
    assert study.result().complete


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"DATA"', '"DATA/nowhere"'), "no such file or folder"),
        (("vocab_size = 61", "vocab_size = 7"), "but model.vocab_size is 7"),
        (("[128, 256]", "[128, 250]"), "batch_tokens = 250 is no multiple of model.context = 32"),
        (('"angpt"]', '"angtp"]'), "unknown architecture 'angtp'"),
        (("d_model = 32", "d_model = 33"), "does not divide"),
        (("[train]", "[train]\nmicro_batch = 3"), "micro_batch = 3 does not divide"),
        (
            ("lrs = [0.004, 0.016, 0.064]", "lrs = [0.1, 0.10001]\nlr_limits = [1e-10, 1]"),
            "more than 1,000 values between",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_written(make, capsys, change, message):
    study = make(change)
    code, said = angpt(capsys, "study", "run", study.folder.with_suffix(".toml"), "--out", study.folder)
    assert code == 2
    assert message in said
    assert not study.folder.exists()


def test_mistakes_of_the_command(make, capsys, tmp_path):
    study = make(*ONE)
    file = study.folder.with_suffix(".toml")
    for args, message in (
        (("run", tmp_path / "no.toml"), "no.toml: does not exist"),
        (("plan", tmp_path / "no.toml"), "no.toml: does not exist"),
        (("status", tmp_path / "no"), "no: holds no study; begin one with"),
        (("run", tmp_path), "study.toml: does not exist"),
        (("run", file, "--out", file), "s.toml: is there and is not an empty folder"),
        (("run", file, "--out", "/proc/nowhere/s"), "/proc/nowhere/s: cannot be written to"),
        (("plan", file, "--tflops", "-1"), "--tflops -1.0: must be positive"),
        (("run", file, "--out", tmp_path / "a\nb"), "a\\nb: has control characters in its name"),
        (("run", file, "--gpus", "2"), "--gpus is for --slurm"),
        (("run", file, "--slurm", "--workers", "2"), "--workers is for runs on this machine"),
        (("run", file, "--workers", "-1", "--out", tmp_path / "w"), "at least one is needed"),
    ):
        code, said = angpt(capsys, "study", *args)
        assert (code, message in said) == (2, True), said
    assert not (tmp_path / "w").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    code, said = angpt(capsys, "study", "run", file, "--out", tmp_path / "full")
    assert (code, "is there and is not an empty folder" in said) == (2, True)


def test_a_study_goes_on_by_its_folder(make, capsys):
    study = make(*ONE)
    study.begin(study.folder.with_suffix(".toml"), "angpt study run s.toml", on_this_machine=True)
    for job in study.jobs():
        pretend(job)
    assert angpt(capsys, "study", "run", study.folder)[0] == 0
    assert "0 of 3 runs to do" in angpt(capsys, "study", "plan", study.folder)[1]
    assert study.commands()[-1] == "angpt study run s.toml"
    (study.folder / "study.toml").write_text("[[grid")
    assert "study.toml: cannot be read as TOML" in angpt(capsys, "study", "status", study.folder)[1]


def test_a_broken_study_file_says_where(make, capsys):
    study = make()
    file = study.folder.with_suffix(".toml")
    file.write_text(file.read_text()[:100])
    code, said = angpt(capsys, "study", "plan", file)
    assert code == 2
    assert re.search(r"s\.toml: cannot be read as TOML|unknown", said)


def test_ctrl_c_saves_every_run(data, tmp_path):
    changes = (('budgets = ["2048"]', 'budgets = ["4M"]'), ("checkpoint_every = 4", "checkpoint_every = 100000"))
    file = write_study(tmp_path / "study.toml", data, *changes)
    for workers in ("2", "0"):
        out = tmp_path / workers
        call = [sys.executable, "-m", "angpt", "study", "run", str(file), "--out", str(out), "--workers", workers]
        process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(list(out.glob("runs/*/metrics.jsonl"))) < max(1, int(workers)):
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 3, (said, errors)
        assert "the same command goes on" in said
        states = Counter(run.state for run in progress(Study.open(out)))
        assert states["stopped"] == max(1, int(workers))
        for folder in out.glob("runs/*"):
            assert Run(folder).summary().status == "interrupted"
            assert list((folder / "checkpoints").glob("step-*"))


def test_the_file_is_kept_with_the_study(make):
    study = make(*ONE)
    study.begin(study.folder.with_suffix(".toml"), "angpt study run s.toml", on_this_machine=True)
    assert read_toml(StudyConfig, study.folder / "study.toml") == study.config
    assert study.commands()[-1] == "angpt study run s.toml"
    again = Study.open(study.folder)
    again.begin(study.folder / "study.toml", "angpt study run studies/s/study.toml", on_this_machine=True)
    assert study.commands()[-1] == "angpt study run s.toml"
