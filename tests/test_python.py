"""The functions of `import angpt`: the examples of docs/python.md, and what the page promises."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import angpt
from angpt.training.run import Run
from tests.training.conftest import parameters, small, without_timing, write_tokens

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def write_notes(folder):
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"The note with number {i} says that {i} times {i} is {i * i}. " * 20)


@pytest.mark.slow
def test_the_examples_run_as_one_script(tmp_path):
    """In a process of its own, without a guard around its calls: the runs of a study must not begin it again."""
    write_notes(tmp_path / "notes")
    (tmp_path / "script.py").write_text("\n".join(EXAMPLES))
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "TrainProgress(step=0, steps=10, loss=None, val_loss=None, tokens_per_s=None)"
    assert any(line.startswith("finished ") for line in lines)
    assert "unfinished" in lines
    for path in ("studies/notes/report.html", "studies/rates/result.json", "fits/scaling/scaling.json"):
        assert (tmp_path / path).exists()


def test_every_function_of_the_page_is_public():
    named = set(re.findall(r"angpt\.(\w+)\(", PAGE)) | set(re.findall(r"`angpt\.(\w+)`", PAGE))
    assert named <= set(angpt.__all__)
    assert {"train", "load", "compare", "study", "fit_scaling", "fit_hparams", "evaluate", "report"} <= named
    for name in angpt.__all__:
        if callable(getattr(angpt, name)):
            assert getattr(angpt, name).__doc__, name


def test_nothing_is_printed_unless_asked(data, tmp_path, capfd):
    angpt.train(small(data), tmp_path / "run")
    angpt.evaluate(tmp_path / "run", limit=2)
    angpt.study(study_of(data), tmp_path / "study", workers=0)
    assert capfd.readouterr() == ("", "")
    angpt.train(small(data), tmp_path / "other", progress=True)
    assert "validation loss" in capfd.readouterr().out


def study_of(data):
    config = small(data).with_settings({"optimizer.lr": None, "batch_tokens": None, "tokens": "512"})
    return angpt.StudyConfig(grid=(angpt.Grid(architectures=("gpt+", "angpt"), batches=(256,)),), train=config)


def test_a_run_from_python_is_that_of_the_command(data, tmp_path):
    run = angpt.train(small(data), tmp_path / "run")
    assert (run.status, run.val_loss) == ("finished", run.evaluations[-1].loss)
    assert run == angpt.load(tmp_path / "run")
    records = [r for r in Run(run.path).records() if r["kind"] == "train"]
    assert [(s.step, s.loss, s.lr) for s in run.steps] == [(r["step"], r["loss"], r["lr"]) for r in records]
    assert len(run.steps) == run.summary.steps
    assert sum(p.numel() for p in run.model().parameters()) == run.summary.parameters
    command = [
        sys.executable,
        "-m",
        "angpt",
        "train",
        "--config",
        run.path / "config.toml",
        "--out",
        tmp_path / "other",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert parameters(Run(tmp_path / "other")) == parameters(Run(run.path))


def test_a_run_continues_after_a_keyboard_interrupt_in_the_same_process(data, tmp_path):
    """Bit by bit as if it had not been interrupted; the lock, the files and the threads of the first call are gone."""

    def interrupt(now):
        if now.step >= 6:
            raise KeyboardInterrupt

    whole = angpt.train(small(data), tmp_path / "whole")
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        angpt.train(small(data), tmp_path / "run", progress=interrupt)
    assert threading.active_count() == before
    assert angpt.load(tmp_path / "run").status == "unfinished"
    with pytest.raises(angpt.UserError, match="exists"):
        angpt.train(small(data), tmp_path / "run")
    seen = []
    run = angpt.train(small(data), tmp_path / "run", resume=True, progress=seen.append)
    assert 0 < seen[0].step <= 6
    assert (seen[-1].step, seen[-1].val_loss) == (12, whole.val_loss)
    assert without_timing(Run(run.path)) == without_timing(Run(whole.path))
    assert parameters(Run(run.path)) == parameters(Run(whole.path))
    assert angpt.train(small(data), tmp_path / "run", resume=True) == run
    assert angpt.train(out=tmp_path / "run", resume=True) == run
    data.rename(tmp_path / "away")
    assert angpt.train(small(data), tmp_path / "run", resume=True) == run
    (tmp_path / "away").rename(data)


def test_functions_work_in_any_thread(data, tmp_path):
    """Only the main thread may handle signals."""
    found = []

    def work():
        found.append(angpt.train(small(data), tmp_path / "run").status)
        found.append(angpt.study(study_of(data), tmp_path / "study", workers=0).result.complete)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["finished", True]


def test_an_interrupted_study_lets_its_runs_save(data, tmp_path):
    """As Ctrl-C in a notebook, which only the process of the notebook hears."""
    config = study_of(data)
    grid = angpt.Grid(architectures=("gpt+",), batches=(256,))
    train = config.train.with_settings({"tokens": "512000", "checkpoint_every": 10_000})
    seen = []

    def interrupt(states):
        seen.append(dict(states))
        if "running" in states.values():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        angpt.study(angpt.StudyConfig(grid=(grid,), train=train), tmp_path / "study", workers=1, progress=interrupt)
    (run,) = (tmp_path / "study" / "runs").iterdir()
    assert angpt.load(run).status == "interrupted"
    assert list(seen[-1].values()) == ["running"]


def test_failed_runs_are_an_error_with_the_results_of_the_others(data, tmp_path):
    config = study_of(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("angpt.training.trainer.Trainer.loop", fails_for("angpt"))
        with pytest.raises(angpt.RunsFailed, match=r"1 of 2 runs failed .*: out of luck") as error:
            angpt.study(config, tmp_path / "study", workers=0)
    assert [run.status for run in error.value.outcome.result.runs] == ["finished", "failed"]
    assert len(error.value.outcome.runs) == 2
    assert angpt.study(config, tmp_path / "study", workers=0, retry=True).result.complete


def fails_for(architecture):
    from angpt.training.trainer import Trainer

    loop = Trainer.loop

    def fail(self, interrupted):
        if self.config.model.architecture == architecture:
            raise angpt.UserError("out of luck")
        return loop(self, interrupted)

    return fail


def test_settings_by_name(data):
    config = angpt.preset("laptop")
    changed = config.with_settings({"model.architecture": "gpt+", "optimizer.beta2": 0.9, "tokens": "1M"})
    assert (changed.recipe, changed.optimizer.beta2, changed.tokens, changed.model.d_model) == ("gpt+", 0.9, "1M", 96)
    for name, near in (("optimizer.lrr", "optimizer.lr"), ("optimizer", "optimizer."), ("tokens.x", "tokens")):
        with pytest.raises(angpt.UserError, match=f"unknown setting '{name}': did you mean .*{near}"):
            config.with_settings({name: 1})
    with pytest.raises(angpt.UserError, match=r"optimizer.lr"):
        config.with_settings({"optimizer.lr": "fast"})
    resolved = config.with_settings({"optimizer.lr": 0.5, "optimizer.warmup": 0.25})
    other = resolved.with_settings({"model.architecture": "gpt+", "optimizer.warmup": 0.125})
    assert (other.optimizer.lr, other.optimizer.warmup) == (None, 0.125)
    same = {"model.architecture": "gpt+", "optimizer.lr": 0.5, "model.d_ff": 384, "model.d_model": 192}
    other = resolved.with_settings({"model.d_ff": 384}).with_settings(same)
    assert (other.optimizer.lr, other.optimizer.warmup, other.model.d_ff) == (0.5, None, 384)


def test_import_is_fast():
    """Names are imported at first use; those of configurations without torch."""
    code = "import sys, angpt; angpt.TrainConfig, angpt.Comparison, angpt.Grid, angpt.preset('32M'); "
    code += "sys.exit(bool({'torch', 'scipy', 'matplotlib', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
