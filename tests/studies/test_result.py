"""result.json: who writes it and when, and that every command reads it."""

import dataclasses
import json
import multiprocessing as mp
import re
import shutil
from collections import Counter

import pytest

from angpt.api import run_folders
from angpt.results import Result
from angpt.studies.executor import InProcess
from angpt.studies.jobs import ended, note_failure
from angpt.studies.study import Study
from angpt.system import write_atomically
from angpt.training.run import Run
from tests.command import angpt, call
from tests.studies.conftest import ONE, pretend


@pytest.fixture
def begun(make):
    """A study of three runs: one has finished, one was interrupted, one has not started."""
    study = make(*ONE)
    study.begin(study.folder.with_suffix(".toml"), "angpt study run s.toml", on_this_machine=True)
    first, second, _ = study.jobs()
    pretend(first)
    pretend(second, "interrupted")
    return study


def states(result):
    return [run.status for run in result.runs]


def test_every_command_reads_the_file(whole, tmp_path, capsys):
    """What the file says counts, as long as the runs are those that it was computed from; a copy of them is."""
    folder = tmp_path / "s"
    shutil.copytree(whole[0], folder, copy_function=shutil.copyfile)
    result = Result.read(folder).of_size("a")
    rows = tuple(row for row in result.rows if row.architecture == "gpt+")
    names = [name for row in rows for name in row.runs]
    runs = tuple(run for run in result.runs if run.name in names)
    planted = {"verdicts": {"a": "Planted."}, "notes": ("as planted",)}
    dataclasses.replace(result, rows=rows, costs=(), runs=runs, **planted).write(folder)
    code, said = angpt(capsys, "report", folder)
    assert (code, "note: as planted" in said) == (0, True)
    assert "Planted." in (folder / "report.html").read_text()
    assert angpt(capsys, "analyze", folder, "--parts", "learned", "--tokens", 64)[0] == 0
    analysed = json.loads((folder / "analysis" / "analysis.json").read_text())["runs"]
    assert [run["run"] for run in analysed] == names
    assert angpt(capsys, "fit", "hparams", folder, "--out", tmp_path / "fit")[0] == 0
    fitted = json.loads((tmp_path / "fit" / "hparams.json").read_text())["sizes"]
    assert [(size["architecture"], len(size["sweeps"])) for size in fitted] == [("gpt+", 1)]
    assert "note: as planted" in angpt(capsys, "study", "status", folder)[1]


def test_the_runs_of_a_fit_are_those_of_the_study(begun):
    shutil.copytree(begun.jobs()[0].folder, begun.folder / "runs" / "left-over")
    assert run_folders([begun.folder], lambda result: result.runs) == [job.folder for job in begun.jobs()[:2]]


def test_it_is_written_whenever_a_run_ends(make):
    study = make(*ONE)
    study.begin(study.folder.with_suffix(".toml"), "", on_this_machine=True)
    seen = []

    def tick(jobs, _):
        counts = Counter(states(Result.read(study.folder)))
        assert counts["finished"] == sum(ended(job.folder) is not None for job in jobs) - len(pool.over)
        seen.append(counts["finished"])

    pool = InProcess(threads=1)
    study.execute(pool, tick)
    assert {0, 1, 2, 3} == set(seen)


def grow(study):
    (study.jobs()[1].folder / "summary.json").unlink()
    Run(study.jobs()[1].folder).metrics.write_text('{"kind": "step", "step": 4}\n')


def edit(study):
    file = study.folder / "study.toml"
    file.write_text(file.read_text().replace("0.064]", "0.064, 0.128]"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda study: pretend(study.jobs()[1]), ["finished", "finished", "waiting"]),  # as a job of a cluster does
        (lambda study: pretend(study.jobs()[0], val_loss=3.0), ["finished", "stopped", "waiting"]),
        (lambda study: note_failure(study.jobs()[2], "lightning"), ["finished", "stopped", "failed"]),
        (lambda study: shutil.rmtree(study.jobs()[1].folder), ["finished", "waiting", "waiting"]),
        (grow, ["finished", "stopped", "waiting"]),
        (edit, ["finished", "stopped", "waiting", "waiting"]),
        (lambda study: (study.folder / "result.json").unlink(), ["finished", "stopped", "waiting"]),
        (lambda study: (study.folder / "result.json").write_text('{"basel'), ["finished", "stopped", "waiting"]),
        (lambda study: (study.folder / "result.json").write_text("[]"), ["finished", "stopped", "waiting"]),
    ],
)
def test_it_is_computed_again_if_it_is_missing_or_stale(begun, monkeypatch, change, expected):
    first, computed = begun.result(), []
    compute = Study._compute
    monkeypatch.setattr(Study, "_compute", lambda study: computed.append(study) or compute(study))
    assert Study.open(begun.folder).result() == first
    assert not computed
    change(begun)
    again = Study.open(begun.folder)
    result = again.result()
    assert states(result) == expected
    assert result == dataclasses.replace(compute(again), sources=result.sources)
    assert Result.read(begun.folder) == result == again.result()
    assert len(computed) == 1


