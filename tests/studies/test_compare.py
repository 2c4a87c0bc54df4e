import dataclasses
import html
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from angpt.cli.main import main
from angpt.config import DataConfig
from angpt.data.shards import TokenData
from angpt.data.sources import _listed_files
from angpt.errors import UserError
from angpt.results import Result
from angpt.serialization import read_toml, to_toml
from angpt.studies.config import StudyConfig
from angpt.studies.executor import Processes, execute
from angpt.studies.folders import summarise_runs
from angpt.studies.jobs import note_failure
from angpt.studies.study import Study
from angpt.training.launch import open_data
from angpt.training.plan import count, make_plan, rule_for
from angpt.training.run import Run
from tests.command import angpt
from tests.studies.conftest import ROOT, compare, ignore, pretend, tiny


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A comparison that has run to its end."""
    folder = tmp_path_factory.mktemp("study") / "s"
    return executed(data, folder, tune=2)


def begun(data, folder, **overrides):
    study = compare(data, folder, **overrides)
    study.begin(None, "angpt compare …", on_this_machine=True)
    return study


def executed(data, folder, **overrides):
    study = begun(data, folder, **overrides)
    study.execute(Processes(2), ignore)
    return study


def rates(study):
    """The learning rate that was chosen for each architecture."""
    return {s.group.architecture: study.tuned(s)[0].lr for s in study.searches() if s.trials}


def trials(study):
    return [job for job in study.planned() if job.folder.parent.name == "tuning"]


def runs(study):
    """The runs of a comparison, less its trials."""
    return [job for job in study.planned() if job.folder.parent.name == "runs"]


def test_every_architecture_sees_the_same_tokens(data, tmp_path):
    jobs = compare(data, tmp_path, architectures=("gpt+", "angpt", "angpt/no-lerp")).jobs()
    assert len({job.folder for job in jobs}) == len(jobs) == 3 * 2 * 2
    same = Counter((j.config.seed, j.config.tokens, j.config.batch_tokens, j.config.data) for j in jobs)
    assert set(same.values()) == {3}


def test_the_architectures_are_trained_in_turn(data, tmp_path):
    names = [job.folder.name for job in compare(data, tmp_path, architectures=("gpt+", "angpt")).jobs()]
    assert names == [f"{a}-{b}-s{seed}" for b in ("2.048k", "4.096k") for seed in (0, 1) for a in ("gpt+", "angpt")]


def test_multiples_are_of_the_parameters_of_the_baseline(data, tmp_path):
    study = compare(data, tmp_path, budgets=("2x", "1x"))
    baseline, _ = count(dataclasses.replace(study.config.train.model, architecture="gpt+"))
    assert study.result().budgets == (baseline, 2 * baseline)


def test_budgets_follow_from_the_settings_of_the_runs(data, tmp_path):
    config = tiny(data, budgets=())
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, tokens="10k"))
    assert Study(tmp_path, config.study()).result().budgets == (5_000, 10_000, 20_000)


def test_the_baseline_alone_has_further_budgets(data, tmp_path):
    study = compare(data, tmp_path, baseline_budgets=("8192",), tune=2)
    assert len(trials(study)) == 3 * 2
    further = [job for job in runs(study) if job.config.tokens == "8192"]
    assert [job.folder.name for job in further] == ["gpt+-8.192k-s0"]
    assert len(runs(study)) == 3 * 2 * 2 + 1
    assert study.result().largest_budget("") == 4096
    assert {job.config.batch_tokens for job in runs(study)} == {256}


def test_tuning_gives_every_architecture_the_same_number_of_trials(data, tmp_path):
    study = compare(data, tmp_path, tune=3)
    jobs = study.jobs()  # no run has a rate yet
    found = Counter(j.config.model.architecture for j in jobs)
    assert set(found.values()) == {3}
    assert tuple(found) == study.config.grid[0].architectures
    assert {j.config.tokens for j in jobs} == {"2048"}
    for name in found:
        mine = [j.config.optimizer.lr for j in jobs if j.config.model.architecture == name]
        model = dataclasses.replace(study.config.train.model, architecture=name)
        centre = rule_for(name).lr_at(count(model)[0], 2048, jobs[0].config.batch_tokens)
        assert mine == pytest.approx([centre / 2, centre, centre * 2], rel=0.01)
    assert len(study.planned()) == 9 + 3 * 2 * 2


def test_tuning_goes_on_beyond_the_edge_of_its_rates(data, tmp_path):
    study = begun(data, tmp_path / "s", tune=3, architectures=("gpt+",), lrs={"gpt+": 0.01})
    tried = []
    while todo := [job for job in trials(study) if not job.folder.exists()]:
        assert study.jobs() == trials(study)
        for job in todo:
            tried.append(job.config.optimizer.lr)
            pretend(job, val_loss=1 + abs(math.log(job.config.optimizer.lr / 0.07)))
    assert tried == [0.005, 0.01, 0.02, 0.04, 0.08, 0.16]
    assert rates(study) == {"gpt+": 0.08}
    assert {job.config.optimizer.lr for job in study.jobs()[6:]} == {0.08}
    assert study.result().notes == ()
    for job in trials(study):
        pretend(job, "diverged" if job.config.optimizer.lr > 0.01 else "finished", val_loss=job.config.optimizer.lr)
    assert next(j.config.optimizer.lr for j in trials(study)) == 0.0025
    for _ in range(9):
        for job in trials(study):
            pretend(job, val_loss=job.config.optimizer.lr)
    assert rates(study) == {"gpt+": 0.000313}
    assert "0.000313, is at the edge" in study.result().notes[0]
    assert study.growth() == []


def test_where_every_trial_diverges_a_rate_is_asked_for(data, tmp_path):
    study = begun(data, tmp_path / "s", tune=2, architectures=("gpt+",), lrs={"gpt+": 0.01})
    for _ in range(9):
        for job in trials(study):
            pretend(job, "diverged", None)
    assert study.jobs() == trials(study)
    assert study.failures() == {"gpt+": "no trial of its learning rate finished; give gpt+ a rate with lrs"}
    assert not study.result().complete


def test_trials_never_see_the_validation_split(data, tmp_path):
    job = compare(data, tmp_path, tune=1).jobs()[0]
    train, tuning = open_data(make_plan(job.config))
    whole = TokenData.open(data, "train")
    assert train.tokens + tuning.tokens == whole.tokens
    assert tuning.read(0, tuning.tokens).tolist() == whole.read(train.tokens, tuning.tokens).tolist()


def test_the_best_trial_sets_the_rate(finished):
    assert set(rates(finished)) == {"gpt+", "ngpt", "angpt"}
    for name, lr in rates(finished).items():
        losses = {}
        for job in trials(finished):
            if job.config.model.architecture == name:
                losses[job.config.optimizer.lr] = Run.open(job.folder).summary().val_loss
        assert lr == min(losses, key=losses.get)
        for job in runs(finished):
            if job.config.model.architecture == name:
                assert Run.open(job.folder).config().optimizer.lr == lr


def test_a_comparison_leaves_its_folder(finished, capsys):
    result = Result.read(finished.folder)
    assert result == finished.result()
    assert result.complete
    assert {r.status for r in result.runs} == {"finished"}
    assert len(result.rows) == 3 * 2
    for row in result.rows:
        losses = [r.val_loss for r in result.runs if (r.architecture, r.tokens) == (row.architecture, row.tokens)]
        assert row.val_loss.n == 2
        assert min(losses) <= row.val_loss.mean <= max(losses)
        assert (row.speedup_tokens is None) == (row.architecture == "gpt+")
    assert [c.architecture for c in result.costs] == ["gpt+", "ngpt", "angpt"]
    assert result.verdict.endswith(".")
    assert angpt(capsys, "report", finished.folder)[0] == 0
    page = (finished.folder / "report.html").read_text(encoding="utf-8")
    assert result.verdict in html.unescape(page).replace("\u00a0", " ")


def test_a_comparison_with_muon_from_the_command_to_the_page(data, tmp_path, capsys):
    """Adam and Muon on one architecture: trials, runs, result, status and report tell them apart."""
    (tmp_path / "train.toml").write_text(to_toml(tiny(data).train))
    options = ["--architectures", "angpt", "angpt:muon", "--seeds", 0, "--budgets", 2048, 4096, "--tune", 2]
    out = tmp_path / "s"
    code, text = angpt(capsys, "compare", "--config", tmp_path / "train.toml", "--out", out, *options)
    assert code == 0, text
    study, result = Study.open(out), Result.read(out)
    assert {(r.architecture, r.tokens) for r in result.rows} == {
        (a, t) for a in ("angpt", "angpt:muon") for t in (2048, 4096)
    }
    assert {job.folder.name for job in runs(study)} == {
        f"{a}-{t}-s0" for a in ("angpt", "angpt-muon") for t in ("2.048k", "4.096k")
    }
    chosen = rates(study)
    for job in runs(study):
        optimizer = Run.open(job.folder).config().optimizer
        assert optimizer.lr == chosen[job.config.recipe]
        assert optimizer.name == ("muon" if job.config.recipe == "angpt:muon" else "adam")
        adam_lr = rule_for("angpt:muon").adam_lr_at(int(job.config.tokens)) if optimizer.name == "muon" else None
        assert optimizer.adam_lr == adam_lr
    losses = {r.architecture: r.val_loss.mean for r in result.rows if r.tokens == 4096}
    assert losses["angpt"] != losses["angpt:muon"]
    assert "anGPT with Muon" in angpt(capsys, "study", "status", out)[1]
    assert "anGPT with Muon" in (out / "report.html").read_text(encoding="utf-8")
    main(["report", *(str(job.folder) for job in runs(study)), "--out", str(tmp_path / "page")])
    assert "anGPT with Muon" in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    code, text = angpt(capsys, "compare", "--optimizer.name", "muon", "--out", tmp_path / "t")
    assert (code, "did you mean --architectures angpt:muon?" in " ".join(text.split())) == (2, True)


def test_runs_alone_make_a_report(finished, tmp_path, capsys):
    folders = [job.folder for job in runs(finished)]
    options = ["--out", str(tmp_path / "page"), "--baseline", "gpt+"]
    main(["report", *map(str, folders), *options])
    page = re.sub("</?span>", "", (tmp_path / "page" / "report.html").read_text(encoding="utf-8"))
    assert html.escape(shlex.join(["angpt", "report", *map(str, folders), *options])) in page  # how to repeat it
    alone, whole = summarise_runs(folders, "gpt+"), finished.result()
    for row in alone.rows:
        same = next(r for r in whole.rows if (r.architecture, r.tokens) == (row.architecture, row.tokens))
        assert dataclasses.replace(row, runs=same.runs) == same
        assert set(row.runs) == set(same.runs)


def test_a_comparison_under_way_has_a_report(data, tmp_path, capsys):
    study = begun(data, tmp_path / "s")
    execute(lambda: study.jobs()[:4], Processes(2), ignore, note_failure)
    assert angpt(capsys, "report", study.folder)[0] == 0
    result = Result.read(study.folder)
    assert not result.complete
    assert Counter(r.status for r in result.runs) == {"finished": 4, "waiting": 8}
    assert result.verdict.startswith("So far: ")


def test_a_failing_run_is_named_with_its_reason_and_tried_again(data, tmp_path, capsys):
    config = tmp_path / "train.toml"
    config.write_text(to_toml(tiny(data).train))
    call = ("compare", "--config", config, "--out", tmp_path / "s", "--seeds", "0", "--budgets", "2048")
    study = begun(data, tmp_path / "s", seeds=(0,), budgets=("2048",))
    spoiled = study.jobs()[1]
    pretend(spoiled, "interrupted")
    (spoiled.folder / "checkpoints").write_text("not a folder")
    code, said = angpt(capsys, *call)
    assert code == 2
    assert f"1 of 3 runs failed (the same command tries again): {spoiled.folder.name}:" in said
    (spoiled.folder / "checkpoints").unlink()
    code, said = angpt(capsys, *call)
    assert code == 0
    assert "report: " in said


def test_diverged_runs_are_data(data, tmp_path, capsys):
    config = tiny(data, architectures=("gpt+", "gpt+/dyt"), seeds=(0,), lrs={"gpt+/dyt": 1e29, "gpt+": 1e-2})
    clip = dataclasses.replace(config.train.optimizer, clip=1e30)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, optimizer=clip))
    study = Study(tmp_path / "s", config.study())
    study.begin(None, "angpt compare", on_this_machine=True)
    result = study.execute(Processes(2), ignore)
    assert result.complete
    assert sum(row.diverged for row in result.rows if row.architecture == "gpt+/dyt") == 2
    assert angpt(capsys, "report", study.folder)[0] == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ("gpt+", "gpt+")}, "architectures = gpt+, gpt+ names one twice"),
        ({"architectures": ()}, "architectures: name at least one"),
        ({"lrs": {"ngtp": 1.0}}, "lrs: ngtp is not among"),
        ({"architectures": ("gpt+", "ngtp")}, "unknown architecture 'ngtp': did you mean ngpt"),
        ({"tune": -1}, "tune = -1"),
        ({"baseline_budgets": ("4096",)}, "baseline_budgets: must be larger than 4.096k"),
    ],
)
def test_mistakes(data, overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        tiny(data, **overrides).study()


def test_mistakes_are_found_before_anything_is_written(data, tmp_path, capsys):
    for overrides in ({"architectures": ("gpt+", "angtp")}, {"budgets": ("many",)}):
        with pytest.raises(UserError):
            begun(data, tmp_path / "s", **overrides)
    assert not (tmp_path / "s").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not an empty folder"):
        begun(data, tmp_path / "full")
    begun(data, tmp_path / "s")
    (tmp_path / "train.toml").write_text(to_toml(tiny(data).train))
    code, said = angpt(capsys, "compare", "--config", tmp_path / "train.toml", "--out", tmp_path / "s", "--seeds", 5)
    assert (code, "holds another study (see its study.toml)" in said) == (2, True)


def test_a_comparison_may_grow(data, tmp_path):
    """Further architectures, seeds and budgets keep every run; other settings of the same runs do not."""
    begun(data, tmp_path / "s")
    earlier = Study.open(tmp_path / "s")
    names = {job.folder for job in earlier.planned()}
    larger = (
        {"seeds": (0, 1, 2)},
        {"architectures": ("gpt+", "ngpt", "angpt", "angpt:muon")},
        {"baseline_budgets": ("9k",)},
    )
    for more in larger:
        study = Study(tmp_path / "s", tiny(data, **more).study())
        assert names < {job.folder for job in study.planned()}
        assert study.extends(earlier)
        assert not earlier.extends(study)
    for other in ({"lrs": {"angpt": 0.5}}, {"seeds": (0,)}, {"budgets": ("9k",)}):
        assert not Study(tmp_path / "s", tiny(data, **other).study()).extends(earlier)


def test_the_configuration_survives_its_file(data, tmp_path):
    config = tiny(data, lrs={"gpt+": 0.5, "angpt": 1e-3}, tune=2).study()
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert read_toml(StudyConfig, tmp_path / "c.toml") == config


def test_names(data, tmp_path):
    names = "gpt+", "angpt/no-lerp", "angpt/no-lerp:muon"
    study = compare(data, tmp_path, architectures=names, budgets=("1.5M",), seeds=(2,), tune=1)
    folders = [job.folder.name for job in runs(study)]
    assert folders == ["gpt+-1.5M-s2", "angpt-no-lerp-1.5M-s2", "angpt-no-lerp-muon-1.5M-s2"]
    assert re.fullmatch(r"angpt-no-lerp-lr0\.\d+", trials(study)[1].folder.name)


def test_two_learning_rates_never_share_a_name(data, tmp_path):
    config = compare(data, tmp_path).config

    def folders(names, *lrs):
        grid = dataclasses.replace(config.grid[0], lrs=lrs)
        study = Study(tmp_path, dataclasses.replace(config, grid=(grid,), names=names))
        return {job.config.optimizer.lr: job.folder.name for job in study.jobs()}

    with pytest.raises(UserError, match="two runs have this name; use names = 'full'"):
        folders("short", "0.5x", "1x")
    rates = (0.01, 0.0100000001, 1e-5, 0.00001000000000000001, 1.0, 3e-4)
    found = folders("full", *rates)
    assert len(set(found.values())) == len(rates)
    assert all(float(re.search("-lr(.*)-s", name)[1]) == lr for lr, name in found.items())
    assert {found[lr].split("-lr")[1].split("-s")[0] for lr in (0.01, 1e-5, 1.0, 3e-4)} == {
        "0.01",
        "1e-05",
        "1",
        "0.0003",
    }


def test_budgets_that_are_the_same_are_one(data, tmp_path):
    assert compare(data, tmp_path, budgets=("4k", "4000")).result().budgets == (4000,)


def test_runs_of_a_gpu_make_a_report_anywhere(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs(finished)[0].folder, folder)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "cuda"'))
    main(["report", str(folder), "--out", str(tmp_path / "page")])
    assert (tmp_path / "page" / "report.html").exists()


def test_a_run_file_leaves_the_rates_of_a_comparison_open(finished, data, tmp_path, capsys):
    config = runs(finished)[2].folder / "config.toml"
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

    def written():
        return sum(file.stat().st_size for file in tmp_path.glob("s/runs/*/metrics.jsonl"))

    for delay in (0.5, 2.0, None):  # None: in the middle of training, however long the imports take
        before = written()
        process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not (tmp_path / "s" / "study.toml").exists() or (delay is None and written() == before):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(delay or 0)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=180)
        codes.append(process.returncode)
        # 130: it was still importing; -2: inside an exec of torch's, after which CPython ends by the signal itself
        assert codes[-1] in (3, 130, -signal.SIGINT), (delay, out, errors)
        assert ("the same command goes on" in out) == (codes[-1] == 3)
        assert not errors
    assert codes[-1] == 3


def test_a_comparison_without_data_prepares_the_standard_library(tmp_path, capsys, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    for number in range(30):
        shutil.copy(ROOT / "angpt" / "config.py", library / f"{number}.py")
    monkeypatch.setattr("angpt.data.sources._stdlib_files", lambda: _listed_files((str(library),)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.toml").write_text(to_toml(dataclasses.replace(tiny("x").train, data=DataConfig())))
    arguments = ["--config", "train.toml", "--architectures", "angpt", "--seeds", 0, "--budgets", 512]
    arguments += ["--model.vocab-size", 2048, "--out", "s"]
    code, said = angpt(capsys, "compare", *arguments)
    assert code == 0, said
    assert "data/stdlib/train: " in said
    code, said = angpt(capsys, "compare", *arguments)  # goes on, with the same data
    assert code == 0, said
    assert "data/stdlib/train: " not in said
    code, said = angpt(capsys, "compare", *arguments, "--out", "t", "--data.path", "data/mine")
    assert (code, (tmp_path / "data" / "mine").exists()) == (2, False)


def test_a_comparison_without_the_packages_of_its_page_trains_nothing(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    (tmp_path / "train.toml").write_text(to_toml(tiny(data).train))
    arguments = ["--config", tmp_path / "train.toml", "--seeds", 0, "--budgets", 512, "--out", tmp_path / "s"]
    code, said = angpt(capsys, "compare", *arguments)
    assert (code, said) == (2, "error: this needs jinja2: pip install 'angpt[report]'")
    assert not (tmp_path / "s").exists()
