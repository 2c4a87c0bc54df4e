import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from angpt.cli.main import main
from angpt.config import read_toml, to_toml
from angpt.data.shards import TokenData
from angpt.errors import UserError
from angpt.studies.compare import Comparison, run_name
from angpt.studies.config import CompareConfig
from angpt.studies.executor import Interrupted, Processes, execute
from angpt.studies.jobs import Job
from angpt.studies.results import Result
from angpt.training.launch import open_data
from angpt.training.plan import make_plan
from angpt.training.run import Run
from tests.studies.conftest import ROOT, ignore, pretend, tiny, without_timing


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A comparison that has run to its end."""
    study = Comparison.create(tmp_path_factory.mktemp("study") / "s", tiny(data, tune=2), "angpt compare …")
    study.execute(Processes(2), ignore)
    study.report()
    return study


def test_every_architecture_sees_the_same_tokens(data, tmp_path):
    study = Comparison(tmp_path, tiny(data, architectures=("gpt+", "angpt", "angpt/no-lerp")))
    jobs = study.jobs(study.default_rates())
    assert len({job.folder for job in jobs}) == len(jobs) == 3 * 2 * 2
    same = Counter((j.config.seed, j.config.tokens, j.config.batch_tokens, j.config.data) for j in jobs)
    assert set(same.values()) == {3}


def test_multiples_are_of_the_parameters_of_the_baseline(data, tmp_path):
    study = Comparison(tmp_path, tiny(data, budgets=("2x", "1x")))
    baseline = make_plan(
        dataclasses.replace(study.config.train, model=study.jobs(study.default_rates())[0].config.model)
    )
    assert study.budgets == [baseline.parameters, 2 * baseline.parameters]


def test_tuning_gives_every_architecture_the_same_number_of_trials(data, tmp_path):
    study = Comparison(tmp_path, tiny(data, tune=3))
    jobs = study.tuning_jobs()
    trials = Counter(j.config.model.architecture for j in jobs)
    assert set(trials.values()) == {3}
    assert set(trials) == set(study.config.architectures)
    for name, centre in study.default_rates().items():
        rates = [j.config.optimizer.lr for j in jobs if j.config.model.architecture == name]
        assert rates == pytest.approx([centre / 2, centre, centre * 2], rel=0.01)


def test_tuning_goes_on_beyond_the_edge_of_its_rates(data, tmp_path):
    study = Comparison.create(tmp_path / "s", tiny(data, tune=3, architectures=("gpt+",), lrs={"gpt+": 0.01}), "…")
    tried = []
    while todo := [job for job in study.tuning_jobs() if not job.folder.exists()]:
        for job in todo:
            tried.append(job.config.optimizer.lr)
            pretend(job, val_loss=1 + abs(math.log(job.config.optimizer.lr / 0.07)))
    assert tried == [0.005, 0.01, 0.02, 0.04, 0.08, 0.16]
    assert study.tuned_rates() == {"gpt+": 0.08}
    assert study.tuning_notes() == []
    for job in study.tuning_jobs():
        pretend(job, "diverged" if job.config.optimizer.lr > 0.01 else "finished", val_loss=job.config.optimizer.lr)
    assert next(j.config.optimizer.lr for j in study.tuning_jobs()) == 0.0025
    for _ in range(9):
        for job in study.tuning_jobs():
            pretend(job, val_loss=job.config.optimizer.lr)
    assert study.tuned_rates() == {"gpt+": 0.000313}
    assert "0.000313, is at the edge" in study.tuning_notes()[0]


def test_trials_never_see_the_validation_split(data, tmp_path):
    job = Comparison(tmp_path, tiny(data, tune=1)).tuning_jobs()[0]
    train, tuning = open_data(make_plan(job.config))
    whole = TokenData.open(data, "train")
    assert train.tokens + tuning.tokens == whole.tokens
    assert tuning.read(0, tuning.tokens).tolist() == whole.read(train.tokens, tuning.tokens).tolist()


def test_the_best_trial_sets_the_rate(finished):
    assert set(finished.tuned_rates()) == {"gpt+", "ngpt", "angpt"}
    for name, lr in finished.tuned_rates().items():
        losses = {}
        for job in finished.tuning_jobs():
            if job.config.model.architecture == name:
                losses[job.config.optimizer.lr] = Run.open(job.folder).summary().val_loss
        assert lr == min(losses, key=losses.get)
        for job in finished.jobs(finished.tuned_rates()):
            if job.config.model.architecture == name:
                assert Run.open(job.folder).config().optimizer.lr == lr


def test_a_comparison_leaves_its_folder(finished):
    result = Result.read(finished.folder / "result.json")
    assert result == finished.result()
    assert result.complete
    assert {r.status for r in result.runs} == {"finished"}
    assert len(result.cells) == 3 * 2
    for cell in result.cells:
        losses = [r.val_loss for r in result.runs if (r.architecture, r.budget) == (cell.architecture, cell.budget)]
        assert cell.val_loss.n == 2
        assert min(losses) <= cell.val_loss.mean <= max(losses)
        assert (cell.speedup_tokens is None) == (cell.architecture == "gpt+")
    assert [c.architecture for c in result.costs] == ["gpt+", "ngpt", "angpt"]
    assert result.verdict.endswith(".")
    page = (finished.folder / "report.html").read_text(encoding="utf-8")
    assert result.verdict in page.replace("&#39;", "'")


def test_called_again_it_repeats_nothing(finished):
    before = {p: p.stat().st_mtime_ns for p in (finished.folder / "runs").rglob("*") if p.name != ".lock"}
    Comparison.create(finished.folder, finished.config, "again").execute(Processes(2), ignore)
    after = {p: p.stat().st_mtime_ns for p in (finished.folder / "runs").rglob("*") if p.name != ".lock"}
    assert {p: t for p, t in after.items() if p.is_file()} == {p: t for p, t in before.items() if p.is_file()}


def test_runs_alone_make_a_report(finished, tmp_path, capsys):
    runs = [job.folder for job in finished.jobs(finished.tuned_rates())]
    main(["report", *map(str, runs), "--out", str(tmp_path / "page")])
    assert (tmp_path / "page" / "report.html").exists()
    main(["report", str(finished.folder), "--out", str(tmp_path / "again")])
    assert Result.read(tmp_path / "again" / "result.json") == finished.result()


def test_a_comparison_under_way_has_a_report(data, tmp_path):
    study = Comparison.create(tmp_path / "s", tiny(data), "angpt compare")
    execute(lambda: study.jobs(study.default_rates())[:4], Processes(2), ignore)
    result = Result.read(study.report().parent / "result.json")
    assert not result.complete
    assert Counter(r.status for r in result.runs) == {"finished": 4, "waiting": 8}


def test_killed_and_called_again_it_gives_the_same_result(data, tmp_path):
    config = tmp_path / "train.toml"
    config.write_text(to_toml(tiny(data).train))

    def call(out):
        arguments = ["compare", "--config", config, "--out", out, "--seeds", "0", "1", "--budgets", "4096", "8192"]
        return [sys.executable, "-m", "angpt", *map(str, arguments)]

    environment = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}}
    subprocess.run(call(tmp_path / "whole"), check=True, stdout=subprocess.DEVNULL, **environment)
    for runs in (2, 6):
        process = subprocess.Popen(call(tmp_path / "parts"), stdout=subprocess.DEVNULL, **environment)
        while len(list(tmp_path.glob("parts/runs/*/checkpoints/step-*"))) < runs and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        process.wait()
    subprocess.run(call(tmp_path / "parts"), check=True, stdout=subprocess.DEVNULL, **environment)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts")]
    assert without_timing(results[0]) == without_timing(results[1])


def test_an_interrupt_saves_every_run_and_the_next_call_goes_on(data, tmp_path):
    study = Comparison.create(tmp_path / "s", tiny(data, budgets=("200000",), seeds=(0,)), "angpt compare")

    def stop(_, running):
        if all((folder / "checkpoints").exists() for folder in running) and running:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        study.execute(Processes(2), stop)
    assert {r.status for r in study.result().runs} == {"interrupted", "waiting"}
    assert any(r.progress > 0 for r in study.result().runs)


def test_a_failing_run_stops_the_comparison_with_its_reason(data, tmp_path):
    good = Comparison(tmp_path, tiny(data)).jobs({"gpt+": 1e-2, "ngpt": 1e-2, "angpt": 1e-2})[0]
    missing = dataclasses.replace(good.config, data=dataclasses.replace(good.config.data, path=str(tmp_path / "no")))
    with pytest.raises(UserError, match="no such file or folder"):
        execute(lambda: [Job(missing, tmp_path / "bad"), good], Processes(1), ignore)


def test_diverged_runs_are_data(data, tmp_path):
    config = tiny(data, architectures=("gpt+", "gpt+/dyt"), seeds=(0,), lrs={"gpt+/dyt": 1e32, "gpt+": 1e-2})
    clip = dataclasses.replace(config.train.optimizer, clip=1e30)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, optimizer=clip))
    study = Comparison.create(tmp_path / "s", config, "angpt compare")
    result = study.execute(Processes(2), ignore)
    assert result.complete
    assert sum(c.diverged for c in result.cells if c.architecture == "gpt+/dyt") == 2
    assert study.report().exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ("gpt+", "gpt+")}, "architectures = gpt+, gpt+ names one twice"),
        ({"architectures": ()}, "architectures: name at least one"),
        ({"lrs": {"ngtp": 1.0}}, "lrs: ngtp is not among"),
        ({"tune": -1}, "tune = -1"),
    ],
)
def test_mistakes(data, overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        tiny(data, **overrides)


def test_mistakes_are_found_before_anything_is_written(data, tmp_path):
    for overrides in ({"architectures": ("gpt+", "angtp")}, {"budgets": ("many",)}):
        with pytest.raises(UserError):
            Comparison.create(tmp_path / "s", tiny(data, **overrides), "angpt compare")
    assert not (tmp_path / "s").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not an empty folder"):
        Comparison.create(tmp_path / "full", tiny(data), "angpt compare")
    Comparison.create(tmp_path / "s", tiny(data), "angpt compare")
    with pytest.raises(UserError, match="holds another comparison"):
        Comparison.create(tmp_path / "s", tiny(data, seeds=(5,)), "angpt compare")


def test_the_configuration_survives_its_file(data, tmp_path):
    config = tiny(data, lrs={"gpt+": 0.5, "angpt": 1e-3}, tune=2)
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert read_toml(CompareConfig, tmp_path / "c.toml") == config


def test_names():
    assert run_name("angpt/no-lerp", 1_500_000, 2) == "angpt-no-lerp-1.5M-s2"


def test_a_folder_of_another_run_is_not_taken_for_this_one(data, tmp_path):
    study = Comparison.create(tmp_path / "s", tiny(data), "angpt compare")
    job = study.jobs(study.default_rates())[0]
    execute(lambda: [Job(dataclasses.replace(job.config, tokens="512"), job.folder)], Processes(1), ignore)
    with pytest.raises(UserError, match="was begun with other settings"):
        study.execute(Processes(1), ignore)


def test_budgets_that_are_the_same_are_one(data, tmp_path):
    study = Comparison(tmp_path, tiny(data, budgets=("4k", "4000")))
    assert study.budgets == [4000]


def test_runs_of_a_gpu_make_a_report_anywhere(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished.jobs(finished.tuned_rates())[0].folder, folder)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "cuda"'))
    main(["report", str(folder), "--out", str(tmp_path / "page")])
    assert (tmp_path / "page" / "report.html").exists()


def test_a_run_file_leaves_the_rates_of_a_comparison_open(finished, data, tmp_path, capsys):
    config = finished.jobs(finished.tuned_rates())[2].folder / "config.toml"
    main(["compare", "--config", str(config), "--out", str(tmp_path / "s"), "--budgets", "512", "--seeds", "0"])
    optimizers = {r.parent.name: Run(r.parent).config().optimizer for r in tmp_path.glob("s/runs/*/config.toml")}
    assert optimizers["gpt+-512-s0"].weight_decay == optimizers["gpt+-512-s0"].warmup == 0.1
    assert optimizers["angpt-512-s0"].weight_decay == 0


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_are_at_least_one(workers):
    with pytest.raises(UserError, match="at least one is needed"):
        Processes(workers)


def test_ctrl_c_at_any_moment_is_an_interrupt(data, tmp_path):
    config = tmp_path / "train.toml"
    config.write_text(to_toml(dataclasses.replace(tiny(data).train, tokens="4M")))
    call = [sys.executable, "-m", "angpt", "compare", "--config", str(config), "--out", str(tmp_path / "s")]
    codes = []
    for delay in (0.5, 2.0, 4.0):
        process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not (tmp_path / "s" / "study.toml").exists():
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
        codes.append(process.returncode)
        # 130: it was still importing; -2: inside of an exec of torch's, after which CPython ends by the signal itself
        assert codes[-1] in (3, 130, -signal.SIGINT), (delay, out, errors)
        assert ("the same command goes on" in out) == (codes[-1] == 3)
        assert not errors
    assert 3 in codes