def test_a_folder_that_cannot_be_written_to_is_read_all_the_same(begun, tmp_path, capsys):
    for name in ("result.json", "report.html"):
        (begun.folder / name).mkdir()  # no file can take its place
    code, out, said = call(capsys, "study", "status", begun.folder)
    assert (code, "1 finished" in out) == (0, True)
    assert said.splitlines() == [f"note: {begun.folder}: result.json cannot be written (Is a directory)"]
    code, said = angpt(capsys, "report", begun.folder)
    assert (code, f"error: {begun.folder}: the page cannot be written" in said) == (2, True)
    assert angpt(capsys, "report", begun.folder, "--out", tmp_path / "page")[0] == 0
    assert (tmp_path / "page" / "report.html").exists()
    assert not list(begun.folder.glob(".*.part"))


def test_an_edited_file_is_noticed(begun, capsys):
    file = begun.folder / "study.toml"
    text = file.read_text()
    file.write_text(text.replace("eval_tokens = 512", "eval_tokens = 256"))
    note = "note: study.toml: 2 runs began with other values of eval_tokens"
    for command in (("study", "status"), ("report",)):
        code, said = angpt(capsys, *command, begun.folder)
        assert (code, note in said) == (0, True)
    file.write_text(text.replace("[0.004, ", "["))
    note = f"note: study.toml: 1 run not in it and left out: {begun.jobs()[0].folder.name}"
    assert note in angpt(capsys, "study", "status", begun.folder)[1]
    file.write_text(text)
    assert "note:" not in angpt(capsys, "study", "status", begun.folder)[1]


def test_an_edited_source_of_the_file_is_noticed(begun, capsys, monkeypatch):
    monkeypatch.setattr("angpt.studies.study.STUDIES", begun.folder.parent)
    source = begun.folder.with_suffix(".toml")
    assert "note:" not in angpt(capsys, "study", "status", source)[1]
    source.write_text(source.read_text() + "# a comment\n")
    assert "note:" not in angpt(capsys, "study", "status", source)[1]
    source.write_text(source.read_text().replace("0.064", "0.128"))
    assert f"note: {source}: was edited since {begun.folder} began" in angpt(capsys, "study", "status", source)[1]


def test_sizes_are_sorted_by_their_parameters(make, capsys):
    """Neither as text nor in the order of the file."""
    grids = '[[grid]]\narchitectures = ["gpt+"]\nsizes = ["250M"]\nbudgets = ["2048"]\n[[grid]]'
    study = make(('["a", "b"]', '["125M", "b", "32M", "a"]'), ("[[grid]]", grids), ("[128, 256]", "[128]"))
    sizes = ("a", "b", "32M", "125M", "250M")
    assert study.result().sizes == sizes
    assert tuple(dict.fromkeys(job.folder.name.split("-")[1] for job in study.planned())) == sizes
    said = angpt(capsys, "study", "plan", study.folder.with_suffix(".toml"), "--out", study.folder)[1]
    counts = [float(number) * {"k": 1e3, "M": 1e6}[unit] for number, unit in re.findall(r"GPT\+ ([\d.]+)([kM])", said)]
    assert (len(counts), counts) == (5, sorted(counts))


def _write(path, text, ready):
    ready.wait()
    for _ in range(200):
        write_atomically(path, text)


def test_two_processes_may_write_it_at_a_time(tmp_path):
    """As the process that trains a study and a report of it do."""
    path, texts = tmp_path / "x", ["a" * 100_000, "b" * 50_000]
    context = mp.get_context("forkserver")
    ready = context.Barrier(2)
    processes = [context.Process(target=_write, args=(path, text, ready)) for text in texts]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        assert not path.exists() or path.read_text() in texts
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert list(tmp_path.iterdir()) == [path]
