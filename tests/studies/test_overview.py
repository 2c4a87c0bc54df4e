import io
import json

import pytest
from rich.console import Console

from angpt.present.words import duration
from angpt.studies.overview import Overview
from angpt.training.record import newest_values
from tests.studies.conftest import compare, pretend


def show(data, folder, *, terminal, status, record):
    """What is printed for a run in this state."""
    job = compare(data, folder).jobs()[0]
    job.folder.mkdir(parents=True)
    (job.folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in record))
    if status:
        pretend(job, status)
    text = io.StringIO()
    with Overview(Console(file=text, force_terminal=terminal, width=100)) as overview:
        overview.tick([job], set() if status else {job.folder})
    return job.folder.name, text.getvalue()


RECORDS = [
    {"kind": "train", "step": 3, "loss": 2.5, "tokens_per_s": 1234.0},
    {"kind": "val", "step": 3, "val_loss": 2.25},
]
LOST = [*RECORDS[:1], {"kind": "val", "step": 3, "val_loss": None}]


def test_plain_lines(data, tmp_path):
    name, text = show(data, tmp_path, terminal=False, status="finished", record=RECORDS)
    assert text == f"{name}: finished, validation loss 2.2500\n"


def test_a_diverged_run_without_a_loss(data, tmp_path):
    name, text = show(data, tmp_path, terminal=False, status="diverged", record=LOST)
    assert text == f"{name}: diverged\n"


def test_the_live_table(data, tmp_path):
    name, text = show(data, tmp_path, terminal=True, status=None, record=RECORDS)
    assert all(part in text for part in (name, "running", "2.500", "2.2500", "1,234"))


@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_left_follows_from_the_work_done(data, tmp_path, monkeypatch, terminal):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    jobs = compare(data, tmp_path).jobs()[:3]
    text = io.StringIO()
    with Overview(Console(file=text, force_terminal=terminal, width=100)) as overview:
        overview.tick(jobs, {jobs[0].folder})
        assert "left" not in text.getvalue()
        for job in jobs[:2]:
            job.folder.mkdir(parents=True)
        pretend(jobs[0], "finished")
        (jobs[1].folder / "metrics.jsonl").write_text(json.dumps({"step": jobs[1].plan.steps // 2}) + "\n")
        now += 60
        overview.tick(jobs, {jobs[1].folder})
    done, left = jobs[0].flops + jobs[1].flops / 2, jobs[1].flops / 2 + jobs[2].flops
    assert f"1 of 3 runs done, about {duration(60 * left / done)} left" in text.getvalue()


def test_records_merge_and_half_lines_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert newest_values(tmp_path) == {}
    path.write_text(json.dumps({"loss": 1.0}) + "\n" + json.dumps({"val_loss": 2.0}) + "\n" + '{"loss": 0.5')
    assert newest_values(tmp_path) == {"loss": 1.0, "val_loss": 2.0}
